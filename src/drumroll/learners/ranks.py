"""Data-parallel ranks: what a learner must agree on with its peers. One rank alone agrees with itself at no cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drumroll.cluster.rendezvous import LOOPBACK, find_store, gloo_options, meeting, register_gloo, steer_nccl

BUCKET = 2**24
"""Elements summed in one collective: large enough for speed, small enough to need little memory."""


@dataclass(frozen=True)
class Ranks:
    """This rank among its peers; `group` is a process group of theirs alone."""

    rank: int = 0
    count: int = 1
    group: Any = None

    @classmethod
    def meet(
        cls,
        rank: int,
        count: int,
        host: str,
        port: int,
        *,
        device: str,
        seconds: float,
        address: str = LOOPBACK,
        patience: float | None = None,
    ) -> Ranks:
        """Wait for the peers at a store, and join them (NCCL on CUDA, gloo elsewhere) at the address of this machine.

        `patience` is how long that may take, `seconds` (its default) how long a collective may take.
        """
        if count == 1:
            return ALONE
        patience = seconds if patience is None else patience
        store, backend, options = find_store(host, port, patience, address), "nccl", None
        with meeting(store, rank, count, address, patience):
            if device.startswith("cuda"):
                steer_nccl(address)
            else:
                backend, options = register_gloo(), gloo_options(host, address, patience)
            limit = timedelta(seconds=seconds)
            dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit, pg_options=options)
        return cls(rank, count, dist.group.WORLD)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by the sum of the ranks' tensors, in buckets; contiguous, because gloo ignores strides."""
        if self.count == 1:
            return
        bucket: list[Tensor] = []
        for i, tensor in enumerate(tensors):
            bucket.append(tensor)
            if sum(t.numel() for t in bucket) >= BUCKET or i == len(tensors) - 1:
                flat = torch.cat([t.flatten() for t in bucket])
                dist.all_reduce(flat, group=self.group)
                for own, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                    own.copy_(part.view_as(own))
                bucket = []

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        if self.count == 1:
            return flag
        told = torch.tensor([int(flag)], device="cuda" if dist.get_backend(self.group) == "nccl" else "cpu")
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.group)
        return bool(told.item())


ALONE = Ranks()
