"""Programs a second through the reward `code`, against a process for each sample: in a fresh box, and without any.

python benchmarks/code.py
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from figures import figure

from drumroll.config.reward import RewardConfig
from drumroll.config.sandbox import SandboxConfig
from drumroll.rewards import Scorer
from drumroll.sample import Prompt, Sample
from drumroll.sandbox.bwrap import _files, _pipe, _user, arguments, interpreter

WORKERS = 2
ROUNDS = 3
PROGRAM = "def main():\n    n = int(input())\n    print(sum(i * i for i in range(n)))\nmain()\n"
COMPLETION = f"The squares are summed:\n```python\n{PROGRAM}```\n"
TESTS = [{"input": "100\n", "output": "328350\n"}]
EXPECTED = b"328350\n"
COMMAND = (interpreter(None), "-I", "-c", PROGRAM)


async def rate(one: Callable[[], Awaitable[None]], count: int) -> float:
    """How many a second, so many in flight as there are workers."""
    left = iter(range(count))

    async def work() -> None:
        for _ in left:
            await one()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(WORKERS)))
    return count / (time.perf_counter() - began)


async def process(*command: str, fds: tuple[int, ...] = ()) -> None:
    """One process, its input and its output."""
    user = _user(61000 if os.geteuid() == 0 else None) if fds else {}
    made = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, pass_fds=fds, env={}, cwd="/", **user
    )
    out, _ = await made.communicate(b"100\n")
    assert out == EXPECTED, out


async def fresh_box() -> None:
    """The same box as ours, made for one program."""
    with _files() as fds, _pipe() as (_, tell):
        await process(*arguments(COMMAND[0], fds, tell, COMMAND[2:]), fds=(*fds.values(), tell))


async def main() -> None:
    """All figures; the ways take turns, so that a slow minute slows them all."""
    scorer = Scorer({"*": [RewardConfig(use="code")]}, sandbox=SandboxConfig(workers=WORKERS))

    async def ours() -> None:
        sample = Sample(Prompt("p", "d", "q", (1,), {"tests": TESTS}), 0, 0, completion=COMPLETION)
        await scorer.score(sample)
        assert sample.reward == 1.0, sample.failure

    ways = {"ours": (ours, 600), "box": (fresh_box, 60), "plain": (lambda: process(*COMMAND), 60)}
    found: dict[str, list[float]] = {name: [] for name in ways}
    await rate(ours, 50)  # the boxes are made
    for _ in range(ROUNDS):
        for name, (one, count) in ways.items():
            found[name].append(await rate(one, count))
    await scorer.close()
    rates = {name: statistics.median(values) for name, values in found.items()}
    facts: dict[str, Any] = {
        "workers": WORKERS,
        "rounds": ROUNDS,
        "python": COMMAND[0],
        **{f"{k}_per_s": round(v, 1) for k, v in rates.items()},
    }
    figure("rewards/code_per_s", rates["ours"], "runs/s", goal=200, **facts)
    figure(
        "rewards/ratio_process_per_sample",
        rates["ours"] / rates["box"],
        "x",
        goal=5,
        against="a fresh bubblewrap a sample",
        **facts,
    )
    figure(
        "rewards/ratio_plain_process",
        rates["ours"] / rates["plain"],
        "x",
        against="a plain python a sample, unprotected",
        **facts,
    )


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
