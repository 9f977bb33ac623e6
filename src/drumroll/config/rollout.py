"""`rollout`: how many samples, and how they are sampled."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from drumroll.config.section import Section

MOST_TOKENS, FEWEST_TOKENS = 1024, 64
"""Bounds of the default of `rollout.max_tokens`."""


def default_length(context: int | None, prompt: int) -> int:
    """The longest completion of a model with this context after the longest prompt."""
    return MOST_TOKENS if context is None else max(FEWEST_TOKENS, min(MOST_TOKENS, context - prompt))


class DomainRollout(Section):
    """What one domain does otherwise; what is not named is as for all."""

    samples: int | None = Field(None, ge=1)
    """Its group size."""
    max_tokens: int | None = Field(None, ge=1)
    """Its longest completion."""
    max_thinking_tokens: int | None = Field(None, ge=1)
    """Its longest thought."""
    stop: list[str] | None = None
    """Strings that end its completions."""
    filter: str | None = None
    """Its group filter."""
    filter_args: dict[str, float] | None = None
    """Arguments of the filter."""


class RolloutConfig(Section):
    """Generation of training samples."""

    prompts: int = Field(64, ge=1)
    """Prompts (groups) per step."""
    samples: int = Field(8, ge=1)
    """Samples per prompt: the group size."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest completion, in tokens. Default: 1024, or less if the model's context has less room after `data.max_prompt_tokens`."""
    max_thinking_tokens: int | None = Field(None, ge=1)
    """Longest thought (`<think>…</think>`), in tokens. At the limit `</think>` is written for the policy, without loss, and the answer follows."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; the learner applies it too, so that log-probs agree."""
    stop: list[str] = []
    """Strings that end a completion."""
    oversample: float = Field(1.0, ge=1)
    """Work on so many times more prompts than a step needs, so that filtered and slow ones do not hold it up."""
    filter: str | None = None
    """Keep only useful groups: zero_variance (drop all-equal rewards), mean_band, or `module:function`."""
    filter_args: dict[str, float] = {}
    """Arguments of the filter, for example {low: 0.1, high: 0.9} for mean_band."""
    order: Literal["draw", "arrival"] = "draw"
    """Train on groups in the order drawn (unbiased, deterministic) or as they complete (faster, favours short samples)."""
    max_staleness: float = Field(0.0, ge=0)
    """Steps that samples may lag behind the weights being trained; 0 is synchronous, fractions bound the work ahead."""
    overage: Literal["drop", "mask"] = "drop"
    """What happens to tokens older than the bound: their group is dropped, or the old tokens are left out of the loss."""
    partial: bool = False
    """Interrupt running samples when the weights change and resume them, tokens kept, under the new ones."""
    kv_at_switch: Literal["keep", "recompute"] = "keep"
    """Whether running samples keep the keys and values of the old weights at a switch, or compute them anew."""
    max_draws_per_step: int | None = Field(None, ge=1)
    """Give a step up with an error after so many prompts. Default: 16 times `prompts` times `oversample`."""
    retries: int = Field(2, ge=0)
    """How often a sample is tried again after an engine was lost or a deadline passed."""
    on_failure: Literal["drop", "replace", "give_up"] = "drop"
    """A failed sample is left out of its group, replaced by another attempt at the prompt, or ends its group."""
    generation_timeout: float = Field(600.0, gt=0)
    """Seconds one generation may take."""
    reward_timeout: float = Field(30.0, gt=0)
    """Seconds one reward function may take for one sample; in a process, without the time it waits for a core."""
    engine_timeout: float = Field(60.0, gt=0)
    """Seconds to wait for an engine when none is alive."""
    reward_workers: int = Field(2, ge=1)
    """Processes that run your own reward functions; one that hangs is killed and replaced."""
    domains: dict[str, DomainRollout] = {}
    """Group size, length, stops and filter of single domains, for example {code: {samples: 4, max_tokens: 256}}."""

    @model_validator(mode="after")
    def _partial_needs_staleness(self) -> Self:
        if self.partial and self.max_staleness < 1:
            raise ValueError(
                f"rollout.partial resumes samples under newer weights, so their tokens are at least one version old: "
                f"it needs rollout.max_staleness of at least 1, got {self.max_staleness:g}"
            )
        return self

    @model_validator(mode="after")
    def _thoughts_leave_room(self) -> Self:
        for domain in (None, *self.domains):
            own = self if domain is None else self.of(domain)
            if own.max_thinking_tokens is not None and own.max_tokens is not None and own.max_thinking_tokens >= own.max_tokens:
                key = "rollout" if domain is None else f"rollout.domains.{domain}"
                raise ValueError(
                    f"{key}.max_thinking_tokens: {own.max_thinking_tokens} leaves no room for an answer within max_tokens: "
                    f"{own.max_tokens}; choose fewer, or a larger max_tokens"
                )
        return self

    @property
    def limits_thoughts(self) -> bool:
        """Whether thoughts of any domain have a limit."""
        return any(own.max_thinking_tokens is not None for own in (self, *self.domains.values()))

    def of(self, domain: str) -> RolloutConfig:
        """How a domain is sampled."""
        own = self.domains.get(domain)
        return self if own is None else self.model_copy(update=own.model_dump(exclude_none=True))

    @property
    def most_samples(self) -> int:
        """The largest group."""
        return max([self.samples, *(d.samples or 0 for d in self.domains.values())])

    @property
    def length_limit(self) -> int:
        """The longest completion, in tokens."""
        return self.max_tokens or MOST_TOKENS

    @property
    def longest(self) -> int:
        """The longest completion of any domain."""
        return max([self.length_limit, *(d.max_tokens or 0 for d in self.domains.values())])

    @property
    def lag_limit(self) -> int:
        """The oldest a trained token may be, in versions."""
        return math.ceil(self.max_staleness)

    @property
    def capacity(self) -> int:
        """Groups in flight or accepted and not yet trained, at most."""
        return math.ceil((1 + self.max_staleness) * self.prompts * self.oversample)

    @property
    def draw_limit(self) -> int:
        """Prompts started in one step, at most."""
        return self.max_draws_per_step or math.ceil(16 * self.prompts * self.oversample)
