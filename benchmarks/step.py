"""Seconds and tokens per second of a whole training step of the quickstart, and their share of the machine's limit.

python benchmarks/step.py [recipe.yaml] [key=value ...]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from figures import figure, gemm_gflops

import drumroll
from drumroll.models.loading import load

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart" / "recipe.yaml"


def main() -> None:
    """Train a few steps; report the median step after the first two."""
    recipe, *overrides = sys.argv[1:] or [str(RECIPE)]
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"output={folder}", "eval={sets: {}}", "checkpoint.every=0"]
        run = drumroll.train(recipe, ["steps=14", *overrides, *fixed])
        steps = run.metrics[3:]
        parameters = sum(p.numel() for p in load(run.config.model).module.parameters())
    limit = gemm_gflops()
    seconds = statistics.median(m["time/step"] for m in steps)
    tokens = statistics.median(m["rollout/tokens"] for m in steps)
    facts = {"recipe": Path(recipe).parent.name, "repeats": len(steps), "gemm_gflops": round(limit, 1)}
    stages = {n: round(statistics.median(m[f"time/{n}"] for m in steps), 4) for n in ("rollout", "infer", "train", "publish")}
    figure("step/seconds", seconds, "s", **facts, stages=stages)
    # Two operations per parameter to decode a token, six to train on it.
    figure("step/tokens_per_s", tokens / seconds, "tokens/s", **facts, limit=round(limit * 1e9 / (8 * parameters)))


if __name__ == "__main__":
    main()
