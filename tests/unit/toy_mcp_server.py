"""A small MCP server: a calculator and a counter. `python toy_mcp_server.py [port]`; without a port it speaks on stdio."""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("toy", log_level="CRITICAL")
count = 0


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@server.tool()
def tick() -> str:
    """Count up."""
    global count
    count += 1
    return f"tick {count}"


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ValueError(why)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
