"""Our own pipelines, a step per job, for benchmarks/pipelines.py.

python ours_pipelines.py RECIPE
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
from drumroll.processes.threads import CORES

Metrics = Mapping[str, float]


class Steps(Quiet):
    """A step waits for its job, and answers when it is committed."""

    def __init__(self) -> None:
        self.jobs = jobs()
        self.began = 0.0

    @override
    def stage(self, name: str) -> None:
        if not self.began and name == "data":  # what comes before it is not a step: the log-probs of the reference
            answer(ready=True)
            self._wait()

    @override
    def committed(self, step: int, metrics: Metrics) -> None:
        seconds = time.perf_counter() - self.began
        answer(seconds=seconds, loss=metrics["train/loss"], tokens=int(metrics["train/tokens"]), threads=CORES.total)
        self._wait()

    def _wait(self) -> None:
        next(self.jobs, None)
        self.began = time.perf_counter()


def main(recipe: str) -> None:
    """Train for as long as jobs come."""
    with tempfile.TemporaryDirectory() as folder:
        drumroll.train(recipe, [f"output={folder}"], progress=Steps())


if __name__ == "__main__":
    main(*sys.argv[1:])
