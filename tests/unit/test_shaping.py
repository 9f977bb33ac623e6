"""Shaping of rewards before the estimator: penalties, normalisation, KL, masks; and whitening of advantages after it."""

import json

import pytest
import torch
from algorithm_references import deviation, mean, sample_batch, written
from hypothesis import given
from hypothesis import strategies as st

from drumroll.algorithms import Algorithm
from drumroll.algorithms.advantages import ESTIMATORS
from drumroll.algorithms.shaping import KLPenalty, Normaliser, repetition, shape
from drumroll.algorithms.statistics import whiten
from drumroll.config.algorithm import AlgorithmConfig


def test_shaping():
    batch = written((0, 5.0, [3]), (0, -5.0, [3] * 6), (1, 1.0, [3] * 8), (1, 1.0, [3] * 10))
    config = AlgorithmConfig(reward_clip=2.0, reward_scale=0.5, overlong_buffer=0.4)
    assert shape(batch, config, 10).tolist() == pytest.approx([1.0, -1.0, 0.5 - 0.5, 0.5 - 1.0])
    assert shape(batch, AlgorithmConfig(length_penalty=2.0), 10).tolist() == pytest.approx([4.8, -6.2, -0.6, -1.0])
    cut = batch.with_(truncated=torch.tensor([True, False, False, True]))
    assert shape(cut, AlgorithmConfig(truncated_penalty=0.3), 10).tolist() == pytest.approx([4.7, -5.0, 1.0, 0.7])


@pytest.mark.parametrize("how", ["drop_truncated", "overage"])
def test_penalties_and_lengths_see_what_was_written_not_what_is_trained(how):
    """Tokens left out of the loss, of a truncated sample or of weights too old, were written all the same."""
    batch = written((0, 1.0, [3]), (0, 1.0, [3] * 8), (0, 0.0, [4] * 10))
    penalties = {"length_penalty": 0.5, "overlong_buffer": 0.4, "repetition_penalty": 0.1, "repetition_ngram": 2}
    whole = AlgorithmConfig(advantage="opo", **penalties)
    expected = shape(batch, whole, 10)
    scores = Algorithm(whole, single_update=True, longest=10)._scores(batch)
    if how == "overage":
        config, fewer = whole, batch.with_(mask=batch.mask & (batch.sample_of_token() != 2))
    else:
        config = AlgorithmConfig(advantage="opo", drop_truncated=True, **penalties)
        fewer = batch.with_(truncated=torch.tensor([False, False, True]))
    done = Algorithm(config, single_update=True, longest=10).advantages(fewer)
    assert done.trained_lengths().tolist() == [1, 8, 0]
    assert done.policy_lengths().tolist() == scores.lengths.tolist() == [1, 8, 10]
    assert shape(done, config, 10).tolist() == expected.tolist()
    own = ESTIMATORS.get("opo")(scores)
    assert done.advantages[done.mask].tolist() == pytest.approx([own[0].item(), *[own[1].item()] * 8])


def test_repetition():
    batch = written((0, 0.0, [3, 4, 3, 4, 3]), (0, 0.0, [3, 4, 5]), (1, 0.0, [7]))
    assert repetition(batch, 2).tolist() == pytest.approx([2 / 4, 0.0, 0.0])
    config = AlgorithmConfig(repetition_penalty=3.0, repetition_ngram=2)
    assert shape(batch, config, 10).tolist() == pytest.approx([-1.5, 0.0, 0.0])


STATISTICS = ["none", "group", "batch", "domain", "running"]
scored = st.lists(st.tuples(st.integers(0, 3), st.floats(-3, 3, width=32)), min_size=1, max_size=12)


@given(st.sampled_from(STATISTICS), st.sampled_from(STATISTICS), st.lists(scored, min_size=1, max_size=3))
def test_normalisation_equals_its_formula(centre, scale, batches):
    normalise = Normaliser(AlgorithmConfig(advantage="reinforce", reward_mean=centre, reward_std=scale))
    past = []
    for rows in batches:
        rows = sorted(rows, key=lambda r: r[0])
        batch = written(*[(g, r, [3]) for g, r in rows])
        past += [r for _, r in rows]

        def peers(kind, group, rows=rows, past=past):
            return {
                "group": [r for g, r in rows if g == group],
                "batch": [r for _, r in rows],
                "domain": [r for g, r in rows if g % 2 == group % 2],
                "running": past,
            }[kind]

        got = normalise(batch.rewards.double(), batch).tolist()
        for value, (g, r) in zip(got, rows, strict=True):
            want = r - mean(peers(centre, g)) if centre != "none" else r
            spread = deviation(peers(scale, g)) if scale != "none" else 0.0
            if not 1e-7 < spread < 1e-5:
                assert value == pytest.approx(want / spread if spread > 1e-6 else want, rel=1e-4, abs=1e-4)


def test_running_statistics_and_the_adaptive_coefficient_survive_a_resume():
    config = AlgorithmConfig(advantage="reinforce", reward_mean="running", reward_std="running", kl_reward=0.1, kl_target=1.0)
    batches = [sample_batch(seed).with_(reference=torch.full((len(sample_batch(seed).tokens),), -2.0)) for seed in range(3)]
    whole, first, second = (Algorithm(config, single_update=True) for _ in range(3))
    expected = [whole.advantages(b).advantages for b in batches][-1]
    for b in batches[:2]:
        first.advantages(b)
    second.restore(json.loads(json.dumps(first.state())))
    got = second.advantages(batches[2]).advantages
    assert torch.equal(got, expected)
    assert whole.penalty.coefficient != 0.1
    assert not torch.equal(Algorithm(config, single_update=True).advantages(batches[2]).advantages, expected)


@pytest.mark.parametrize("advantage", ["reinforce", "dr_grpo"])
def test_kl_in_the_reward(advantage):
    """Each token pays for itself; an estimator per sample sees the sum, one per token what is still to come."""
    batch = written((0, 1.0, [3, 4]), (0, 0.0, [5]))
    batch = batch.with_(reference=torch.where(batch.mask, -1.0, 0.0), behaviour=torch.tensor([0, -0.5, -2.0, 0, -1.0]))
    done = Algorithm(AlgorithmConfig(advantage=advantage, kl_reward=0.1), single_update=True).advantages(batch)
    costs = [0.05, -0.1, 0.0]  # 0.1 × (log-prob − reference log-prob)
    if advantage == "reinforce":
        want = [1 - costs[0] - costs[1], 1 - costs[1], 0.0]
    else:
        own = 1 - costs[0] - costs[1]
        want = [own / 2, own / 2, -own / 2]
    assert done.advantages[done.mask].tolist() == pytest.approx(want)


@pytest.mark.parametrize("advantage", ["positive", "pass_at_k"])
def test_a_success_is_one_whatever_the_reference_costs(advantage):
    """A KL cost above the reward makes no failure of a success, and a KL gain no success of a failure."""
    batch = written((0, 1.0, [3, 4]), (0, 0.0, [5]), (0, 0.0, [6]))
    reference = torch.where(batch.mask, torch.where(batch.sample_of_token() == 0, -50.0, -0.1), 0.0)
    batch = batch.with_(reference=reference, behaviour=torch.where(batch.mask, -1.0, 0.0))
    costly = Algorithm(AlgorithmConfig(advantage=advantage, kl_reward=1.0), single_update=True).advantages(batch)
    free = Algorithm(AlgorithmConfig(advantage=advantage), single_update=True).advantages(batch)
    assert costly.advantages.tolist() == free.advantages.tolist()
    assert free.advantages[batch.mask][0] > 0


def test_the_adaptive_coefficient_moves_towards_its_target():
    penalty = KLPenalty(AlgorithmConfig(kl_reward=0.1, kl_target=1.0, kl_horizon=10))
    penalty(torch.tensor([5.0]), torch.tensor([0]), 1)
    assert penalty.coefficient == pytest.approx(0.1 * (1 + 0.2 / 10))
    penalty(torch.tensor([0.95]), torch.tensor([0]), 1)
    assert penalty.coefficient == pytest.approx(0.1 * 1.02 * (1 - 0.05 / 10))


def test_masks_of_difficulty_and_zero_advantage():
    batch = written((0, 1.0, [3]), (0, 1.0, [4]), (1, 1.0, [5]), (1, 0.0, [6]), (2, 0.0, [7]), (2, 0.0, [8]))
    for config in (AlgorithmConfig(difficulty_band=(0.2, 0.8)), AlgorithmConfig(drop_zero_advantage=True)):
        done = Algorithm(config, single_update=True).advantages(batch)
        assert done.tokens[done.mask].tolist() == [5, 6]
        assert float(Algorithm(config, single_update=True).aggregate(done).sum()) == pytest.approx(1.0)


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
