"""The config of supervised training."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from drumroll.config.data import DatasetConfig
from drumroll.config.eval import HeldOutConfig
from drumroll.config.rollout import RolloutConfig, default_length
from drumroll.config.run import RunConfig


class SFTConfig(RunConfig):
    """Supervised training on given answers."""

    pipeline: str = "sft"
    """`rl` trains on the model's own scored samples; `sft` imitates given answers; `dpo` learns from preferences; `reward_model` learns to score answers from preferences; `distill` follows a teacher; `module:NAME` is a pipeline of your own."""
    batch: int = Field(64, ge=1)
    """Rows per step."""
    max_tokens: int = Field(1024, ge=2)
    """Longest row, prompt and completion together, in tokens."""
    overlong: Literal["truncate", "drop", "fail"] = "truncate"
    """What to do with a longer row: cut it there, skip it, or stop. Counted in `data/truncated` and `data/dropped/long`."""
    train_on: list[str] | Literal["all"] = ["assistant"]
    """The roles whose messages are trained; of rows with prompt and completion, only the completion's. `all` trains every token, prompts and observations included: a model that starts from nothing learns to read sooner."""
    train_column: str | None = None
    """Column of the row with a true or false for each message, which then decides what is trained. Without it, a message's own key `train` (true, false) or `weight` (1, 0) comes before `train_on`."""
    held_out: dict[str, HeldOutConfig] = {}
    """Held-out rows with answers by name: `eval/<name>/loss` and `eval/<name>/perplexity` are measured with every evaluation."""
    eval_max_tokens: int | None = Field(None, ge=1)
    """Longest completion in evaluation. Default: 1024, or less if the model's context has less room after `data.max_prompt_tokens`."""

    @model_validator(mode="after")
    def _something_is_trained(self) -> Self:
        if not self.train_on:
            raise ValueError("train_on is empty, so nothing would be trained; give roles, for example [assistant], or all")
        if self.train_on == "all" and self.train_column is not None:
            raise ValueError("train_on: all trains every token; leave train_column out, or give roles")
        return self

    @override
    def held_out_sets(self) -> dict[str, HeldOutConfig]:
        return self.held_out

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
        return [] if self.train_on == "all" else [(dataset.completion, "supervised training")]

    @override
    def arithmetic(self) -> list[str]:
        return [f"{self.steps} steps × {self.batch} rows = {self.steps * self.batch:,} rows"]
