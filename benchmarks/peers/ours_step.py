"""Our own training, a step per job, for benchmarks/step.py.

python ours_step.py RECIPE LENGTHS [key=value ...]

LENGTHS is a list of JSON: the tokens of each row of a step, in draw order, whatever the model writes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Mapping

from lines import answer, jobs
from typing_extensions import override

import drumroll
from drumroll.engines import Completion, Request
from drumroll.engines.native import NativeEngine
from drumroll.observe.progress import Quiet
from drumroll.sample import StopReason

Metrics = Mapping[str, float]


class Steps(Quiet):
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
        answer(seconds=seconds, mean_length=metrics["rollout/length"], stages=stages, skipped=metrics["rollout/zero_variance"])
        self._wait()

    def _wait(self) -> None:
        next(self.jobs)
        self.began = time.perf_counter()


def record(lengths: list[int]) -> None:
    """Make every engine of this process write so many tokens in each row, past ends of sequence."""
    generate = NativeEngine.generate

    async def recorded(self: NativeEngine, request: Request) -> Completion:
        if self.model.eos:
            self.model = dataclasses.replace(self.model, eos=frozenset())
        sampling = dataclasses.replace(request.sampling, max_tokens=lengths[request.order % len(lengths)])
        done = await generate(self, dataclasses.replace(request, sampling=sampling))
        if done.stop is StopReason.LENGTH:
            done.stop = StopReason.EOS  # else the scheduler would ask for the rest of its own limit
        return done

    NativeEngine.generate = recorded  # type: ignore[method-assign]


def main(recipe: str, lengths: str, *overrides: str) -> None:
    """Train for as long as jobs come."""
    record(json.loads(lengths))
    with tempfile.TemporaryDirectory() as folder:
        drumroll.train(recipe, [*overrides, f"output={folder}"], progress=Steps())


if __name__ == "__main__":
    main(*sys.argv[1:])
