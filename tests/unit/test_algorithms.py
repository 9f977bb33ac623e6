"""Every estimator, loss, aggregation and correction equals a slow loop written from its formula, edges included."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumroll.algorithms import Algorithm
from drumroll.algorithms.advantages import ESTIMATORS, Scores
from drumroll.algorithms.aggregations import AGGREGATIONS
from drumroll.algorithms.corrections import behaviour_weights
from drumroll.algorithms.losses import LOSSES, PolicyLoss, Tokens, kl_divergence
from drumroll.algorithms.statistics import whiten
from drumroll.batch import pack
from drumroll.config import load
from drumroll.config.algorithm import RECIPES, AlgorithmConfig
from drumroll.errors import AlgorithmError, ConfigError

# --- estimators ---


def mean(values):
    return sum(values) / len(values)


def deviation(values):
    return math.sqrt(mean([(v - mean(values)) ** 2 for v in values]))


def slow_pass_at_k(rewards, k):
    """By enumeration: the mean over all k-subsets with and without each sample."""
    n, k = len(rewards), min(k, len(rewards))
    value = {c: float(any(rewards[i] > 0 for i in c)) for c in itertools.combinations(range(n), k)}
    centre, spread = mean(list(value.values())), deviation(list(value.values()))
    if spread < 1e-6:
        return [0.0] * n
    return [(mean([v for c, v in value.items() if i in c]) - centre) / spread for i in range(n)]


SLOW = {
    "grpo": lambda r, n: [(x - mean(r)) / (deviation(r) + 1e-6) if deviation(r) > 1e-6 else 0.0 for x in r],
    "dr_grpo": lambda r, n: [x - mean(r) for x in r],
    "rloo": lambda r, n: [r[i] - mean(r[:i] + r[i + 1 :]) if len(r) > 1 else 0.0 for i in range(len(r))],
    "opo": lambda r, n: [x - sum(a * b for a, b in zip(r, n, strict=True)) / max(1, sum(n)) for x in r],
    "pass_at_k": lambda r, n: slow_pass_at_k(r, 2),
    "reinforce": lambda r, n: list(r),
    "positive": lambda r, n: [float(x > 0) for x in r],
}
reward = st.one_of(st.sampled_from([0.0, 1.0, -1.0]), st.floats(-5, 5))
member = st.tuples(reward, st.integers(1, 9))


@pytest.mark.parametrize("name", sorted(ESTIMATORS.parts))
@given(groups=st.lists(st.lists(member, min_size=1, max_size=6), min_size=1, max_size=4))
def test_estimators_equal_their_formulas(name, groups):
    rewards = torch.tensor([r for g in groups for r, _ in g], dtype=torch.float64)
    lengths = torch.tensor([n for g in groups for _, n in g])
    group_of = torch.tensor([i for i, g in enumerate(groups) for _ in g])
    got = ESTIMATORS.get(name)(Scores(rewards, group_of, lengths, AlgorithmConfig(pass_k=2)))
    want = [a for g in groups for a in SLOW[name]([r for r, _ in g], [n for _, n in g])]
    assert got.tolist() == pytest.approx(want, abs=1e-6, rel=1e-6)
    assert torch.isfinite(got).all()


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


# --- corrections ---


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


# --- whole algorithms ---


def sample_batch(seed=0):
    from test_batch import random_groups

    batch = pack(random_groups(seed=seed))
    noise = torch.Generator().manual_seed(seed)
    return batch.with_(behaviour=-torch.rand(len(batch.tokens), generator=noise) * 3 * batch.mask)


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


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("correction", ["none", "truncate_sequence"])
def test_no_recipe_depends_on_how_a_batch_is_cut(recipe, correction):
    """The whole gradient in float64, off-policy, whole against cut into micro-batches and reversed."""
    from test_batch import gradient, relative

    config = AlgorithmConfig.model_validate({"recipe": recipe, "correction": correction})
    algorithm = Algorithm(config, single_update=False, longest=10)
    batch = sample_batch()
    batch = algorithm.advantages(batch.with_(old=batch.behaviour * 0.9))
    whole = gradient(batch, algorithm.loss, algorithm.aggregate)
    assert whole.norm() > 1e-6
    assert relative(gradient(batch, algorithm.loss, algorithm.aggregate, micro_tokens=17), whole) < 1e-10
    backwards = batch.select(list(reversed(range(batch.num_traces))))
    assert relative(gradient(backwards, algorithm.loss, algorithm.aggregate), whole) < 1e-10


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_skipping_zero_advantage_is_exact_for_every_recipe(recipe):
    from test_batch import gradient, relative

    algorithm = Algorithm(AlgorithmConfig.model_validate(recipe), single_update=True, longest=10)
    batch = algorithm.advantages(sample_batch())

    class Never(PolicyLoss):
        skips_zero_advantage = False

    full = gradient(batch, Never(algorithm.config), algorithm.aggregate)
    assert relative(gradient(batch, algorithm.loss, algorithm.aggregate), full) < 1e-10


def test_shaping():
    algorithm = Algorithm(
        AlgorithmConfig(reward_clip=2.0, reward_scale=0.5, overlong_buffer=0.4), single_update=True, longest=10
    )
    shaped = algorithm.shape(torch.tensor([5.0, -5.0, 1.0, 1.0]), torch.tensor([1, 6, 8, 10]))
    assert shaped.tolist() == pytest.approx([1.0, -1.0, 0.5 - 0.5, 0.5 - 1.0])


@given(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=20))
def test_whitening(rows):
    values, mask = torch.tensor([v for v, _ in rows], dtype=torch.float64), torch.tensor([m for _, m in rows])
    out = whiten(values, mask)
    assert torch.isfinite(out).all()
    assert out[~mask].eq(0).all()
    if mask.any() and values[mask].std(correction=0) > 1e-6:
        assert float(out[mask].mean()) == pytest.approx(0, abs=1e-6)
        assert float(out[mask].std(correction=0)) == pytest.approx(1, abs=1e-6)


def test_truncated_samples_and_domains():
    batch = sample_batch()
    batch = batch.with_(truncated=torch.arange(batch.num_samples) < 3)
    config = AlgorithmConfig(drop_truncated=True, domain_weights={"d": 0.25})
    algorithm = Algorithm(config, single_update=True)
    done = algorithm.advantages(batch)
    assert not done.mask[done.sample_of_token() < 3].any()
    assert float(algorithm.aggregate(done).sum()) == pytest.approx(0.25)


def test_an_estimator_of_ones_own_and_a_guard_against_nan(mine):
    name = mine(
        "from drumroll.algorithms.advantages import ESTIMATORS\n"
        "def halves(scores): return scores.rewards / 2\n"
        "def broken(scores): return scores.rewards / 0 * 0\n"
    )
    batch = sample_batch()
    done = Algorithm(AlgorithmConfig(advantage=f"{name}:halves"), single_update=True).advantages(batch)
    assert done.advantages is not None
    assert done.advantages[done.mask].max() == 0.5
    with pytest.raises(AlgorithmError, match=rf"algorithm.advantage '{name}:broken' gave nan for sample 0 .*domain 'd'"):
        Algorithm(AlgorithmConfig(advantage=f"{name}:broken"), single_update=True).advantages(batch)


def test_a_loss_that_is_not_a_number_names_itself_and_the_sample(mine):
    from test_batch import gradient

    name = mine("def broken(tokens, config): return tokens.logprobs * float('nan')")
    algorithm = Algorithm(AlgorithmConfig(loss=f"{name}:broken"), single_update=True)
    with pytest.raises(AlgorithmError, match=rf"loss '{name}:broken' gave nan for a token of sample \d+"):
        gradient(algorithm.advantages(sample_batch()), algorithm.loss, algorithm.aggregate)


def test_recipes_by_name(small):
    config = load(small(algorithm="dapo")).config
    assert (config.algorithm.clip_high, config.algorithm.overlong_buffer) == (0.28, 0.25)
    assert load(small(algorithm={"recipe": "dapo", "clip_high": 0.4})).config.algorithm.clip_high == 0.4
    with pytest.raises(ConfigError, match=r"algorithm.recipe 'dappo' is not known.*Did you mean 'dapo'"):
        load(small(algorithm="dappo"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"algorithm": "rloo", "rollout": {"max_staleness": 1}}, "has no ratio that would notice; set algorithm.correction"),
        ({"algorithm": "rloo", "rollout": {"samples": 1}}, "compares the samples of a group"),
        ({"rollout": {"partial": True}}, "needs rollout.max_staleness of at least 1, got 0"),
        ({"rollout": {"oversample": 0.5}}, "greater than or equal to 1, got 0.5"),
        ({"rollout": {"max_staleness": -1}}, "greater than or equal to 0, got -1"),
        ({"deterministic": True, "rollout": {"max_staleness": 1}}, "deterministic: true needs rollout.order: draw"),
    ],
)
def test_unsound_combinations_are_refused(small, changes, reason):
    with pytest.raises(ConfigError) as caught:
        load(small(**changes))
    assert reason in str(caught.value)
