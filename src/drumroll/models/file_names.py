"""The tensors of a model's files, where transformers' module holds others.

transformers fuses the experts of a layer into one parameter when it loads them. Files hold each by itself, and so do
checkpoints, exports and what engines receive: those names are the same for every backend and engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from drumroll.models.blocks import Block, Files

NARROW = 2
"""Columns of a parameter with which its conversion is tried; of one alone transformers makes no column."""


def find_files(module: Any) -> Files | None:
    """How a model's files hold its parameters; None if they hold other things than rows of them, one after another.

    transformers' own conversion tells: it is given numbers in order, in rows of a few, and they show where the rows go.
    """
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    names = set(revert_weight_conversion(module, {name: torch.empty(s, device="meta") for name, s in shapes.items()}))
    if names == set(shapes):
        return {}
    found: dict[str, list[Block]] = {}
    for name, shape in shapes.items():
        narrow = (*shape[:-1], min(shape[-1], NARROW))
        numbers = torch.arange(math.prod(narrow), dtype=torch.float64)
        try:
            parts = revert_weight_conversion(module, {name: numbers.view(narrow)})
        except Exception:  # foreign code, which may need several parameters at once
            return None
        blocks = _blocks(parts, numbers, shape[-1])
        if blocks is None:
            return None
        if list(parts) != [name]:
            found[name] = blocks
    known = {block.name for blocks in found.values() for block in blocks} | (shapes.keys() - found.keys())
    return found if known == names else None


def _blocks(parts: Mapping[str, Tensor], numbers: Tensor, width: int) -> list[Block] | None:
    """The tensors in the order of their rows; None if those are not all rows in their order."""
    ordered = sorted(parts.items(), key=lambda part: float(part[1].flatten()[0]))
    if not torch.equal(torch.cat([part.flatten() for _, part in ordered]), numbers):
        return None
    shapes = {name: (*part.shape[:-1], width) for name, part in ordered}
    return [Block(name, shape, (0,) * len(shape), shape) for name, shape in shapes.items()]


def as_in_files(tensors: Iterable[tuple[str, Tensor]], files: Files) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters as the tensors that files hold in their place: views."""
    for name, tensor in tensors:
        if name not in files:
            yield name, tensor
            continue
        sizes = [math.prod(block.sizes) for block in files[name]]
        for block, part in zip(files[name], tensor.detach().view(-1).split(sizes), strict=True):
            yield block.name, part.view(block.sizes)


def renamed(files: Files | None, before: str, after: str) -> Files | None:
    """The same for a module whose names begin otherwise."""

    def other(name: str) -> str:
        return after + name.removeprefix(before)

    def moved(block: Block) -> Block:
        return Block(other(block.name), block.shape, block.offsets, block.sizes)

    return None if files is None else {other(name): [moved(block) for block in found] for name, found in files.items()}
