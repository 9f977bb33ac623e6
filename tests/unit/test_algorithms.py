"""Whole algorithms: presets, user-defined parts, guards against NaN, and combinations that the config refuses."""

import pytest
import torch
from algorithm_references import sample_batch, written
from test_batch import gradient, relative

from drumroll.algorithms import Algorithm
from drumroll.algorithms.advantages import ESTIMATORS
from drumroll.algorithms.losses import LOSSES, PolicyLoss
from drumroll.config import load
from drumroll.config.algorithm import PRESETS, AlgorithmConfig
from drumroll.errors import AlgorithmError, ConfigError

# --- presets ---


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("correction", ["none", "truncate_sequence"])
def test_no_preset_depends_on_how_a_batch_is_cut(preset, correction):
    """The whole gradient in float64, off-policy, whole against cut into micro-batches and reversed."""
    config = AlgorithmConfig.model_validate({"preset": preset, "correction": correction})
    algorithm = Algorithm(config, single_update=False, longest=10)
    batch = sample_batch()
    batch = algorithm.advantages(batch.with_(old=batch.behaviour * 0.9))
    whole = gradient(batch, algorithm.loss, algorithm.aggregate)
    assert whole.norm() > 1e-6
    assert relative(gradient(batch, algorithm.loss, algorithm.aggregate, micro_tokens=17), whole) < 1e-10
    backwards = batch.select(list(reversed(range(batch.num_traces))))
    assert relative(gradient(backwards, algorithm.loss, algorithm.aggregate), whole) < 1e-10


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_skipping_zero_advantage_is_exact_for_every_preset(preset):
    algorithm = Algorithm(AlgorithmConfig.model_validate(preset), single_update=True, longest=10)
    batch = algorithm.advantages(sample_batch())

    class Never(PolicyLoss):
        skips_zero_advantage = False

    full = gradient(batch, Never(algorithm.config), algorithm.aggregate)
    assert relative(gradient(batch, algorithm.loss, algorithm.aggregate), full) < 1e-10


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_batch_without_a_trained_token(preset):
    batch = sample_batch()
    algorithm = Algorithm(AlgorithmConfig.model_validate(preset), single_update=True)
    done = algorithm.advantages(batch.with_(mask=torch.zeros_like(batch.mask)))
    assert not done.advantages.any()
    assert not algorithm.aggregate(done).any()


def test_presets_by_name(small):
    config = load(small(algorithm="dapo")).config
    assert (config.algorithm.clip_high, config.algorithm.overlong_buffer) == (0.28, 0.25)
    assert load(small(algorithm={"preset": "dapo", "clip_high": 0.4})).config.algorithm.clip_high == 0.4
    with pytest.raises(ConfigError, match=r"algorithm.preset 'dappo' is not known.*Did you mean 'dapo'"):
        load(small(algorithm="dappo"))


# --- parts and guards ---


def test_what_the_config_knows_of_the_parts_is_what_they_declare():
    """The config is read without importing torch, so it keeps its own lists."""
    from drumroll.config.algorithm import GROUPED, WITH_CRITIC, WITH_GREEDY, WITHOUT_RATIO

    ours = [
        name for name, part in ESTIMATORS.parts.items() if part.__module__.startswith("drumroll.")
    ]  # other tests have theirs
    traits = {name: ESTIMATORS.traits(name) for name in ours}
    assert {n for n, t in traits.items() if t.get("grouped")} == GROUPED
    assert {n for n, t in traits.items() if "values" in t.get("needs", ())} == WITH_CRITIC
    assert {n for n, t in traits.items() if "greedy" in t.get("needs", ())} == WITH_GREEDY
    assert {n for n in LOSSES.parts if LOSSES.traits(n).get("ratio") is False} == WITHOUT_RATIO


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


def test_a_finite_loss_with_a_broken_gradient_leaves_the_weights(mine):
    from drumroll.config.optim import OptimConfig
    from drumroll.learners import Update
    from drumroll.learners.backends.torch import torch_learner
    from drumroll.models.loading import load as load_model

    name = mine("def broken(tokens, config): return (tokens.logprobs * 0).sqrt()")
    algorithm = Algorithm(AlgorithmConfig(loss=f"{name}:broken"), single_update=True)
    learner = torch_learner(load_model("tiny-random"), OptimConfig(lr=1.0), total_steps=1)
    before = {n: w.clone() for n, w in learner.weights()}
    with pytest.raises(AlgorithmError, match=r"the gradient at step 1 has norm nan though the loss is finite"):
        learner.update(Update(algorithm.advantages(sample_batch()), algorithm.loss, algorithm.aggregate))
    assert all(torch.equal(before[n], w) for n, w in learner.weights())


def test_a_critic_of_ones_own_estimator_is_asked_for_by_its_traits(mine, small):
    from drumroll.placement.layout import requests
    from drumroll.workers.runtime import open_algorithm

    text = "from drumroll.algorithms.advantages import ESTIMATORS\n{}def mine(scores): return scores.rewards\n"
    name = mine(text.format("@ESTIMATORS.register('with_critic', needs=('values',))\n"))
    config = load(small(algorithm={"advantage": f"{name}:mine", "critic_first": 1})).config
    assert "critic" in [r.role for r in requests(config, open_algorithm(config).needs)]
    plain = load(small(algorithm={"advantage": f"{mine(text.format(''))}:mine"})).config
    assert "critic" not in [r.role for r in requests(plain, open_algorithm(plain).needs)]
    with pytest.raises(ConfigError, match=r"critic_first: 1 needs a critic, but algorithm.advantage: .*:mine asks for none"):
        Algorithm(plain.algorithm.model_copy(update={"critic_first": 1}), single_update=True)


def test_what_a_critic_explains_of_equal_returns_is_nothing():
    batch = written((0, 1.0, [3, 4]), (0, 1.0, [5]))
    algorithm = Algorithm(AlgorithmConfig(preset="ppo", gae_decay=1.0), single_update=True)
    algorithm.advantages(batch.with_(values=torch.where(batch.mask, torch.tensor([0.0, 0.3, 0.9, 0.0, -2.0]), 0.0)))
    assert algorithm.metrics["critic/explained"] == 0.0


def test_a_loss_that_is_not_a_number_names_itself_and_the_sample(mine):
    name = mine("def broken(tokens, config): return tokens.logprobs * float('nan')")
    algorithm = Algorithm(AlgorithmConfig(loss=f"{name}:broken"), single_update=True)
    with pytest.raises(AlgorithmError, match=rf"loss '{name}:broken' gave nan for a token of sample \d+"):
        gradient(algorithm.advantages(sample_batch()), algorithm.loss, algorithm.aggregate)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"algorithm": "rloo", "rollout": {"max_staleness": 1}}, "has no ratio that would notice; set algorithm.correction"),
        ({"algorithm": "rloo", "rollout": {"samples": 1}}, "compares the samples of a group"),
        ({"algorithm": "lite_ppo", "rollout": {"samples": 1}}, "compare the samples of a group"),
        ({"algorithm": "rloo", "optim": {"epochs": 2}}, "has no ratio that would notice; set another loss"),
        ({"algorithm": {"preset": "remax", "reward_std": "batch"}}, "takes the greedy answer's reward for its baseline"),
        ({"algorithm": {"kl_target": 1.0}}, "adapts algorithm.kl_reward, which is 0"),
        ({"algorithm": {"critic_first": 3}}, "needs a critic, but algorithm.advantage: grpo has none"),
        ({"algorithm": {"advantage": "pass_at_k", "pass_k": 9}}, "cannot be drawn from rollout.samples: 4"),
        ({"algorithm": {"difficulty_band": [0.8, 0.2]}}, "needs low < high"),
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
