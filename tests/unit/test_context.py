"""Ranks that divide the tokens of sequences (`parallel.context`) train as one process does, each with its part of the activations.

`test_parallel.py` compares all models and roles; here are the cases of `make test`, planted errors, failures, and memory.
"""

import contextlib

import pytest
import test_divided_faults as faults
import test_parallel
import torch
from live_memory import activation_bytes
from test_batch import random_groups
from test_divided_faults import both_ranks, folder  # noqa: F401
from test_memory import batch
from test_parallel import LIMITS, MISTAKES, OPTIM, SIZES, Matrix, ReplicasDifferError
from transformers import LlamaConfig

from drumroll.algorithms.aggregations import Shares
from drumroll.algorithms.losses import PolicyLoss
from drumroll.batch import pack
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.errors import ConfigError, Interrupted, PeerFailed
from drumroll.learners import Update
from drumroll.mesh import Mesh
from drumroll.models import context_parallel
from drumroll.models.context_parallel import ContextLayout
from drumroll.models.tensor_parallel import check_heads

CONTEXT = "context 2"
BOTH = "shard 2 × context 2"
ONCE = [(CONTEXT, "Llama", "actor"), (CONTEXT, "Gemma 3", "critic"), (BOTH, "Gemma 3", "critic")]
"""Cases of `make test`."""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    with contextlib.closing(Matrix(tmp_path_factory.mktemp("models"))) as made:
        yield made


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("layout", "family", "role"), ONCE)
def test_ranks_that_divide_tokens_train_as_one_process(matrix, layout, family, role, dtype):
    found = matrix.compare(layout, family, role, dtype)
    assert found.within(LIMITS[dtype]), found


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"recompute": True}, {"accumulate": "local"}, {"reshard": False}], ids=str)
@pytest.mark.parametrize("layout", [CONTEXT, BOTH])
def test_options_change_nothing(matrix, layout, options):
    for dtype, limits in LIMITS.items():
        found = matrix.compare(layout, "Gemma 3", "actor", dtype, **options)
        assert found.within(limits), (dtype, found)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_tensor_divides_the_heads_and_context_what_is_left(matrix, monkeypatch, role):
    monkeypatch.setitem(test_parallel.LAYOUTS, "both", {"tensor": 2, "context": 2})
    config = LlamaConfig(**SIZES | {"num_key_value_heads": 4}, vocab_size=97, tie_word_embeddings=True)
    monkeypatch.setitem(test_parallel.FAMILIES, "four", config)
    for dtype, limits in LIMITS.items():
        found = matrix.compare("both", "four", role, dtype)
        assert found.within(limits), (dtype, found)


# --- how nodes are dealt ---


class Group:
    """A rank among others that never meet."""

    def __init__(self, patch, rank, size):
        patch.setattr(context_parallel.dist, "get_rank", lambda group: rank)
        patch.setattr(context_parallel.dist, "get_world_size", lambda group: size)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_every_node_and_every_row_has_one_rank_and_ranks_have_equally_many(monkeypatch, seed, size):
    made = pack(random_groups(3, 4, seed=seed))
    tree, chosen = made.tree(), made.tokens[made.mask]
    before = tree.node_of[made.mask.nonzero()[:, 0] - 1]
    cpu = torch.device("cpu")
    layouts = [ContextLayout(len(tree.tokens), tree.paths, before, Group(monkeypatch, rank, size), cpu) for rank in range(size)]
    each = -(-len(tree.tokens) // size)
    assert {len(layout.nodes) for layout in layouts} == {each}
    nodes = torch.cat([layout.nodes for layout in layouts])
    assert set(nodes.tolist()) == set(range(len(tree.tokens)))
    rows = torch.cat([layout.rows for layout in layouts])
    assert sorted(rows.tolist()) == list(range(len(before)))
    counts = [len(layout.rows) for layout in layouts]
    assert max(counts) - min(counts) <= torch.bincount(before).max()
    positions = torch.empty(len(tree.tokens), dtype=torch.int64)
    for path in tree.paths:
        positions[path.nodes] = torch.arange(len(path.nodes))
    for layout in layouts:
        tokens, at, picked = layout.own(tree.tokens, chosen)
        assert torch.equal(tokens, tree.tokens[layout.nodes])
        assert torch.equal(layout.nodes[at], before[layout.rows])
        assert torch.equal(picked, chosen[layout.rows])
        real = layout.nodes < len(positions) - 1  # what fills has the token of the last node
        assert torch.equal(layout.positions()[0][real], positions[layout.nodes[real]])


def test_heads_that_do_not_divide_are_refused():
    config = LlamaConfig(**SIZES)
    with pytest.raises(
        ConfigError, match=r"parallel: context 4 does not divide the model's 2 key-value heads; nearest .* context 2\."
    ):
        check_heads(config, "context", 4)
    with pytest.raises(
        ConfigError, match=r"tensor 2 × context 2 does not divide the model's 2 key-value heads; .* context 1\."
    ):
        check_heads(config, "context", 2, tensor=2)


# --- planted errors ---


@contextlib.contextmanager
def patched(target, name, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        yield


def summing_wrong(factor):
    """Gradients are not summed over `context`, or wrongly."""

    def mistake(backend):
        plain = backend.ranks.add

        def add(tensors, axis="data"):
            if axis != "context":
                plain(tensors, axis)
            elif factor:
                plain(tensors, axis)
                torch._foreach_mul_(list(tensors), factor)

        return patched(backend.ranks, "add", add)

    return mistake


def summed_gradient(ctx, grad):
    """Of the joined numbers: every rank has computed all of it, so the sum is twice too much."""
    (rows,) = ctx.saved_tensors
    return 2 * grad.index_select(0, rows), None, None, None


PLANTED = {
    "tokens stay": lambda backend: patched(context_parallel, "_exchanged", lambda x, group: x.clone()),
    "gradients stay": lambda backend: patched(
        context_parallel._Exchange, "backward", staticmethod(lambda ctx, grad: (grad, None))
    ),
    "joined twice": lambda backend: patched(context_parallel._Join, "backward", staticmethod(summed_gradient)),
    "positions of the first rank": lambda backend: patched(
        ContextLayout, "positions", lambda layout: layout.tree.position[: len(layout.position)][None]
    ),
    "sum left out": summing_wrong(0),
    "sum halved": summing_wrong(0.5),
}


def train_wrongly(*arguments):
    MISTAKES.update(PLANTED)  # of this rank's process
    return test_parallel.train(*arguments)


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_error_is_found(matrix, mistake):
    """By a number far beyond its limit, or because replicas differ."""
    works, alone = matrix.works("Llama", "actor"), matrix.alone("Llama", "actor", "float32")
    parts = matrix.run({"context": 2}, train_wrongly, matrix.model("Llama"), "actor", "float32", works, mistake)
    try:
        found = test_parallel.errors(parts, alone, works, Mesh(context=2))
    except ReplicasDifferError:
        return
    assert not found.within(LIMITS["float32"].times(100)), found


# --- failures ---

PLACES = {
    "exchange": (context_parallel._Exchange, "forward"),
    "exchange backward": (context_parallel._Exchange, "backward"),
    "join": (context_parallel._Join, "forward"),
}


def fail(number, port, model, where, harm=faults.fail, seconds=faults.PATIENCE):
    """Fail on rank 0, then work on: how all calls ended, and the weights at the end."""
    faults.LAYOUTS[CONTEXT] = {"context": 2}  # of this process
    learner = faults.open_learner(faults.join(number, port, CONTEXT, seconds), CONTEXT, model)
    ends = []
    with pytest.MonkeyPatch.context() as patch:
        if number == 0 and where in PLACES:
            patch.setattr(*PLACES[where], staticmethod(harm))
        elif number == 0 and where:
            faults.plant(patch, learner, where, harm)
        if where:
            ends.append(faults.attempt(learner.update, faults.work(1)))
    ends.append(faults.attempt(learner.update, faults.work(2)))
    if ends[-1] != faults.FINE:
        return ends, {}
    return ends, {name: tensor.clone() for name, tensor in learner.weights()}


@pytest.mark.parametrize("where", ["inputs", "loss"])
def test_a_failure_on_which_ranks_vote_leaves_nothing_behind(where, folder, both_ranks):  # noqa: F811
    (_, truth), _ = both_ranks(fail, folder, "")
    for number, (ends, weights) in enumerate(both_ranks(fail, folder, where)):
        assert [kind for kind, _ in ends] == [Interrupted if number else MemoryError, None]
        assert weights.keys() == truth.keys()
        assert all(torch.equal(tensor, truth[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("where", ["exchange", "exchange backward", "join", "sum"])
def test_a_rank_that_fails_in_a_collective_leaves_its_peer_at_once(where, folder, both_ranks):  # noqa: F811
    (mine, _), (others, _) = both_ranks(fail, folder, where)
    assert mine[0] == (MemoryError, "planted")
    assert others[0][0] is PeerFailed
    assert "Rank 1 of 2 lost its peers" in others[0][1]
    faults.assert_left([mine[1], others[1]])


@pytest.mark.slow
@pytest.mark.parametrize("where", ["exchange", "exchange backward"])
def test_a_rank_that_hangs_is_waited_for_until_the_collective_deadline(where, folder):  # noqa: F811
    store = faults.dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (store.port, folder, where, faults.hang, faults.DEADLINE)
    ((ends, _),) = faults.run_ranks(fail, 2, *arguments, seconds=faults.PATIENCE / 4, lost=(0,))
    assert ends[0][0] is PeerFailed
    assert "did not come within cluster.collective_timeout" in ends[0][1]
    faults.assert_left(ends[1:])


# --- memory ---


def activations(rank, model, recompute):
    """The bytes of activations of 8,192 tokens; a small update before makes the moments."""
    optim = OPTIM.model_copy(update={"micro_tokens": 8192, "minibatch": None})
    with patched(test_parallel, "OPTIM", optim):
        learner = test_parallel.open_learner(test_parallel.RANKS[-1], model, "actor", "float32", recompute)
    for prompt, length in ((4, 4), (7168, 256)):
        work = Update(batch(1, 4, prompt, length, 60), PolicyLoss(AlgorithmConfig()), Shares("token_mean"))
        found = activation_bytes(learner, work)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_two_ranks_hold_hardly_more_than_half_of_the_activations_each(matrix, recompute):
    (whole,) = matrix.run({}, activations, "tiny-even-random", recompute)
    each = max(matrix.run({"context": 2}, activations, "tiny-even-random", recompute))
    assert each <= 0.6 * whole
