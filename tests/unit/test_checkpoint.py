"""Checkpoints are saved by any number of ranks and loaded by any other, bit for bit, or refused in one sentence."""

import dataclasses
import itertools
import json
import math
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import Parameter

from drumroll.errors import StoreError
from drumroll.learners import checkpoint
from drumroll.learners.checkpoint import MOMENTS, Snapshot, adamw_state, load, set_adamw_state
from drumroll.learners.pieces import Block, Piece, cut

BETAS = (0.8, 0.9)


class Rank:
    """One rank's masters of a model of named tensors, cut into rows and columns, and their AdamW."""

    flat = False

    def __init__(self, number, whole, rows, columns, replicas=1):
        grid = list(itertools.product(range(replicas), range(rows), range(columns)))
        self.number, (replica, self.row, self.column) = number, grid[number]
        self.rows, self.columns, self.replica = rows, columns, replica
        self.boxes = {name: self.box(tensor.shape) for name, tensor in whole.items()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
        self.masters = {name: Parameter(self.cut(name, tensor)) for name, tensor in whole.items()}
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=0.1, betas=BETAS, fused=True)

    def box(self, shape):
        """(begin, end) of each dimension: the first is cut into rows, the second into columns; late ranks may get nothing."""
        cuts = [(self.row, self.rows), (self.column, self.columns)][: len(shape)]
        found = [(0, size) for size in shape]
        for dim, (at, count) in enumerate(cuts):
            each = -(-shape[dim] // count)
            found[dim] = (min(at * each, shape[dim]), min((at + 1) * each, shape[dim]))
        return found

    def cut(self, name, tensor):
        return tensor[tuple(slice(*ends) for ends in self.boxes[name])].clone()

    def pieces(self):
        """A tensor without columns is the same on all ranks of a row, and one without rows on all ranks."""
        found = []
        for name, master in self.masters.items():
            dims = len(self.shapes[name])
            first = self.replica == 0 and (dims > 0 or self.row == 0) and (dims > 1 or self.column == 0)
            offsets = tuple(begin for begin, _ in self.boxes[name])
            found.append(Piece(name, self.shapes[name], offsets, master.detach(), first))
        return found

    def step(self, gradients):
        for name, master in self.masters.items():
            master.grad = self.cut(name, gradients[name])
        self.optimizer.step()

    def fill(self, *seeds):
        """Put blocks of random tensors into masters and moments: last digits of a step depend on how a tensor is cut."""
        shapes = list(self.shapes.values())
        self.step(model(shapes))
        with torch.no_grad():
            for values, (master, *moments, _) in zip(
                zip(*(model(shapes, s).items() for s in seeds), strict=True), self.state(), strict=True
            ):
                for own, (name, value) in zip((master, *moments), values, strict=True):
                    own.copy_(self.cut(name, value.square()))

    def save(self, folder):
        moments, step = adamw_state(self.optimizer, list(self.masters.values()))
        Snapshot.take(self.number, self.pieces_of(moments), step).write(folder)

    def load(self, folder):
        masters = list(self.masters.values())
        moments = {key: [torch.zeros_like(master) for master in masters] for key in MOMENTS}
        set_adamw_state(self.optimizer, masters, moments, load(folder, self.pieces_of(moments)))

    def pieces_of(self, moments):
        """The rank's whole state; a `flat` rank holds runs of elements, as ZeRO does, which are cut into pieces."""
        pieces = self.pieces()
        found = {"master": pieces} | {
            key: [dataclasses.replace(p, tensor=t) for p, t in zip(pieces, of, strict=True)] for key, of in moments.items()
        }
        return {key: [part for piece in of for part in self.runs(piece)] for key, of in found.items()}

    def runs(self, piece):
        if not self.flat or not piece.tensor.numel():
            return [piece]
        block = Block(piece.name, piece.shape, piece.offsets, tuple(piece.tensor.shape))
        flat, middle = piece.tensor.view(-1), piece.tensor.numel() // 2
        return cut([block], 0, flat[:middle], first=piece.first) + cut([block], middle, flat[middle:], first=piece.first)

    def state(self):
        return [
            (master.detach(), *(self.optimizer.state[master][key] for key in ("exp_avg", "exp_avg_sq", "step")))
            for master in self.masters.values()
        ]


def model(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.weight": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}


def ranks(whole, division):
    return [Rank(number, whole, *division) for number in range(math.prod(division))]


def same(one, other):
    return all(torch.equal(a, b) for x, y in zip(one.state(), other.state(), strict=True) for a, b in zip(x, y, strict=True))


SHAPES = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=4)
DIVISIONS = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2))


@given(SHAPES, DIVISIONS, DIVISIONS, st.sampled_from([1, 64, 2**28]))
@settings(max_examples=40)
def test_saved_under_one_division_and_loaded_under_another(shapes, saved, loaded, file_bytes):
    """Masters and moments come back bit for bit, and so do two further steps with other gradients, which need the moments."""
    whole, folder = model(shapes), Path(tempfile.mkdtemp())
    before, after, expected = ranks(whole, saved), ranks(model(shapes, 9), loaded), ranks(whole, loaded)
    kept, checkpoint.FILE_BYTES = checkpoint.FILE_BYTES, file_bytes
    try:
        for rank in [*before, *expected]:
            rank.fill(1, 2, 3)
        for rank in [*before, *after]:
            rank.flat = rank.number % 2 == 1
        for rank in reversed(before):  # in any order
            rank.save(folder)
        for rank in after:
            rank.load(folder)
        assert all(map(same, after, expected))
        for rank in [*after, *expected]:
            rank.step(model(shapes, 4))
            rank.step(model(shapes, 5))
        assert all(map(same, after, expected))
    finally:
        checkpoint.FILE_BYTES = kept
        shutil.rmtree(folder)


def test_files_hold_tensors_by_name_and_replicas_write_nothing(tmp_path):
    """Two replicas of two ranks: each block is in one file, under its name, and the moments are beside it."""
    whole = model([(6, 4), (3,)])
    for rank in ranks(whole, (2, 1, 2)):
        rank.step(model([(6, 4), (3,)], 1))
        rank.save(tmp_path)
    files = ["shard-00001-model-00001-of-00001.safetensors", "shard-00002-model-00001-of-00001.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["exp_avg", "exp_avg_sq", "master", "tensors.json"]
    for folder in ("exp_avg", "exp_avg_sq", "master"):
        assert sorted(p.name for p in (tmp_path / folder).iterdir()) == files
    halves = [load_file(tmp_path / "master" / file)["layers.0.weight"] for file in files]
    assert [tuple(half.shape) for half in halves] == [(3, 4), (3, 4)]
    assert json.loads((tmp_path / "tensors.json").read_text()) == {
        "shapes": {"layers.0.weight": [6, 4], "layers.1.weight": [3]},
        "step": 1.0,
    }


def test_a_role_that_never_stepped_has_no_moments(tmp_path):
    [rank], [other] = ranks(model([(2, 3)]), (1, 1, 1)), ranks(model([(2, 3)], 5), (1, 1, 1))
    rank.save(tmp_path)
    other.step(model([(2, 3)], 1))
    other.load(tmp_path)
    assert torch.equal(*(r.masters["layers.0.weight"] for r in (rank, other)))
    assert not other.optimizer.state


def saved(folder, shapes=((6, 4), (5,)), division=(3, 1, 1)):
    for rank in ranks(model(shapes), division):
        rank.step(model(shapes, 1))
        rank.save(folder)
    return folder


def refused(folder, shapes=((6, 4), (5,)), names=None):
    """The sentence by which a checkpoint is refused; nothing of the rank has changed."""
    whole = model(shapes, 7)
    [rank], [untouched] = (ranks({(names or {}).get(n, n): t for n, t in whole.items()}, (1, 1, 1)) for _ in range(2))
    for one in (rank, untouched):
        one.step({(names or {}).get(n, n): t for n, t in model(shapes, 8).items()})
    with pytest.raises(StoreError) as error:
        rank.load(folder)
    assert same(rank, untouched)
    return str(error.value).replace(str(folder), "FOLDER")


@pytest.mark.parametrize("folder", ["master", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_missing_file_is_noticed(tmp_path, folder, number):
    [file] = (saved(tmp_path) / folder).glob(f"shard-0000{number}-*")
    file.unlink()
    assert refused(tmp_path) == (
        f"the checkpoint FOLDER is not complete: the files in {folder}/ do not hold every element of layers.0.weight once. "
        "Restore its files, or remove it to resume from the one before."
    )


def test_a_missing_folder_a_damaged_file_and_a_missing_description(tmp_path):
    assert "is not complete: it has no tensors.json" in refused(tmp_path)
    shutil.rmtree(saved(tmp_path) / "exp_avg")
    assert "is not complete: it has no folder exp_avg/" in refused(tmp_path)
    next((tmp_path / "master").iterdir()).write_bytes(b"x" * 100)
    assert "is not complete: a file in master/ cannot be read" in refused(tmp_path)


@pytest.mark.parametrize("wrong", [(1, 0), (0, 1)])
def test_a_block_at_a_wrong_place_is_noticed(tmp_path, wrong, monkeypatch):
    """Overlapping blocks leave others without values; the number of elements alone would not tell."""
    honest, cut = Rank.pieces, ranks(model([(6, 4)]), (3, 1, 1))
    monkeypatch.setattr(Piece, "__post_init__", lambda self: None)

    def shifted(self):
        return [
            replace(p, offsets=tuple(a + b for a, b in zip(p.offsets, wrong, strict=True))) if self.number == 0 else p
            for p in honest(self)
        ]

    for rank in cut:
        monkeypatch.setattr(Rank, "pieces", shifted)
        rank.save(tmp_path)
    monkeypatch.setattr(Rank, "pieces", honest)
    assert "do not hold every element of layers.0.weight once" in refused(tmp_path, ((6, 4),))


def test_another_model_is_refused_by_the_first_tensor_that_differs(tmp_path):
    other = "the checkpoint FOLDER holds another model than the config names: "
    fix = ". Continue it without that override, or begin a new run."
    saved(tmp_path)
    assert (
        refused(tmp_path, ((6, 4), (7,))) == f"{other}layers.1.weight has shape [5] in the checkpoint and [7] in the model{fix}"
    )
    assert refused(tmp_path, ((6, 4),)) == f"{other}the model has no layers.1.weight{fix}"
    assert refused(tmp_path, names={"layers.1.weight": "head"}) == f"{other}the checkpoint has no head{fix}"


def test_the_format_of_before_is_refused(tmp_path):
    (tmp_path / "master.safetensors").write_bytes(b"")
    assert refused(tmp_path) == (
        "the checkpoint FOLDER has the format of an older drumroll (master.safetensors): resume the run with that version, or "
        "train it again with this one."
    )


def write_while_others_sum(rank, meeting, folder):
    """Ranks save their blocks without waiting for each other: the last begins when all others have written."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=3)
    mine = ranks(model([(6, 4), (5,)]), (3, 1, 1))[rank]
    mine.fill(1, 2, 3)
    if rank < 2:
        mine.save(folder)
    dist.all_reduce(torch.ones(1))
    if rank == 2:
        mine.save(folder)
    dist.all_reduce(torch.ones(1))
    other = ranks(model([(6, 4), (5,)], 5), (1, 3, 1))[rank]
    other.load(folder)
    dist.all_reduce(torch.ones(1))
    return other.state()


def test_ranks_save_and_load_without_collectives(tmp_path):
    """A collective in saving would wait here for ever for ranks that sum."""
    folder = tmp_path / "saved"
    folder.mkdir()
    found = run_ranks(write_while_others_sum, 3, tmp_path / "meeting", folder, seconds=60)
    whole = ranks(model([(6, 4), (5,)]), (1, 3, 1))
    for rank, state in zip(whole, found, strict=True):
        rank.fill(1, 2, 3)
        assert all(torch.equal(a, b) for x, y in zip(rank.state(), state, strict=True) for a, b in zip(x, y, strict=True))
