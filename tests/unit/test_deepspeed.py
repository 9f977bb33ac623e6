"""The DeepSpeed backend trains as one process does, goes on from checkpoints of any backend, and ends when a rank fails."""

import itertools
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import test_divided_faults as faults
import test_layout_change as layouts
import test_parallel
import torch
import transformers as hf
from forked import RankPool
from live_memory import LiveMemory
from test_memory import batch
from test_parallel import FAMILIES, LIMITS, RANKS, ROLES, ReplicasDifferError, whole

from drumroll.algorithms.aggregations import Shares
from drumroll.algorithms.losses import PolicyLoss
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.config.optim import OptimConfig
from drumroll.config.roles import ParallelConfig
from drumroll.errors import ConfigError, Interrupted, MissingExtra, PeerFailed
from drumroll.learners import Learner, Update
from drumroll.learners.backend import LearnerSpec
from drumroll.learners.backends import find_backend
from drumroll.learners.heads import LogProbHead
from drumroll.learners.ranks import ALONE
from drumroll.models.loading import load

STRATEGIES = {"ZeRO-2": {"zero": 2}, "ZeRO-3": {"zero": 3}, "ZeRO-3, offload": {"zero": 3, "offload": "all"}}
ONCE = [("ZeRO-3", "Llama", "actor"), ("ZeRO-2", "Qwen2", "LoRA"), ("ZeRO-3, offload", "Gemma 3", "critic")]
"""Cases of `make test`. Micro-batches are uneven, and some ranks have none (`test_parallel.py`)."""
PLANTED = [("ZeRO-2", "left out"), ("ZeRO-3", "halved"), ("ZeRO-3, offload", "own norm")]
MORE = [
    (strategy, mistake) for strategy in STRATEGIES for mistake in test_parallel.MISTAKES if (strategy, mistake) not in PLANTED
]


def quick(first, *others):
    """The first case in `make test`, the others in `make test-slow`."""
    given = [case if isinstance(case, tuple) else (case,) for case in others]
    return [first, *(pytest.param(*case, marks=pytest.mark.slow) for case in given)]


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    made = layouts.Changes(tmp_path_factory.mktemp("changes"))
    yield made
    made.matrix.close()


@pytest.fixture(scope="module")
def matrix(changes):
    return changes.matrix


def compare(matrix, strategy, family, role, mistake=None, ranks=2, **options):
    options = {"backend": "deepspeed", **STRATEGIES[strategy], **options}
    return matrix.compare(f"shard {ranks}", family, role, "float32", mistake, **options)


# --- equality with one process ---


@pytest.mark.parametrize(("strategy", "family", "role"), ONCE)
def test_each_strategy_trains_as_one_process(matrix, strategy, family, role):
    found = compare(matrix, strategy, family, role)
    assert found.within(LIMITS["float32"]), found


def assert_found(matrix, strategy, mistake):
    try:
        found = compare(matrix, strategy, "Llama", "actor", mistake)
    except ReplicasDifferError:
        return
    assert not found.within(LIMITS["float32"].times(100)), found


@pytest.mark.parametrize(("strategy", "mistake"), PLANTED)
def test_a_planted_error_is_found(matrix, strategy, mistake):
    assert_found(matrix, strategy, mistake)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "mistake"), MORE)
def test_every_planted_error_is_found(matrix, strategy, mistake):
    assert_found(matrix, strategy, mistake)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_trains_every_model_as_one_process(matrix, strategy, family):
    for role in ROLES:
        found = compare(matrix, strategy, family, role)
        assert found.within(LIMITS["float32"]), (role, found)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_options_change_nothing(matrix, strategy):
    found = compare(matrix, strategy, "Gemma 3", "actor", recompute=True)
    assert found.within(LIMITS["float32"]), found
    found = compare(matrix, strategy, "Llama", "actor", ranks=4)
    assert found.within(LIMITS["float32"]), found
    if strategy != "ZeRO-3, offload":
        found = compare(matrix, strategy, "Qwen3", "critic", offload="optimizer")
        assert found.within(LIMITS["float32"]), found


def low_precision(rank, folder, works, options):
    """Gradients of the first minibatch, the change of the weights, and the types of all state."""
    learner = test_parallel.open_learner(RANKS[-1], folder, "actor", "bfloat16", **options)
    backend, grads = learner.backend, []
    clip = backend.clip

    def spy(limit):
        grads.append(test_parallel.gradients(backend))
        return clip(limit)

    backend.clip = spy
    before = test_parallel.copied(test_parallel.pieces(backend))
    learner.update(works[0])
    after = test_parallel.copied(test_parallel.pieces(backend))
    types = {piece.tensor.dtype for piece in [*after, *grads[0]]}
    return before, grads[0], after, types, {name: (tensor.dtype, tensor.clone()) for name, tensor in learner.weights()}


@pytest.mark.parametrize("strategy", quick("ZeRO-3", "ZeRO-2", "ZeRO-3, offload"))
def test_bfloat16_keeps_master_weights_and_gradients_in_float32(matrix, strategy):
    given = matrix.model("Llama"), matrix.works("Llama", "actor")
    truth = matrix.run({"shard": 2}, low_precision, *given, {})
    found = matrix.run({"shard": 2}, low_precision, *given, {"backend": "deepspeed", **STRATEGIES[strategy]})
    for mine in found:
        assert mine[3] == {torch.float32}
        assert {dtype for dtype, _ in mine[4].values()} == {torch.bfloat16}
        assert mine[4].keys() == truth[0][4].keys()
    before, grads, after = ([whole([part[i] for part in parts]) for parts in (found, truth)] for i in (0, 1, 2))
    assert torch.equal(*before)
    assert test_parallel.distance(*grads) < 0.01  # sums of bfloat16 products in another order
    assert test_parallel.distance(after[0] - before[0], after[1] - before[1]) < 0.2
    joined = torch.cat([found[0][4][name][1].flatten() for name in sorted(found[0][4])])
    assert torch.equal(joined, after[0].bfloat16())


# --- more tokens on one rank than on another ---


def chunks(rank, model, zero, rows):
    """The gradient's norm where ranks score their tokens in different numbers of chunks."""
    ranks, optim = RANKS[-1], OptimConfig(lr=1e-4, micro_tokens=10_000)
    options = {"parallel": ParallelConfig(shard=ranks.mesh.shard, **zero)}
    backend = find_backend("deepspeed" if zero else "torch")(LearnerSpec(model, LogProbHead(), ranks, optim, **options))
    work = Update(batch(4, 1, 8, 12, 60), PolicyLoss(AlgorithmConfig()), Shares("token_mean"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drumroll.models.head.LanguageModelHead.__call__.__kwdefaults__", {"rows": rows[rank]})
        learner = Learner(backend, optim)
        return [learner.update(work).steps[0][0] for _ in range(3)]


@pytest.mark.parametrize("zero", quick(3, 2))
def test_ranks_may_score_their_tokens_in_different_numbers_of_chunks(matrix, zero):
    (truth,) = matrix.run({}, chunks, "tiny-random", {}, [1024])
    for found in matrix.run({"shard": 2}, chunks, "tiny-random", {"zero": zero}, [5, 1024]):
        assert found == pytest.approx(truth, rel=1e-4)


# --- frozen roles, weights, exports ---


def frozen(rank, folder, batches, options, recompute=False):
    spec = LearnerSpec(folder, LogProbHead(), RANKS[-1], parallel=ParallelConfig(shard=RANKS[-1].mesh.shard, **options))
    learner = Learner(find_backend("deepspeed" if options else "torch")(spec), test_parallel.OPTIM)
    return [learner.infer(batch, 0.8) for batch in batches], [learner.infer_reference(batch, 0.8) for batch in batches]


@pytest.mark.parametrize("strategy", quick("ZeRO-3", "ZeRO-2", "ZeRO-3, offload"))
def test_a_frozen_role_infers_as_one_process(matrix, strategy):
    batches = [work.batch for work in matrix.works("Llama", "actor")]
    ((truth, _),) = matrix.run({}, frozen, matrix.model("Llama"), batches, {})
    for found in zip(*matrix.run({"shard": 2}, frozen, matrix.model("Llama"), batches, STRATEGIES[strategy]), strict=True):
        for number, given in enumerate(batches):
            assert (given.gather([part[number] for part in found]) - truth[number]).abs().max() <= 1e-5


def against_itself(rank, folder, works, options):
    """Log-probs without adapters, and the adapters after an update that follows."""
    learner = test_parallel.open_learner(RANKS[-1], folder, "LoRA", "float32", **options)
    reference = [learner.infer_reference(work.batch, test_parallel.TEMPERATURE) for work in works]
    learner.update(works[0])
    return reference, test_parallel.copied(test_parallel.pieces(learner.backend))


@pytest.mark.parametrize("zero", quick(3, 2))
def test_adapters_are_switched_off_for_the_reference_and_trained_after_it(matrix, zero):
    works = matrix.works("Qwen2", "LoRA")
    given = matrix.model("Qwen2"), works
    ((truth, adapters),) = matrix.run({}, against_itself, *given, {})
    found = matrix.run({"shard": 2}, against_itself, *given, {"backend": "deepspeed", "zero": zero})
    for number, work in enumerate(works):
        joined = work.batch.gather([reference[number] for reference, _ in found])
        assert (joined - truth[number]).abs().max() <= 1e-5
    assert torch.allclose(whole([mine for _, mine in found]), whole([adapters]), atol=1e-5)


def trained_and_exported(rank, folder, role, works, target, options):
    """Train, export, and give the weights by name."""
    learner = test_parallel.open_learner(RANKS[-1], folder, role, "float32", **options)
    learner.update(works[0])
    learner.export(target)
    RANKS[-1].most(0)
    return {name: tensor.clone() for name, tensor in learner.weights()}


@pytest.mark.parametrize(("zero", "role"), quick((3, "LoRA"), (3, "actor"), (2, "LoRA"), (2, "actor")))
def test_an_export_is_that_of_one_process(matrix, zero, role, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    given = matrix.model("Qwen2"), role, matrix.works("Qwen2", role)
    options = {"backend": "deepspeed", "zero": zero}
    (truth,) = matrix.run({}, trained_and_exported, *given, tmp_path / "one", {})
    for found in matrix.run({"shard": 2}, trained_and_exported, *given, tmp_path / "two", options):
        assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in truth.items()}
        assert all(torch.allclose(tensor, truth[name], atol=1e-5) for name, tensor in found.items())
    one, two = (hf.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)
    assert load(str(tmp_path / "two")).module.config.architectures == ["Qwen2ForCausalLM"]


# --- checkpoints ---

CHANGES = [("shard 2", "ZeRO-3 × 2", "actor"), ("ZeRO-3 × 2", layouts.ONE, "actor"), (layouts.ONE, "ZeRO-2 × 2", "actor")]
MORE_CHANGES = [
    *(
        ("shard 2", f"ZeRO-{zero} × {ranks}", role)
        for zero in (2, 3)
        for ranks in (1, 2)
        for role in ("actor", "critic", "LoRA")
    ),
    *(
        (f"ZeRO-{zero} × 2", after, role)
        for zero in (2, 3)
        for after in ("shard 2", layouts.ONE)
        for role in ("critic", "LoRA")
    ),
    *((f"ZeRO-{zero} × 1", f"ZeRO-{5 - zero} × 2", "actor") for zero in (2, 3)),
    *((f"ZeRO-{zero} × 2", f"ZeRO-{5 - zero} × 1", "actor") for zero in (2, 3)),
]


def assert_goes_on(changes, before, after, role):
    checkpoint, (_, truth) = changes.begun(before, role)
    steps, losses = changes.losses(layouts.resume, after, role, checkpoint)
    assert set(steps) == {2}
    assert losses == pytest.approx(truth, rel=layouts.LIMIT, abs=layouts.LIMIT)


@pytest.mark.parametrize(("before", "after", "role"), CHANGES)
def test_training_goes_on_under_another_backend(changes, before, after, role):
    assert_goes_on(changes, before, after, role)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "role"), MORE_CHANGES)
def test_training_goes_on_under_every_other_layout(changes, before, after, role):
    assert_goes_on(changes, before, after, role)


def forgetful(rank, folder, role, works, checkpoint, options):
    """Resume without copying the loaded master weights to the working weights, or without the moments."""
    kind, given = options["forget"], {key: value for key, value in options.items() if key != "forget"}
    with pytest.MonkeyPatch.context() as patch:
        if kind == "weights":
            patch.setattr("drumroll.learners.backends.zero.Zero2.refresh", lambda zero: None)
        else:
            patch.setattr("drumroll.learners.backends.deepspeed.set_adamw_state", lambda *_: None)
        return layouts.resume(rank, folder, role, works, checkpoint, given)


@pytest.mark.parametrize("kind", quick("weights", "moments"))
def test_a_resume_that_forgets_something_is_found(changes, kind, monkeypatch):
    checkpoint, (_, truth) = changes.begun(layouts.ONE, "actor")
    monkeypatch.setitem(layouts.OPTIONS, "ZeRO-2", {**layouts.OPTIONS["ZeRO-2"], "forget": kind})
    _, losses = changes.losses(forgetful, "ZeRO-2 × 2", "actor", checkpoint)
    assert losses != pytest.approx(truth, rel=10 * layouts.LIMIT, abs=10 * layouts.LIMIT)


# --- compilers ---


def without_compiler(rank, folder, works, options, extensions):
    """Train where no program can be started; returns what was written for extensions of torch."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PATH": "", "CC": "false", "CXX": "false", "TORCH_EXTENSIONS_DIR": str(extensions)}.items():
            patch.setenv(name, value)
        patch.setattr(subprocess.Popen, "__init__", faults.fail)
        test_parallel.open_learner(RANKS[-1], folder, "actor", "float32", **options).update(works[0])
    return [path.name for path in extensions.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_compiled(matrix, strategy, tmp_path):
    given = matrix.model("Llama"), matrix.works("Llama", "actor"), {"backend": "deepspeed", **STRATEGIES[strategy]}
    matrix.pools.pop((("shard", 2),))[0].close()  # new processes
    assert matrix.run({"shard": 2}, without_compiler, *given, tmp_path) == [[], []]


# --- memory ---


def state(rank, model, dtype, zero):
    """The bytes of this rank's weights, master weights, moments and gradients in its second update."""
    ranks, optim = RANKS[-1], OptimConfig(lr=1e-4, micro_tokens=200)
    parallel = ParallelConfig(shard=ranks.mesh.shard, **zero)
    backend = find_backend("deepspeed" if zero else "torch")(
        LearnerSpec(model, LogProbHead(), ranks, optim, dtype, parallel=parallel)
    )
    learner, found = Learner(backend, optim), []
    work = Update(batch(4, 2, 8, 12, 60), PolicyLoss(AlgorithmConfig()), Shares("token_mean"))
    learner.update(work)
    clip = backend.clip

    def spy(limit):
        parameters = [getattr(p, "ds_tensor", p) for p in backend.parameters]
        gradients = [part for flat in backend.zero.gradients() for part in flat] if zero else [m.grad for m in backend.master]
        moments = [t for each in backend.optimizer.state.values() for t in each.values() if t.dim()]
        found.append(LiveMemory([*parameters, *backend.master, *gradients, *moments]).live)
        return clip(limit)

    backend.clip = spy
    learner.update(work)
    return found[0]


@pytest.mark.parametrize("dtype", quick("float32", "bfloat16"))
def test_two_ranks_hold_hardly_more_than_half_of_the_state_each(matrix, dtype):
    (truth,) = matrix.run({}, state, "tiny-random", dtype, {})
    assert max(matrix.run({"shard": 2}, state, "tiny-random", dtype, {"zero": 3})) <= 0.52 * truth


def opening(rank, folder, zero):
    """The most bytes of tensors that were alive while a frozen role was opened, in bytes of its weights."""
    spec = LearnerSpec(folder, LogProbHead(), RANKS[-1], parallel=ParallelConfig(shard=2, **zero))
    with LiveMemory() as live:
        backend = find_backend("deepspeed")(spec)
    return live.peak / sum(4 * torch.Size(shape).numel() for shape in backend._sizes.values())


def test_no_rank_holds_the_whole_model_when_it_is_opened(matrix, tmp_path):
    """Of a model whose largest tensor is a twentieth of it."""
    config = replace_sizes(FAMILIES["Qwen2"], num_hidden_layers=8, vocab_size=96)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    test_parallel.tiny.tokenizer().save_pretrained(tmp_path)
    assert max(matrix.run({"shard": 2}, opening, str(tmp_path), {"zero": 3})) < 0.65
    assert min(matrix.run({"shard": 2}, opening, str(tmp_path), {"zero": 2})) > 0.95


def replace_sizes(config, **sizes):
    return type(config)(**{**config.to_dict(), "layer_types": None, **sizes})


# --- failures ---


@pytest.fixture(scope="module")
def both_ranks():
    with RankPool(2) as pool:
        yield partial(pool.meet, seconds=faults.PATIENCE / 4)


@pytest.fixture(scope="module")
def undisturbed(matrix, both_ranks):
    known = {}

    def find(layout):
        if layout not in known:
            known[layout] = both_ranks(faults.rank, layout, matrix.model("Qwen3"), "")[0][1]
        return known[layout]

    return find


def assert_nothing_left_behind(layout, where, matrix, both_ranks, undisturbed):
    truth = undisturbed(layout)
    for number, (ends, weights) in enumerate(both_ranks(faults.rank, layout, matrix.model("Qwen3"), where)):
        own = Interrupted if "interrupt" in where else MemoryError
        assert [kind for kind, _ in ends] == [own if number == 0 else Interrupted]
        assert weights.keys() == truth.keys()
        assert all(torch.equal(tensor, truth[name]) for name, tensor in weights.items())


@pytest.mark.parametrize(("layout", "where"), quick(("ZeRO-3", "second loss"), ("ZeRO-2", "second loss")))
def test_a_failure_on_which_ranks_vote_leaves_nothing_behind(layout, where, matrix, both_ranks, undisturbed):
    assert_nothing_left_behind(layout, where, matrix, both_ranks, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("where", [where for where in faults.VOTED if "local" not in where])
@pytest.mark.parametrize("layout", STRATEGIES)
def test_every_failure_on_which_ranks_vote_leaves_nothing_behind(layout, where, matrix, both_ranks, undisturbed):
    assert_nothing_left_behind(layout, where, matrix, both_ranks, undisturbed)


def assert_leaves_at_once(layout, where, matrix, both_ranks):
    (mine, _), (others, _) = both_ranks(faults.rank, layout, matrix.model("Qwen3"), where)
    assert mine[0] == (MemoryError, "planted")
    faults.assert_left(mine[1:])
    assert others[0][0] is PeerFailed
    assert "Rank 1 of 2 lost its peers" in others[0][1]
    faults.assert_left(others[1:])


@pytest.mark.parametrize(("layout", "where"), [("ZeRO-3", "sum"), ("ZeRO-2", "step")])
def test_a_rank_that_fails_in_a_collective_leaves_its_peer_at_once(layout, where, matrix, both_ranks):
    assert_leaves_at_once(layout, where, matrix, both_ranks)


ALONE_THERE = {("ZeRO-2", "weights"), ("ZeRO-2", "frozen forward"), ("ZeRO-3, offload", "clip")}
"""Where ranks do not wait for each other: weights are whole, or a vote follows."""
TOGETHER = [case for case in itertools.product(STRATEGIES, faults.LEFT) if case not in ALONE_THERE]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "where"), TOGETHER)
def test_every_rank_that_fails_in_a_collective_leaves_its_peer_at_once(layout, where, matrix, both_ranks):
    assert_leaves_at_once(layout, where, matrix, both_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward", "clip", "step", "weights", "frozen forward"])
def test_a_rank_that_hangs_is_waited_for_until_the_collective_deadline(where, matrix):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (store.port, "ZeRO-3", matrix.model("Qwen3"), where, faults.hang, faults.DEADLINE)
    ((ends, _),) = faults.run_ranks(faults.rank, 2, *arguments, seconds=faults.PATIENCE / 4, lost=(0,))
    assert ends[0][0] is PeerFailed
    assert "did not come within cluster.collective_timeout" in ends[0][1]
    faults.assert_left(ends[1:])


@pytest.mark.slow
@pytest.mark.parametrize("layout", STRATEGIES)
def test_a_rank_whose_receivers_fail_goes_on_gathering_for_its_peer(layout, matrix, both_ranks):
    ends = both_ranks(faults.publish, layout, matrix.model("Qwen3"))
    assert ends == [((MemoryError, "planted"), faults.FINE), (faults.FINE, faults.FINE)]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["snapshot", "write", "load"])
def test_a_rank_that_fails_in_a_checkpoint_tells_and_stays(where, matrix, both_ranks, tmp_path):
    mine, others = both_ranks(faults.save_and_load, "ZeRO-3", matrix.model("Qwen3"), tmp_path, where)
    assert mine[-2:] == [(MemoryError, "planted"), faults.FINE]
    assert set(others) == set(mine[:-2]) | {faults.FINE} == {faults.FINE}


def open_badly(number, port, layout, folder):
    """Rank 0 cannot read the model."""
    ranks = faults.join(number, port, layout, faults.PATIENCE)
    with pytest.MonkeyPatch.context() as patch:
        if number == 0:
            patch.setattr("drumroll.learners.backends.deepspeed.fill_block", faults.fail)
        return faults.attempt(faults.open_learner, ranks, layout, folder)


@pytest.mark.parametrize("layout", quick("ZeRO-3", "ZeRO-2"))
def test_a_rank_that_cannot_open_its_model_leaves_its_peer_at_once(layout, matrix, both_ranks):
    mine, others = both_ranks(open_badly, layout, matrix.model("Qwen3"))
    assert mine == (MemoryError, "planted")
    assert others[0] is PeerFailed


def load_whole_weights(number, port, folder, checkpoint, where):
    """Rank 0 fails to load under ZeRO-2, where ranks give each other their parts of the weights: how the call and the next end."""
    learner = faults.open_learner(faults.join(number, port, "ZeRO-2", faults.PATIENCE), "ZeRO-2", folder)
    learner.snapshot()
    learner._write(checkpoint)
    learner.backend.ranks.most(0)
    with pytest.MonkeyPatch.context() as patch:
        if number == 0:
            patch.setattr(where, faults.fail)
        end = faults.attempt(learner.load, checkpoint)
    return end, faults.attempt(learner.update, faults.work(1))


def test_a_rank_that_fails_to_read_a_checkpoint_tells_its_peer(matrix, both_ranks, tmp_path):
    reading = "drumroll.learners.backends.deepspeed.load_checkpoint"
    mine, others = both_ranks(load_whole_weights, matrix.model("Qwen3"), tmp_path, reading)
    assert mine == ((MemoryError, "planted"), faults.FINE)
    assert (others[0][0], others[1]) == (Interrupted, faults.FINE)


@pytest.mark.slow
def test_a_rank_that_fails_to_copy_a_checkpoint_leaves_its_peer_at_once(matrix, both_ranks, tmp_path):
    copying = "drumroll.learners.backends.zero.Zero2.refresh"
    mine, others = both_ranks(load_whole_weights, matrix.model("Qwen3"), tmp_path, copying)
    assert mine[0] == (MemoryError, "planted")
    assert others[0][0] is PeerFailed
    faults.assert_left([mine[1], others[1]])


# --- refusals ---


def test_a_missing_deepspeed_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingExtra, match=r"^roles.actor.backend: deepspeed needs .*: pip install 'drumroll\[deepspeed\]'$"):
        find_backend("deepspeed")(LearnerSpec("tiny", LogProbHead(), ALONE))


def test_float64_is_refused():
    with pytest.raises(ConfigError, match=r"^roles.actor.dtype: DeepSpeed computes in float32 or bfloat16, not in float64\.$"):
        find_backend("deepspeed")(replace(LearnerSpec("tiny", LogProbHead(), ALONE), dtype="float64"))
