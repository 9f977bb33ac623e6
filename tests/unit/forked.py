"""Processes of tests, forked from one warm process: a two-rank job starts in a fraction of a second instead of ten.

The warm process has imported torch, transformers and our parts, and has never computed anything: a process that has
computed must not be forked, because its threads are not there in the child.
"""

from __future__ import annotations

import io
import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "transformers.models.llama.modeling_llama",
        "drumroll.learners.backends.torch",
        "drumroll.api",
    ]
)


def _rank(answers: Connection, function: Callable[..., Any], rank: int, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        answer = io.BytesIO()
        torch.save(function(rank, *arguments), answer)  # by value: shared tensors would be gone with this process
        answers.send((answer.getvalue(), ""))
    except BaseException:
        answers.send((None, traceback.format_exc()))


def run_ranks(
    function: Callable[..., Any], count: int, *arguments: Any, seconds: float = 300.0, lost: tuple[int, ...] = ()
) -> list[Any]:
    """The results of `function(rank, *arguments)` on this many ranks at once, but for those that are to die of it.

    No process outlives the call.
    """
    ranks, pipes = list[Any](), list[Connection]()
    try:
        for rank in range(count):
            mine, theirs = FORKED.Pipe()
            process = FORKED.Process(target=_rank, args=(theirs, function, rank, arguments), daemon=True)
            process.start()
            theirs.close()
            ranks.append(process)
            pipes.append(mine)
        answers = list[Any]()
        for rank, pipe in enumerate(pipes):
            if rank in lost:
                continue
            assert pipe.poll(seconds), f"rank {rank} did not answer within {seconds:g} s"
            answer, failure = pipe.recv()
            assert answer is not None, f"rank {rank} failed:\n{failure}"
            answers.append(torch.load(io.BytesIO(answer), weights_only=False))
        return answers
    finally:
        for process in ranks:
            process.kill()
            process.join()
