"""`sandbox`: where programs that the model wrote are run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from drumroll.config.section import Section


class SandboxConfig(Section):
    """Isolated execution, for the reward `code` and for your own that take an argument `sandbox`."""

    backend: Literal["bwrap", "http", "unsafe-subprocess"] = "bwrap"
    """`bwrap`: boxes on this machine, made by bubblewrap. `http`: a SandboxFusion server. `unsafe-subprocess`: plain processes with all your rights."""
    url: str | None = None
    """http: address of the server, for example http://sandbox:8080."""
    workers: int = Field(0, ge=0)
    """Programs run at once; 0 takes one per core (http: four)."""
    seconds: float = Field(10.0, gt=0)
    """Run time (wall time less waiting for a core) of one run: of a test with input and output, of all calls and asserts together, of a pytest file."""
    memory_mb: int = Field(512, ge=64)
    """Memory of one run."""
    python: str | None = None
    """Interpreter of the programs, 3.10 or newer, with what it has installed. Default: /usr/bin/python3 (unsafe-subprocess: our own)."""
