"""The device mesh of a training role: how many ranks along each axis, and where a rank stands. Plain data, no torch.

Ranks are numbered with `tensor` fastest, so that ranks that exchange the most are neighbours:
data, shard, pipeline, context, tensor. Process groups along the axes belong to `learners`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

AXES = ("data", "shard", "pipeline", "context", "tensor")


@dataclass(frozen=True, slots=True)
class Mesh:
    """The number of ranks along each axis, and this rank's number.

    Ranks at different `data` and `shard` coordinates train on different rows; the others share the rows of their
    coordinates. `expert` is no axis: it regroups data × shard × tensor, or a part of it, as the backend says.
    """

    data: int = 1
    shard: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        assert all(getattr(self, axis) >= 1 for axis in (*AXES, "expert")), f"sizes are at least 1: {self}"
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"
        regrouped = self.shares * self.tensor
        assert regrouped % self.expert == 0, f"expert {self.expert} does not divide data × shard × tensor = {regrouped}"

    @property
    def size(self) -> int:
        """Ranks in all."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's place along each axis."""
        found, rest = dict[str, int](), self.rank
        for axis in reversed(AXES):
            rest, found[axis] = divmod(rest, getattr(self, axis))
        return found

    @property
    def shares(self) -> int:
        """Into how many shares a batch is cut: data × shard."""
        return self.data * self.shard

    @property
    def share(self) -> int:
        """Which share of a batch this rank trains on."""
        at = self.coordinates
        return at["data"] * self.shard + at["shard"]

    def along(self, *axes: str) -> list[list[int]]:
        """All groups of ranks that differ only in their coordinates on these axes, each in the order of its ranks."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            at = replace(self, rank=rank).coordinates
            groups.setdefault(tuple(at[axis] for axis in AXES if axis not in axes), []).append(rank)
        return list(groups.values())

    def leaders(self) -> list[int]:
        """One rank for each share, in the order of the shares: the first of those with the same rows."""
        each = self.size // self.shares
        return [share * each for share in range(self.shares)]
