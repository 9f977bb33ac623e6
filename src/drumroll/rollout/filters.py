"""Group filters: decide which complete groups are worth training on.

A filter takes a group's rewards and returns None to keep it, or the reason to drop it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence

from drumroll.errors import ConfigError
from drumroll.registry import Registry

Filter = Callable[..., str | None]
FILTERS: Registry[Filter] = Registry("rollout.filter")


def find_filter(name: str, arguments: Mapping[str, float]) -> Filter:
    """Return the filter by name with its arguments, which are checked against its signature."""
    function = FILTERS.get(name)
    taken = list(inspect.signature(function).parameters)[1:]
    try:
        inspect.signature(function).bind([0.0], **arguments)
    except TypeError as error:
        raise ConfigError(
            f"rollout.filter_args {dict(arguments)} do not fit the filter '{name}': {error}; it takes {', '.join(taken) or 'none'}."
        ) from None
    return functools.partial(function, **arguments)


@FILTERS.register("zero_variance")
def zero_variance(rewards: Sequence[float]) -> str | None:
    """Drop groups whose rewards are all equal: they teach a group-relative method nothing."""
    return None if max(rewards) - min(rewards) > 1e-9 else f"all rewards equal {rewards[0]:g}"


@FILTERS.register("mean_band")
def mean_band(rewards: Sequence[float], low: float = 0.0, high: float = 1.0) -> str | None:
    """Keep groups whose mean reward is strictly between `low` and `high`: not too hard, not too easy."""
    mean = sum(rewards) / len(rewards)
    return None if low < mean < high else f"mean reward {mean:g} outside ({low:g}, {high:g})"
