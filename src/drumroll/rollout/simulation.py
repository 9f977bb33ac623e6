"""Simulated engines, rewards, environments and prompts for the real scheduler on virtual time.

Lengths and rewards depend only on (seed, draw, index in the group), so that two schedules can be compared on the same
draws. The scheduler's tests and benchmarks and `drumroll plan --simulate` use this module.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drumroll.config.rollout import RolloutConfig
from drumroll.engines import Completion, Request
from drumroll.engines.router import Router
from drumroll.lifecycle import Listener
from drumroll.rewards.group_calls import GroupCalls
from drumroll.rollout.scheduler import Rollouts
from drumroll.sample import GREEDY, Prompt, Sample, StopReason, Version


@dataclass(frozen=True)
class Workload:
    """The sizes and durations of a simulated run. Times are in units of the median generation time."""

    engines: int = 8
    slots: int = 64
    sigma: float = 1.0
    longest: float = 8.0
    reward_time: float = 1.0
    train_time: float = 0.0
    filtered: float = 0.5
    median_tokens: int = 16
    seed: int = 0

    def length(self, draw: int, index: int) -> float:
        """Return a sample's length: log-normal, median 1, capped."""
        rng = random.Random(f"length/{self.seed}/{draw}/{index}")
        return min(self.longest, math.exp(self.sigma * rng.gauss(0, 1)))

    def tokens(self, draw: int, index: int) -> int:
        """Return a sample's length in whole tokens."""
        return max(1, round(self.length(draw, index) * self.median_tokens))

    def useful(self, draw: int) -> bool:
        """Return whether a group survives the filter."""
        return random.Random(f"useful/{self.seed}/{draw}").random() >= self.filtered

    def reward(self, draw: int, index: int) -> float:
        """Return a sample's reward; groups to be filtered have equal rewards."""
        return float(index % 2) if self.useful(draw) else 0.0


class SimSource:
    """An endless source of prompts that hold their draw number."""

    def __init__(self, domains: tuple[str, ...] = ("a", "b"), shares: Mapping[str, float] | None = None) -> None:
        self.domains = domains
        self.shares = shares or {"": 1.0}
        self.count = 0

    def draw(self) -> Prompt:
        """Return the next prompt."""
        number = self.count
        self.count += 1
        domain = self.domains[number % len(self.domains)]
        return Prompt(f"p{number}", domain, str(number), (number,), stream=domain if len(self.shares) > 1 else "")

    def exhausted(self) -> bool:
        """Return False: the source never ends."""
        return False

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the number of prompts drawn."""
        return {"count": self.count}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.count = state["count"]


@dataclass
class _Call:
    """A request that an engine is working on."""

    request: Request
    reply: asyncio.Future[Completion]
    began: float
    tokens: int


class SimEngine:
    """Generates at constant speed in each of its slots, and records when it held which weights."""

    def __init__(self, name: str, slots: int, work: Workload) -> None:
        self.name = name
        self.slots = slots
        self.work = work
        self.switches: list[tuple[float, Version]] = [(-math.inf, 0)]
        self.calls: dict[str, _Call] = {}

    async def generate(self, request: Request) -> Completion:
        """Generate one turn. Its full length depends only on the sample, also when it is resumed."""
        assert len(self.calls) < self.slots, f"{self.name} was given more than its {self.slots} slots"
        loop = asyncio.get_running_loop()
        draw, index = request.id.partition("#")[0].partition("~")[0].split(".")
        whole = self.work.tokens(int(draw), GREEDY if index == "greedy" else int(index))
        tokens = max(1, whole - (len(request.tokens) - 1))
        call = _Call(request, loop.create_future(), loop.time(), tokens)
        self.calls[request.id] = call
        for delay in self.replies(call):
            loop.call_later(delay, self._answer, call)
        try:
            return await call.reply
        finally:
            self.calls.pop(request.id, None)

    def replies(self, call: _Call) -> list[float]:
        """Return the delays after which the answer arrives; engines in tests lose, delay and repeat it."""
        return [call.tokens / self.work.median_tokens]

    def _answer(self, call: _Call) -> None:
        if not call.reply.done():
            call.reply.set_result(self._completion(call, call.tokens, StopReason.EOS))

    def _completion(self, call: _Call, tokens: int, stop: StopReason) -> Completion:
        step = 1 / self.work.median_tokens
        if len(self.switches) == 1 or self.switches[-1][0] <= call.began:
            versions = [self.switches[-1][1]] * tokens
        else:
            versions = [self._version_at(call.began + i * step) for i in range(tokens)]
        return Completion([1] * tokens, [-1.0] * tokens, versions, stop)

    def _version_at(self, time: float) -> Version:
        return next(version for since, version in reversed(self.switches) if since <= time)

    def switch(self, version: Version) -> None:
        """Switch to new weights while requests run."""
        self.switches.append((asyncio.get_running_loop().time(), version))

    def interrupt(self) -> None:
        """Return every request's tokens so far."""
        now = asyncio.get_running_loop().time()
        for call in list(self.calls.values()):
            if not call.reply.done():
                done = min(call.tokens - 1, int((now - call.began) * self.work.median_tokens))
                call.reply.set_result(self._completion(call, done, StopReason.ABORTED))


class SimScorer:
    """Rewards that take `reward_time`."""

    def __init__(self, work: Workload) -> None:
        self.work = work

    async def score(self, sample: Sample, group: GroupCalls | None = None) -> None:
        """Wait, then set the reward that the workload defines."""
        if self.work.reward_time:
            await asyncio.sleep(self.work.reward_time)
        sample.reward = self.work.reward(sample.draw, sample.index)


@dataclass
class Outcome:
    """The result of a simulated run."""

    steps: int
    seconds: float
    useful: float
    slots: int
    started: int

    @property
    def utilisation(self) -> float:
        """The share of all slot time spent on tokens of groups that were trained on."""
        return self.useful / (self.seconds * self.slots)


async def simulate(work: Workload, config: RolloutConfig, steps: int, listeners: tuple[Listener, ...] = ()) -> Outcome:
    """Run the scheduler for some steps, with a learner that takes `train_time`."""
    loop = asyncio.get_running_loop()
    router = Router(config.engine_timeout)
    engines = [SimEngine(f"e{i}", work.slots, work) for i in range(work.engines)]
    for engine in engines:
        router.join(engine.name, engine.generate, engine.slots, engine.interrupt)
    rollouts = Rollouts(
        config, work.seed, SimSource(), router, SimScorer(work), lambda tokens: "", listeners=listeners, clock=loop.time
    )
    tokens = started = 0
    for step in range(1, steps + 1):
        groups = await rollouts.take(config.prompts)
        started += rollouts.stats.started
        tokens += sum(s.policy_length() for g in groups for s in g.samples)
        if work.train_time:
            await asyncio.sleep(work.train_time)
        for engine in engines:
            engine.switch(step)
        rollouts.publish(step)
        rollouts.trained(groups)
    outcome = Outcome(steps, loop.time(), tokens / work.median_tokens, work.engines * work.slots, started)
    await rollouts.close()
    return outcome


def barrier(work: Workload, config: RolloutConfig, steps: int) -> Outcome:
    """Compute the batch-level baseline on the same draws: generate all, then score all, and refill until there are enough.

    Every round draws the number of groups still needed times `oversample`, generates all of them by list scheduling
    over the slots, waits for the last sample, scores, and keeps the useful groups.
    """
    slots, clock, useful_time, draw, started = work.engines * work.slots, 0.0, 0.0, 0, 0
    for _ in range(steps):
        have = 0
        while have < config.prompts:
            count = math.ceil((config.prompts - have) * config.oversample)
            draws = range(draw, draw + count)
            draw += count
            lengths = [[generation_time(work, d, i) for i in range(config.samples)] for d in draws]
            started += count * config.samples
            clock += greedy_makespan([t for group in lengths for t in group], slots) + work.reward_time
            for d, group in zip(draws, lengths, strict=True):
                if work.useful(d) and have < config.prompts:
                    have += 1
                    useful_time += sum(group)
        clock += work.train_time
    return Outcome(steps, clock, useful_time, slots, started)


def generation_time(work: Workload, draw: int, index: int) -> float:
    """Return the time that a sample's generation takes."""
    return work.tokens(draw, index) / work.median_tokens


def greedy_makespan(jobs: list[float], slots: int) -> float:
    """Return when list scheduling ends: every job, in order, goes to the slot that is free first."""
    free = [0.0] * slots
    for job in jobs:
        heapq.heapreplace(free, free[0] + job)
    return max(free)
