"""A checkpoint goes on under any other layout: the losses of the next updates are those of the layout that wrote it."""

import pytest
import torch
from test_parallel import LAYOUTS, RANKS, TEMPERATURE, Matrix, open_learner

from drumroll.errors import StoreError
from drumroll.learners.statistics import merge
from drumroll.mesh import Mesh

LIMIT = 1e-5
ONE = "one process"
LOSS = {"actor": "train/loss", "LoRA": "train/loss", "critic": "critic/loss"}
CHANGES = [
    *(("shard 2", after, "actor") for after in ("tensor 2", ONE, "data 4", "data 2 × shard 2")),
    *((before, "shard 2", "actor") for before in ("tensor 2", ONE)),
    *(("shard 2", after, "critic") for after in ("tensor 2", ONE)),
    *((ONE, "shard 2", role) for role in ("critic", "LoRA")),
    ("shard 2", "data 2 × shard 2", "LoRA"),
    ("shard 2", ONE, "LoRA"),
    *(("context 2", after, "actor") for after in (ONE, "shard 2")),
]
"""Layouts before and after, and roles."""


OPTIONS = {f"ZeRO-{zero}": {"backend": "deepspeed", "zero": zero} for zero in (2, 3)}
"""How ranks of a layout open their learners, where it is not as the torch backend does."""


def layout_of(name):
    """Ranks of a named layout; `ZeRO-3 × 2` are two of DeepSpeed."""
    backend, _, ranks = name.partition(" × ")
    return {"shard": int(ranks)} if backend in OPTIONS else {} if name == ONE else LAYOUTS[name]


def options_of(name):
    return OPTIONS.get(name.partition(" × ")[0], {})


def begin(rank, folder, role, works, checkpoint, options):
    """Train, save, and go on: the statistics of the updates after saving."""
    learner = open_learner(RANKS[-1], folder, role, "float32", **options)
    for work in works[:2]:
        learner.update(work)
    learner.snapshot()
    RANKS[-1].most(0)
    learner._write(checkpoint)
    return learner.step, [learner.update(work) for work in works[2:]]


def resume(rank, folder, role, works, checkpoint, options):
    """Load and go on. The learner has computed before, with other weights, and its last update failed."""
    learner = open_learner(RANKS[-1], folder, role, "float32", **options)
    learner.infer(works[0].batch, TEMPERATURE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "_loss", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            learner.update(works[0])
    learner.load(checkpoint)
    return learner.step, [learner.update(work) for work in works[2:]]


def refusal(rank, folder, checkpoint):
    """What a learner of another model says, and whether it is as before."""
    learner = open_learner(RANKS[-1], folder, "actor", "float32")
    before = [master.clone() for master in learner.backend.master]
    try:
        learner.load(checkpoint)
    except StoreError as error:
        same = all(torch.equal(a, b) for a, b in zip(before, learner.backend.master, strict=True))
        return str(error), same


class Changes:
    """Checkpoints of layouts, and how training went on under them."""

    def __init__(self, folder):
        self.folder, self.matrix, self.known = folder, Matrix(folder), {}

    def works(self, role):
        """Four updates, neighbours of which have different gradients."""
        return self.matrix.works("Qwen3", role) * 2

    def begun(self, layout, role):
        """The checkpoint of a layout, and the losses after it."""
        if (layout, role) not in self.known:
            checkpoint = self.folder / f"checkpoint {layout} {role}"
            checkpoint.mkdir()
            self.known[layout, role] = checkpoint, self.losses(begin, layout, role, checkpoint)
        return self.known[layout, role]

    def losses(self, function, layout, role, checkpoint):
        mesh = Mesh(**layout_of(layout))
        given = self.matrix.model("Qwen3"), role, self.works(role), checkpoint, options_of(layout)
        found = self.matrix.run(layout_of(layout), function, *given)
        steps, leaders = [step for step, _ in found], [found[rank][1] for rank in mesh.leaders()]
        return steps, [merge(list(update))[LOSS[role]] for update in zip(*leaders, strict=True)]


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    made = Changes(tmp_path_factory.mktemp("changes"))
    yield made
    made.matrix.close()


@pytest.mark.parametrize(("before", "after", "role"), CHANGES)
def test_training_goes_on_under_another_layout(changes, before, after, role):
    checkpoint, (_, truth) = changes.begun(before, role)
    steps, losses = changes.losses(resume, after, role, checkpoint)
    assert set(steps) == {2}
    assert losses == pytest.approx(truth, rel=LIMIT, abs=LIMIT)


@pytest.mark.parametrize("layout", ["shard 2", "tensor 2"])
def test_the_checkpoint_of_another_model_is_refused_by_all_ranks(changes, layout):
    checkpoint, _ = changes.begun(ONE, "actor")
    for text, same in changes.matrix.run(layout_of(layout), refusal, changes.matrix.model("Llama"), checkpoint):
        assert text.startswith(f"the checkpoint {checkpoint} holds another model than the config names: ")
        assert same
