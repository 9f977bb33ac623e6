"""The scheduler against a batch-level barrier loop on the same draws, greedy list scheduling, and its own CPU cost.

The workload is fixed: 512 slots, 64 groups × 8, oversample 2, half the groups filtered, lengths log-normal with σ = 1 capped
at 8 medians, a reward takes one median. Utilisation counts only tokens of groups that are trained on.

python benchmarks/scheduler.py
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from figures import figure

from drumroll.config.rollout import RolloutConfig
from drumroll.engines import Completion, Request
from drumroll.engines.router import Router
from drumroll.lifecycle import DrawEvent, Event
from drumroll.rollout.scheduler import Rollouts
from drumroll.rollout.simulation import Outcome, SimSource, Workload, barrier, generation_time, greedy_makespan, simulate
from drumroll.rollout.virtual import run
from drumroll.sample import Sample, StopReason
from drumroll.store.ledger import Ledger

STEPS = 30
WORK = Workload(engines=8, slots=64, median_tokens=64)


def config(**changes: object) -> RolloutConfig:
    """The fixed workload's settings."""
    fixed = {
        "prompts": 64,
        "samples": 8,
        "oversample": 2,
        "filter": "zero_variance",
        "max_tokens": 100_000,
        "generation_timeout": 1e9,
    }
    return RolloutConfig.model_validate(fixed | changes)


def against_the_barrier() -> None:
    """Step time and useful utilisation, as ratios to the baseline."""
    baseline = barrier(WORK, config(), STEPS)
    modes = [("", "draw", 1.0), ("arrival/", "arrival", 1.0), ("sync/", "draw", 0.0), ("sync_arrival/", "arrival", 0.0)]
    for name, order, staleness in modes:
        ours: Outcome = run(simulate(WORK, config(order=order, max_staleness=staleness), STEPS))
        facts = {"order": order, "max_staleness": staleness, "steps": STEPS, "baseline": "generate all, reward all, refill"}
        figure(
            *(f"scheduler/{name}useful_utilisation_ratio", ours.utilisation / baseline.utilisation, "x"),
            goal=2.0, ours=round(ours.utilisation, 4), barrier=round(baseline.utilisation, 4), **facts,
        )  # fmt: skip
        figure(
            *(f"scheduler/{name}step_time_ratio", ours.seconds / baseline.seconds, "x"),
            goal=0.5, at_most=True, ours=round(ours.seconds / STEPS, 3), barrier=round(baseline.seconds / STEPS, 3), **facts,
        )  # fmt: skip


def makespan(per_slot: int) -> tuple[float, float, float]:
    """Ours, greedy list scheduling on the same draws, and the lower bound, for so many samples per slot."""
    work = Workload(engines=8, slots=64, reward_time=0.0, filtered=0.0, median_tokens=64)
    slots = work.engines * work.slots
    prompts = per_slot * slots // 8
    ours = run(simulate(work, config(prompts=prompts, oversample=1, filter=None), 1))
    jobs = [generation_time(work, d, i) for d in range(prompts) for i in range(8)]
    return ours.seconds, greedy_makespan(jobs, slots), max(sum(jobs) / slots, max(jobs))


def scale() -> None:
    """A thousand engines: does the schedule, and the controller, keep up?"""
    work = Workload(engines=1000, slots=64, reward_time=0.0, filtered=0.0, median_tokens=8)
    slots = work.engines * work.slots
    prompts = 2 * slots // 8
    began = time.process_time()
    ours = run(simulate(work, config(prompts=prompts, oversample=1, filter=None), 1))
    cost = (time.process_time() - began) / ours.started
    jobs = [generation_time(work, d, i) for d in range(prompts) for i in range(8)]
    facts = {"engines": work.engines, "slots": slots, "samples": ours.started}
    figure(
        "scheduler/scale/makespan_over_greedy",
        ours.seconds / greedy_makespan(jobs, slots),
        "x",
        goal=1.02,
        at_most=True,
        **facts,
    )
    figure("scheduler/scale/cpu_us_per_sample", cost * 1e6, "µs", **facts, note="simulated engines included")


class Instant:
    """An engine and a scorer that answer when told, so that only the controller's own work is measured."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []

    async def generate(self, request: Request) -> Completion:
        """Wait for the signal, then answer."""
        ready = asyncio.get_running_loop().create_future()
        self.waiting.append(ready)
        await ready
        return Completion([1, 2], [-1.0, -1.0], [0, 0], StopReason.EOS)

    async def score(self, sample: Sample, group: object = None) -> None:
        """At once."""
        sample.reward = float(sample.index % 2)


async def controller_cost(in_flight: int) -> tuple[float, int]:
    """CPU seconds per transition with so many samples in flight, ledger included; and the number of transitions."""
    engine, transitions = Instant(), 0

    def count(event: Event | DrawEvent) -> None:
        nonlocal transitions
        transitions += isinstance(event, Event)

    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.sqlite")
        router = Router()
        for i in range(-(-in_flight // 64)):
            router.join(f"e{i}", engine.generate, 64)
        settings = config(prompts=in_flight // 8, oversample=1, filter=None)
        rollouts = Rollouts(settings, 0, SimSource(), router, engine, lambda tokens: "", listeners=[ledger, count])
        began = time.process_time()
        task = asyncio.ensure_future(rollouts.take(settings.prompts))
        while len(engine.waiting) < in_flight:
            await asyncio.sleep(0)
        for ready in engine.waiting:
            ready.set_result(None)
        groups = await task
        rollouts.publish(1)
        rollouts.trained(groups)
        ledger.next_step()
        ledger.commit(1)
        spent = time.process_time() - began
        ledger.close()
    return spent / transitions, transitions


def simulated_worlds() -> None:
    """How many worlds with faults the test suite plays in a minute on one core."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "simulation"))
    from world import play  # pyrefly: ignore[missing-import]

    began = time.perf_counter()
    reports = [play(seed) for seed in range(150)]
    figure(
        "simulation/runs_per_minute",
        60 * len(reports) / (time.perf_counter() - began),
        "runs/min",
        samples=sum(r.samples for r in reports),
    )


def main() -> None:
    """All figures."""
    against_the_barrier()
    ours, greedy, _ = makespan(4)
    figure("scheduler/makespan_over_greedy", ours / greedy, "x", goal=1.02, at_most=True, samples_per_slot=4)
    ours, _, bound = makespan(32)
    figure("scheduler/makespan_over_bound_32", ours / bound, "x", goal=1.15, at_most=True, samples_per_slot=32)
    asyncio.run(controller_cost(2_000))  # warm up
    small = min(asyncio.run(controller_cost(10_000))[0] for _ in range(3))
    large = min(asyncio.run(controller_cost(100_000))[0] for _ in range(2))
    figure(
        "scheduler/cpu_us_per_transition",
        large * 1e6,
        "µs",
        goal=60,
        at_most=True,
        in_flight=100_000,
        at_10k=round(small * 1e6, 2),
    )
    figure("scheduler/growth_10k_100k", large / small, "x", goal=2.0, at_most=True)
    scale()
    simulated_worlds()


if __name__ == "__main__":
    main()
