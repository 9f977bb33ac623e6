"""Programs as answers: the completion's code is run against the row's tests, in a sandbox."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from drumroll.rewards import REWARDS
from drumroll.sandbox import Sandbox, Status
from drumroll.sandbox.suites import read_tests

FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def extract(completion: str) -> str:
    """The last fenced block, also if it was cut off; without any, the whole text."""
    blocks = [block for block in FENCE.findall(completion) if block.strip()]
    return blocks[-1] if blocks else completion


@REWARDS.register("code", keeps_time=True)
async def code(
    completion: str,
    tests: Any,
    sandbox: Sandbox,
    prefix: str = "",
    partial: bool = False,
    seconds: float | None = None,
    memory_mb: int | None = None,
) -> float:
    """1 if the program passes all tests, else 0; with `partial` the fraction that it passes. It begins with `prefix`."""
    own = sandbox.limits
    limits = replace(own, stop_early=not partial, seconds=seconds or own.seconds, memory_mb=memory_mb or own.memory_mb)
    outcome = await sandbox.run(prefix + extract(completion), read_tests(tests), limits)
    return outcome.passed / outcome.total if partial else float(outcome.status is Status.PASSED)
