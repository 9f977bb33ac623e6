"""One of eight ranks that do not exist: the real backend at the width of the 7B recipe, with tensors and peers that are fake.

Fake tensors have shapes and types but no memory, and a fake process group answers every collective at once. What is left
is what a rank allocates and what it says to its peers.
"""

from __future__ import annotations

import collections
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import run_ranks
from live_memory import LiveMemory, held
from test_memory import batch, work_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config
from typing_extensions import override

from drumroll.algorithms.aggregations import Shares
from drumroll.algorithms.losses import PolicyLoss
from drumroll.config import load as load_recipe
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.learners import Learner, Update
from drumroll.learners.backend import LearnerSpec
from drumroll.learners.backends import division
from drumroll.learners.backends.torch import open_backend
from drumroll.learners.heads import LogProbHead
from drumroll.learners.ranks import Ranks
from drumroll.mesh import Mesh
from drumroll.models import loading, tiny
from drumroll.models.shape import KNOWN, shape_of
from drumroll.placement.memory import Training, predicted_peak

RECIPE = Path(__file__).parents[2] / "recipes" / "multi-domain" / "qwen2.5-7b-8gpu.yaml"
RANKS, MICRO_BATCHES = 8, 2


class Fake(FakeTensorMode):
    """Makes tensors fake; where the host asks for a number of one, it is 1."""

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)

    @override
    def dispatch(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype is torch.bool else 1
        return super().dispatch(func, types, args, kwargs)


class FakeRanks(Ranks):
    """Ranks whose passes of the model are fake. Everything else (cutting batches, votes) is real."""

    fake: Fake

    @contextmanager
    def computing(self):
        with super().computing(), self.fake:
            yield


class EmptyBlocks:
    """The files of a model that nobody has."""

    def __init__(self, folder):
        pass

    def __contains__(self, name):
        return True

    def block(self, name, shape, offsets, sizes):
        return torch.empty(sizes, device="meta")


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    @override
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.seen[func._schema.name.removeprefix("c10d::").strip("_")] += 1
        return func(*args, **(kwargs or {}))


def fake_backend(folder, recipe, layers, parallel):
    """The backend of the recipe's actor on one rank, with so many layers."""
    fake, actor = Fake(), recipe.roles.actor
    Qwen2Config(**{**KNOWN[recipe.model], "num_hidden_layers": layers}).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    group = dist.group.WORLD
    ranks = FakeRanks(Mesh(shard=RANKS), group, met=True, along={"shard": group})
    ranks.fake = fake
    materialise = division.materialise

    def faked(*arguments):
        with fake:
            materialise(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "BlocksInFiles", EmptyBlocks)
        patch.setattr(division, "materialise", faked)
        spec = LearnerSpec(
            str(folder),
            LogProbHead(),
            ranks,
            recipe.optim,
            actor.dtype,
            parallel=parallel,
            recompute_activations=actor.recompute_activations,
        )
        return open_backend(spec)


def update(rank, folder, layers, options):
    """Collectives and peak of live tensor bytes of one rank in its second update, and the prediction."""
    recipe = load_recipe(RECIPE, []).config
    parallel = recipe.roles.actor.parallel.model_copy(update=options)
    backend = fake_backend(folder, recipe, layers, parallel)
    learner = Learner(backend, recipe.optim, total_steps=2)
    made = batch(2 * RANKS, 4, 1000, 3000, 500)
    work = Update(made, PolicyLoss(AlgorithmConfig()), Shares("token_mean"))
    learner.update(work)
    with LiveMemory(held(learner)) as live, Collectives() as collectives:
        learner.update(work)
    actor, mesh = recipe.roles.actor, Mesh(shard=RANKS)
    how = Training(
        actor.dtype, mesh, recompute=actor.recompute_activations, **parallel.model_dump(include={"reshard", "accumulate"})
    )
    shape = shape_of({**KNOWN[recipe.model], "num_hidden_layers": layers})
    share = made.select(made.shares(RANKS)[0])
    return dict(collectives.seen), live.peak, predicted_peak(shape, how, work_of(share, recipe.optim.micro_tokens))


CASES = {
    "three layers": (3, {}),
    "gathered once": (3, {"reshard": False}),
    "summed once": (3, {"accumulate": "local"}),
    "full depth": (28, {}),
}


@pytest.mark.parametrize("case", [*list(CASES)[:-1], pytest.param("full depth", marks=pytest.mark.slow)])
def test_a_rank_of_the_7b_recipe_gathers_reduces_and_holds_what_it_should(tmp_path, case):
    layers, options = CASES[case]
    [(collectives, peak, predicted)] = run_ranks(update, 1, tmp_path, layers, options, seconds=1200.0)
    passes = 2 if options.get("reshard", True) else 1  # of a layer that gather its weights
    sums = 1 if "accumulate" in options else MICRO_BATCHES
    assert collectives == {
        "allgather_base": MICRO_BATCHES * (1 + passes * layers),  # embedding and head are one group
        "reduce_scatter_base": sums * (1 + layers),
        "allreduce": 6 + 3 * MICRO_BATCHES,  # votes, the largest number of micro-batches, the norm of the gradient
    }
    assert predicted == pytest.approx(peak, rel=0.15)
    assert peak < 80e9, "the recipe is for devices of 80 GB"
