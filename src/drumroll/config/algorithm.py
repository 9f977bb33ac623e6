"""`algorithm`: advantage estimator, loss, aggregation, corrections, regularisers; and named recipes of these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from drumroll.config.section import Section
from drumroll.errors import did_you_mean

RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "grpo", "loss": "ppo", "aggregation": "token_mean"},
    "dr_grpo": {"advantage": "dr_grpo", "loss": "ppo", "aggregation": "fixed_length"},
    "rloo": {"advantage": "rloo", "loss": "pg", "aggregation": "sequence_sum"},
    "reinforce": {"advantage": "reinforce", "loss": "pg", "whiten": True, "advantage_clip": 2.0, "reward_clip": 10.0},
    "reinforce++": {"advantage": "reinforce", "loss": "ppo", "whiten": True},
    "reinforce++_baseline": {"advantage": "dr_grpo", "loss": "ppo", "whiten": True},
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
    "lite_ppo": {"advantage": "dr_grpo", "scale": "batch", "loss": "ppo", "aggregation": "token_mean"},
    "sapo": {"advantage": "grpo", "loss": "sapo", "aggregation": "token_mean"},
}
"""A name stands for these choices; keys set beside it win."""

GROUPED = frozenset({"grpo", "dr_grpo", "rloo", "opo", "pass_at_k"})
"""Estimators that compare the samples of a group, so that a group of one teaches nothing."""
WITHOUT_RATIO = frozenset({"pg"})
"""Losses that take the samples for the policy's own: stale ones would bias them unseen."""

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"]
Correction = Literal["none", "truncate", "truncate_sequence", "band", "geometric"]


class AlgorithmConfig(Section):
    """How rewards become gradients."""

    recipe: str = "grpo"
    """A named choice of the parts below (`drumroll explain algorithm` lists them); keys set beside it win."""
    advantage: str = "grpo"
    """Estimator by name (grpo, dr_grpo, rloo, opo, pass_at_k, reinforce, positive), or `module:function`."""
    pass_k: int = Field(2, ge=1)
    """k of the pass_at_k estimator."""
    scale: Literal["none", "batch"] = "none"
    """Divide advantages by their standard deviation over the batch's samples."""
    whiten: bool = False
    """Shift and scale token advantages to mean 0 and deviation 1 over the batch."""
    advantage_clip: float | None = Field(None, gt=0)
    """Largest advantage, either sign."""
    reward_clip: float | None = Field(None, gt=0)
    """Largest reward, either sign, before anything else."""
    reward_scale: float = 1.0
    """Factor on rewards, after clipping."""
    overlong_buffer: float = Field(0.0, ge=0, le=1)
    """Soft penalty: over the last share of `rollout.max_tokens` the reward falls by up to 1."""
    drop_truncated: bool = False
    """Leave samples that ran out of tokens out of the loss."""
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
    entropy: float = 0.0
    """Weight of an entropy bonus."""

    @model_validator(mode="before")
    @classmethod
    def _apply_recipe(cls, values: Any) -> Any:
        if isinstance(values, str):
            values = {"recipe": values}
        name = values.get("recipe", "grpo") if isinstance(values, dict) else None
        if not isinstance(name, str):
            return values
        if name not in RECIPES:
            raise ValueError(
                f"algorithm.recipe '{name}' is not known; choose one of {', '.join(RECIPES)}.{did_you_mean(name, RECIPES)}"
            )
        return {**RECIPES[name], **values}
