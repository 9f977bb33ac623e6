"""Context parallelism (Ulysses): ranks compute the same token tree together, each with a part of the tokens.

Everything but attention works on a rank's own tokens. Around attention two all-to-alls trade tokens for heads: each rank
gets all tokens of its own heads, attends over the whole tree, and returns to each rank the outputs of that rank's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drumroll.batch import Path
from drumroll.models.prefix_tree import PrefixTree
from drumroll.processes.accelerator import send

_Function: Any = torch.autograd.Function  # its methods take what each function needs


class ContextLayout:
    """A `Layout` of the nodes of a token tree that one rank of a group computes, and of the numbers it computes for them.

    `before` are the nodes at which the head computes a row. Nodes are dealt in the order of their rows, so that ranks have
    equally many nodes, and numbers of rows that differ at most by the largest of a node. Nodes without weight that only
    see each other fill the last places.
    """

    def __init__(self, nodes: int, paths: Sequence[Path], before: Tensor, group: Any, device: torch.device) -> None:
        self.group, self.size, rank = group, dist.get_world_size(group), dist.get_rank(group)
        each = -(-nodes // self.size)
        rows = torch.bincount(before, minlength=each * self.size)
        order = rows.argsort(descending=True, stable=True)  # the nodes that fill have no rows, and come last
        dealt = order.view(each, self.size).T  # [ranks, each]
        place = torch.empty_like(order)  # of each node among all ranks' nodes
        place[dealt.flatten()] = torch.arange(len(order))
        paths = [Path(place[path.nodes], path.start) for path in paths]
        self.tree = PrefixTree([*paths, Path(place[nodes:])], device)
        self.position = self.tree.position[rank * each : (rank + 1) * each]
        at = place[before]
        self.rows, self.all_rows = (at // each == rank).nonzero()[:, 0], len(before)
        self.nodes = dealt[rank].clamp(max=nodes - 1)  # of this rank; what fills may be any token
        self.before = at[self.rows] % each  # of each of this rank's rows, among its nodes

    def own(self, tokens: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of all nodes' tokens and all rows' chosen tokens this rank's, and the node before each of its rows."""
        return tokens[self.nodes], self.before, chosen[self.rows]

    def positions(self) -> Tensor:
        """Return the position of each of this rank's nodes in its sequence, [1, nodes]."""
        return self.position[None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        by_rank = torch.cat([x.unflatten(1, (self.size, -1)).flatten(2) for x in (q, k, v)], dim=2)
        mixed = _Exchange.apply(by_rank.transpose(0, 1), self.group).flatten(0, 1)
        sizes = [x.shape[1] // self.size * x.shape[2] for x in (q, k, v)]
        queries, keys, values = (
            part.unflatten(1, (-1, x.shape[2])) for part, x in zip(mixed.split(sizes, dim=1), (q, k, v), strict=True)
        )
        out = self.tree.attend(layer, queries, keys, values, scale, window)
        back = _Exchange.apply(out.unflatten(0, (self.size, -1)).flatten(2), self.group)
        return back.transpose(0, 1).reshape(len(q), q.shape[1], v.shape[2])

    def joined(self, numbers: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The numbers of all rows, on every rank; the gradient of each goes to the rank that computed it."""
        rows = send(self.rows, numbers[0].device)
        return tuple(_Join.apply(column, rows, self.all_rows, self.group) for column in numbers)

    def total(self, counts: Tensor) -> Tensor:
        """The sum of all ranks' counts."""
        total = counts.clone()
        dist.all_reduce(total, group=self.group)
        return total


# --- collectives with gradients; contiguous, because gloo ignores strides ---


def _exchanged(x: Tensor, group: Any) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


class _Exchange(_Function):
    """[ranks, ...]: sends each rank its entry; the result has what each rank sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


class _Join(_Function):
    """A column of which each rank has some rows. Every rank computes the whole loss of it, so gradients are not summed."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: Tensor, size: int, group: Any) -> Tensor:
        ctx.save_for_backward(rows)
        out = own.new_zeros(size, *own.shape[1:]).index_copy_(0, rows, own)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        return grad.index_select(0, rows), None, None, None
