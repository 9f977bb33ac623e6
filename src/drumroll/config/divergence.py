"""How a policy is compared with a teacher: which divergence, over which tokens of the vocabulary."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from drumroll.config.section import Section


class DivergenceConfig(Section):
    """The distance between the distributions of student and teacher at each trained token."""

    use: str = "reverse"
    """forward (KL of the teacher to the student), reverse (KL of the student to the teacher), jsd, skew_forward, skew_reverse, or `module:function`."""
    beta: float = Field(0.5, ge=0, le=1)
    """jsd: share of the teacher in the mixture that both are compared with; near 0 it acts like forward, near 1 like reverse."""
    skew: float = Field(0.1, ge=0, lt=1)
    """skew_forward, skew_reverse: share that the second distribution gets of the first one."""
    over: Literal["all", "top_k", "sampled"] = "sampled"
    """Which tokens are compared: the whole vocabulary, the teacher's `top_k` with all others as one, or (an unbiased estimate) the sampled token."""
    top_k: int = Field(64, ge=1)
    """How many of the teacher's likeliest tokens `over: top_k` compares one by one."""

    @model_validator(mode="after")
    def _numbers_fit(self) -> Self:
        if self.use == "jsd" and self.beta in (0, 1):
            raise ValueError(
                f"beta: {self.beta:g} is the limit where jsd becomes another: set use: {'reverse' if self.beta else 'forward'}"
            )
        if self.over != "top_k" and self.top_k != type(self).model_fields["top_k"].default:
            raise ValueError(f"top_k: {self.top_k} belongs to over: top_k, but over is {self.over}")
        return self

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, values: Any) -> Any:
        if isinstance(values, DivergenceConfig) and not isinstance(values, cls):
            return values.model_dump(exclude_unset=True)
        return {"use": values} if isinstance(values, str) else values


class WholeDivergence(DivergenceConfig):
    """The same over the whole vocabulary, unless said otherwise."""

    over: Literal["all", "top_k", "sampled"] = "all"
    """Which tokens are compared: the whole vocabulary, the teacher's `top_k` with all others as one, or (an unbiased estimate) the sampled token."""
