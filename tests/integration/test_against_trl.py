"""Our losses and gradients are those of TRL's GRPOTrainer, to 1e-5, wherever the settings mean the same thing.

TRL answers all cases at once, in an environment of its own: benchmarks/peers/trl_losses.py.
"""

from functools import partial

import peers
import pytest
import torch
from peers import distance

from drumroll.algorithms import Algorithm
from drumroll.algorithms.losses import Tokens
from drumroll.batch import pack
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.sample import Group, Owner, Prompt, Sample, Trace

GROUPS, SIZE, LONGEST = 4, 4, 24
SEEDS = [str(seed) for seed in range(6)]
EMPTY = "99"
"""The case of which one sample has no trained token."""

CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
SAME = {
    # name: (ours, TRL's). TRL's `grpo` averages per sample and its `bnpo` per token, as our grpo recipe does.
    "grpo": ({"preset": "grpo"}, {"loss_type": "bnpo", "epsilon": 0.2}),
    "grpo, as published": ({"preset": "grpo", "aggregation": "sequence_mean"}, {"loss_type": "grpo", "epsilon": 0.2}),
    # TRL leaves the deviation out by `scale_rewards`; its constant is max_completion_length.
    "dr_grpo": ({"preset": "dr_grpo"}, {"loss_type": "dr_grpo", "epsilon": 0.2, "scale_rewards": "none"}),
    "dapo": ({"preset": "dapo"}, {"loss_type": "dapo", **CLIP}),
    # TRL's `delta` bounds the ratio for either sign; for a positive advantage the clip has bound it before.
    "dapo, dual clip": ({"preset": "dapo", "dual_clip": 3.0}, {"loss_type": "dapo", "delta": 3.0, **CLIP}),
    # TRL's cispo takes epsilon_high for the largest ratio itself, and no lower bound.
    "cispo": ({"preset": "cispo"}, {"loss_type": "cispo", "epsilon_high": 1.28}),
    "gspo": (
        {"preset": "gspo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    # The narrow clip of the recipe binds nearly everywhere; a wide one lets gradients through.
    "gspo, wide": (
        {"preset": "gspo", "clip_low": 0.3, "clip_high": 0.5},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.3, "epsilon_high": 0.5},
    ),
    # TRL's sapo averages per sample.
    "sapo": (
        {"preset": "sapo", "aggregation": "sequence_mean"},
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    ),
    # TRL weighs its KL term by the ratio unless told not to.
    "kl": ({"preset": "dapo", "kl": 0.1}, {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False, **CLIP}),
} | {
    # The gap between the engine's log-probs and the trainer's: our truncate is its token_truncate, our band its token_mask.
    f"correction {ours}": (
        {"preset": "dapo", "correction": ours, "correction_low": 0.5, "correction_high": 2.0},
        {
            "loss_type": "dapo",
            "use_vllm": True,
            "vllm_importance_sampling_mode": theirs,
            "vllm_importance_sampling_clip_min": low,
            "vllm_importance_sampling_clip_max": 2.0,
            **CLIP,
        },
    )
    for ours, theirs, low in [
        ("truncate", "token_truncate", None),
        ("truncate_sequence", "sequence_truncate", None),
        ("band", "token_mask", 0.5),
    ]
}


def make_case(seed, *, empty=False):
    """Ragged samples with other owners' tokens between; ratios from e^-3 to e^3 or so; advantages of either sign and 0."""
    noise = torch.Generator().manual_seed(seed)
    samples = GROUPS * SIZE
    lengths = torch.randint(1, LONGEST + 1, (samples,), generator=noise)
    lengths[0] = LONGEST
    mask = (torch.arange(LONGEST) < lengths[:, None]) & (torch.rand(samples, LONGEST, generator=noise) < 0.9)
    mask[:, 0] = True
    if empty:
        mask[1] = False

    def normal(*shape):
        return torch.randn(*shape, generator=noise)

    old = -3 * torch.rand(samples, LONGEST, generator=noise) - 0.01
    advantages = normal(samples)
    advantages[2] = 0
    return {
        "lengths": lengths,
        "mask": mask.long(),
        "logprobs": (old + normal(samples, LONGEST)).double(),
        "old": old.double(),
        "behaviour": old + 0.5 * normal(samples, LONGEST),
        "reference": (old + 0.5 * normal(samples, LONGEST)).double(),
        "advantages": advantages,
        "rewards": normal(samples),
    }


SETTINGS = {name: {**theirs, "num_generations": SIZE, "max_completion_length": LONGEST} for name, (_, theirs) in SAME.items()}
CASES = {name: partial(make_case, int(name), empty=name == EMPTY) for name in (*SEEDS, EMPTY)}
RECORDING = peers.Recording("trl_losses", SETTINGS, CASES, exact=("logprobs", "old", "reference"))
live, trl = RECORDING.fixtures()


@pytest.mark.peers
def test_the_recording_is_what_trl_answers(live):
    assert RECORDING.agrees_with(live)


def packed(case):
    """The case as groups of samples, packed: the trained tokens are those of its mask, row by row."""
    groups = []
    for g in range(GROUPS):
        prompt = Prompt(str(g), "d", "", (1,))
        group = Group(prompt, g, [])
        for i in range(g * SIZE, (g + 1) * SIZE):
            trace = Trace()
            trace.extend([1], Owner.PROMPT)
            for trained, logprob in zip(case["mask"][i, : case["lengths"][i]], case["behaviour"][i], strict=False):
                policy = {"owner": Owner.POLICY, "logprobs": [logprob.item()], "versions": [0]}
                trace.extend([2], **(policy if trained else {"owner": Owner.ENVIRONMENT}))
            group.samples.append(Sample(prompt, g, i, traces=[trace], reward=case["rewards"][i].item()))
        groups.append(group)
    return pack(groups)


def loss_and_gradient(case, settings):
    """Ours, through the parts that a learner is given; the gradient laid out as the padded tensors are."""
    algorithm = Algorithm(AlgorithmConfig(**settings), single_update=False, longest=LONGEST)
    batch, trained = packed(case), case["mask"].bool()
    sequence = batch.trace_of_token()[batch.mask]
    logprobs = case["logprobs"].clone().requires_grad_()
    tokens = Tokens(
        logprobs=logprobs[trained],
        entropy=torch.zeros(len(sequence)),
        old=case["old"][trained],
        behaviour=batch.behaviour[batch.mask],
        advantages=case["advantages"][sequence],
        reference=case["reference"][trained],
        sequence=sequence,
    )
    per_token, _ = algorithm.loss(tokens)
    loss = (per_token * algorithm.aggregate(batch)[batch.mask]).sum()
    return loss.detach(), *torch.autograd.grad(loss, logprobs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SAME)
def test_loss_and_gradient_are_those_of_trl(trl, name, seed):
    loss, gradient = loss_and_gradient(trl.cases[seed], SAME[name][0])
    assert distance(loss, trl.answers[f"{name}/{seed}/loss"]) < 1e-5
    assert distance(gradient, trl.answers[f"{name}/{seed}/gradient"]) < 1e-5


@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_differ_from_trl_by_the_deviation_only(trl, seed):
    """TRL divides by the sample deviation + 1e-4, we by the population deviation + 1e-6."""
    batch = packed(trl.cases[seed])
    sequence = batch.trace_of_token()[batch.mask]

    def ours(recipe):
        algorithm = Algorithm(AlgorithmConfig(preset=recipe), single_update=False, longest=LONGEST)
        return algorithm.advantages(batch).advantages[batch.mask]

    groups = batch.rewards.view(GROUPS, SIZE)
    ratio = (groups.std(1, correction=0) + 1e-6) / (groups.std(1, correction=1) + 1e-4)
    assert distance(ours("dr_grpo"), trl.answers[f"dr_grpo/{seed}/advantages"][sequence]) < 1e-5
    assert distance(ours("grpo") * ratio[sequence // SIZE], trl.answers[f"grpo/{seed}/advantages"][sequence]) < 1e-5


@pytest.mark.parametrize("name", ["grpo, as published", "sapo", "gspo, wide"])
def test_trl_counts_a_sample_without_trained_tokens_and_we_do_not(trl, name):
    loss, gradient = loss_and_gradient(trl.cases[EMPTY], SAME[name][0])
    share = 1 - 1 / (GROUPS * SIZE)
    assert distance(loss * share, trl.answers[f"{name}/{EMPTY}/loss"]) < 1e-5
    assert distance(gradient * share, trl.answers[f"{name}/{EMPTY}/gradient"]) < 1e-5
