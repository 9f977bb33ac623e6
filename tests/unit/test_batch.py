"""Packing loses nothing, and cutting a batch changes neither its tokens nor its gradient."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumroll.algorithms import Algorithm
from drumroll.algorithms.aggregations import AGGREGATIONS, token_mean
from drumroll.algorithms.losses import PolicyLoss, SFTLoss
from drumroll.batch import pack
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.config.optim import OptimConfig
from drumroll.learners import Update
from drumroll.learners.backends.torch import torch_learner
from drumroll.models.loading import load
from drumroll.sample import Group, Owner, Prompt, Sample, Trace


def make_trace(segments):
    trace = Trace()
    trace.extend([1], Owner.PROMPT)
    for owner, tokens in segments:
        if owner is Owner.POLICY:
            trace.extend(tokens, owner, [-0.1 * t for t in tokens], [3] * len(tokens))
        else:
            trace.extend(tokens, owner)
    return trace


tokens = st.lists(st.integers(3, 60), min_size=1, max_size=6)
segments = st.lists(st.tuples(st.sampled_from(list(Owner)), tokens), min_size=1, max_size=4)
rewards = st.floats(-2, 2, width=32)


@st.composite
def groups(draw):
    made = []
    for g in range(draw(st.integers(1, 4))):
        prompt = Prompt(str(g), "d", "", (1,))
        samples = [
            Sample(
                prompt,
                g,
                i,
                traces=[make_trace(s) for s in draw(st.lists(segments, min_size=1, max_size=2))],
                reward=draw(rewards),
            )
            for i in range(draw(st.integers(1, 4)))
        ]
        made.append(Group(prompt, g, samples))
    return made


@given(groups())
def test_packing_keeps_every_token_in_order(made):
    batch = pack(made)
    traces = [t for g in made for s in g.samples for t in s.traces]
    assert batch.tokens.tolist() == [t for trace in traces for t in trace.tokens]
    assert batch.mask.tolist() == [o is Owner.POLICY for trace in traces for o in trace.owners]
    assert batch.versions[batch.mask].eq(3).all()
    assert batch.lengths.tolist() == [len(trace.tokens) for trace in traces]
    assert batch.policy_lengths().tolist() == [s.policy_length() for g in made for s in g.samples]
    assert batch.rewards.tolist() == [s.reward for g in made for s in g.samples]


@given(groups(), st.integers(1, 40))
def test_micro_batches_partition_the_traces(made, budget):
    batch = pack(made)
    chunks = batch.micro_batches(budget)
    assert sorted(t for c in chunks for t in c) == list(range(batch.num_traces))
    families = batch.families()
    for chunk in chunks:
        assert batch.computed(families, chunk) <= budget or len(chunk) == 1


@given(groups(), st.integers(1, 40), st.integers(1, 5), st.integers(1, 4))
def test_units_are_never_separated(made, budget, size, count):
    """Neighbouring samples are pairs: no cut lies between them, and none is lost or repeated."""
    batch = pack(made)
    batch = batch.with_(unit_of=torch.arange(batch.num_samples) // 2)
    for cut in (batch.chunks(size), batch.shares(count), batch.micro_batches(budget)):
        assert sorted(trace for traces in cut for trace in traces) == list(range(batch.num_traces))
        homes = [{int(batch.sample_of[trace]) // 2 for trace in traces} for traces in cut]
        assert sum(map(len, homes)) == len(set().union(*homes))
    lone = batch.with_(unit_of=None)
    assert [len({int(lone.sample_of[t]) for t in traces}) for traces in lone.chunks(size)][:-1] == [size] * (
        len(lone.chunks(size)) - 1
    )


@given(groups(), st.randoms())
def test_select_follows_the_traces(made, random):
    batch = pack(made)
    order = list(range(batch.num_traces))
    random.shuffle(order)
    picked = batch.select(order)
    ends = torch.cumsum(batch.lengths, 0).tolist()
    spans = [(end - int(n), end) for end, n in zip(ends, batch.lengths, strict=True)]
    assert picked.tokens.tolist() == [t for i in order for t in batch.tokens[slice(*spans[i])].tolist()]
    assert picked.sample_of.tolist() == [int(batch.sample_of[i]) for i in order]


@given(groups())
def test_advantages_reach_policy_tokens_only(made):
    batch = Algorithm(AlgorithmConfig(), single_update=True).advantages(pack(made))
    assert batch.advantages is not None
    assert batch.advantages[~batch.mask].eq(0).all()


@given(groups())
@pytest.mark.parametrize("name", ["token_mean", "sequence_mean"])
def test_token_weights_sum_to_one(name, made):
    batch = pack(made)
    weights = AGGREGATIONS[name](batch, 1)
    assert weights[~batch.mask].eq(0).all()
    assert float(weights.sum()) == pytest.approx(1.0 if batch.mask.any() else 0.0, abs=1e-5)


def random_groups(count=6, samples=4, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, n=None):
        values = torch.randint(low, high, (n or 1,), generator=generator).tolist()
        return values if n else values[0]

    made = []
    for g in range(count):
        prompt = Prompt(str(g), "d", "", (1,))
        shared = draw(3, 60, draw(2, 9))
        own = [make_trace([(Owner.PROMPT, shared), (Owner.POLICY, draw(3, 60, draw(1, 9)))]) for _ in range(samples)]
        rewards = [float(draw(0, 2)) for _ in range(samples)] if g % 2 else [1.0] * samples
        made.append(
            Group(
                prompt,
                g,
                [Sample(prompt, g, i, traces=[t], reward=r) for i, (t, r) in enumerate(zip(own, rewards, strict=True))],
            )
        )
    return made


def exact(model):
    """Norms and routers in the model's own precision. Hugging Face's round activations and gradients to float32 on the way, and what
    is shared is added up before that rounding, not after: without this, a float64 model agrees only to about 1e-7."""
    for norm in model.module.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            gain = 1.0 if type(norm).__name__.startswith("Gemma") else 0.0

            def forward(x, norm=norm, gain=gain):
                eps = getattr(norm, "variance_epsilon", None) or norm.eps
                return (norm.weight + gain) * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

            norm.forward = forward
        if type(norm).__name__.endswith("TopKRouter"):
            norm.forward = partial(exact_router, norm)
    return model


def exact_router(router, x):
    logits = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), router.weight)
    top, chosen = logits.softmax(-1).topk(router.top_k)
    return logits, top / top.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else top, chosen


def gradient(batch, loss, aggregate=token_mean, micro_tokens=10_000, dtype="float64"):
    """The whole gradient of one update, as a vector (clipping off, learning rate 0)."""
    model = exact(load("tiny-random", dtype=dtype, seed=1))
    learner = torch_learner(model, OptimConfig(lr=0.0, grad_clip=0, micro_tokens=micro_tokens), total_steps=1)
    grads = []
    learner.backend.optimizer.step = lambda: grads.extend(p.grad.clone().flatten() for p in learner.backend.master)  # type: ignore[method-assign]
    learner.update(Update(batch, loss, aggregate))
    return torch.cat(grads)


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_does_not_depend_on_micro_batches_or_order(dtype, bound, aggregation):
    batch = Algorithm(AlgorithmConfig(), single_update=True).advantages(pack(random_groups()))
    loss, aggregate = PolicyLoss(AlgorithmConfig()), AGGREGATIONS[aggregation]
    whole = gradient(batch, loss, aggregate, dtype=dtype)
    assert whole.norm() > 1e-6
    assert relative(gradient(batch, loss, aggregate, micro_tokens=17, dtype=dtype), whole) < bound
    shuffled = batch.select(list(reversed(range(batch.num_traces))))
    assert relative(gradient(shuffled, loss, aggregate, dtype=dtype), whole) < bound


def test_skipping_zero_advantage_traces_is_exact():
    batch = Algorithm(AlgorithmConfig(), single_update=True).advantages(pack(random_groups()))

    class Never(PolicyLoss):
        skips_zero_advantage = False

    config = AlgorithmConfig()
    assert relative(gradient(batch, PolicyLoss(config)), gradient(batch, Never(config))) < 1e-10


def test_gradient_equals_plain_padded_transformers():
    """Against Hugging Face's own attention on a padded batch, by the textbook loss."""
    batch = pack(random_groups())
    ours = gradient(batch, SFTLoss())
    model = load("tiny-random", dtype="float64", seed=1).module
    model.set_attn_implementation("eager")
    width = int(batch.lengths.max())
    ids, mask = torch.zeros(batch.num_traces, width, dtype=torch.int64), torch.zeros(batch.num_traces, width)
    trained = torch.zeros(batch.num_traces, width, dtype=torch.bool)
    start = 0
    for row, length in enumerate(batch.lengths.tolist()):
        ids[row, :length] = batch.tokens[start : start + length]
        mask[row, :length] = 1
        trained[row, :length] = batch.mask[start : start + length]
        start += length
    logprobs = torch.log_softmax(model(input_ids=ids, attention_mask=mask).logits[:, :-1], -1)
    chosen = logprobs.gather(2, ids[:, 1:, None])[..., 0]
    (-(chosen[trained[:, 1:]]).mean()).backward()
    plain = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert relative(ours, plain) < 1e-6
