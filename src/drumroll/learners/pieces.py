"""Pieces: which part of each named tensor a rank holds, whatever strategy divided it.

A full tensor is covered by the pieces of all ranks; ranks that are replicas of each other hold the same pieces. Checkpoints,
exports and the memory that a rank reports speak of pieces, so none of them knows how a model was divided.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
