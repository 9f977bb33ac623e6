"""Losses on pairs train on several ranks as in one process: no rank gets half a pair."""

import contextlib

import pytest
import torch
from test_batch import random_groups
from test_parallel import EVERYWHERE, LAYOUTS, LIMITS, Matrix, errors, infer, train

from drumroll.algorithms.aggregations import unit_mean
from drumroll.algorithms.preferences import PreferenceLoss
from drumroll.batch import Batch, Family
from drumroll.config.preferences import PreferenceTerms
from drumroll.data.preferences import packed
from drumroll.learners import Update
from drumroll.mesh import Mesh


class Preferences(Matrix):
    """An update by DPO, and one by KTO on answers by themselves, as every layout is given them."""

    def works(self, family, role):
        key = (family, role)
        if key not in self.known:
            batches = [rated(seed, pairs=pairs) for seed, pairs in ((0, True), (1, False))]
            (columns,) = self.run({}, infer, self.model(family), role, batches)
            losses = PreferenceLoss(PreferenceTerms(beta=0.5, sft=0.1)), PreferenceLoss(PreferenceTerms(loss="kto"), 0.3)
            self.known[key] = [
                Update(batch.with_(reference=torch.where(batch.mask, column + 0.1 * noise(batch), 0.0)), loss, unit_mean)
                for batch, column, loss in zip(batches, columns, losses, strict=True)
            ]
        return self.known[key]


def rated(seed, *, pairs):
    groups = random_groups(13, 2, seed=seed)
    for group in groups:
        group.samples[0].reward, group.samples[1].reward = 1.0, 0.0
    return packed(groups, pairs=pairs)


def noise(batch):
    return torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(7))


@contextlib.contextmanager
def separated():
    """Every trace is dealt by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "units", lambda self: [Family([trace], 0) for trace in range(self.num_traces)])
        yield


def train_separated(rank, *job):
    with separated():
        return train(rank, *job)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    made = Preferences(tmp_path_factory.mktemp("models"))
    yield made
    made.close()


@pytest.mark.parametrize("layout", ["shard 2", "tensor 2"])
def test_ranks_train_on_preferences_as_one_process(matrix, layout):
    found = matrix.compare(layout, "Llama", "actor", "float64")
    assert found.within(LIMITS["float64"]), found


def test_a_pair_on_two_ranks_is_found(matrix):
    works, alone = matrix.works("Llama", "actor"), matrix.alone("Llama", "actor", "float64")
    layout = LAYOUTS["shard 2"]
    parts = matrix.run(layout, train_separated, matrix.model("Llama"), "actor", "float64", works)
    with separated():
        assert not errors(parts, alone, works, Mesh(**layout)).within(LIMITS["float64"].times(100))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "options"), EVERYWHERE)
def test_every_backend_and_layout_trains_on_preferences(matrix, layout, options):
    found = matrix.compare(layout, "Llama", "actor", "float32", **options)
    assert found.within(LIMITS["float32"]), found
