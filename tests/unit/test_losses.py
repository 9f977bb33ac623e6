"""Every loss, correction and aggregation equals a slow loop written from its formula, edges included."""

import math

import pytest
import torch
from algorithm_references import mean, sample_batch
from hypothesis import given
from hypothesis import strategies as st

from drumroll.algorithms.aggregations import AGGREGATIONS
from drumroll.algorithms.corrections import behaviour_weights
from drumroll.algorithms.losses import LOSSES, PolicyLoss, Tokens, ValueLoss, ValueTokens, kl_divergence
from drumroll.config.algorithm import AlgorithmConfig

# --- losses ---


def slow_loss(name, c, rows):
    """Per token, in plain Python; rows are (logprob, old, advantage, sequence)."""
    total = {s: sum(n - o for n, o, _, t in rows if t == s) for *_, s in rows}
    count = {s: sum(t == s for *_, t in rows) for *_, s in rows}

    def clip(x):
        return min(max(x, 1 - c.clip_low), 1 + c.clip_high)

    out = []
    for n, o, a, s in rows:
        ratio = math.exp(min(max(n - o, -20), 20))
        if name == "ppo":
            gain = min(ratio * a, clip(ratio) * a)
            gain = max(gain, c.dual_clip * a) if c.dual_clip and a < 0 else gain
            out.append(-gain)
        elif name == "pg":
            out.append(-a * n)
        elif name == "gspo":
            g = math.exp(min(max(total[s] / count[s], -20), 20))
            out.append(-min(g * a, clip(g) * a))
        elif name == "cispo":
            out.append(-clip(ratio) * a * n)
        elif name == "topr":
            out.append(-(1.0 if a >= 0 else min(1.0, math.exp(min(max(total[s], -20), 20)))) * a * n)
        elif name == "sapo":
            t = c.temperature_positive if a > 0 else c.temperature_negative
            out.append(-a * 4 / t / (1 + math.exp(-t * (ratio - 1))))
        elif name == "mirror":
            out.append(-a * n + 0.5 * c.mirror * min(max(n - o, -20), 20) ** 2)
    return out


logprob = st.floats(-30, 0)
row = st.tuples(logprob, logprob, st.floats(-3, 3), st.integers(0, 3))


def tokens_of(rows):
    n, o, a = (torch.tensor(c, dtype=torch.float64) for c in list(zip(*rows, strict=True))[:3])
    sequence = torch.tensor([r[3] for r in rows])
    return Tokens(n.requires_grad_(), torch.zeros_like(n), o, o, a, None, sequence)


@pytest.mark.parametrize("name", sorted(LOSSES.parts))
@given(rows=st.lists(row, min_size=1, max_size=8), dual=st.sampled_from([None, 3.0]))
def test_losses_equal_their_formulas(name, rows, dual):
    config = AlgorithmConfig(loss=name, clip_low=0.2, clip_high=0.3, dual_clip=dual)
    got = LOSSES.get(name)(tokens_of(rows), config)
    assert got.tolist() == pytest.approx(slow_loss(name, config, rows), rel=1e-6, abs=1e-6)
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("name", sorted(LOSSES.parts))
def test_at_the_old_policy_every_loss_has_the_policy_gradient(name):
    """Where nothing has moved, all of them push each token by its advantage; gspo spreads it over the sequence."""
    rows = [(-1.0, -1.0, 0.5, 0), (-2.0, -2.0, 0.5, 0), (-0.5, -0.5, -1.5, 1)]
    tokens = tokens_of(rows)
    LOSSES.get(name)(tokens, AlgorithmConfig(loss=name)).sum().backward()
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx([-0.5, -0.5, 1.5], abs=1e-9)


@pytest.mark.parametrize("name", sorted(LOSSES.parts))
@pytest.mark.parametrize(
    ("now", "old"), [(-1e4, 0.0), (0.0, -1e4), (-math.inf, -1.0), (-1.0, -math.inf), (-math.inf, -math.inf)]
)
def test_huge_ratios_and_impossible_tokens(name, now, old):
    """Far away is finite; where the log-prob itself is in the loss, -inf is caught by the learner's guard."""
    tokens = tokens_of([(now, old, 1.0, 0), (-1.0, -1.0, -1.0, 0)])
    loss = LOSSES.get(name)(tokens, AlgorithmConfig(loss=name))
    if math.isinf(now) and name in ("pg", "cispo", "topr", "mirror"):
        assert not torch.isfinite(loss).all()
        return
    assert torch.isfinite(loss).all()
    loss.sum().backward()
    assert tokens.logprobs.grad is not None
    assert torch.isfinite(tokens.logprobs.grad).all()


@given(st.lists(st.tuples(*[st.floats(-5, 5)] * 3), min_size=1, max_size=6), st.sampled_from([None, 0.2]))
def test_the_value_loss_equals_its_formula(rows, clip):
    value, old, returns = (torch.tensor(c, dtype=torch.float64) for c in zip(*rows, strict=True))
    got, _ = ValueLoss(AlgorithmConfig(value_clip=clip))(ValueTokens(value, old, returns))
    for loss, (v, o, r) in zip(got.tolist(), rows, strict=True):
        held = o + min(max(v - o, -clip), clip) if clip else v
        assert loss == pytest.approx(max((v - r) ** 2, (held - r) ** 2) / 2)


def test_the_imitation_term_acts_on_successes_only():
    tokens = tokens_of([(-1.0, -1.0, 0.0, 0), (-2.0, -2.0, 0.0, 1)])
    tokens.rewards = torch.tensor([1.0, 0.0])
    loss, _ = PolicyLoss(AlgorithmConfig(sft=0.5))(tokens)
    assert loss.tolist() == pytest.approx([0.5, 0.0])
    assert not PolicyLoss(AlgorithmConfig(sft=0.5)).skips_zero_advantage


def test_clipping_stops_the_gradient_and_cispo_does_not():
    rows = [(0.0, -2.0, 1.0, 0), (-4.0, -2.0, -1.0, 1)]  # far beyond the clip in the direction of the advantage
    for name, moves in (("ppo", False), ("cispo", True)):
        tokens = tokens_of(rows)
        LOSSES.get(name)(tokens, AlgorithmConfig(loss=name)).sum().backward()
        assert tokens.logprobs.grad is not None
        assert bool((tokens.logprobs.grad != 0).all()) is moves


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators(estimator):
    new, reference = torch.tensor([-1.0, -2.0, -40.0]), torch.tensor([-1.5, -2.0, 0.0])
    got = kl_divergence(new, reference, estimator).tolist()
    for value, n, r in zip(got, new.tolist(), reference.tolist(), strict=True):
        gap = min(max(r - n, -20), 20)
        want = {"k1": -gap, "k2": gap * gap / 2, "k3": math.exp(gap) - gap - 1}[estimator]
        assert value == pytest.approx(want, rel=1e-5)


# --- corrections and aggregations ---


@pytest.mark.parametrize("kind", ["none", "truncate", "truncate_sequence", "band", "geometric"])
@given(rows=st.lists(st.tuples(logprob, logprob, st.integers(0, 2)), min_size=1, max_size=8))
def test_corrections_equal_their_formulas(kind, rows):
    config = AlgorithmConfig(correction=kind, correction_low=0.5, correction_high=2.0)
    old, behaviour = (torch.tensor(c, dtype=torch.float64) for c in list(zip(*rows, strict=True))[:2])
    got = behaviour_weights(old, behaviour, torch.tensor([r[2] for r in rows]), config).tolist()
    gaps = [min(max(o - b, -20), 20) for o, b, _ in rows]
    for value, gap, (*_, s) in zip(got, gaps, rows, strict=True):
        own = [g for g, (*_, t) in zip(gaps, rows, strict=True) if t == s]
        ratio, geometric = math.exp(gap), math.exp(mean(own))
        want = {
            "none": 1.0,
            "truncate": min(ratio, 2.0),
            "truncate_sequence": min(math.exp(min(max(sum(own), -20), 20)), 2.0),
            "band": ratio if 0.5 <= ratio <= 2 else 0.0,
            "geometric": float(0.5 <= geometric <= 2),
        }[kind]
        if min(abs(ratio - 0.5), abs(ratio - 2), abs(geometric - 0.5), abs(geometric - 2)) > 1e-9:
            assert value == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_aggregations_equal_their_formulas(name):
    batch = sample_batch()
    lengths, samples = batch.policy_lengths().tolist(), batch.num_samples
    shares = AGGREGATIONS[name](batch, 10).tolist()
    total = sum(lengths)
    for share, trained, sample in zip(shares, batch.mask.tolist(), batch.sample_of_token().tolist(), strict=True):
        want = {
            "token_mean": 1 / total,
            "sequence_mean": 1 / samples / lengths[sample],
            "sequence_sum": 1 / samples,
            "fixed_length": 1 / samples / 10,
        }[name]
        assert share == pytest.approx(want if trained else 0.0)
