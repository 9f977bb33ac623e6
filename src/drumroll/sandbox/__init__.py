"""Runs programs that models wrote in isolation, with their tests, and grades them where the programs cannot interfere.

`inside/` runs in the box; the rest runs on our side. A backend sends jobs to boxes; `grading` turns the replies into an
`Outcome`. A program is never imported, run or unpickled in this process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from drumroll.errors import DrumrollError

if TYPE_CHECKING:
    from drumroll.config.sandbox import SandboxConfig


class SandboxError(DrumrollError):
    """A box could not be started, or was lost through no fault of the program."""


class Status(StrEnum):
    """How a program did; of several tests, the first that it did not pass decides."""

    PASSED = "passed"
    FAILED = "failed"  # it ran, and a test failed
    ERROR = "error"  # it does not compile, raised, or exited with a code
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT = "output"  # it printed more than allowed
    CRASHED = "crashed"  # a signal ended it, or it took its box down


@dataclass(frozen=True)
class Limits:
    """The limits of one run: each stdin test is a run, all calls and asserts together are one, and so is each pytest file."""

    seconds: float = 10.0
    """Run time: wall time minus the time that the program's processes waited for a core."""
    memory_mb: int = 512
    output_kb: int = 1024
    file_mb: int = 16
    processes: int = 16
    stop_early: bool = False
    """Stop at the first test that fails."""


@dataclass(frozen=True)
class Stdio:
    """The program reads `input` and must print `output`, ignoring spaces at the ends of lines."""

    input: str
    output: str


@dataclass(frozen=True)
class Call:
    """A function of the program, called with arguments, must return a value."""

    function: str
    args: Any
    expected: Any


@dataclass(frozen=True)
class Assert:
    """Code that uses the program's names and must not raise."""

    code: str


@dataclass(frozen=True)
class Pytest:
    """A test file that imports the code under test from `solution`."""

    code: str


Test = Stdio | Call | Assert | Pytest


@dataclass(frozen=True)
class Outcome:
    """The result of a program."""

    status: Status
    passed: int
    total: int
    stdout: str = ""
    stderr: str = ""
    why: str = ""
    seconds: float = 0.0
    """Run time."""


class Sandbox(Protocol):
    """Runs programs, any number of them at once."""

    limits: Limits
    """The default limits of a run."""

    async def run(self, program: str, tests: Sequence[Test], limits: Limits | None = None) -> Outcome:
        """Run a program against its tests."""
        ...

    async def close(self) -> None:
        """End all processes and remove all files."""
        ...


def open_sandbox(config: SandboxConfig, struck: Counter[str] | None = None) -> Sandbox:
    """Open the sandbox that a config names. Anything that cannot work here is reported now, not at the first program.

    Programs that exceed their time are counted in `struck` as `program`.
    """
    if config.backend == "bwrap":
        from drumroll.sandbox.bwrap import BwrapSandbox

        return BwrapSandbox(config, struck)
    if config.backend == "http":
        from drumroll.sandbox.http import HttpSandbox

        return HttpSandbox(config, struck)
    from drumroll.sandbox.unsafe import UnsafeSandbox

    return UnsafeSandbox(config, struck)
