"""The config of supervised training."""

from __future__ import annotations

from typing import Self

from pydantic import Field
from typing_extensions import override

from drumroll.config.data import DatasetConfig
from drumroll.config.rollout import RolloutConfig, default_length
from drumroll.config.run import RunConfig


class SFTConfig(RunConfig):
    """Supervised training on given answers."""

    pipeline: str = "sft"
    """`rl` trains on the model's own scored samples; `sft` imitates given answers; `dpo` learns from preferences; `reward_model` learns to score answers from preferences; `distill` follows a teacher; `module:NAME` is a pipeline of your own."""
    batch: int = Field(64, ge=1)
    """Rows per step."""
    max_tokens: int = Field(1024, ge=2)
    """Longest row, prompt and completion together, in tokens; a longer one loses its tail."""
    observations: bool = False
    """Learn to predict prompts and observations too, not only the answers: a model that starts from nothing learns to read sooner."""
    eval_max_tokens: int | None = Field(None, ge=1)
    """Longest completion in evaluation. Default: 1024, or less if the model's context has less room after `data.max_prompt_tokens`."""

    @override
    def rollout_section(self) -> RolloutConfig:
        return RolloutConfig(max_tokens=self.eval_max_tokens)

    @override
    def with_lengths(self, context: int | None) -> Self:
        longest = self.eval_max_tokens or default_length(context, self.data.max_prompt_tokens)
        return self.model_copy(update={"eval_max_tokens": longest})

    @override
    def longest_trained(self) -> int:
        return self.max_tokens

    @override
    def batch_size(self) -> int:
        return self.batch

    @override
    def training_columns(self, dataset: DatasetConfig) -> list[tuple[str, str]]:
        return [(dataset.completion, "supervised training")]

    @override
    def arithmetic(self) -> list[str]:
        return [f"{self.steps} steps × {self.batch} rows = {self.steps * self.batch:,} rows"]
