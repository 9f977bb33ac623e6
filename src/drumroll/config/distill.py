"""The config of distillation, and of demonstrations beside reinforcement learning."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator
from typing_extensions import override

from drumroll.config.data import DataConfig, DatasetConfig
from drumroll.config.divergence import DivergenceConfig, WholeDivergence
from drumroll.config.eval import HeldOutConfig
from drumroll.config.reward import ALL_DOMAINS, RewardConfig
from drumroll.config.rollout import RolloutConfig
from drumroll.config.run import RunConfig
from drumroll.config.section import Section
from drumroll.config.sft import SFTConfig

STUDENT_WEIGHTED = ("reverse", "jsd", "skew_reverse")
"""Divergences with a term that weighs tokens by the student's distribution."""


class DemonstrationsConfig(Section):
    """Rows with answers, a few of them in every step."""

    data: DataConfig
    """The rows, as `data` of supervised training."""
    batch: int = Field(32, ge=1)
    """Rows per step."""
    max_tokens: int = Field(1024, ge=2)
    """Longest row, prompt and completion together, in tokens; a longer one loses its tail."""


class DistillConfig(RunConfig):
    """Distillation: follow a teacher on given answers, on the policy's own samples, or on both in turn."""

    pipeline: str = "distill"
    """`rl` trains on the model's own scored samples; `sft` imitates given answers; `dpo` learns from preferences; `reward_model` learns to score answers from preferences; `distill` follows a teacher; `module:NAME` is a pipeline of your own."""
    divergence: WholeDivergence = WholeDivergence()
    """Which divergence from the teacher (`roles.teacher`) is made small, over which tokens."""
    on_policy: float = Field(1.0, ge=0, le=1)
    """Share of the steps that train on the policy's own samples, which need no answers; the others train on the rows' answers."""
    rollout: RolloutConfig = RolloutConfig(samples=1)
    """Generation of the policy's own samples; its temperature also divides the logits of student and teacher."""
    batch: int = Field(64, ge=1)
    """Rows of a step on given answers."""
    max_tokens: int = Field(1024, ge=2)
    """Longest row with a given answer, prompt and completion together, in tokens; a longer one loses its tail."""
    teacher: float = Field(1.0, ge=0)
    """Weight of the divergence."""
    sft: float = Field(0.0, ge=0)
    """Weight of a term that imitates given answers, beside the divergence."""
    held_out: dict[str, HeldOutConfig] = {}
    """Held-out rows with answers by name: their negative log-likelihood is measured with every evaluation, as `eval/<name>/loss` and `eval/<name>/perplexity`."""

    @override
    def has_rollouts(self) -> bool:
        return self.on_policy > 0

    @override
    def learns_from_rewards(self) -> bool:
        return False

    def is_scored(self) -> bool:
        """Whether the recipe names rewards, which are measured and not learned from."""
        return bool(super().rewards())

    @override
    def held_out_sets(self) -> dict[str, HeldOutConfig]:
        return self.held_out

    @override
    def rollout_section(self) -> RolloutConfig:
        return self.rollout

    @override
    def divergence_section(self) -> DivergenceConfig:
        return self.divergence

    @override
    def needs(self) -> dict[str, str]:
        return {"teacher": "pipeline: distill compares with the teacher"}

    @override
    def rewards(self) -> dict[str, list[RewardConfig]]:
        return super().rewards() or {ALL_DOMAINS: [RewardConfig(use="unscored")]}

    @override
    def batch_size(self) -> int:
        sampled = self.rollout.prompts * self.rollout.most_samples if self.on_policy else 0
        return max(sampled, self.batch if self.on_policy < 1 else 0)

    @override
    def longest_trained(self) -> int:
        return max(self.longest_trace() if self.on_policy else 0, self.max_tokens if self.on_policy < 1 else 0)

    @override
    def training_columns(self, dataset: DatasetConfig) -> list[tuple[str, str]] | None:
        return [(dataset.completion, "distillation on given answers")] if self.on_policy < 1 else None

    @override
    def arithmetic(self) -> list[str]:
        sampled, samples = self.own_steps(self.steps), self.rollout.prompts * self.rollout.samples
        return [
            f"{sampled} steps × {samples:,} of the policy's own samples = {sampled * samples:,} samples",
            f"{self.steps - sampled} steps × {self.batch} rows with answers = {(self.steps - sampled) * self.batch:,} rows",
        ]

    def own_steps(self, step: int) -> int:
        """How many of so many first steps train on the policy's own samples."""
        return int(step * self.on_policy + 1e-9)

    def is_own(self, step: int) -> bool:
        """Whether the step after so many trains on the policy's own samples."""
        return self.own_steps(step + 1) > self.own_steps(step)

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if not self.roles.teacher.models():
            raise ValueError("pipeline: distill needs a model to learn from: name one under roles.teacher.model")
        if self.on_policy < 1 and self.divergence.over == "sampled" and self.divergence.use in STUDENT_WEIGHTED:
            raise ValueError(
                f"divergence.over: sampled estimates {self.divergence.use} on tokens that the student drew, and with on_policy: "
                f"{self.on_policy:g} it trains on given answers too; set over: all or top_k, or use: forward"
            )
        if self.eval.sets and not self.is_scored():
            raise ValueError("reward is missing: eval.sets are scored by it, for example reward: exact")
        if self.sft and self.on_policy == 1:
            raise ValueError(f"sft: {self.sft:g} imitates given answers, and on_policy: 1 has none; set on_policy below 1")
        if self.deterministic and (self.rollout.max_staleness > 0 or self.rollout.order != "draw"):
            raise ValueError(
                "deterministic: true needs rollout.order: draw and rollout.max_staleness: 0, because which weights write "
                f"which token depends on timing otherwise; got {self.rollout.order} and {self.rollout.max_staleness:g}"
            )
        return self


def demonstrations(config: RunConfig, section: DemonstrationsConfig | DistillConfig) -> SFTConfig:
    """The rows of a section as supervised training reads them."""
    own = {name: getattr(section, name) for name in ("batch", "max_tokens", "held_out") if hasattr(section, name)}
    own["data"] = section.data.model_copy(update={"template": config.data.template | section.data.template})
    return SFTConfig(name=config.name, model=config.model, steps=config.steps, seed=config.seed, **own)
