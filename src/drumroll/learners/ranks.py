"""The ranks of a training role: where this one stands on the mesh, and how it agrees with its peers.

A rank alone agrees with itself at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _abort_process_group

from drumroll.config.accelerators import is_accelerator
from drumroll.errors import Interrupted, PeerFailed
from drumroll.mesh import Mesh
from drumroll.processes.accelerator import collectives, takes
from drumroll.processes.rendezvous import Rendezvous, find_store, gloo_options, meeting, register_gloo, steer_collectives

BUCKET = 2**24
"""Elements summed in one collective: large enough for speed, small enough to need little memory."""


@dataclass
class Ranks:
    """This rank's mesh, and the process group of all ranks on it. Ranks that never `met` (of frozen roles) agree alone."""

    mesh: Mesh = field(default_factory=Mesh)
    group: Any = None
    met: bool = False

    @classmethod
    def meet(
        cls,
        mesh: Mesh,
        rendezvous: Rendezvous,
        *,
        device: str,
        seconds: float,
        patience: float | None = None,
    ) -> Ranks:
        """Wait for the peers at their store, and join them (by the collectives of its device) at the address of this rank.

        `patience` is how long that may take, `seconds` (its default) how long a collective may take.
        """
        if mesh.size == 1:
            return ALONE
        patience = seconds if patience is None else patience
        host, address = rendezvous.host, rendezvous.addresses[mesh.rank]
        store, backend, options = find_store(host, rendezvous.port, patience, address), collectives(device), None
        with meeting(store, mesh.rank, mesh.size, address, patience):
            if is_accelerator(device):
                steer_collectives(device, address)
            else:
                backend, options = register_gloo(), gloo_options(host, address, patience)
            limit = timedelta(seconds=seconds)
            dist.init_process_group(
                backend, store=store, rank=mesh.rank, world_size=mesh.size, timeout=limit, pg_options=options
            )
        return cls(mesh, dist.group.WORLD, met=True)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by the sum of the ranks' tensors, in buckets; contiguous, because gloo ignores strides."""
        if not self.met:
            return
        bucket: list[Tensor] = []
        with self.failing_together():
            for i, tensor in enumerate(tensors):
                bucket.append(tensor)
                if sum(t.numel() for t in bucket) >= BUCKET or i == len(tensors) - 1:
                    flat = torch.cat([t.flatten() for t in bucket])
                    self._reduce(flat, dist.ReduceOp.SUM)
                    for own, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                        own.copy_(part.view_as(own))
                    bucket = []

    def most(self, number: int) -> int:
        """The largest number that any rank gives."""
        if not self.met:
            return number
        with self.failing_together():
            if self.group is None:
                raise PeerFailed(
                    f"Rank {self.mesh.rank} of {self.mesh.size} has left its peers after a failure; start the run again."
                )
            told = torch.tensor([number], device=takes(dist.get_backend(self.group)))
            self._reduce(told, dist.ReduceOp.MAX)
            return int(told.item())

    @contextmanager
    def agreed(self, undo: Callable[[], None]) -> Iterator[None]:
        """Run a block of local work on every rank, then vote; if it failed on one rank, all call `undo` and raise."""
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
        try:
            stopped = self.most(int(failure is not None))
        except PeerFailed as lost:
            if failure is None:
                raise
            raise failure from lost
        if stopped:
            undo()
            raise failure or Interrupted("another rank stopped in this update")

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """If the block fails here, leave the group, so that peers waiting in a collective fail at once."""
        try:
            yield
        except BaseException:
            group, self.group = self.group, None
            if group is not None:
                with suppress(Exception):
                    _abort_process_group(group)
            raise

    def _reduce(self, tensor: Tensor, op: Any) -> None:
        try:
            dist.all_reduce(tensor, op=op, group=self.group)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise PeerFailed(
                f"Rank {self.mesh.rank} of {self.mesh.size} lost its peers in an update: one of them failed, which its own error "
                f"explains, or did not come within cluster.collective_timeout ({reason})."
            ) from error


ALONE = Ranks()
