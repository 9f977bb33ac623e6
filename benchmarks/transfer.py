"""How fast a batch moves between stages on a cluster: from the builder to a learner's rank, as a share of a memory copy.

python benchmarks/transfer.py
"""

from __future__ import annotations

import asyncio
import statistics
import time

import torch
from figures import figure

from drumroll.batch import Batch
from drumroll.placement.devices import Kind, Pool
from drumroll.workers.group import Role
from drumroll.workers.ray_group import RayGroup, RayRuntime

TOKENS = 4_000_000
REPEATS = 7


def made(tokens: int) -> Batch:
    """A batch of so many tokens, in samples of a thousand."""
    samples = tokens // 1000
    zeros = torch.zeros(tokens)
    return Batch(
        tokens=torch.zeros(tokens, dtype=torch.int64),
        lengths=torch.full((samples,), 1000),
        owned=torch.ones(tokens, dtype=torch.bool),
        mask=torch.ones(tokens, dtype=torch.bool),
        behaviour=zeros,
        versions=torch.zeros(tokens, dtype=torch.int64),
        sample_of=torch.arange(samples),
        group_of=torch.arange(samples) // 8,
        rewards=torch.zeros(samples),
        truncated=torch.zeros(samples, dtype=torch.bool),
        domains=("d",) * samples,
        advantages=zeros.clone(),
    )


def size(batch: Batch) -> int:
    """Bytes of its tensors."""
    return sum(v.nbytes for v in vars(batch).values() if isinstance(v, torch.Tensor))


class Maker:
    """The builder's side."""

    def make(self, tokens: int) -> Batch:
        """A new batch, left in the object store."""
        torch.set_num_threads(1)
        return made(tokens)


class Reader:
    """A rank's side."""

    def read(self, batch: Batch) -> float:
        """Touch every byte."""
        torch.set_num_threads(1)
        columns = [v for v in vars(batch).values() if isinstance(v, torch.Tensor)]
        return sum(float(c.sum()) for c in columns)


async def main() -> None:
    """Make here, read there; the controller holds only a reference."""
    torch.set_num_threads(1)
    runtime = RayRuntime(Pool.of([{Kind.CPU: 2}]), name="transfer")
    try:
        devices = runtime.pool.devices
        builder: RayGroup[Maker] = RayGroup(runtime, Role.BATCH_BUILDER, [Maker], [devices[:1]])
        rank: RayGroup[Reader] = RayGroup(runtime, Role.ACTOR, [Reader], [devices[1:]])
        batch = made(TOKENS)
        target = {n: torch.empty_like(v) for n, v in vars(batch).items() if isinstance(v, torch.Tensor)}
        moves, copies, reads = [], [], []
        for _ in range(REPEATS):
            began = time.perf_counter()
            batch.tokens.sum(), batch.versions.sum(), batch.behaviour.sum()
            reads.append(time.perf_counter() - began)
            reference = await builder.keep(0, Maker.make, TOKENS)
            began = time.perf_counter()
            await rank.call(0, Reader.read, reference)
            moves.append(time.perf_counter() - began)
            began = time.perf_counter()
            for name, column in target.items():
                column.copy_(getattr(batch, name))
            copies.append(time.perf_counter() - began)
        move, copy = statistics.median(moves[1:]), statistics.median(copies[1:])
        facts = {"megabytes": size(batch) // 10**6, "move_ms": round(move * 1e3, 2), "memcpy_ms": round(copy * 1e3, 2)}
        figure("transfer/fraction_of_memcpy", copy / move, "x", **facts, includes="the call, mapping, and reading every byte")
    finally:
        await runtime.close()


if __name__ == "__main__":
    asyncio.run(main())
