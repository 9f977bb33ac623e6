"""Every named algorithm on the quickstart's task, from the same start: held-out accuracy gained, and steps to 0.8.

python benchmarks/algorithms.py [--seeds 3] [--steps 60] [NAME ...]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from figures import figure

import drumroll
from drumroll.config.algorithm import RECIPES

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart" / "recipe.yaml"
EVERY = 10


def one(name: str, seed: int, steps: int) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """A short run: its summary and its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"seed={seed}", f"steps={steps}", f"algorithm={name}", f"output={folder}", f"eval.every={EVERY}"]
        run = drumroll.train(RECIPE, overrides)
        return run.summary, run.metrics


def measure(name: str, seeds: int, steps: int) -> None:
    """Mean gain over both domains and all seeds; the median step at which the mean accuracy reaches 0.8."""
    gains, reached, seconds = [], [], []
    for seed in range(seeds):
        summary, metrics = one(name, seed, steps)
        sets = list(summary["before"])
        gains.append(statistics.mean(summary["after"][s] - summary["before"][s] for s in sets))
        curve = [(m["step"], statistics.mean(m[f"eval/{s}"] for s in sets)) for m in metrics if f"eval/{sets[0]}" in m]
        reached.append(next((step for step, value in curve if value >= 0.8), None))
        seconds.append(summary["seconds"])
    facts = {"seeds": seeds, "steps": steps, "seconds": round(statistics.mean(seconds), 1)}
    figure(f"algorithms/{name}/gain", statistics.mean(gains), "accuracy", goal=0.4, worst=round(min(gains), 4), **facts)
    known = [step for step in reached if step is not None]
    if len(known) == seeds:
        figure(f"algorithms/{name}/steps_to_0.8", statistics.median(known), "steps", measured_every=EVERY, **facts)


def main() -> None:
    """All algorithms, or those named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(RECIPES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    for name in arguments.names:
        measure(name, arguments.seeds, arguments.steps)


if __name__ == "__main__":
    main()
