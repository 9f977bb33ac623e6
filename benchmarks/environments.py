"""Episodes that wait for their environments: does the engine stay busy, and what does a waiting episode cost?

python benchmarks/environments.py
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from figures import figure

from drumroll.config.environment import EnvironmentConfig
from drumroll.config.rollout import RolloutConfig
from drumroll.data.render import Renderer
from drumroll.engines import Completion, Request
from drumroll.engines.router import Router
from drumroll.envs import ENVIRONMENTS, Step
from drumroll.envs.episodes import Episodes
from drumroll.models import tiny
from drumroll.rewards import Scorer
from drumroll.rollout.scheduler import Rollouts
from drumroll.sample import Prompt, Sample, Scene, StopReason

EPISODES, TURNS, SLOTS = 512, 6, 64
LATENCY, SIGMA = 0.2, 1.0
TOKENS, TOKEN_SECONDS = (4, 16), 0.002
"""A turn's length is drawn between these; an engine writes one token of every slot in so long."""


@ENVIRONMENTS.register("slow", runs="inline")
class Slow:
    """Answers after a log-normal time of 200 ms in the mean; the number of turns is drawn too."""

    def reset(self, seed: int, **row: Any) -> str:
        """Begin."""
        self.rng = random.Random(seed)
        self.left = self.rng.randint(2, TURNS)
        return "go:"

    async def step(self, text: str) -> Step:
        """Wait, answer."""
        await asyncio.sleep(self.rng.lognormvariate(math.log(LATENCY) - SIGMA**2 / 2, SIGMA))
        self.left -= 1
        return Step("on:", 0.0, self.left == 0)

    def close(self) -> None:
        """Nothing is held."""


class Writer:
    """An engine whose slots each write at a constant speed; counts the time they are busy."""

    def __init__(self) -> None:
        self.busy = 0.0

    async def generate(self, request: Request) -> Completion:
        """A turn of a length that depends on the sample and the turn alone."""
        count = random.Random(f"{request.seed}/{len(request.tokens)}").randint(*TOKENS)
        await asyncio.sleep(count * TOKEN_SECONDS)
        self.busy += count * TOKEN_SECONDS
        return Completion([5] * count, [-1.0] * count, [0] * count, StopReason.EOS)


class Rows:
    """Prompts that are played."""

    def __init__(self, use: str) -> None:
        self.use, self.count = use, 0
        self.shares = {"": 1.0}

    def draw(self) -> Prompt:
        """The next one."""
        self.count += 1
        return Prompt(f"p{self.count}", "d", "", (), scene=Scene(self.use))

    def exhausted(self) -> bool:
        """Never."""
        return False

    def metrics(self) -> dict[str, float]:
        """None."""
        return {}

    def state(self) -> dict[str, Any]:
        """How many were drawn."""
        return {"count": self.count}

    def restore(self, state: Any) -> None:
        """Go back."""
        self.count = state["count"]


def open_episodes() -> Episodes:
    """Episodes of the tiny tokenizer."""
    tokenizer = tiny.tokenizer()

    def no_pool(size: int) -> Any:
        raise AssertionError("nothing here computes")

    decode: Callable[[list[int]], str] = tokenizer.decode
    return Episodes(EnvironmentConfig(max_turns=TURNS), 0, Renderer(tokenizer), decode, 4096, no_pool)


async def ours() -> tuple[float, float]:
    """(seconds, slot seconds used) of the scheduler."""
    engine, router, episodes = Writer(), Router(), open_episodes()
    router.join("engine", engine.generate, SLOTS)
    config = RolloutConfig(prompts=EPISODES // 8, samples=8, max_tokens=64)
    rollouts = Rollouts(config, 0, Rows("slow"), router, Scorer({}), lambda tokens: "", episodes=episodes.open)
    began = time.perf_counter()
    await rollouts.take(config.prompts)
    seconds = time.perf_counter() - began
    await rollouts.close()
    return seconds, engine.busy


async def synchronous() -> tuple[float, float]:
    """(seconds, slot seconds used) of a loop that gives all live episodes a turn, waits for all, lets all act, waits for all."""
    engine, router, episodes = Writer(), Router(), open_episodes()
    router.join("engine", engine.generate, SLOTS)
    rows, source = [], Rows("slow")
    for draw in range(EPISODES // 8):
        prompt = source.draw()
        rows += [Sample(prompt, draw, index) for index in range(8)]
    began = time.perf_counter()
    opened = [(sample, episode) for sample in rows if (episode := episodes.open(sample)) is not None]
    await asyncio.gather(*(episode.begin() for _, episode in opened))
    scheduler = RolloutConfig(max_tokens=64)
    writer = Rollouts(scheduler, 0, source, router, Scorer({}), lambda tokens: "")
    live = opened
    while live:
        await asyncio.gather(*(turn(writer, sample) for sample, _ in live))
        goes_on = await asyncio.gather(*(episode.answer() for _, episode in live))
        live = [pair for pair, more in zip(live, goes_on, strict=True) if more]
    return time.perf_counter() - began, engine.busy


async def turn(writer: Rollouts, sample: Sample) -> None:
    """One generation, by the same requests as the scheduler's."""
    from drumroll.engines import Sampling
    from drumroll.sample import Owner, sample_seed

    trace = sample.traces[-1]
    seed = sample_seed(0, "train", sample.draw, sample.index)
    request = Request(f"{sample.id}.{len(trace.tokens)}", tuple(trace.tokens), Sampling(1.0, 64), seed)
    done = await writer.router.generate(request, sample.draw, sample.draw, math.inf, lambda: None)
    trace.extend(done.tokens, Owner.POLICY, done.logprobs, done.versions)
    sample.stop = done.stop


@ENVIRONMENTS.register("idle", runs="inline")
class Idle:
    """Never answers."""

    def reset(self, seed: int, **row: Any) -> str:
        """Begin, with a page of text."""
        return "word " * 200

    async def step(self, text: str) -> Step:
        """Wait for ever."""
        await asyncio.Event().wait()
        raise AssertionError

    def close(self) -> None:
        """Nothing is held."""


def resident_mb() -> float:
    """Memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def idle(count: int) -> float:
    """MB that so many episodes take while all wait for their environments."""
    engine, router, episodes = Writer(), Router(), open_episodes()
    router.join("engine", engine.generate, SLOTS)
    config = RolloutConfig(prompts=count // 8, samples=8, max_tokens=64)
    before = resident_mb()
    rollouts = Rollouts(config, 0, Rows("idle"), router, Scorer({}), lambda tokens: "", episodes=episodes.open)
    task = asyncio.ensure_future(rollouts.take(config.prompts))
    expected = engine.busy
    while router.busy() or engine.busy == expected or any(f.unsettled == 0 for f in rollouts._flights.values()):
        await asyncio.sleep(0.2)
    states = [s.state.value for f in rollouts._flights.values() for s in f.group.samples]
    assert states == ["acting"] * count, {state: states.count(state) for state in set(states)}
    used = resident_mb() - before
    task.cancel()
    await rollouts.close()
    return used


def main() -> None:
    """All figures; memory in a process of its own."""
    if sys.argv[1:] == ["idle"]:
        figure("environments/idle_mb_10k", asyncio.run(idle(10_000)), "MB", goal=1000, at_most=True, observation_tokens=1000)
        return
    repeats = [(asyncio.run(ours()), asyncio.run(synchronous())) for _ in range(3)]
    ratios = sorted((o[1] / o[0]) / (s[1] / s[0]) for o, s in repeats)
    (seconds, busy), (their_seconds, their_busy) = repeats[0]
    figure(
        *("environments/utilisation_ratio", ratios[1], "x"),
        goal=1.5,
        ours=round(busy / seconds / SLOTS, 4),
        turn_synchronous=round(their_busy / their_seconds / SLOTS, 4),
        seconds=round(seconds, 2),
        their_seconds=round(their_seconds, 2),
        episodes=EPISODES, slots=SLOTS, latency_mean_ms=1e3 * LATENCY, sigma=SIGMA, repeats=[round(r, 3) for r in ratios],
    )  # fmt: skip
    subprocess.run([sys.executable, __file__, "idle"], check=True)


if __name__ == "__main__":
    main()
