"""A run that changes its layout and its backend at every stop ends as a run of one process that never stopped."""

import random

import pytest
from test_parallel import LAYOUTS, RANKS, Matrix, open_learner

from drumroll.learners.statistics import merge
from drumroll.mesh import Mesh

TORCH = {
    "one process": {},
    **{name: LAYOUTS[name] for name in ("data 2", "shard 2", "tensor 2", "data 2 × shard 2")},
    "context 2": {"context": 2},
}
MEGATRON = {
    "tensor 2": {"tensor": 2},
    "pipeline 2": {"pipeline": 2},
    "data 2": {"data": 2},
    "tensor 2 × pipeline 2": {"tensor": 2, "pipeline": 2},
}
DEEPSPEED = {"ZeRO-2": {"zero": 2}, "ZeRO-3": {"zero": 3}, "ZeRO-3, offload": {"zero": 3, "offload": "all"}}
PLACES = {
    **{f"torch, {name}": (axes, {}) for name, axes in TORCH.items()},
    # `expert` makes other ranks of them: the stand-in for CUDA stays in their processes
    **{f"megatron, {name}": ({**axes, "expert": 1}, {"backend": "megatron"}) for name, axes in MEGATRON.items()},
    **{f"deepspeed, {name}": ({"shard": 2, "data": 1}, {"backend": "deepspeed", **how}) for name, how in DEEPSPEED.items()},
}
"""The axes of a layout, and how its learners are opened."""


def stage(rank, folder, work, before, after, options):
    """Go on where others stopped: the statistics of an update."""
    learner = open_learner(RANKS[-1], folder, "actor", "float32", **options)
    if before is not None:
        learner.load(before)
    found = learner.update(work)
    learner.snapshot()
    RANKS[-1].most(0)
    learner._write(after)
    return found


def ways(seed, length):
    """A walk that visits each backend, and no place twice."""
    chosen = random.Random(seed)
    while True:
        walk = chosen.sample(list(PLACES), length)
        if {place.partition(",")[0] for place in walk} == {"torch", "megatron", "deepspeed"}:
            return walk


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    made = Matrix(tmp_path_factory.mktemp("models"))
    yield made
    made.close()


def walked(matrix, places, works, folder):
    """The losses of a run that trains at one place after the other."""
    losses, before = [], None
    for number, (place, work) in enumerate(zip(places, works, strict=True)):
        after = folder / f"{number}"
        after.mkdir(parents=True)
        axes, options = PLACES[place]
        found = matrix.run(axes, stage, matrix.model("Qwen3"), work, before, after, options)
        losses.append(merge([found[rank] for rank in Mesh(**axes).leaders()])["train/loss"])
        before = after
    return losses


@pytest.mark.parametrize(("seed", "length"), [(1, 3), pytest.param(0, 10, marks=pytest.mark.slow)])
def test_a_walk_over_layouts_and_backends_ends_where_one_process_does(matrix, tmp_path, seed, length):
    """Neighbours have different batches: equal gradients would hide lost moments."""
    works = (matrix.works("Qwen3", "actor") * length)[:length]
    truth = walked(matrix, ["torch, one process"] * length, works, tmp_path / "one")
    assert walked(matrix, ways(seed, length), works, tmp_path / "walk") == pytest.approx(truth, rel=1e-5, abs=1e-5)


def test_a_walk_that_forgets_the_moments_is_found(matrix, tmp_path):
    """The checkpoint's own steps are those before the moments: AdamW begins anew."""
    works = (matrix.works("Qwen3", "actor") * 2)[:3]
    truth = walked(matrix, ["torch, one process"] * 3, works, tmp_path / "one")
    places = ["torch, one process", "torch, data 2"]
    walked(matrix, places, works[:2], tmp_path / "walk")
    described = tmp_path / "walk" / "1" / "tensors.json"
    described.write_text(described.read_text().replace('"step": 6', '"step": 0'))
    axes, options = PLACES["torch, shard 2"]
    arguments = (works[2], tmp_path / "walk" / "1", tmp_path / "last", options)
    (tmp_path / "last").mkdir()
    found = matrix.run(axes, stage, matrix.model("Qwen3"), *arguments)
    lost = merge([found[rank] for rank in Mesh(**axes).leaders()])["train/loss"]
    assert described.read_text().count('"step": 0'), described.read_text()[-60:]
    assert lost != pytest.approx(truth[2], rel=1e-5, abs=1e-5)
