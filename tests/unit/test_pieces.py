"""Flat runs of a parameter's elements become blocks of named tensors."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from drumroll.learners.pieces import Block, cut

SIZES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(1, 5))
def test_runs_of_a_fused_parameter_cover_every_tensor_once(sizes, ranks):
    blocks = [Block(str(n), tuple(s + 1 for s in of), (1,) * len(of), of) for n, of in enumerate(sizes)]
    parameter = torch.arange(sum(math.prod(of) for of in sizes), dtype=torch.float32)
    found = {block.name: torch.full(block.shape, -1.0) for block in blocks}
    each = -(-len(parameter) // ranks)
    for start in range(0, len(parameter), each):
        for piece in cut(blocks, start, parameter[start : start + each]):
            where = tuple(slice(a, a + n) for a, n in zip(piece.offsets, piece.tensor.shape, strict=True))
            assert (found[piece.name][where] == -1).all(), "an element is in two pieces"
            found[piece.name][where] = piece.tensor
    whole = torch.cat([found[b.name][tuple(slice(1, None) for _ in b.sizes)].reshape(-1) for b in blocks])
    assert torch.equal(whole, parameter)


def test_pieces_are_views():
    run = torch.zeros(7)
    for piece in cut([Block("a", (3, 4), (0, 0), (3, 4))], 3, run):
        piece.tensor.fill_(1)
    assert run.all()


def test_a_run_has_as_few_pieces_as_it_can():
    pieces = cut([Block("a", (9, 4), (2, 0), (5, 4))], 3, torch.zeros(10))
    assert [(p.offsets, tuple(p.tensor.shape)) for p in pieces] == [((2, 3), (1, 1)), ((3, 0), (2, 4)), ((5, 0), (1, 1))]
