"""`algorithm`: advantage estimator, loss, aggregation, corrections, regularisers; and named presets of these."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from drumroll.config.divergence import DivergenceConfig
from drumroll.config.section import Section
from drumroll.errors import did_you_mean

PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {"advantage": "gae", "loss": "ppo", "whiten": True, "value_clip": 0.2, "aggregation": "token_mean"},
    "grpo": {"advantage": "grpo", "loss": "ppo", "aggregation": "token_mean"},
    "dr_grpo": {"advantage": "dr_grpo", "loss": "ppo", "aggregation": "fixed_length"},
    "rloo": {"advantage": "rloo", "loss": "pg", "aggregation": "sequence_sum"},
    "reinforce": {"advantage": "reinforce", "loss": "pg", "whiten": True, "advantage_clip": 2.0, "reward_clip": 10.0},
    "reinforce++": {"advantage": "reinforce", "loss": "ppo", "whiten": True},
    "reinforce++_baseline": {"advantage": "dr_grpo", "loss": "ppo", "whiten": True},
    "remax": {"advantage": "remax", "loss": "pg", "aggregation": "sequence_sum"},
    "opo": {"advantage": "opo", "loss": "pg", "aggregation": "token_mean"},
    "dapo": {
        "advantage": "grpo",
        "loss": "ppo",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregation": "token_mean",
        "overlong_buffer": 0.25,
    },
    "gspo": {"advantage": "grpo", "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"},
    "cispo": {"advantage": "grpo", "loss": "cispo", "clip_low": 1.0, "clip_high": 0.28, "aggregation": "token_mean"},
    "topr": {"advantage": "dr_grpo", "loss": "topr", "aggregation": "sequence_mean"},
    "raft++": {"advantage": "positive", "loss": "ppo", "aggregation": "token_mean"},
    "lite_ppo": {
        "advantage": "reinforce",
        "reward_mean": "group",
        "reward_std": "batch",
        "loss": "ppo",
        "aggregation": "token_mean",
    },
    "sapo": {"advantage": "grpo", "loss": "sapo", "aggregation": "sequence_mean"},
    "starpo": {"advantage": "grpo", "loss": "ppo", "clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean"},
    "gigpo": {"advantage": "gigpo", "turn_discount": 0.95, "loss": "ppo", "aggregation": "token_mean"},
}
"""A name stands for these choices; keys set beside it win."""

GROUPED = frozenset({"grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "gigpo", "turns"})
"""Estimators that compare the samples of a group, so that a group of one teaches nothing."""
WITH_CRITIC = frozenset({"gae"})
"""Built-in estimators that need a critic; one of the user's own says so by its traits, which `Algorithm.needs` reads."""
WITH_GREEDY = frozenset({"remax"})
"""Estimators that need a greedy sample of every prompt, which is not trained on."""
WITHOUT_RATIO = frozenset({"pg"})
"""Losses that take the samples for the policy's own: stale ones would bias them unseen."""

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
Statistic = Literal["none", "group", "batch", "domain", "running"]
Correction = Literal["none", "truncate", "truncate_sequence", "band", "geometric"]


class AlgorithmConfig(Section):
    """How rewards become gradients."""

    preset: str = "grpo"
    """A named choice of the parts below (`drumroll explain algorithm` lists them); keys set beside it win."""
    advantage: str = "grpo"
    """Estimator by name (gae, grpo, dr_grpo, rloo, remax, opo, pass_at_k, reinforce, positive, gigpo, turns), or `module:function`."""
    pass_k: int = Field(2, ge=1)
    """pass_at_k: how many are drawn."""
    discount: float = Field(1.0, ge=0, le=1)
    """gae, reinforce: factor on what comes a token later."""
    turn_discount: float = Field(1.0, ge=0, le=1)
    """gigpo, turns: factor on what comes a turn later."""
    turn_weight: float = Field(1.0, ge=0)
    """gigpo: weight of the comparison among turns that began in the same state."""
    gae_decay: float = Field(0.95, ge=0, le=1)
    """gae: weight of later surprises (λ); 1 trusts the rewards, 0 the critic."""
    whiten: bool = False
    """Shift and scale token advantages to mean 0 and deviation 1 over the batch."""
    advantage_clip: float | None = Field(None, gt=0)
    """Largest advantage, either sign."""
    reward_clip: float | None = Field(None, gt=0)
    """Largest reward, either sign, before anything else."""
    reward_scale: float = 1.0
    """Factor on rewards, after clipping."""
    reward_mean: Statistic = "none"
    """Subtract the mean reward of the group, the batch, the batch's samples of the domain, or of the run so far."""
    reward_std: Statistic = "none"
    """Divide rewards by their standard deviation over the same choices."""
    length_penalty: float = Field(0.0, ge=0)
    """Taken from the reward of a completion of `rollout.max_tokens`; a shorter one loses its share."""
    overlong_buffer: float = Field(0.0, ge=0, le=1)
    """Soft penalty: over the last share of `rollout.max_tokens` the reward falls by up to 1."""
    truncated_penalty: float = Field(0.0, ge=0)
    """Hard penalty: taken from the reward of samples that ran out of tokens."""
    repetition_penalty: float = Field(0.0, ge=0)
    """Taken from the reward, times the share of `repetition_ngram`-token pieces that were written before."""
    repetition_ngram: int = Field(4, ge=1)
    """Length of the pieces that are looked for."""
    kl_reward: float = Field(0.0, ge=0)
    """Take so much per nat of KL against the reference policy from each token's reward; above 0 it loads the reference role."""
    kl_reward_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of that KL."""
    kl_target: float | None = Field(None, gt=0)
    """Adapt `kl_reward` so that a sample's KL stays near this many nats. Default: fixed."""
    kl_horizon: int = Field(10_000, ge=1)
    """Samples over which the adaptation acts."""
    drop_truncated: bool = False
    """Leave samples that ran out of tokens out of the loss."""
    drop_zero_advantage: bool = False
    """Leave samples without advantage out of the loss's mean, instead of counting them as zeros."""
    difficulty_band: tuple[float, float] | None = None
    """Leave groups whose mean reward lies outside [low, high] out of the loss."""
    loss: str = "ppo"
    """Loss by name (ppo, pg, gspo, cispo, topr, sapo, mirror), or `module:function`."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """The probability ratio is clipped above 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """With a negative advantage the ratio counts at most so much (dual-clip PPO)."""
    temperature_positive: float = Field(1.0, gt=0)
    """sapo: how sharply the gate closes for positive advantages."""
    temperature_negative: float = Field(1.05, gt=0)
    """sapo: how sharply the gate closes for negative advantages."""
    mirror: float = Field(0.1, ge=0)
    """mirror: weight of the squared log-ratio that keeps the policy near the one that sampled."""
    aggregation: Aggregation = "token_mean"
    """Every token counts the same; every sample the same (mean or sum of its tokens); or sums over a fixed length."""
    domain_weights: dict[str, float] = {}
    """Factor on the loss of a domain's samples; 1 for those not named."""
    correction: Correction = "none"
    """Weight of a token for the gap between the policy that sampled and the one before the update: none, truncated ratio (per token or per sequence), only within a band, or sequences whose mean ratio is within the band."""
    correction_low: float = Field(0.5, ge=0)
    """Lower end of the band."""
    correction_high: float = Field(2.0, ge=1)
    """Upper end of the band, and where ratios are truncated."""
    kl: float = Field(0.0, ge=0)
    """Weight of the KL term against the reference policy; above 0 it loads the reference role."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL."""
    teacher: float = Field(0.0, ge=0)
    """Weight of the divergence from the teacher role, on the policy's own samples (on-policy distillation)."""
    divergence: DivergenceConfig = DivergenceConfig()
    """teacher: which divergence, over which tokens."""
    entropy: float = 0.0
    """Weight of an entropy bonus."""
    sft: float = Field(0.0, ge=0)
    """Weight of an imitation term: on samples with a reward above 0 or, where `demonstrations` names rows, on those."""
    value_clip: float | None = Field(None, gt=0)
    """The critic's loss counts a value as if it had moved at most so far from the old one."""
    critic_first: int = Field(0, ge=0)
    """So many first steps train the critic only."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        if isinstance(values, str):
            values = {"preset": values}
        name = values.get("preset", "grpo") if isinstance(values, dict) else None
        if not isinstance(name, str):
            return values
        if name not in PRESETS:
            raise ValueError(
                f"algorithm.preset '{name}' is not known; choose one of {', '.join(PRESETS)}.{did_you_mean(name, PRESETS)}"
            )
        return {**PRESETS[name], **values}

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.kl_target is not None and not self.kl_reward:
            raise ValueError("algorithm.kl_target adapts algorithm.kl_reward, which is 0; give it a start, for example 0.05")
        if self.difficulty_band is not None and self.difficulty_band[0] >= self.difficulty_band[1]:
            raise ValueError(f"algorithm.difficulty_band needs low < high, got {list(self.difficulty_band)}")
        if self.advantage in WITH_GREEDY and (self.reward_mean, self.reward_std) != ("none", "none"):
            raise ValueError(
                f"algorithm.advantage: {self.advantage} takes the greedy answer's reward for its baseline, so algorithm.reward_mean and "
                f"reward_std must be none, got {self.reward_mean} and {self.reward_std}"
            )
        if self.critic_first and self.advantage not in WITH_CRITIC and ":" not in self.advantage:
            raise ValueError(
                f"algorithm.critic_first: {self.critic_first} needs a critic, but algorithm.advantage: {self.advantage} has none"
            )
        return self

    def needs_reference(self) -> bool:
        """Whether a term compares the policy with the reference."""
        return self.kl > 0 or self.kl_reward > 0
