"""The ranks of a training role: where this one stands on the mesh, and how it agrees with its peers.

A rank alone agrees with itself at no cost. Ranks that divide a model compute it together: their forward and backward passes
are collectives, so a rank that fails in one leaves the group instead of voting.
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
from drumroll.mesh import AXES, Mesh
from drumroll.processes.accelerator import collectives, takes
from drumroll.processes.rendezvous import Rendezvous, find_store, gloo_options, meeting, register_gloo, steer_collectives

BUCKET = 2**24
"""Elements summed in one collective: large enough for speed, small enough to need little memory."""


@dataclass
class Ranks:
    """This rank's mesh, and the process group of all ranks on it. Ranks that never `met` (whole frozen replicas) agree alone.

    `along` holds the groups of the ranks that differ from this one on a single axis, for axes of several ranks.
    """

    mesh: Mesh = field(default_factory=Mesh)
    group: Any = None
    met: bool = False
    along: dict[str, Any] = field(default_factory=dict)
    seconds: float = 1800.0  # of a collective

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
                options = gloo_options(host, address, patience)
                backend = register_gloo(options)
            limit = timedelta(seconds=seconds)
            dist.init_process_group(
                backend, store=store, rank=mesh.rank, world_size=mesh.size, timeout=limit, pg_options=options
            )
            along = {axis: _group_along(mesh, axis, backend, options, limit) for axis in AXES if getattr(mesh, axis) > 1}
        return cls(mesh, dist.group.WORLD, met=True, along=along, seconds=seconds)

    @property
    def divided(self) -> bool:
        """Whether no rank holds the whole model, so that its forward and backward passes are collectives."""
        return self.mesh.size > self.mesh.data

    def add(self, tensors: Sequence[Tensor], axis: str = "data") -> None:
        """Replace each tensor by its sum over the ranks along an axis, in buckets; contiguous, because gloo ignores strides."""
        group = self.along.get(axis)
        if group is None:
            return
        bucket: list[Tensor] = []
        with self.failing_together():
            for i, tensor in enumerate(tensors):
                bucket.append(tensor)
                if sum(t.numel() for t in bucket) >= BUCKET or i == len(tensors) - 1:
                    flat = torch.cat([t.flatten() for t in bucket])
                    self._reduce(flat, dist.ReduceOp.SUM, group)
                    for own, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                        own.copy_(part.view_as(own))
                    bucket = []

    def total(self, number: Tensor) -> Tensor:
        """The sum of a tensor over all ranks."""
        with self.failing_together():
            self._reduce(number, dist.ReduceOp.SUM, self.group)
            return number

    def most(self, number: int) -> int:
        """The largest number that any rank gives."""
        if not self.met:
            return number
        with self.failing_together():
            told = torch.tensor([number], device=takes(dist.get_backend(self.group)))
            self._reduce(told, dist.ReduceOp.MAX, self.group)
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
        """If the block fails here, leave all groups, so that peers waiting in a collective fail at once."""
        if self.met and self.group is None:
            raise PeerFailed(
                f"Rank {self.mesh.rank} of {self.mesh.size} has left its peers after a failure; start the run again."
            )
        try:
            yield
        except BaseException as error:
            group, self.group = self.group, None
            if group is not None:
                with suppress(Exception):
                    _abort_process_group(group)
            if _from_peers(error):
                reason = str(error).strip().splitlines()[0]
                raise PeerFailed(
                    f"Rank {self.mesh.rank} of {self.mesh.size} lost its peers: one of them failed, which its own error "
                    f"explains, or did not come within cluster.collective_timeout ({reason})."
                ) from error
            raise

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Run a pass of the model: where ranks compute it together, a failure leaves the group; elsewhere the caller's vote tells."""
        if not self.divided:
            yield
            return
        with self.failing_together():
            yield

    def _reduce(self, tensor: Tensor, op: Any, group: Any) -> None:
        dist.all_reduce(tensor, op=op, group=group)


def _group_along(mesh: Mesh, axis: str, backend: str, options: Any, limit: timedelta) -> Any:
    """The group of the ranks that differ from this one on an axis. All ranks make all such groups, in the same order."""
    every = mesh.along(axis)
    if len(every) == 1:
        return dist.group.WORLD
    made = [dist.new_group(ranks, backend=backend, pg_options=options, timeout=limit) for ranks in every]
    return next(group for ranks, group in zip(every, made, strict=True) if mesh.rank in ranks)


def _from_peers(error: BaseException) -> bool:
    """Whether an error says that a collective ended because of another rank."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


ALONE = Ranks()
