"""The learner's variants: a critic, adapters, recomputed activations, working weights in bfloat16."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from forked import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from test_batch import exact, random_groups, relative

from drumroll.algorithms import Algorithm
from drumroll.algorithms.aggregations import Shares
from drumroll.algorithms.losses import PolicyLoss, SFTLoss, ValueLoss
from drumroll.batch import pack
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.config.optim import OptimConfig
from drumroll.config.roles import LoraConfig
from drumroll.errors import Interrupted, ModelError
from drumroll.learners import Update
from drumroll.learners.backend import Count
from drumroll.learners.backends.torch import torch_learner
from drumroll.learners.heads import Settings
from drumroll.learners.ranks import Ranks
from drumroll.learners.statistics import Statistics, merge
from drumroll.mesh import Mesh
from drumroll.models.loading import load
from drumroll.models.lora import add_adapters
from drumroll.models.value import value_model
from drumroll.processes.rendezvous import Rendezvous
from drumroll.sample import Group, Owner, Prompt, Sample, Trace


def gradient_of(learner, work):
    grads = []
    learner.backend.optimizer.step = lambda: grads.extend(p.grad.clone().flatten() for p in learner.backend.master)  # type: ignore[method-assign]
    learner.update(work)
    return torch.cat(grads)


def batch():
    made = pack(random_groups())
    return made.with_(behaviour=torch.where(made.mask, -1.0, 0.0))


def critic(micro_tokens=10_000, dtype="float64", **optim):
    config = OptimConfig(grad_clip=0, micro_tokens=micro_tokens, **optim)
    learner = torch_learner(value_model(exact(load("tiny-random", dtype=dtype, seed=1))), config, total_steps=1)
    torch.nn.init.normal_(learner.backend.model.module.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    return learner


def test_a_value_is_what_is_expected_before_its_token():
    """Changing a token changes no value up to and including its own."""
    learner, made = critic(), batch()
    before = learner.infer(made)
    assert before[~made.mask].eq(0).all()
    assert before[made.mask].ne(0).all()
    last = int(made.lengths[0]) - 1
    changed = made.tokens.clone()
    changed[last] = 9
    after = learner.infer(made.with_(tokens=changed))
    assert torch.equal(before, after)
    changed[last - 1] = 9
    assert not torch.equal(before, learner.infer(made.with_(tokens=changed)))


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-10), ("float32", 1e-5)])
def test_the_critics_gradient_does_not_depend_on_micro_batches(dtype, bound):
    made = batch()
    made = made.with_(values=critic().infer(made) * 0.9)
    made = Algorithm(AlgorithmConfig(preset="ppo"), single_update=True).advantages(made)
    work = Update(made, ValueLoss(AlgorithmConfig(preset="ppo")), Shares("token_mean"))
    whole = gradient_of(critic(dtype=dtype), work)
    assert whole.norm() > 1e-6
    assert relative(gradient_of(critic(17, dtype), work), whole) < bound


def test_a_critic_learns_what_to_expect(tmp_path):
    made = batch()
    learner = critic(lr=1e-2, dtype="float32")
    learner.backend.model.module.head.weight.data.zero_()
    algorithm = Algorithm(AlgorithmConfig(preset="ppo", gae_decay=1.0, value_clip=None, whiten=False), single_update=True)
    errors = []
    for _ in range(40):
        done = algorithm.advantages(made.with_(values=learner.infer(made)))
        errors.append(learner.update(Update(done, algorithm.value_loss, algorithm.value_aggregate)).metrics()["critic/loss"])
    assert errors[-1] < 0.3 * errors[0]
    learner.save(tmp_path)
    twin = critic(dtype="float32")
    twin.load(tmp_path)
    assert torch.equal(twin.infer(made), learner.infer(made))


def test_an_idle_update_counts_and_trains_nothing():
    learner = torch_learner(load("tiny-random"), OptimConfig(lr=1.0), total_steps=1)
    before = copy.deepcopy(dict(learner.weights()))
    assert merge([learner.update(Update(batch(), SFTLoss(), Shares("token_mean"), idle=True))]) == {}
    assert learner.step == 1
    assert all(torch.equal(before[name], value) for name, value in learner.weights())


def adapted(lr=1e-2, dtype="float32", **lora):
    model = load("tiny-random", dtype=dtype, seed=1)
    add_adapters(model, LoraConfig(rank=4, alpha=8, **lora))
    return torch_learner(model, OptimConfig(lr=lr, grad_clip=0), total_steps=1)


def test_adapters_train_alone_and_the_reference_is_the_model_without_them(tmp_path):
    learner, made = adapted(), batch()
    start = torch_learner(load("tiny-random", seed=1), None).infer(made, 1.0)
    assert all("lora_" in name for name, _ in learner.weights())
    assert torch.allclose(learner.infer(made, 1.0), start, atol=1e-6)
    for _ in range(3):
        learner.update(Update(made, SFTLoss(), Shares("token_mean")))
    trained = learner.infer(made, 1.0)
    assert (trained - start).abs().max() > 0.1
    assert torch.allclose(learner.infer_reference(made, 1.0), start, atol=1e-6)
    assert torch.equal(learner.infer(made, 1.0), trained)
    learner.export(tmp_path)
    exported = torch_learner(load(str(tmp_path)), None).infer(made, 1.0)
    assert torch.allclose(exported, trained, atol=1e-5)
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    (tmp_path / "state").mkdir()
    learner.save(tmp_path / "state")
    twin = adapted()
    twin.load(tmp_path / "state")
    assert torch.equal(twin.infer(made, 1.0), trained)


def test_adapters_on_layers_that_do_not_exist():
    with pytest.raises(ModelError, match=r"roles.actor.lora: Target modules .*nowhere"):
        adapted(targets=["nowhere"])


def test_recomputed_activations_give_the_same_gradient():
    work = Update(batch(), SFTLoss(), Shares("token_mean"))
    grads = [
        gradient_of(
            torch_learner(
                load("tiny-random", dtype="float64", seed=1, recompute_activations=recompute),
                OptimConfig(grad_clip=0),
                total_steps=1,
            ),
            work,
        )
        for recompute in (False, True)
    ]
    assert grads[0].norm() > 1e-6
    assert relative(grads[1], grads[0]) < 1e-12


def test_recomputing_really_happens(monkeypatch):
    """Fewer saved activations: each layer's forward runs twice."""
    learner = torch_learner(load("tiny-random", recompute_activations=True), OptimConfig(), total_steps=1)
    layer, calls = learner.backend.model.module.model.layers[0], []
    plain = layer.mlp.forward
    monkeypatch.setattr(layer.mlp, "forward", lambda *a: calls.append(1) or plain(*a))
    learner.update(Update(batch(), SFTLoss(), Shares("token_mean")))
    assert len(calls) == 2


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_stays_off_in_updates(recompute):
    """The policy that is trained is the one that sampled."""
    model = load("tiny-random", seed=1, recompute_activations=recompute)
    layer = model.module.model.layers[0]
    layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Dropout(0.5))
    learner = torch_learner(model, OptimConfig(), total_steps=1)
    made = batch()
    made = made.with_(behaviour=learner.infer(made, 1.0))
    metrics = learner.update(Update(made, SFTLoss(), Shares("token_mean"))).metrics()
    assert metrics["train/mismatch"] < 1e-5


def test_a_rank_without_tokens_keeps_the_steps_metrics():
    steps = [(2.0, 1e-3)]
    busy, empty = (Statistics(steps=steps, loss=loss, tokens=tokens) for loss, tokens in ((0.5, 8), (0.0, 0)))
    busy.columns["entropy"] = [torch.full((8,), 1.5)]
    plain = {"train/lr": 1e-3, "train/grad_norm": 2.0}
    assert merge([empty, busy]) == {"train/loss": 0.5, "train/tokens": 8.0, "train/entropy": 1.5, **plain}
    assert merge([empty, empty]) == {"train/loss": 0.0, "train/tokens": 0.0, **plain}


@given(st.lists(st.lists(st.floats(0.01, 10), max_size=9), min_size=1, max_size=5))
def test_metrics_do_not_depend_on_how_tokens_are_spread(ratios):
    """Quantiles and extremes are exact, means equal but for rounding: averages of the ranks' own would be neither."""

    def statistics(columns):
        made = Statistics(steps=[(1.0, 1e-3)])
        for column in columns:
            made.add(torch.tensor(float(sum(column))), len(column), {"ratio": torch.tensor(column)} if column else {})
        return made

    spread, alone = merge([statistics([ratio]) for ratio in ratios]), merge([statistics(ratios)])
    assert spread == pytest.approx(alone, rel=1e-6)
    for name in ("train/ratio_max", "train/ratio_q01", "train/ratio_q99"):
        assert spread.get(name) == alone.get(name)


def test_bfloat16_keeps_float32_masters():
    """A step far below bfloat16's resolution is not lost: a few of them move the working weights."""
    learner = torch_learner(load("tiny-random", dtype="bfloat16", seed=1), OptimConfig(lr=1e-3, grad_clip=0), total_steps=1)
    assert all(m.dtype is torch.float32 for m in learner.backend.master)
    assert all(w.dtype is torch.bfloat16 for w in learner.backend.working)
    name = learner.backend.names.index("model.norm.weight")
    ones = learner.backend.working[name].detach().clone()
    learner.update(Update(batch(), SFTLoss(), Shares("token_mean")))
    assert torch.equal(ones, learner.backend.working[name])  # 1 ± 1e-3 is 1 in bfloat16
    for _ in range(8):
        learner.update(Update(batch(), SFTLoss(), Shares("token_mean")))
    assert not torch.equal(ones, learner.backend.working[name])


def bfloat16_learner(micro_tokens):
    config = OptimConfig(grad_clip=0, micro_tokens=micro_tokens)
    return torch_learner(load("tiny-random", dtype="bfloat16", seed=1), config, total_steps=1)


def test_bfloat16_gradients_add_up_in_float32():
    """Many micro-batches give the float64 sum of their gradients, so each is rounded to bfloat16 once and their sum never."""
    work, learner = Update(batch(), SFTLoss(), Shares("token_mean")), bfloat16_learner(17)
    made = work.batch.with_(weights=work.aggregate(work.batch))
    alone = []
    for traces in made.micro_batches(17):
        learner.backend.train([made.select(traces)], Settings(), partial(learner._loss, work))
        assert all(p.grad is None for p in learner.backend.working)
        alone.append(
            torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in learner.backend.master])
        )
        learner.backend.drop_gradients()
    assert len(alone) > 8
    added = gradient_of(bfloat16_learner(17), work)
    assert added.dtype is torch.float32
    assert relative(added.double(), torch.stack(alone).double().sum(0)) < 1e-6
    whole = gradient_of(bfloat16_learner(10_000), work)
    exact = load("tiny-random", dtype="bfloat16", seed=1)
    for parameter in exact.module.parameters():
        parameter.data = parameter.data.float()
    truth = gradient_of(torch_learner(exact, OptimConfig(grad_clip=0), total_steps=1), work)
    assert relative(added, truth) < 1.1 * relative(whole, truth)  # no worse than one pass


def test_a_failed_update_leaves_no_gradient_behind(monkeypatch):
    learner, work = bfloat16_learner(17), Update(batch(), SFTLoss(), Shares("token_mean"))
    clean = gradient_of(bfloat16_learner(17), work)
    for boundary in ("_share", "_clip"):
        with monkeypatch.context() as patch:
            patch.setattr(learner, boundary, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                learner.update(work)
    calls, check = [], learner.backend._check_stop
    monkeypatch.setattr(
        learner.backend, "_check_stop", lambda: calls.append(1) or (learner.interrupt() if len(calls) == 3 else check())
    )
    with pytest.raises(Interrupted):
        learner.update(work)
    learner.backend.stop.clear()
    assert torch.equal(gradient_of(learner, work), clean)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_decay_spares_norms_and_biases(tmp_path, dtype):
    """With no gradient a step of AdamW is the decay alone; the moments of all parameters survive a checkpoint."""

    def learner(decay):
        model = load("tiny-random", dtype=dtype, seed=1)
        layer = model.module.model.layers[0]
        layer.mlp.experts_bias = torch.nn.Parameter(torch.ones(2, 3, dtype=model.module.dtype))  # of experts, one row each
        layer.mlp.down_proj.bias = torch.nn.Parameter(torch.ones(160, dtype=model.module.dtype))
        return torch_learner(model, OptimConfig(lr=0.1, weight_decay=decay, grad_clip=0), total_steps=1)

    made, decayed = batch(), learner(0.5)
    before = [p.detach().clone() for p in decayed.backend.master]
    decayed.update(Update(made, SFTLoss(), lambda b: torch.zeros(len(b.tokens))))
    for name, old, new in zip(decayed.backend.names, before, decayed.backend.master, strict=True):
        spared = "norm" in name or name.endswith("bias")
        assert torch.allclose(new, old if spared else old * 0.95), name
    work = Update(made, SFTLoss(), Shares("token_mean"))
    decayed.update(work)
    decayed.save(tmp_path)
    twin = learner(0.5)
    twin.load(tmp_path)
    for one in (decayed, twin):
        one.update(Update(made, SFTLoss(), Shares("sequence_mean")))
    assert all(torch.equal(a, b) for a, b in zip(decayed.backend.master, twin.backend.master, strict=True))


def data_parallel(rank, count, port, dtype):
    """The gradients of two minibatches' steps, and the log-probs of this rank's share."""
    torch.set_num_threads(1)
    ranks = Ranks.meet(
        Mesh(data=count, rank=rank), Rendezvous("127.0.0.1", port, ("127.0.0.1",) * count), device="cpu", seconds=60
    )
    config = OptimConfig(lr=1e-2, grad_clip=0, minibatch=12, micro_tokens=60)
    learner = torch_learner(exact(load("tiny-random", dtype=dtype, seed=1)), config, total_steps=1, ranks=ranks)
    made = Algorithm(AlgorithmConfig(advantage="reinforce", loss="pg"), single_update=True).advantages(batch())
    grads, step = [], learner.backend.optimizer.step

    def spy():
        grads.append(torch.cat([p.grad.clone().flatten() for p in learner.backend.master]))
        step()

    learner.backend.optimizer.step = spy  # type: ignore[method-assign]
    before = learner.infer(made, 1.0)
    statistics = learner.update(Update(made, PolicyLoss(AlgorithmConfig(loss="pg")), Shares("token_mean")))
    return {"grads": grads, "logprobs": before, "statistics": statistics}


@pytest.mark.xdist_group("ranks")  # one process preloads what the ranks fork from
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-10), ("float32", 1e-5)])
def test_two_ranks_have_the_gradient_of_one(dtype, bound):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parts = run_ranks(data_parallel, 2, 2, store.port, dtype)
    whole = data_parallel(0, 1, 0, dtype)
    for mine, theirs in zip(parts[0]["grads"], parts[1]["grads"], strict=True):
        assert torch.equal(mine, theirs)
    assert len(whole["grads"]) == 2
    assert relative(parts[0]["grads"][0], whole["grads"][0]) < bound
    assert relative(parts[0]["grads"][1], whole["grads"][1]) < 100 * bound  # after a step of Adam, which magnifies
    made = batch()
    assert torch.allclose(made.gather([p["logprobs"] for p in parts]), whole["logprobs"], atol=1e-6)
    merged, alone = merge([p["statistics"] for p in parts]), merge([whole["statistics"]])
    assert merged["train/tokens"] == alone["train/tokens"]
    assert merged == pytest.approx(alone, rel=1e-4, abs=1e-6)


def padded(rank, count, port):
    """One trace for two ranks, under a backend that wants three micro-batches or more, and an even number."""
    torch.set_num_threads(1)
    ranks = Ranks.meet(
        Mesh(data=count, rank=rank), Rendezvous("127.0.0.1", port, ("127.0.0.1",) * count), device="cpu", seconds=60
    )
    learner = torch_learner(load("tiny-random", seed=1), OptimConfig(lr=1e-2, grad_clip=0), total_steps=1, ranks=ranks)
    learner.backend.count = Count(least=3, multiple=2)
    counts, train = [], learner.backend.train
    learner.backend.train = lambda micro, *rest: counts.append(len(micro)) or train(micro, *rest)
    made = batch()
    made = made.select([0])
    logprobs, grad = learner.infer(made), gradient_of(learner, Update(made, SFTLoss(), Shares("token_mean")))
    return {"counts": counts, "logprobs": logprobs, "grad": grad}


@pytest.mark.xdist_group("ranks")
def test_a_rank_without_rows_takes_part_in_every_micro_batch():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parts, alone = run_ranks(padded, 2, 2, store.port), padded(0, 1, 0)
    assert [part["counts"] for part in parts] == [[4], [4]] == [alone["counts"]] * 2
    assert all(relative(part["grad"], alone["grad"]) < 1e-5 for part in parts)
    assert sorted(len(part["logprobs"]) for part in parts) == [0, len(alone["logprobs"])]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 6))
def test_shares_are_balanced_and_lose_nothing(lengths, ranks):
    made = pack(
        [
            Group(Prompt("p", "d", "", (1,)), 0, [Sample(Prompt("p", "d", "", (1,)), 0, i, traces=[trace(n)], reward=0.0)])
            for i, n in enumerate(lengths)
        ]
    )
    shares = made.shares(ranks)
    assert sorted(t for share in shares for t in share) == list(range(len(lengths)))
    loads = [sum(int(made.lengths[t]) for t in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths) + 1
    column = torch.arange(len(made.tokens), dtype=torch.float32)
    starts = torch.cumsum(made.lengths, 0) - made.lengths
    parts = [
        torch.cat([column[int(starts[t]) : int(starts[t] + made.lengths[t])] for t in share] or [torch.zeros(0)])
        for share in shares
    ]
    assert torch.equal(made.gather(parts), column)


def trace(length):
    made = Trace()
    made.extend([1], Owner.PROMPT)
    made.extend([3] * length, Owner.POLICY, [0.0] * length, [0] * length)
    return made
