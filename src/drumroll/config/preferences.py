"""The config of training on preferences, and the registry of its losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from drumroll.config.data import DatasetConfig
from drumroll.config.eval import HeldOutConfig
from drumroll.config.rollout import RolloutConfig
from drumroll.config.run import RunConfig
from drumroll.config.section import Section
from drumroll.registry import Registry

PREFERENCE_LOSSES: Registry[Callable[..., Any]] = Registry("loss")
"""Filled by `algorithms/preferences`. Traits: `reference=False` (compares with no reference), `pairs=False` (takes single rated answers)."""
BUILT_IN_LOSSES = ("dpo", "ipo", "simpo", "kto")
LOSSES_OF_KEY = {
    "label_smoothing": ("dpo", "simpo"),
    "gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Keys that only some of the built-in losses read."""


class PreferenceTerms(Section):
    """The loss of training on preferences."""

    loss: str = "dpo"
    """`dpo`, `ipo`, `simpo` (no reference) on pairs, `kto` on single answers that were called good or bad, or `module:function`."""
    beta: float = Field(0.1, gt=0)
    """How closely the policy is held to the reference; larger is closer. For `ipo` 1 / (2 β) is the margin to reach, for `simpo` β scales the mean log-prob (2 to 2.5 is usual)."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """How often a label is taken to be wrong (`dpo`, `simpo`)."""
    sft: float = Field(0.0, ge=0)
    """Weight of the chosen answer's negative log-likelihood, averaged over its tokens."""
    gamma: float = Field(0.5, ge=0)
    """The margin that `simpo` wants between the rewards of chosen and rejected."""
    desirable_weight: float = Field(1.0, ge=0)
    """Weight of good answers in `kto`."""
    undesirable_weight: float = Field(1.0, ge=0)
    """Weight of bad answers in `kto`."""

    def takes_pairs(self) -> bool:
        """Whether the loss compares a chosen with a rejected answer."""
        return PREFERENCE_LOSSES.traits(self.loss).get("pairs", True)

    def takes_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return PREFERENCE_LOSSES.traits(self.loss).get("reference", True)


class PreferenceRows(RunConfig):
    """The keys of pipelines that train on preferences."""

    batch: int = Field(64, ge=1)
    """Rows per step."""
    max_tokens: int = Field(1024, ge=2)
    """Longest answer together with its prompt, in tokens."""
    overlong: Literal["truncate", "drop", "fail"] = "truncate"
    """What to do with a row of which an answer is longer: cut both answers there, skip the row, or stop. Counted in `data/dropped/long` when skipped."""
    held_out: dict[str, HeldOutConfig] = {}
    """Held-out preferences by name: loss, accuracy and margin are measured with every evaluation, as `eval/<name>/accuracy`."""

    def takes_pairs(self) -> bool:
        """Whether the loss compares a chosen with a rejected answer."""
        return True

    def comparer(self) -> str:
        """What compares answers, for sentences."""
        return f"pipeline: {self.pipeline}"

    def margin_kind(self) -> str | None:
        """What the margin of a pair is read from: `column`, `scores`, or None for none."""
        return None

    @override
    def held_out_sets(self) -> dict[str, HeldOutConfig]:
        return self.held_out

    @override
    def longest_trained(self) -> int:
        return self.max_tokens * 2 if self.takes_pairs() else self.max_tokens  # a pair is never separated

    @override
    def batch_size(self) -> int:
        return self.batch * 2

    @override
    def training_columns(self, dataset: DatasetConfig) -> list[tuple[str, str]]:
        return [(column, self.comparer()) for column in ("chosen", "rejected")] if self.takes_pairs() else []

    @override
    def arithmetic(self) -> list[str]:
        rows = "pairs" if self.takes_pairs() else "rows"
        return [f"{self.steps} steps × {self.batch} {rows} = {self.steps * self.batch:,} {rows}"]


class PreferenceConfig(PreferenceTerms, PreferenceRows):
    """Training on preferences: pairs of answers, or single answers that were called good or bad."""

    pipeline: str = "dpo"
    """`rl` trains on the model's own scored samples; `sft` imitates given answers; `dpo` learns from preferences; `reward_model` learns to score answers from preferences; `distill` follows a teacher; `module:NAME` is a pipeline of your own."""
    batch: int = Field(64, ge=1)
    """Rows per step: pairs, or with `loss: kto` also single answers."""
    reference: Literal["role", "lora", "precomputed"] | None = None
    """Where the reference's log-probs come from: `role` (a second model, `roles.reference`), `lora` (the actor without its adapters), or `precomputed` (once, before the first step; kept in the run directory). Default: `lora` if the actor trains adapters and `roles.reference` names no model, else `role`."""
    eval_max_tokens: int = Field(64, ge=1)
    """Longest completion in evaluation."""

    @model_validator(mode="after")
    def _loss_fits(self) -> Self:
        for key, losses in LOSSES_OF_KEY.items():
            value = getattr(self, key)
            if value != type(self).model_fields[key].default and self.loss in BUILT_IN_LOSSES and self.loss not in losses:
                raise ValueError(f"{key}: {value:g} belongs to loss: {' or '.join(losses)}, but loss is {self.loss}")
        if self.loss == "simpo" and self.reference is not None:
            raise ValueError(f"loss: simpo uses no reference; leave out reference: {self.reference}")
        if self.reference == "lora" and (self.roles.actor.lora is None or self.roles.reference.model is not None):
            raise ValueError(
                "reference: lora is the actor without its adapters, so it needs roles.actor.lora and no roles.reference.model"
            )
        return self

    @override
    def rollout_section(self) -> RolloutConfig:
        return RolloutConfig(max_tokens=self.eval_max_tokens)

    @override
    def needs(self) -> dict[str, str]:
        own_weights = self.reference == "precomputed" and self.roles.reference.model is None
        if own_weights or not self.takes_reference():
            return {}
        return {"reference": f"loss: {self.loss} compares with the reference policy"}

    @override
    def comparer(self) -> str:
        return f"loss: {self.loss}"

    def terms(self) -> PreferenceTerms:
        """The keys of the loss alone."""
        return PreferenceTerms.model_validate({name: getattr(self, name) for name in PreferenceTerms.model_fields})
