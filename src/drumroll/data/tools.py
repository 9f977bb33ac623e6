"""Tools and tool calls in conversations: as chat templates read them, and in words for templates that know no tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from drumroll.data.conversation import tools_in_words
from drumroll.data.render import Renderer
from drumroll.sample import Message

TEACH = """You may call these tools:
<tools>
{tools}
</tools>
To call one, write <tool_call>{{"name": "its name", "arguments": {{"an argument": "its value"}}}}</tool_call>; you get its result in \
<tool_response>. When you know the final answer, write it without a call."""
KEPT = ("name", "tool_call_id")
"""Keys of a message that templates read besides its role, content and calls."""


def teach(schemas: Sequence[Any]) -> str:
    """Return instructions on how to call tools, for models whose chat template has none."""
    return TEACH.format(tools="\n".join(json.dumps(schema["function"]) for schema in schemas))


def written(name: str, arguments: Any) -> str:
    """Format a call as text."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def plain(message: Message, kept: Sequence[str] = KEPT) -> Message:
    """Return a message as templates read it: its text, tool calls with parsed arguments, no empty fields."""
    found: Message = {"role": message["role"], "content": message.get("content") or ""}
    if message.get("tool_calls"):
        found["tool_calls"] = [
            {"type": "function", "function": {"name": c["function"]["name"], "arguments": _data(c["function"]["arguments"])}}
            for c in message["tool_calls"]
        ]
    return found | {key: message[key] for key in kept if message.get(key)}


def in_words(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Any], *, begins: bool = True, kept: Sequence[str] = KEPT
) -> list[Message]:
    """Return messages as templates read them. If the template shows no tools, tools, calls and results become words.

    They are the words that tool environments use in training. `begins` says whether the messages begin the conversation.
    """
    turns = [plain(message, kept) for message in messages]
    if renderer.takes_tools or not (tools or any(m["role"] == "tool" or m.get("tool_calls") for m in turns)):
        return turns
    for turn in turns:
        calls = [written(c["function"]["name"], c["function"]["arguments"]) for c in turn.pop("tool_calls", ())]
        turn["content"] = "\n".join(text for text in (turn["content"], *calls) if text)
    return tools_in_words(turns, teach(tools) if tools and begins else "")


def _data(arguments: Any) -> Any:
    """Parse arguments, which travel as text, into data for templates."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
