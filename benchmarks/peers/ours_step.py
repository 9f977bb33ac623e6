"""Our own training, a step per job, for benchmarks/step.py.

python ours_step.py RECIPE [key=value ...]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping

from lines import answer, jobs
from typing_extensions import override

import drumroll
from drumroll.observe.progress import Quiet

Metrics = Mapping[str, float]


class Turns(Quiet):
    """A step waits for its job, and answers when it is committed."""

    def __init__(self) -> None:
        self.jobs = jobs()
        self.began = 0.0

    @override
    def begin(self, step: int, before: Metrics) -> None:
        answer(ready=True)
        self._wait()

    @override
    def committed(self, step: int, metrics: Metrics) -> None:
        seconds = time.perf_counter() - self.began
        stages = {name: metrics[f"time/{name}"] for name in ("rollout", "infer", "train", "publish")}
        answer(seconds=seconds, mean_length=metrics["rollout/length"], stages=stages)
        self._wait()

    def _wait(self) -> None:
        next(self.jobs)
        self.began = time.perf_counter()


def main(recipe: str, *overrides: str) -> None:
    """Train for as long as jobs come."""
    with tempfile.TemporaryDirectory() as folder:
        drumroll.train(recipe, [*overrides, f"output={folder}"], progress=Turns())


if __name__ == "__main__":
    main(*sys.argv[1:])
