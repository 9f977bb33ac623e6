"""Our loss of reward models and its gradient are those of TRL's RewardTrainer, to 1e-5.

TRL answers all cases at once, in an environment of its own: benchmarks/peers/trl_reward_model.py.
"""

from functools import partial

import peers
import pytest
import torch
from peers import distance

from drumroll.algorithms.aggregations import unit_mean
from drumroll.algorithms.losses import RewardLoss
from drumroll.learners.heads import ScoreHead
from drumroll.pipelines.reward_model import scored
from drumroll.sample import Group, Owner, Prompt, Sample, Trace

PAIRS = 6
SAME = {
    # name: (weight of centring, TRL's options)
    "plain": (0.0, {}),
    "margin": (0.0, {"margin": True}),
    "centred": (0.05, {"center_rewards_coefficient": 0.05}),
    "margin, centred": (0.2, {"margin": True, "center_rewards_coefficient": 0.2}),
}
SEEDS = [str(seed) for seed in range(3)]


def make_case(seed):
    noise = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(2 * PAIRS, generator=noise) + 0.5
    return {"scores": scores.double(), "margins": torch.rand(PAIRS, generator=noise).double() * 3}


RECORDING = peers.Recording(
    "trl_reward_model",
    {name: theirs for name, (_, theirs) in SAME.items()},
    {seed: partial(make_case, int(seed)) for seed in SEEDS},
    ("scores", "margins"),
)
live, trl = RECORDING.fixtures()


@pytest.mark.peers
def test_the_recording_is_what_trl_answers(live):
    assert RECORDING.agrees_with(live)


def batch_of(case, *, margin):
    """Pairs as the learner gets them."""
    groups = []
    for pair in range(PAIRS):
        prompt = Prompt(str(pair), "d", "", (1,))
        group = Group(prompt, pair, [])
        for i, reward in enumerate((1.0, 0.0)):
            trace = Trace()
            trace.extend([1], Owner.PROMPT)
            trace.extend([2, 3 + i], Owner.POLICY, [0.0, 0.0], [0, 0])
            group.samples.append(Sample(prompt, pair, i, traces=[trace], reward=reward))
        if margin:
            group.samples[0].rewards["margin"] = case["margins"][pair].item()
        groups.append(group)
    return scored(groups)


def loss_and_gradient(case, center, *, margin):
    """Ours, through the parts that a learner is given; the gradient in the case's order, chosen answers first."""
    batch, scores = batch_of(case, margin=margin), case["scores"].clone().requires_grad_()
    ours = scores.view(2, PAIRS).T.flatten()
    per_token, _ = ScoreHead("none").loss(RewardLoss(center), (ours,), batch, moved=False)
    loss = (per_token * unit_mean(batch)[batch.mask]).sum()
    return loss.detach(), *torch.autograd.grad(loss, scores)


@pytest.mark.parametrize("case", SEEDS)
@pytest.mark.parametrize("name", SAME)
def test_loss_and_gradient_are_those_of_trl(trl, name, case):
    center, theirs = SAME[name]
    loss, gradient = loss_and_gradient(trl.cases[case], center, margin="margin" in theirs)
    assert distance(loss, trl.answers[f"{name}/{case}/loss"]) < 1e-5
    assert distance(gradient, trl.answers[f"{name}/{case}/gradient"]) < 1e-5


def test_the_cases_tell_the_settings_apart(trl):
    """A lost margin or another weight of centring is far beyond the limit."""
    for name, center, margin in (("margin", 0.0, False), ("centred", 0.04, False), ("margin, centred", 0.2, False)):
        loss, _ = loss_and_gradient(trl.cases["0"], center, margin=margin)
        assert distance(loss, trl.answers[f"{name}/0/loss"]) > 1e-3, name
