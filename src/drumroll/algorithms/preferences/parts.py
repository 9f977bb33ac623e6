"""What a loss on preferences sees, and how it becomes a loss per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from drumroll.algorithms.losses.parts import Tokens
from drumroll.algorithms.statistics import sums_by
from drumroll.config.preferences import PREFERENCE_LOSSES, PreferenceTerms


@dataclass(frozen=True)
class Answers:
    """Whole answers, all [answers]."""

    logprobs: Tensor  # summed over the trained tokens, with gradient
    reference: Tensor  # the same under the reference; 0 if the loss takes none
    lengths: Tensor  # trained tokens

    def ratio(self) -> Tensor:
        """Log-probability under the policy over that under the reference."""
        return self.logprobs - self.reference

    def mean(self) -> Tensor:
        """Mean log-prob of a token."""
        return self.logprobs / self.lengths.clamp_min(1)


@dataclass(frozen=True)
class Pairs:
    """The answers of pairs, in the same order."""

    chosen: Answers
    rejected: Answers


@dataclass(frozen=True)
class Rated:
    """Answers by themselves, and which of them were called good."""

    answers: Answers
    good: Tensor  # bool
    kl: float  # estimate of KL(policy ‖ reference) on the whole batch


def smoothed(margin: Tensor, config: PreferenceTerms) -> Tensor:
    """-log σ(margin), if a share `label_smoothing` of the labels is wrong."""
    wrong = config.label_smoothing
    return -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss on preferences as the learner takes it; plain data, so that it can travel to a worker.

    Every token of a unit (a pair, or a rated answer) gets the unit's loss: weighted by `unit_mean`, they sum to the mean
    over units.
    """

    config: PreferenceTerms
    kl: float = 0.0  # of the batch, for losses on rated answers
    entropy_gradient: bool = False
    skips_zero_advantage: bool = False

    @property
    def name(self) -> str:
        """The loss's."""
        return self.config.loss

    def __call__(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        assert tokens.unit is not None
        assert tokens.rewards is not None
        good = tokens.rewards > 0
        pairs = Pairs(_answers(tokens, good), _answers(tokens, ~good))
        loss = PREFERENCE_LOSSES.get(self.config.loss)
        if self.config.takes_pairs():
            terms, stats = loss(pairs, self.config), self._compare(pairs)
        else:
            rated = Rated(_answers(tokens, torch.ones_like(good)), pairs.chosen.lengths > 0, self.kl)
            terms, stats = loss(rated, self.config), self._rate(rated)
        per_token = terms[tokens.unit]
        if self.config.sft:
            share = (pairs.chosen.lengths + pairs.rejected.lengths) / pairs.chosen.lengths.clamp_min(1)
            imitated = torch.where(good, -tokens.logprobs * share[tokens.unit], 0.0)
            per_token = per_token + self.config.sft * imitated
        return per_token, stats

    def _rewards(self, answers: Answers) -> Tensor:
        """The reward that an answer's log-probs imply."""
        of = answers.ratio() if self.config.takes_reference() else answers.mean()
        return self.config.beta * of.detach()

    def _compare(self, pairs: Pairs) -> dict[str, Tensor]:
        """[pairs] diagnostics."""
        chosen, rejected = self._rewards(pairs.chosen), self._rewards(pairs.rejected)
        return {
            "accuracy": (chosen > rejected).to(chosen.dtype),
            "margin": chosen - rejected,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "logprob_chosen": pairs.chosen.logprobs.detach(),
            "logprob_rejected": pairs.rejected.logprobs.detach(),
        }

    def _rate(self, rated: Rated) -> dict[str, Tensor]:
        """[good or bad answers] diagnostics."""
        rewards, logprobs, good = self._rewards(rated.answers), rated.answers.logprobs.detach(), rated.good
        right = (rewards > self.config.beta * self.kl) == good
        return {
            "accuracy": right.to(rewards.dtype),
            "reward_chosen": rewards[good],
            "reward_rejected": rewards[~good],
            "logprob_chosen": logprobs[good],
            "logprob_rejected": logprobs[~good],
        }


def _answers(tokens: Tokens, of: Tensor) -> Answers:
    """Each unit's tokens of which `of` is true, summed."""
    assert tokens.unit is not None
    assert tokens.units is not None

    def total(values: Tensor) -> Tensor:
        assert tokens.unit is not None
        assert tokens.units is not None
        return sums_by(torch.where(of, values, 0.0), tokens.unit, tokens.units)

    now = tokens.logprobs
    return Answers(
        total(now),
        torch.zeros(tokens.units, dtype=now.dtype, device=now.device) if tokens.reference is None else total(tokens.reference),
        total(torch.ones_like(now)),
    )
