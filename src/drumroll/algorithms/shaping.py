"""Rewards as the estimator sees them: clipped, scaled, less penalties, shifted and scaled by statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drumroll.algorithms.statistics import deviations_of, means_of, sums_by
from drumroll.batch import Batch
from drumroll.config.algorithm import AlgorithmConfig

FLAT = 1e-6
"""A deviation below this is none."""


def shape(batch: Batch, config: AlgorithmConfig, longest: int) -> Tensor:
    """[samples] rewards clipped and scaled, less what length, truncation and repetition cost."""
    rewards, lengths = shape_alone(batch.rewards, config), batch.policy_lengths()
    rewards = rewards - config.length_penalty * lengths / longest
    if config.overlong_buffer:
        buffer = config.overlong_buffer * longest
        rewards = rewards - ((lengths - (longest - buffer)) / buffer).clamp(0, 1)
    rewards = rewards - config.truncated_penalty * batch.truncated
    if config.repetition_penalty:
        rewards = rewards - config.repetition_penalty * repetition(batch, config.repetition_ngram)
    return rewards


def shape_alone(rewards: Tensor, config: AlgorithmConfig) -> Tensor:
    """Clipped and scaled: what needs no tokens."""
    limit = config.reward_clip or math.inf
    return rewards.to(torch.float64).clamp(-limit, limit) * config.reward_scale


def repetition(batch: Batch, size: int) -> Tensor:
    """[samples] the share of pieces of `size` policy tokens that their sample wrote before."""
    pieces, repeated = [0] * batch.num_samples, [0] * batch.num_samples
    seen: list[set[tuple[int, ...]]] = [set() for _ in range(batch.num_samples)]
    tokens, owned = batch.tokens.split(batch.lengths.tolist()), batch.owned.split(batch.lengths.tolist())
    for sample, all_tokens, own in zip(batch.sample_of.tolist(), tokens, owned, strict=True):
        written = all_tokens[own].tolist()
        for start in range(len(written) - size + 1):
            piece = tuple(written[start : start + size])
            pieces[sample] += 1
            repeated[sample] += piece in seen[sample]
            seen[sample].add(piece)
    return torch.tensor([r / max(1, p) for r, p in zip(repeated, pieces, strict=True)], dtype=torch.float64)


class Normaliser:
    """Mean and deviation of rewards, chosen apart; `running` remembers all rewards of the run."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.count, self.mean, self.squares = 0, 0.0, 0.0  # squares: sum of squared distances from the mean
        self.scale: Tensor | float = 1.0  # [samples] what the last rewards were multiplied by

    def __call__(self, rewards: Tensor, batch: Batch) -> Tensor:
        """Shifted and scaled; a deviation of 0 leaves the rewards unscaled, so that nothing is divided by it."""
        config = self.config
        if "running" in (config.reward_mean, config.reward_std):
            self._add(rewards)
        names = sorted(set(batch.domains))
        index = {
            "group": batch.group_of,
            "batch": torch.zeros_like(batch.group_of),
            "domain": torch.tensor([names.index(d) for d in batch.domains]),
        }
        centred = rewards
        if config.reward_mean == "running":
            centred = rewards - self.mean
        elif config.reward_mean != "none":
            centred = rewards - means_of(rewards, index[config.reward_mean])
        self.scale = 1.0
        if config.reward_std == "none":
            return centred
        if config.reward_std == "running":
            deviation = torch.full_like(rewards, math.sqrt(self.squares / max(1, self.count)))
        else:
            deviation = deviations_of(rewards, index[config.reward_std])
        self.scale = torch.where(deviation > FLAT, 1 / deviation.clamp_min(FLAT), 1.0)
        return torch.where(deviation > FLAT, centred / deviation.clamp_min(FLAT), centred)

    def _add(self, rewards: Tensor) -> None:
        """Chan's update of count, mean and squares by a batch."""
        new, mean = len(rewards), float(rewards.mean())
        total, gap = self.count + new, mean - self.mean
        self.squares += float(((rewards - mean) ** 2).sum()) + gap**2 * self.count * new / total
        self.mean += gap * new / total
        self.count = total

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]


class KLPenalty:
    """What distance from the reference costs each token; the coefficient is fixed, or adapted to a target (1909.08593)."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.coefficient = config.kl_reward
        self.last = 0.0

    def __call__(self, kl: Tensor, sample_of: Tensor, samples: int) -> Tensor:
        """[trained tokens] the cost, from each token's KL; then the coefficient moves towards the target."""
        cost = self.coefficient * kl
        self.last = float(sums_by(kl, sample_of, samples).mean())
        if self.config.kl_target is not None:
            error = min(max(self.last / self.config.kl_target - 1, -0.2), 0.2)
            self.coefficient *= 1 + error * samples / self.config.kl_horizon
        return cost

    def state(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.coefficient = state["coefficient"]
