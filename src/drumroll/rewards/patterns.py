"""`regex`: does the completion match a pattern? It runs in the pool: a pattern can take exponential time."""

from __future__ import annotations

import re

from drumroll.rewards import REWARDS, Processes

SECONDS = 5.0
"""CPU time; a pattern that needs more fails the sample."""


@REWARDS.register("regex")
async def regex(completion: str, pattern: str, processes: Processes, full: bool = False) -> float:
    """1 when `pattern` is found in the completion, or with `full` is all of it; `(?s)` and other flags go into the pattern."""
    arguments = {"text": completion, "pattern": pattern, "full": full}
    return float(await processes.run("drumroll.rewards.patterns:matches", arguments, SECONDS, cpu=True))


def matches(text: str, pattern: str, full: bool) -> bool:
    """Called in the pool."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} is not a regular expression: {error}") from None
    return (compiled.fullmatch(text.strip()) if full else compiled.search(text)) is not None
