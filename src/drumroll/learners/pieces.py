"""Pieces: which part of each named tensor a rank holds, whatever strategy divided it.

A full tensor is covered by the pieces of all ranks; ranks that are replicas of each other hold the same pieces. Checkpoints,
exports and the memory that a rank reports speak of pieces, so none of them knows how a model was divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from drumroll.models.blocks import Block as Block
from drumroll.models.blocks import Files


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a named tensor, as one rank holds it."""

    name: str  # its Hugging Face name
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # where the block begins in it, one number for each dimension
    tensor: Tensor  # the block itself, in this rank's memory; it may be empty
    first: bool = True  # whether this is the first of the ranks that hold the same block: the one that writes it

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.offsets) == self.tensor.dim(), f"{self.name}: {self}"
        ends = (begin + size for begin, size in zip(self.offsets, self.tensor.shape, strict=True))
        assert all(end <= whole for end, whole in zip(ends, self.shape, strict=True)), (
            f"{self.name}: {self.offsets} {self.shape}"
        )


def cut(blocks: Sequence[Block], start: int, flat: Tensor, *, first: bool = True) -> list[Piece]:
    """The pieces in a flat run of a parameter's elements, as views of it.

    The parameter is the blocks' elements one after another, and the run begins at its element `start`: optimizers that
    divide state (ZeRO, Megatron's distributed one) hold such runs, which begin and end anywhere in a row.
    """
    found: list[Piece] = []
    for block in blocks:
        size = math.prod(block.sizes)
        begin, end = max(start, 0), min(start + flat.numel(), size)
        for offsets, sizes in _rectangles(block.sizes, begin, end) if begin < end else ():
            count = math.prod(sizes)
            tensor = flat.narrow(0, begin - start, count).view(sizes)
            at = tuple(a + b for a, b in zip(block.offsets, offsets, strict=True))
            found.append(Piece(block.name, block.shape, at, tensor, first))
            begin += count
        start -= size
    return found


def in_files(piece: Piece, files: Files) -> list[Piece]:
    """A piece of a parameter as pieces of the tensors that a model's files hold in its place."""
    if piece.name not in files:
        return [piece]
    start = piece.offsets[0] * math.prod(piece.shape[1:])  # only rows are divided
    return cut(files[piece.name], start, piece.tensor.view(-1), first=piece.first)


def shapes_in_files(shapes: Mapping[str, tuple[int, ...]], files: Files) -> dict[str, tuple[int, ...]]:
    """The whole shapes of the tensors that a model's files hold in the place of parameters of these shapes."""
    blocks = {name: files.get(name, (Block(name, shape, (), ()),)) for name, shape in shapes.items()}
    return {block.name: block.shape for parts in blocks.values() for block in parts}


Rectangle = tuple[tuple[int, ...], tuple[int, ...]]


def _rectangles(sizes: tuple[int, ...], begin: int, end: int) -> Iterator[Rectangle]:
    """Offsets and sizes of the blocks that a run of elements of a row-major tensor consists of, in its order."""
    if len(sizes) <= 1:
        yield ((begin,), (end - begin,)) if sizes else ((), ())
        return
    inner = math.prod(sizes[1:])
    while begin < end:
        row, column = divmod(begin, inner)
        if column == 0 and end - begin >= inner:
            rows = (end - begin) // inner
            yield (row, *(0 for _ in sizes[1:])), (rows, *sizes[1:])
            begin += rows * inner
        else:
            stop = min(inner, column + end - begin)
            yield from (((row, *at), (1, *of)) for at, of in _rectangles(sizes[1:], column, stop))
            begin += stop - column
