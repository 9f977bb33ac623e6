"""Processes of tests, forked from one warm process: a two-rank job starts in a fraction of a second instead of ten.

The warm process has imported torch, transformers and our parts, and has never computed anything: a process that has
computed must not be forked, because its threads are not there in the child.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "transformers.models.llama.modeling_llama",
        "transformers.models.mixtral.modeling_mixtral",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "drumroll.learners.backends.torch",
        "drumroll.api",
        "megatron.core.models.gpt",
        "deepspeed.runtime.zero.stage3",
        "deepspeed.runtime.zero.muon.muon_optimizer",
    ]
)
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed tells that it looked for others

AFTER_FAILURE = 2.0
"""Seconds in which other ranks may still tell how they failed."""


def _rank(jobs: Connection, rank: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported before the fork
    while True:
        function, arguments = jobs.recv()
        try:
            answer = io.BytesIO()
            torch.save(function(rank, *arguments), answer)  # by value: shared tensors would be gone with this process
            jobs.send((answer.getvalue(), ""))
        except BaseException:
            jobs.send((None, traceback.format_exc()))


class RankPool:
    """Processes that run functions together, one call after the other, and keep their module's state between calls.

    A call that fails ends them all: the others may wait for the one that failed.
    """

    def __init__(self, count: int) -> None:
        self.processes, self.pipes = list[Any](), list[Connection]()
        for rank in range(count):
            mine, theirs = FORKED.Pipe()
            process = FORKED.Process(target=_rank, args=(theirs, rank), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(mine)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], *arguments: Any, seconds: float = 300.0, lost: tuple[int, ...] = ()
    ) -> list[Any]:
        """The results of `function(rank, *arguments)` on all ranks at once, but for those that are to die of it."""
        try:
            for pipe in self.pipes:
                pipe.send((function, arguments))
            return self._answers(seconds, lost)
        except BaseException:
            self.close()
            raise

    def meet(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> list[Any]:
        """The same with the port of a new store, where the ranks meet, as the first argument."""
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self.run(function, store.port, *arguments, seconds=seconds)

    def _answers(self, seconds: float, lost: tuple[int, ...]) -> list[Any]:
        """The answer of every rank, in order. After a failure the others get a moment to tell theirs: one is the cause."""
        until, waiting = time.monotonic() + seconds, {n: pipe for n, pipe in enumerate(self.pipes) if n not in lost}
        answers, failures = dict[int, Any](), list[str]()
        while waiting:
            ready = wait(list(waiting.values()), timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                answer, failure = waiting.pop(rank).recv()
                if answer is None:
                    failures.append(f"rank {rank} failed:\n{failure}")
                    until = min(until, time.monotonic() + AFTER_FAILURE)
                else:
                    answers[rank] = torch.load(io.BytesIO(answer), weights_only=False)
        assert not failures, "\n".join(failures)
        assert not waiting, f"ranks {sorted(waiting)} did not answer within {seconds:g} s"
        return [answers[rank] for rank in sorted(answers)]

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()


def run_ranks(
    function: Callable[..., Any], count: int, *arguments: Any, seconds: float = 300.0, lost: tuple[int, ...] = ()
) -> list[Any]:
    """The same on this many new ranks. No process outlives the call."""
    with RankPool(count) as pool:
        return pool.run(function, *arguments, seconds=seconds, lost=lost)
