"""Turns tests into runs, and a box's replies into outcomes. Expected outputs stay on this side."""

from __future__ import annotations

import asyncio
import base64
import hmac
import itertools
import json
import math
import secrets
import signal
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from drumroll.config.sandbox import SandboxConfig
from drumroll.errors import DataError
from drumroll.sandbox import Assert, Call, Limits, Outcome, Pytest, Status, Stdio, Test
from drumroll.sandbox.inside.examiner import PROGRAM_ENDED
from drumroll.sandbox.inside.link import Link, frame
from drumroll.sandbox.inside.program import MEMORY_EXIT
from drumroll.sandbox.inside.zygote import PLAIN, WITH_PYTEST

TAIL = 2000
PACKER = Link(-1, -1, {})
BY_REASON = {"timeout": Status.TIMEOUT, "memory": Status.MEMORY, "output": Status.OUTPUT}


@dataclass(frozen=True)
class Job:
    """One run. `message` is sent to the box; its last part holds the tests, which the program never sees."""

    program: str
    tests: Sequence[Test]
    limits: Limits
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def needs_pytest(self) -> bool:
        """Whether the box needs pytest."""
        return isinstance(self.tests[0], Pytest)

    def message(self) -> bytes:
        """Return the job as the supervisor reads it."""
        first = self.tests[0]
        script = isinstance(first, Stdio)
        limits = {k: v for k, v in asdict(self.limits).items() if k != "stop_early"}
        public = {
            "mode": "script" if script else "exam",
            "program": self.program,
            "stdin": first.input if isinstance(first, Stdio) else "",
            "limits": limits,
        }
        tests = [] if script else [_carry(test) for test in self.tests]
        private = {"nonce": self.nonce, "tests": tests, "stop": self.limits.stop_early}
        return (WITH_PYTEST if self.needs_pytest else PLAIN) + frame(public) + frame(private)

    def outcome(self, reply: dict[str, Any] | None) -> Outcome:
        """Grade a reply; None means that the box was lost."""
        lost = Outcome(Status.CRASHED, 0, len(self.tests), why="the program took its box down")
        if reply is None:
            return lost
        if "late" in reply:
            return replace(lost, status=Status.TIMEOUT, why="the box did not answer in time", seconds=self.limits.seconds)
        if not hmac.compare_digest(str(reply.get("nonce")), self.nonce):
            return lost
        script = isinstance(self.tests[0], Stdio)
        graded = self._script(reply) if script else self._exam(reply)
        return replace(graded, stdout=reply["stdout"][-TAIL:], stderr=reply["stderr"][-TAIL:], seconds=reply["seconds"])

    def _script(self, reply: dict[str, Any]) -> Outcome:
        test = self.tests[0]
        assert isinstance(test, Stdio)
        status, why = _ending(reply)
        if status is None:
            same = same_output(reply["stdout"], test.output)
            status, why = (Status.PASSED, "") if same else (Status.FAILED, "the output differs")
        return Outcome(status, int(status is Status.PASSED), 1, why=why)

    def _exam(self, reply: dict[str, Any]) -> Outcome:
        verdicts = [v for v in reply["verdicts"] if "passed" in v]
        collected = sum(v["collected"] for v in reply["verdicts"] if "collected" in v)
        total = max(collected, 1) if self.needs_pytest else len(self.tests)
        passed = sum(v["passed"] for v in verdicts)
        if passed == total == len(verdicts) and reply["why"] == "ended":
            return Outcome(Status.PASSED, passed, total)
        said = next((v["why"] for v in verdicts if not v["passed"]), PROGRAM_ENDED)
        if reply["why"] in BY_REASON or said == PROGRAM_ENDED:
            status, why = _ending(reply)
            status, said = status or Status.ERROR, why or said
        else:
            status = Status.MEMORY if said.startswith("MemoryError") else Status.FAILED
        return Outcome(status, min(passed, total - 1), total, why=said)


def _ending(reply: dict[str, Any]) -> tuple[Status | None, str]:
    """Return the status of a program that did not end well, and why; None if it did."""
    code = reply["exit"]
    if reply["why"] in BY_REASON:
        return BY_REASON[reply["why"]], f"over its limit: {reply['why']}"
    if code is None or code == 0:
        return None, ""
    if code == MEMORY_EXIT:
        return Status.MEMORY, "over its limit: memory"
    if code < 0:
        return (Status.TIMEOUT if -code == signal.SIGXCPU else Status.CRASHED), f"ended by signal {-code}"
    last = reply["stderr"].strip().rpartition("\n")[2]
    return Status.ERROR, last[:500] or f"exited with code {code}"


def _carry(test: Test) -> dict[str, Any]:
    if isinstance(test, Call):
        return {"call": PACKER.pack({"function": test.function, "args": test.args, "expected": test.expected})}
    assert isinstance(test, Assert | Pytest)
    return {"pytest" if isinstance(test, Pytest) else "assert": test.code}


def same_output(printed: str, expected: str) -> bool:
    """Return whether outputs are equal line by line, ignoring trailing spaces; decimal fractions may differ by a millionth."""
    ours, theirs = _lines(printed), _lines(expected)
    if ours == theirs:
        return True
    if len(ours) != len(theirs) or "." not in expected:
        return False
    words = [(a.split(), b.split()) for a, b in zip(ours, theirs, strict=True)]
    return all(len(a) == len(b) and all(map(_same_word, a, b)) for a, b in words)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if "." not in expected:
        return False
    try:
        return math.isclose(float(printed), float(expected), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False


def runs(tests: Sequence[Test]) -> Iterator[list[Test]]:
    """Yield the tests of each run: adjacent calls and asserts share a run, all others run alone."""
    for together, group in itertools.groupby(tests, lambda t: isinstance(t, Call | Assert)):
        if together:
            yield list(group)
        else:
            yield from ([test] for test in group)


class Grader(ABC):
    """A sandbox whose backend sends one job at a time to a box and returns its reply."""

    def __init__(self, config: SandboxConfig, struck: Counter[str] | None) -> None:
        self.limits = Limits(seconds=config.seconds, memory_mb=config.memory_mb)
        self.struck = Counter() if struck is None else struck

    @abstractmethod
    async def carry(self, job: Job) -> dict[str, Any] | None:
        """Run a job and return the reply.

        None means that its program took the box down, `{"late": ...}` that no reply came in its run time. Raises
        `TimeoutError` if the machine was too busy to give it that time.
        """

    @abstractmethod
    async def close(self) -> None:
        """End all processes and remove all files."""

    async def run(self, program: str, tests: Sequence[Test], limits: Limits | None = None) -> Outcome:
        """Run a program against its tests. After a time-out the remaining tests are skipped: they would take as long."""
        if not tests:
            raise DataError("A program was given no tests; a row needs at least one in its `tests`.")
        limits = limits or self.limits
        outcomes: list[Outcome] = []
        for group in runs(tests):
            bad = _bad(outcomes)
            if bad and (limits.stop_early or any(o.status is Status.TIMEOUT for o in bad)):
                outcomes.append(Outcome(Status.FAILED, 0, len(group)))
                continue
            job = Job(program, group, limits)
            outcomes.append(job.outcome(await self.carry(job)))
            self.struck["program"] += outcomes[-1].status is Status.TIMEOUT
        shown = next(iter(_bad(outcomes)), outcomes[-1])
        return replace(
            shown,
            passed=sum(o.passed for o in outcomes),
            total=sum(o.total for o in outcomes),
            seconds=sum(o.seconds for o in outcomes),
        )


def _bad(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [o for o in outcomes if o.status is not Status.PASSED]


def decode_reply(text: str) -> dict[str, Any] | None:
    """Decode a reply that arrived as text."""
    try:
        return json.loads(base64.b64decode(text, validate=True)[5:])
    except ValueError:
        return None


async def read_reply(stream: asyncio.StreamReader) -> dict[str, Any]:
    """Read a reply from a pipe."""
    size = int.from_bytes(await stream.readexactly(4), "little")
    return json.loads(await stream.readexactly(size))
