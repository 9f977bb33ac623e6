"""An algorithm is a choice of parts: shaping × estimator × loss × aggregation × correction, functions on tensors, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drumroll.algorithms.advantages import ESTIMATORS, Scores, TurnScores
from drumroll.algorithms.aggregations import Shares
from drumroll.algorithms.losses import LOSSES, PolicyLoss, ValueLoss, kl_divergence
from drumroll.algorithms.preferences import PreferenceLoss
from drumroll.algorithms.shaping import FLAT, KLPenalty, Normaliser, shape, shape_alone
from drumroll.algorithms.statistics import means_of, sums_by, whiten
from drumroll.batch import Batch, Turns
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.errors import AlgorithmError, ConfigError

__all__ = ["GREEDY", "OLD", "REFERENCE", "TEACHER", "VALUES", "Algorithm", "PreferenceLoss"]
OLD, REFERENCE, TEACHER, VALUES, GREEDY = "old log-probs", "reference", "teacher", "values", "greedy"


class Algorithm:
    """The parts that a config names, ready to use.

    `needs` names the passes and samples asked for besides the update itself, each with the reason: only these are run.
    With one optimizer step per batch the policy before the update is the policy in it, so its log-probs need no pass of
    their own. Samples of older weights are met by a correction, or by taking the sampling policy for the old one.
    """

    def __init__(self, config: AlgorithmConfig, *, single_update: bool, longest: int = 1, stale: bool = False) -> None:
        self.config = config
        self.longest = longest
        self.loss = PolicyLoss(config)
        self.value_loss = ValueLoss(config)
        self.aggregate = Shares(config.aggregation, longest)
        self.value_aggregate = Shares("token_mean", longest)
        self.normalise = Normaliser(config)
        self.penalty = KLPenalty(config)
        self.metrics: dict[str, float] = {}
        self._estimate = ESTIMATORS.get(config.advantage)
        self._traits = ESTIMATORS.traits(config.advantage)
        LOSSES.get(config.loss)
        self.old_is_behaviour = stale and config.correction == "none"
        self.needs = self._needs(single_update)
        if config.critic_first and VALUES not in self.needs:
            raise ConfigError(
                f"algorithm.critic_first: {config.critic_first} needs a critic, but algorithm.advantage: {config.advantage} asks for none; "
                'register it with needs=("values",), or set critic_first 0.'
            )

    def _needs(self, single_update: bool) -> dict[str, str]:
        config, needs = self.config, {}
        if not single_update and not self.old_is_behaviour:
            needs[OLD] = "several minibatches or epochs move the policy away from the one before the update"
        if config.needs_reference():
            terms = [name for name in ("kl", "kl_reward") if getattr(config, name)]
            needs[REFERENCE] = f"algorithm.{' and algorithm.'.join(terms)} compare with the reference policy"
        if config.teacher:
            needs[TEACHER] = "algorithm.teacher compares with the teacher"
        for what in self._traits.get("needs", ()):
            why = "the critic's expectations" if what == VALUES else "the reward of a greedy answer to each prompt"
            needs[what] = f"algorithm.advantage: {config.advantage} compares with {why}"
        return needs

    def advantages(self, batch: Batch) -> Batch:
        """Give every trained token its advantage (and the critic its target), and every sample its weight."""
        config = self.config
        batch = batch.with_(mask=self._mask(batch), old=batch.behaviour if self.old_is_behaviour else batch.old)
        mask = batch.mask
        scores = self._scores(batch)
        estimate = self._estimate(scores)
        self._check(estimate, scores, batch)
        tokens = torch.zeros(len(mask), dtype=torch.float64)
        tokens[mask] = estimate if self._traits.get("per_token") else estimate[batch.sample_of_token()[mask]]
        returns: Tensor | None = None
        if scores.values is not None:
            returns = torch.zeros(len(mask))
            returns[mask] = (tokens[mask] + scores.values).float()
            if mask.any():
                error, spread = (v.var(correction=0) for v in (returns[mask] - scores.values, returns[mask]))
                self.metrics["critic/explained"] = float(1 - error / spread) if spread > FLAT**2 else 0.0
        if config.whiten:
            tokens = whiten(tokens, mask)
        if config.advantage_clip is not None:
            tokens = tokens.clamp(-config.advantage_clip, config.advantage_clip)
        if config.drop_zero_advantage:
            batch = batch.with_(mask=mask & (self._moved(tokens, batch) > 0)[batch.sample_of_token()])
        weights = torch.tensor([config.domain_weights.get(d, 1.0) for d in batch.domains])
        return batch.with_(advantages=tokens.float(), returns=returns, sample_weights=weights, turns=None)

    def _mask(self, batch: Batch) -> Tensor:
        """[tokens] which policy tokens are trained: not those of truncated samples or of groups too easy or too hard."""
        config, keep = self.config, torch.ones(batch.num_samples, dtype=torch.bool)
        if config.drop_truncated:
            keep &= ~batch.truncated
        if config.difficulty_band is not None:
            low, high = config.difficulty_band
            mean = means_of(batch.rewards, batch.group_of)
            keep &= (mean >= low) & (mean <= high)
        return batch.mask & keep[batch.sample_of_token()]

    def _scores(self, batch: Batch) -> Scores:
        """Shaped rewards per sample and per token: of an episode each turn's at its last token, else the outcome at each trace's."""
        mask, sample_of, trace_of = batch.mask, batch.sample_of_token()[batch.mask], batch.trace_of_token()[batch.mask]
        rewards = self.normalise(shape(batch, self.config, self.longest), batch)
        self.metrics = {}
        token_rewards = torch.zeros(len(trace_of), dtype=torch.float64)
        last = torch.ones_like(trace_of, dtype=torch.bool)
        last[:-1] = trace_of[1:] != trace_of[:-1]
        token_rewards[last] = rewards[sample_of[last]]
        chain_of = trace_of
        if batch.turns is not None:
            chain_of = self._place_turns(batch, batch.turns, rewards, token_rewards)
        if self.config.kl_reward:
            assert batch.reference is not None
            policy = batch.behaviour if batch.old is None else batch.old
            kl = kl_divergence(policy[mask].double(), batch.reference[mask].double(), self.config.kl_reward_estimator)
            self.metrics["train/kl_coefficient"] = self.penalty.coefficient
            cost = self.penalty(kl, sample_of, batch.num_samples)
            self.metrics["train/kl_reward"] = self.penalty.last
            token_rewards = token_rewards - cost
            rewards = rewards - sums_by(cost, sample_of, batch.num_samples)
        values = None if batch.values is None else batch.values[mask].double()
        greedy = None if batch.greedy is None else shape_alone(batch.greedy, self.config)
        passed, lengths = batch.rewards > 0, batch.policy_lengths()
        turns = self._turns(batch) if self._traits.get("turns") else None
        return Scores(
            rewards, batch.group_of, lengths, self.config, greedy, token_rewards, values, trace_of, passed, turns, chain_of
        )

    def _place_turns(self, batch: Batch, turns: Turns, rewards: Tensor, token_rewards: Tensor) -> Tensor:
        """Put the rewards of played samples at their turns' last trained tokens, in place; return the chains of tokens.

        The last turn gets what is left of the sample's reward: penalties, the shift of a normaliser, rewards of other functions.
        The reward of a turn without a trained token goes to the trained token before it, if the episode has one.
        """
        samples, owner = batch.num_samples, turns.sample_of
        sample_of, trace_of = batch.sample_of_token()[batch.mask], batch.trace_of_token()[batch.mask]
        is_last = torch.ones_like(owner, dtype=torch.bool)
        is_last[:-1] = owner[1:] != owner[:-1]
        scale = torch.as_tensor(self.normalise.scale, dtype=torch.float64).expand(samples)
        earned = torch.where(is_last, 0.0, shape_alone(turns.rewards, self.config) * scale[owner])
        earned = torch.where(is_last, (rewards - sums_by(earned, owner, samples))[owner], earned)
        played = torch.zeros(samples, dtype=torch.bool)
        played[owner[turns.anchor_of >= 0]] = True
        token_rewards[played[sample_of]] = 0.0
        place = torch.searchsorted(turns.of_token[batch.mask].contiguous(), torch.arange(len(owner)), right=True) - 1
        if len(sample_of):
            known = played[owner] & (place >= 0) & (sample_of[place.clamp_min(0)] == owner)
            token_rewards.index_add_(0, place[known], earned[known])
        first = torch.full((samples,), batch.num_traces).scatter_reduce_(
            0, batch.sample_of, torch.arange(batch.num_traces), "amin"
        )
        return torch.where(played[sample_of], first[sample_of], trace_of)

    def _turns(self, batch: Batch) -> TurnScores:
        """The turns as the estimator sees them: rewards clipped and scaled. Plain answers are one turn each."""
        found = batch.turns
        if found is None:
            every = torch.arange(batch.num_samples)
            found = Turns(every, batch.rewards, torch.full_like(every, -1), batch.sample_of_token())
        return TurnScores(found.sample_of, shape_alone(found.rewards, self.config), found.anchor_of, found.of_token[batch.mask])

    @staticmethod
    def _moved(tokens: Tensor, batch: Batch) -> Tensor:
        """[samples] how much advantage a sample has, either sign."""
        return sums_by(tokens.abs(), batch.sample_of_token(), batch.num_samples)

    def _check(self, estimate: Tensor, scores: Scores, batch: Batch) -> None:
        """No NaN escapes: name the function and the sample."""
        name, per_token = self.config.advantage, self._traits.get("per_token")
        wanted = int(batch.mask.sum()) if per_token else batch.num_samples
        if estimate.shape != (wanted,):
            unit = "trained token" if per_token else "sample"
            raise AlgorithmError(
                f"algorithm.advantage '{name}' must return one advantage per {unit}, got shape {tuple(estimate.shape)} for {wanted}."
            )
        bad = (~torch.isfinite(estimate)).nonzero()[:, 0].tolist()
        if bad:
            sample = int(batch.sample_of_token()[batch.mask][bad[0]]) if per_token else bad[0]
            raise AlgorithmError(
                f"algorithm.advantage '{name}' gave {estimate[bad[0]].item()} for sample {sample} of the batch "
                f"(group {int(batch.group_of[sample])}, domain '{batch.domains[sample]}', reward {scores.rewards[sample].item():g})."
            )

    def state(self) -> dict[str, Any]:
        """What the parts remember from step to step."""
        return {"normalise": self.normalise.state(), "penalty": self.penalty.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.normalise.restore(state["normalise"])
        self.penalty.restore(state["penalty"])
