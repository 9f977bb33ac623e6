"""The config of training a reward model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from drumroll.config.preferences import PreferenceRows
from drumroll.config.rollout import RolloutConfig


class RewardModelConfig(PreferenceRows):
    """Training a reward model on pairs of a chosen and a rejected answer."""

    pipeline: str = "reward_model"
    """`rl` trains on the model's own scored samples; `sft` imitates given answers; `dpo` learns from preferences; `reward_model` learns to score answers from preferences; `distill` follows a teacher; `module:NAME` is a pipeline of your own."""
    overlong: Literal["truncate", "drop", "fail"] = "drop"
    """What to do with a row of which an answer is longer: skip the row, cut both answers there (the score is then that of a beginning), or stop. Counted in `data/dropped/long` when skipped."""
    margin: Literal["column", "scores"] | None = None
    """By how much the chosen answer should score higher: the row's column `margin`, or (`scores`) `score_chosen` less `score_rejected`. Default: no margin."""
    center: float = Field(0.0, ge=0)
    """Weight of (score of chosen + score of rejected)², which keeps scores around 0; 0.01 is usual."""

    @model_validator(mode="after")
    def _generates_nothing(self) -> Self:
        if self.eval.sets:
            raise ValueError("eval.sets: a reward model generates no answers; name held-out pairs under held_out")
        return self

    @override
    def trains_scores(self) -> bool:
        return True

    @override
    def rollout_section(self) -> RolloutConfig:
        return RolloutConfig(max_tokens=1)  # nothing is generated

    @override
    def margin_kind(self) -> str | None:
        return self.margin
