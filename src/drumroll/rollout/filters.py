"""Group filters: which complete groups are worth training on.

A filter takes a group's rewards and returns None to keep it, or the reason to drop it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drumroll.registry import Registry

Filter = Callable[..., str | None]
FILTERS: Registry[Filter] = Registry("rollout.filter")


@FILTERS.register("zero_variance")
def zero_variance(rewards: Sequence[float]) -> str | None:
    """Drop groups whose rewards are all equal: they teach nothing to a group-relative method."""
    return None if max(rewards) - min(rewards) > 1e-9 else f"all rewards equal {rewards[0]:g}"


@FILTERS.register("mean_band")
def mean_band(rewards: Sequence[float], low: float = 0.0, high: float = 1.0) -> str | None:
    """Keep groups whose mean reward lies strictly between `low` and `high`: not too hard, not too easy."""
    mean = sum(rewards) / len(rewards)
    return None if low < mean < high else f"mean reward {mean:g} outside ({low:g}, {high:g})"
