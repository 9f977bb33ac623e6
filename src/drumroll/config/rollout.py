"""`rollout`: how many samples, and how they are sampled."""

from __future__ import annotations

from pydantic import Field

from drumroll.config.section import Section


class RolloutConfig(Section):
    """Generation of training samples."""

    prompts: int = Field(64, ge=1)
    """Prompts (groups) per step."""
    samples: int = Field(8, ge=1)
    """Samples per prompt: the group size."""
    max_tokens: int = Field(64, ge=1)
    """Longest completion, in tokens."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the learner applies it too, so that log-probs agree."""
    stop: list[str] = []
    """Strings that end a completion."""
    reward_timeout: float = Field(30.0, gt=0)
    """Seconds a reward function may take for one sample before the sample fails."""
