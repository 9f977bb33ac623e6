"""Every named algorithm on the quickstart's task, from the same start: held-out accuracy gained, and steps to 0.8.

python benchmarks/algorithms.py [--seeds 3] [--steps 30] [--write] [NAME ...]

With --write the table goes to docs/algorithms.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from figures import figure

import drumroll
from drumroll.algorithms.explain import explain_preset
from drumroll.config.algorithm import PRESETS

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "quickstart" / "recipe.yaml"
PAGE = ROOT / "docs" / "algorithms.md"
EVERY = 5
HEADER = """# Algorithms, measured

Made by `python benchmarks/algorithms.py --write`. Every named algorithm trains the built-in `tiny` model on the quickstart's
two tasks for {steps} steps of 32 prompts × 8 samples, from the same start, with {seeds} seeds, on the same learning-rate
schedule (the critic of `ppo`: 1e-3). The task is small: the table shows that each algorithm learns, not which is best.

*Before* and *after* are held-out greedy accuracy, the mean of both tasks and all seeds; *worst* is the smallest gain of a
seed; *steps to 0.8* is the median over seeds, measured every {every} steps. *Seconds* are as measured: alone on the
machine they say something, beside other work they do not.

| algorithm | before | after | gain | worst | steps to 0.8 | seconds a run |
|---|---|---|---|---|---|---|
"""


@dataclass
class Result:
    """One algorithm over all seeds."""

    name: str
    before: list[float]
    after: list[float]
    reached: list[float | None]
    seconds: list[float]

    def gains(self) -> list[float]:
        """Held-out accuracy gained, by seed."""
        return [a - b for a, b in zip(self.after, self.before, strict=True)]

    def steps(self) -> float | None:
        """The median step at which a seed reached 0.8; None if one did not."""
        known = [step for step in self.reached if step is not None]
        return statistics.median(known) if len(known) == len(self.reached) else None

    def row(self) -> str:
        """As a line of the table."""
        steps = self.steps()
        numbers = [statistics.mean(self.before), statistics.mean(self.after), statistics.mean(self.gains()), min(self.gains())]
        cells = [f"`{self.name}`", *(f"{n:.3f}" for n in numbers), "not reached" if steps is None else f"{steps:g}"]
        return f"| {' | '.join(cells)} | {statistics.mean(self.seconds):.0f} |"


def measure(name: str, seeds: int, steps: int) -> Result:
    """Short runs of one algorithm."""
    result = Result(name, [], [], [], [])
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            overrides = [f"seed={seed}", f"steps={steps}", f"algorithm={name}", f"output={folder}", f"eval.every={EVERY}"]
            run = drumroll.train(RECIPE, [*overrides, "roles.critic.optim.lr=1e-3", "trackers=[]"])
            summary, metrics = run.summary, run.metrics
        sets = list(summary["before"])
        result.before.append(statistics.mean(summary["before"].values()))
        result.after.append(statistics.mean(summary["after"].values()))
        curve = [(m["step"], statistics.mean(m[f"eval/{s}"] for s in sets)) for m in metrics if f"eval/{sets[0]}" in m]
        result.reached.append(next((step for step, value in curve if value >= 0.8), None))
        result.seconds.append(summary["seconds"])
    facts = {"seeds": seeds, "steps": steps, "seconds": round(statistics.mean(result.seconds), 1)}
    gains, reached = result.gains(), result.steps()
    figure(f"algorithms/{name}/gain", statistics.mean(gains), "accuracy", goal=0.4, worst=round(min(gains), 4), **facts)
    if reached is not None:
        figure(f"algorithms/{name}/steps_to_0.8", reached, "steps", measured_every=EVERY, **facts)
    return result


def write(results: list[Result], seeds: int, steps: int) -> None:
    """The page: the table, and what each algorithm is made of."""
    parts = "\n\n".join(f"```\n{explain_preset(r.name)}\n```" for r in results)
    table = "\n".join(r.row() for r in results)
    PAGE.write_text(f"{HEADER.format(steps=steps, seeds=seeds, every=EVERY)}{table}\n\n## What they are made of\n\n{parts}\n")


def main() -> None:
    """All algorithms, or those named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(PRESETS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    results: list[Result] = []
    for name in arguments.names:
        results.append(measure(name, arguments.seeds, arguments.steps))
        if arguments.write:
            write(results, arguments.seeds, arguments.steps)


if __name__ == "__main__":
    main()
