"""What the controller pays for a sample on Ray, and how its call rate compares with Ray's own, with an engine that answers at once.

python benchmarks/cluster.py
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from typing import Any

import ray
from figures import figure

from drumroll.config.rollout import RolloutConfig
from drumroll.engines import Completion, Engine, Request, Sampling
from drumroll.engines.router import Router
from drumroll.placement.devices import Kind, Pool
from drumroll.rollout.scheduler import Rollouts
from drumroll.rollout.simulation import SimSource
from drumroll.sample import Sample, StopReason
from drumroll.workers.group import Role
from drumroll.workers.ray_group import RayGroup, RayRuntime

CALLS = 1500
WINDOW = 64
REPEATS = 5
TOKENS = 64


class Instant:
    """An engine without a model."""

    async def generate(self, request: Request) -> Completion:
        """As many tokens as a short answer has."""
        return Completion([1] * TOKENS, [0.0] * TOKENS, [0] * TOKENS, StopReason.EOS)


class InstantScorer:
    """A reward that costs nothing."""

    async def score(self, sample: Sample, group: object = None) -> None:
        """Half of them pass."""
        sample.reward = float(sample.index % 2)


async def window(call: Any, count: int) -> float:
    """Calls per second with so many in flight."""
    limit = asyncio.Semaphore(WINDOW)

    async def one() -> None:
        async with limit:
            await call()

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return count / (time.perf_counter() - began)


async def samples(group: RayGroup[Any]) -> float:
    """CPU seconds of this process per sample, with the real scheduler and router."""
    config = RolloutConfig(prompts=32, samples=8, max_tokens=TOKENS)
    router = Router()

    async def generate(request: Request) -> Completion:
        return await group.call(0, Engine.generate, request)

    router.join("engine-0", generate, 256)
    rollouts = Rollouts(config, 0, SimSource(), router, InstantScorer(), lambda tokens: "")
    rollouts.trained(await rollouts.take(config.prompts))
    rollouts.publish(0)  # the instant engine's weights never change
    began, steps = time.process_time(), 8
    for _ in range(steps):
        groups = await rollouts.take(config.prompts)
        rollouts.publish(0)
        rollouts.trained(groups)
    spent = time.process_time() - began
    await rollouts.close()
    return spent / (steps * config.prompts * config.samples)


async def main() -> None:
    """Ours and Ray's own calls take turns."""
    runtime = RayRuntime(Pool.of([{Kind.CPU: 2}]), name="cluster")
    try:
        group: RayGroup[Any] = RayGroup(runtime, Role.ROLLOUT, [Instant], [runtime.pool.devices[:1]])
        actor: Any = ray.remote(Instant)
        bare = actor.options(num_cpus=0, max_concurrency=1000).remote()
        request = Request("0.0", tuple(range(32)), Sampling(1.0, TOKENS), 0)

        async def own_call() -> None:
            await group.call(0, Engine.generate, request)

        async def bare_call() -> None:
            await bare.generate.remote(request)

        await window(own_call, 200)
        await window(bare_call, 200)
        pairs = [(await window(own_call, CALLS), await window(bare_call, CALLS)) for _ in range(REPEATS)]
        own, theirs = (statistics.median(p[i] for p in pairs) for i in (0, 1))
        ratio = statistics.median(a / b for a, b in pairs)
        facts = {"calls_per_s": round(own), "ray_calls_per_s": round(theirs), "in_flight": WINDOW, "cores": os.cpu_count()}
        figure("cluster/fraction_of_ray_call_rate", ratio, "x", goal=0.7, **facts)
        spent = [await samples(group) for _ in range(3)]
        figure("cluster/cpu_ms_per_sample", statistics.median(spent) * 1e3, "ms", goal=3.0, at_most=True, tokens=TOKENS)
    finally:
        await runtime.close()


if __name__ == "__main__":
    asyncio.run(main())
