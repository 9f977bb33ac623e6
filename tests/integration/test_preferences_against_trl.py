"""Our losses on preferences and their gradients are those of TRL's DPOTrainer, KTOTrainer and CPOTrainer, to 1e-5.

TRL answers all cases at once, in an environment of its own: benchmarks/peers/trl_preferences.py.
"""

from functools import partial

import peers
import pytest
import torch
from peers import distance

from drumroll.algorithms import Algorithm
from drumroll.algorithms.aggregations import unit_mean
from drumroll.algorithms.losses import Tokens
from drumroll.algorithms.preferences import PreferenceLoss
from drumroll.batch import pack
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.config.preferences import PreferenceTerms
from drumroll.data.preferences import packed
from drumroll.sample import Group, Owner, Prompt, Sample, Trace
from drumroll.workers.batch_builder import BatchBuilder

PAIRS, LONGEST = 5, 12
SEEDS = [str(seed) for seed in range(4)]
EVEN = "99"
"""The case whose chosen answers are equally long."""

SAME = {
    # name: (ours, TRL's trainer and options)
    "dpo": ({"loss": "dpo"}, ["dpo", {"loss_type": ["sigmoid"], "beta": 0.1}]),
    "dpo, beta 0.5": ({"loss": "dpo", "beta": 0.5}, ["dpo", {"loss_type": ["sigmoid"], "beta": 0.5}]),
    "ipo": ({"loss": "ipo", "beta": 0.3}, ["dpo", {"loss_type": ["ipo"], "beta": 0.3}]),
    "kto": ({"loss": "kto", "beta": 0.2}, ["kto", {"beta": 0.2}]),
    "kto, weighted": (
        {"loss": "kto", "beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.6},
        ["kto", {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.6}],
    ),
    "simpo": ({"loss": "simpo", "beta": 2.0, "gamma": 0.7}, ["cpo", {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.0}]),
    "simpo, smoothed": (
        {"loss": "simpo", "beta": 2.5, "gamma": 0.5, "label_smoothing": 0.1},
        ["cpo", {"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 0.5, "cpo_alpha": 0.0, "label_smoothing": 0.1}],
    ),
    # TRL averages the term over all chosen tokens of a batch, we over each chosen answer's: the same if these are equally long.
    "dpo with sft": ({"loss": "dpo", "sft": 0.3}, ["dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3], "beta": 0.1}]),
}  # fmt: skip
SETTINGS = {name: theirs for name, (_, theirs) in SAME.items()}
CASES = [(name, case) for name in SAME for case in ([EVEN] if "sft" in name else SEEDS)]


def make_case(seed, *, even=False):
    """Chosen before rejected answers, ragged, with tokens that are not trained between."""
    noise = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST + 1, (2 * PAIRS,), generator=noise)
    lengths[:PAIRS] = 7 if even else lengths[:PAIRS]
    mask = torch.arange(LONGEST) < lengths[:, None]
    if not even:
        mask &= torch.rand(mask.shape, generator=noise) < 0.8
    mask[:, 0] = True
    reference, kl_reference = (-3 * torch.rand(*mask.shape, generator=noise) - 1 for _ in range(2))
    gaps = [torch.randn(*mask.shape, generator=noise) for _ in range(2)]
    case = {
        "reference": reference,
        "logprobs": (reference + 0.5 * gaps[0]).clamp_max(-0.01),
        "kl_reference": kl_reference,
        "kl_logprobs": (kl_reference + 0.3 * gaps[1]).clamp_max(-0.01),
    }
    return {**{name: column.double() for name, column in case.items()}, "mask": mask.long()}


MAKE = {name: partial(make_case, int(name), even=name == EVEN) for name in (*SEEDS, EVEN)}
EXACT = ("logprobs", "reference", "kl_logprobs", "kl_reference")
RECORDING = peers.Recording("trl_preferences", SETTINGS, MAKE, EXACT)
live, trl = RECORDING.fixtures()


@pytest.mark.peers
def test_the_recording_is_what_trl_answers(live):
    assert RECORDING.agrees_with(live)


def groups_of(case):
    """Pairs as groups; the trained tokens are those of the mask."""
    groups = []
    for pair in range(PAIRS):
        prompt = Prompt(str(pair), "d", "", (1,))
        group = Group(prompt, pair, [])
        for i, (row, reward) in enumerate(((pair, 1.0), (pair + PAIRS, 0.0))):
            trace = Trace()
            trace.extend([1], Owner.PROMPT)
            for trained in case["mask"][row].tolist():
                trace.extend([2], *((Owner.POLICY, [0.0], [0]) if trained else (Owner.ENVIRONMENT,)))
            group.samples.append(Sample(prompt, pair, i, traces=[trace], reward=reward))
        groups.append(group)
    return groups


ORDER = [row for pair in range(PAIRS) for row in (pair, pair + PAIRS)]
"""The case's rows in the order of our batch."""


def flat(case, column):
    return case[column][ORDER][case["mask"][ORDER].bool()]


def kl_of(case):
    """Ours, by the stage that estimates it."""
    batch = pack(groups_of(case))
    columns = {"old": torch.zeros(len(batch.tokens)).double(), "reference": torch.zeros(len(batch.tokens)).double()}
    for name, column in (("old", "kl_logprobs"), ("reference", "kl_reference")):
        columns[name][batch.mask] = flat(case, column)
    builder = BatchBuilder(Algorithm(AlgorithmConfig(), single_update=True))
    return max(0.0, builder.divergence(batch.with_(**columns)))


def loss_and_gradient(case, settings):
    """Ours, through the parts that a learner is given; the gradient laid out as the padded tensors are."""
    terms = PreferenceTerms(**settings)
    batch = packed(groups_of(case), pairs=terms.takes_pairs())
    unit, units = batch.unit_of_token()
    logprobs = case["logprobs"].clone().requires_grad_()
    now = logprobs[ORDER][case["mask"][ORDER].bool()]
    tokens = Tokens(
        logprobs=now,
        entropy=torch.zeros_like(now),
        old=now.detach(),
        behaviour=now.detach(),
        advantages=torch.zeros_like(now),
        reference=flat(case, "reference") if terms.takes_reference() else None,
        sequence=batch.trace_of_token()[batch.mask],
        rewards=batch.rewards[batch.sample_of_token()][batch.mask],
        unit=unit[batch.mask],
        units=units,
    )
    per_token, _ = PreferenceLoss(terms, 0.0 if terms.takes_pairs() else kl_of(case))(tokens)
    loss = (per_token * unit_mean(batch)[batch.mask]).sum()
    return loss.detach(), *torch.autograd.grad(loss, logprobs)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_loss_and_gradient_are_those_of_trl(trl, name, case):
    cases, answers = trl
    loss, gradient = loss_and_gradient(cases[case], SAME[name][0])
    assert distance(loss, answers[f"{name}/{case}/loss"]) < 1e-5
    assert distance(gradient, answers[f"{name}/{case}/gradient"]) < 1e-5


def test_the_cases_tell_the_settings_apart(trl):
    """A wrong β, a lost margin, a sum for an average, a lost KL or weight are far beyond the limit."""
    cases, answers = trl
    assert {kl_of(cases[seed]) > 0 for seed in SEEDS} == {True, False}
    wrong = {
        "dpo": {"loss": "dpo", "beta": 0.11},
        "ipo": {"loss": "dpo", "beta": 0.3},
        "kto, weighted": {"loss": "kto", "beta": 0.2},
        "simpo": {"loss": "simpo", "beta": 2.0, "gamma": 0.6},
        "simpo, smoothed": {"loss": "simpo", "beta": 2.5, "gamma": 0.5},
    }
    for name, settings in wrong.items():
        loss, _ = loss_and_gradient(cases["0"], settings)
        assert distance(loss, answers[f"{name}/0/loss"]) > 1e-3, name
