"""The learner's variants: a critic, adapters, recomputed activations, working weights in bfloat16."""

import copy

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
from drumroll.learners.critic import TorchCritic
from drumroll.learners.ranks import Ranks
from drumroll.learners.torch import TorchLearner
from drumroll.learners.totals import Totals, merge
from drumroll.models.adapters import add_adapters
from drumroll.models.loading import load
from drumroll.models.value import value_model
from drumroll.sample import Group, Owner, Prompt, Sample, Trace


def gradient_of(learner, work):
    grads = []
    learner.optimizer.step = lambda: grads.extend(p.grad.clone().flatten() for p in learner.master)  # type: ignore[method-assign]
    learner.update(work)
    return torch.cat(grads)


def batch():
    made = pack(random_groups())
    return made.with_(behaviour=torch.where(made.mask, -1.0, 0.0))


def critic(micro_tokens=10_000, dtype="float64", **optim):
    config = OptimConfig(grad_clip=0, micro_tokens=micro_tokens, **optim)
    learner = TorchCritic(value_model(exact(load("tiny-random", dtype=dtype, seed=1))), config, total_steps=1)
    torch.nn.init.normal_(learner.model.module.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    return learner


def test_a_value_is_what_is_expected_before_its_token():
    """Changing a token changes no value up to and including its own."""
    learner, made = critic(), batch()
    before = learner.values(made)
    assert before[~made.mask].eq(0).all()
    assert before[made.mask].ne(0).all()
    last = int(made.lengths[0]) - 1
    changed = made.tokens.clone()
    changed[last] = 9
    after = learner.values(made.with_(tokens=changed))
    assert torch.equal(before, after)
    changed[last - 1] = 9
    assert not torch.equal(before, learner.values(made.with_(tokens=changed)))


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-10), ("float32", 1e-5)])
def test_the_critics_gradient_does_not_depend_on_micro_batches(dtype, bound):
    made = batch()
    made = made.with_(values=critic().values(made) * 0.9)
    made = Algorithm(AlgorithmConfig(preset="ppo"), single_update=True).advantages(made)
    work = Update(made, ValueLoss(AlgorithmConfig(preset="ppo")), Shares("token_mean"))
    whole = gradient_of(critic(dtype=dtype), work)
    assert whole.norm() > 1e-6
    assert relative(gradient_of(critic(17, dtype), work), whole) < bound


def test_a_critic_learns_what_to_expect(tmp_path):
    made = batch()
    learner = critic(lr=1e-2, dtype="float32")
    learner.model.module.head.weight.data.zero_()
    algorithm = Algorithm(AlgorithmConfig(preset="ppo", gae_decay=1.0, value_clip=None, whiten=False), single_update=True)
    errors = []
    for _ in range(40):
        done = algorithm.advantages(made.with_(values=learner.values(made)))
        errors.append(learner.update(Update(done, algorithm.value_loss, algorithm.value_aggregate))["critic/loss"])
    assert errors[-1] < 0.3 * errors[0]
    learner.save(tmp_path)
    twin = critic(dtype="float32")
    twin.load(tmp_path)
    assert torch.equal(twin.values(made), learner.values(made))


def test_an_idle_update_counts_and_trains_nothing():
    learner = TorchLearner(load("tiny-random"), OptimConfig(lr=1.0), total_steps=1)
    before = copy.deepcopy(learner.weights())
    assert learner.update(Update(batch(), SFTLoss(), Shares("token_mean"), idle=True)) == {}
    assert learner.step == 1
    assert all(torch.equal(before[name], value) for name, value in learner.weights().items())


def adapted(lr=1e-2, dtype="float32", **lora):
    model = load("tiny-random", dtype=dtype, seed=1)
    add_adapters(model, LoraConfig(rank=4, alpha=8, **lora))
    return TorchLearner(model, OptimConfig(lr=lr, grad_clip=0), total_steps=1)


def test_adapters_train_alone_and_the_reference_is_the_model_without_them(tmp_path):
    learner, made = adapted(), batch()
    start = TorchLearner(load("tiny-random", seed=1), None).logprobs(made, 1.0)
    assert all("lora_" in name for name in learner.weights())
    assert torch.allclose(learner.logprobs(made, 1.0), start, atol=1e-6)
    for _ in range(3):
        learner.update(Update(made, SFTLoss(), Shares("token_mean")))
    trained = learner.logprobs(made, 1.0)
    assert (trained - start).abs().max() > 0.1
    assert torch.allclose(learner.reference_logprobs(made, 1.0), start, atol=1e-6)
    assert torch.equal(learner.logprobs(made, 1.0), trained)
    learner.export(tmp_path)
    exported = TorchLearner(load(str(tmp_path)), None).logprobs(made, 1.0)
    assert torch.allclose(exported, trained, atol=1e-5)
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    (tmp_path / "state").mkdir()
    learner.save(tmp_path / "state")
    twin = adapted()
    twin.load(tmp_path / "state")
    assert torch.equal(twin.logprobs(made, 1.0), trained)


def test_adapters_on_layers_that_do_not_exist():
    with pytest.raises(ModelError, match=r"roles.actor.lora: Target modules .*nowhere"):
        adapted(targets=["nowhere"])


def test_recomputed_activations_give_the_same_gradient():
    work = Update(batch(), SFTLoss(), Shares("token_mean"))
    grads = [
        gradient_of(
            TorchLearner(
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
    learner = TorchLearner(load("tiny-random", recompute_activations=True), OptimConfig(), total_steps=1)
    layer, calls = learner.model.module.model.layers[0], []
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
    learner = TorchLearner(model, OptimConfig(), total_steps=1)
    made = batch()
    made = made.with_(behaviour=learner.logprobs(made, 1.0))
    metrics = learner.update(Update(made, SFTLoss(), Shares("token_mean")))
    assert metrics["train/mismatch"] < 1e-5


def test_a_rank_without_tokens_keeps_the_steps_metrics():
    report = {"train/loss": 0.5, "train/tokens": 8.0, "train/lr": 1e-3, "train/grad_norm": 2.0, "train/entropy": 1.5}
    empty = {"train/loss": 0.0, "train/tokens": 0.0, "train/lr": 1e-3, "train/grad_norm": 2.0}
    assert merge([empty, report]) == report
    assert merge([empty, empty]) == empty


def test_bfloat16_keeps_float32_masters():
    """A step far below bfloat16's resolution is not lost: a few of them move the working weights."""
    learner = TorchLearner(load("tiny-random", dtype="bfloat16", seed=1), OptimConfig(lr=1e-3, grad_clip=0), total_steps=1)
    assert all(m.dtype is torch.float32 for m in learner.master)
    assert all(w.dtype is torch.bfloat16 for w in learner.working)
    name = learner.names.index("model.norm.weight")
    ones = learner.working[name].detach().clone()
    learner.update(Update(batch(), SFTLoss(), Shares("token_mean")))
    assert torch.equal(ones, learner.working[name])  # 1 ± 1e-3 is 1 in bfloat16
    for _ in range(8):
        learner.update(Update(batch(), SFTLoss(), Shares("token_mean")))
    assert not torch.equal(ones, learner.working[name])


def bfloat16_learner(micro_tokens):
    config = OptimConfig(grad_clip=0, micro_tokens=micro_tokens)
    return TorchLearner(load("tiny-random", dtype="bfloat16", seed=1), config, total_steps=1)


def test_bfloat16_gradients_add_up_in_float32():
    """Many micro-batches give the float64 sum of their gradients, so each is rounded to bfloat16 once and their sum never."""
    work, learner = Update(batch(), SFTLoss(), Shares("token_mean")), bfloat16_learner(17)
    made = work.batch.with_(weights=work.aggregate(work.batch))
    alone = []
    for traces in made.micro_batches(17):
        learner._backward(made.select(traces), work, Totals("train"))
        assert all(p.grad is None for p in learner.working)
        alone.append(torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in learner.master]))
        learner.optimizer.zero_grad()
    assert len(alone) > 8
    added = gradient_of(bfloat16_learner(17), work)
    assert added.dtype is torch.float32
    assert relative(added.double(), torch.stack(alone).double().sum(0)) < 1e-6
    whole = gradient_of(bfloat16_learner(10_000), work)
    exact = load("tiny-random", dtype="bfloat16", seed=1)
    for parameter in exact.module.parameters():
        parameter.data = parameter.data.float()
    truth = gradient_of(TorchLearner(exact, OptimConfig(grad_clip=0), total_steps=1), work)
    assert relative(added, truth) < 1.1 * relative(whole, truth)  # no worse than one pass


def test_a_failed_update_leaves_no_gradient_behind(monkeypatch):
    learner, work = bfloat16_learner(17), Update(batch(), SFTLoss(), Shares("token_mean"))
    clean = gradient_of(bfloat16_learner(17), work)
    for boundary in ("_share", "_clip"):
        with monkeypatch.context() as patch:
            patch.setattr(learner, boundary, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                learner.update(work)
    calls, check = [], learner._check_stop
    monkeypatch.setattr(
        learner, "_check_stop", lambda: calls.append(1) or (learner.interrupt() if len(calls) == 3 else check())
    )
    with pytest.raises(Interrupted):
        learner.update(work)
    learner._stop.clear()
    assert torch.equal(gradient_of(learner, work), clean)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_decay_spares_norms_and_biases(tmp_path, dtype):
    """With no gradient a step of AdamW is the decay alone; the moments of all parameters survive a checkpoint."""

    def learner(decay):
        model = load("tiny-random", dtype=dtype, seed=1)
        layer = model.module.model.layers[0]
        layer.mlp.experts_bias = torch.nn.Parameter(torch.ones(2, 3, dtype=model.module.dtype))  # of experts, one row each
        layer.mlp.down_proj.bias = torch.nn.Parameter(torch.ones(160, dtype=model.module.dtype))
        return TorchLearner(model, OptimConfig(lr=0.1, weight_decay=decay, grad_clip=0), total_steps=1)

    made, decayed = batch(), learner(0.5)
    before = [p.detach().clone() for p in decayed.master]
    decayed.update(Update(made, SFTLoss(), lambda b: torch.zeros(len(b.tokens))))
    for name, old, new in zip(decayed.names, before, decayed.master, strict=True):
        spared = "norm" in name or name.endswith("bias")
        assert torch.allclose(new, old if spared else old * 0.95), name
    work = Update(made, SFTLoss(), Shares("token_mean"))
    decayed.update(work)
    decayed.save(tmp_path)
    twin = learner(0.5)
    twin.load(tmp_path)
    for one in (decayed, twin):
        one.update(Update(made, SFTLoss(), Shares("sequence_mean")))
    assert all(torch.equal(a, b) for a, b in zip(decayed.master, twin.master, strict=True))


def data_parallel(rank, count, port, dtype):
    """The gradients of two minibatches' steps, and the log-probs of this rank's share."""
    torch.set_num_threads(1)
    ranks = Ranks.meet(rank, count, "127.0.0.1", port, device="cpu", seconds=60)
    config = OptimConfig(lr=1e-2, grad_clip=0, minibatch=12, micro_tokens=60)
    learner = TorchLearner(exact(load("tiny-random", dtype=dtype, seed=1)), config, total_steps=1, ranks=ranks)
    made = Algorithm(AlgorithmConfig(advantage="reinforce", loss="pg"), single_update=True).advantages(batch())
    grads, step = [], learner.optimizer.step

    def spy():
        grads.append(torch.cat([p.grad.clone().flatten() for p in learner.master]))
        step()

    learner.optimizer.step = spy  # type: ignore[method-assign]
    before = learner.logprobs(made, 1.0)
    metrics = learner.update(Update(made, PolicyLoss(AlgorithmConfig(loss="pg")), Shares("token_mean")))
    return {"grads": grads, "logprobs": before, "metrics": metrics}


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
    merged = merge([p["metrics"] for p in parts])
    assert merged["train/tokens"] == whole["metrics"]["train/tokens"]
    for name in ("train/loss", "train/entropy", "train/grad_norm", "train/kl", "train/mismatch"):
        assert merged[name] == pytest.approx(whole["metrics"][name], rel=1e-4, abs=1e-6), name


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
