"""`algorithm`: advantage estimator, loss, aggregation, regularisers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from drumroll.config.section import Section


class AlgorithmConfig(Section):
    """How rewards become gradients."""

    advantage: str = "grpo"
    """Estimator by name (grpo), or `module:function`."""
    normalise_std: bool = True
    """Divide group advantages by the group's standard deviation (GRPO does, Dr.GRPO does not)."""
    clip_low: float = Field(0.2, ge=0, le=1)
    """PPO clips the probability ratio below 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """PPO clips the probability ratio above 1 + clip_high."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Every token counts the same, or every sample counts the same."""
    kl: float = Field(0.0, ge=0)
    """Weight of the KL term (k3 estimator) against the reference policy; above 0 it loads the reference role."""
    entropy: float = 0.0
    """Weight of an entropy bonus."""
