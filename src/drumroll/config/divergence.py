"""How a policy is compared with a teacher: which divergence, over which tokens of the vocabulary."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from drumroll.config.section import Section


class DivergenceConfig(Section):
    """The distance between the distributions of student and teacher at each trained token."""

    use: str = "reverse"
    """forward (KL of the teacher to the student), reverse (KL of the student to the teacher), jsd, skew_forward, skew_reverse, or `module:function`."""
    beta: float = Field(0.5, gt=0, lt=1)
    """jsd: share of the teacher in the mixture that both are compared with; near 0 it acts like forward, near 1 like reverse."""
    skew: float = Field(0.1, ge=0, lt=1)
    """skew_forward, skew_reverse: share that the second distribution gets of the first one."""
    over: Literal["all", "top_k", "sampled"] = "sampled"
    """Which tokens are compared: the whole vocabulary, the teacher's `top_k` with all others as one, or (an unbiased estimate) the sampled token."""
    top_k: int = Field(64, ge=1)
    """How many of the teacher's likeliest tokens `over: top_k` compares one by one."""

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, values: Any) -> Any:
        return {"use": values} if isinstance(values, str) else values
