"""`eval`: held-out sets, measured while training."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from drumroll.config.best import BestBy, lower_is_better
from drumroll.config.data import DatasetConfig
from drumroll.config.section import Section


class HeldOutConfig(DatasetConfig):
    """A held-out set with answers."""

    split: str = "held_out"
    """Passed to a function source, which must keep splits apart."""
    limit: int | None = Field(200, ge=1)
    """Use at most this many rows."""


class EvalSetConfig(HeldOutConfig):
    """A held-out set with its own sampling."""

    samples: int = Field(1, ge=1)
    """k: completions per prompt; reports avg@k and pass@k."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    sampled: int = Field(0, ge=0)
    """Besides, draw so many completions per prompt at temperature 1; reported as `eval/<set>/sampled`."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; evaluation only."""
    top_k: int = Field(0, ge=0)
    """Draw among the k likeliest tokens; 0 is all. Evaluation only."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Draw only tokens at least this times as likely as the likeliest. Evaluation only."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest completion. Default: the rollout's."""
    max_thinking_tokens: int | None = Field(None, ge=1)
    """Longest thought. Default: the rollout's."""


class EvalConfig(Section):
    """Evaluation while training; always at step 0 and at the end."""

    every: int = Field(0, ge=0)
    """Evaluate every so many steps; 0 only at the start and the end."""
    sets: dict[str, EvalSetConfig] = {}
    """Held-out sets by name."""
    pass_threshold: float = 0.5
    """A completion passes when its reward is above this; pass@k counts prompts with a passing completion."""
    best_by: str | None = None
    """What decides the best checkpoint: a set, or a metric such as `eval/sums/loss`. Of losses, perplexities, divergences, errors and lengths the lowest is best, and of any metric after a minus sign (`-eval/sums/x`). Default: the highest mean over `eval.sets`; without them the lowest mean loss over `held_out`."""

    def decided_by(self, held_out: Iterable[str]) -> BestBy:
        """What decides the best checkpoint, in a run with these held-out sets with answers."""
        wanted, with_answers = self.best_by, list(held_out)
        if wanted is None and self.sets:
            return BestBy(tuple(f"eval/{name}" for name in self.sets))
        if wanted is None:
            return BestBy(tuple(f"eval/{name}/loss" for name in with_answers), lower=True)
        name = wanted.removeprefix("-")
        metric = name if name.startswith("eval/") else f"eval/{name}/loss" if name in with_answers else f"eval/{name}"
        return BestBy((metric,), lower=name != wanted or lower_is_better(metric))
