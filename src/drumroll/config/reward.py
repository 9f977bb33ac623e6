"""`reward`: which functions score which domain."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from drumroll.config.section import Section

ALL_DOMAINS = "*"


class RewardConfig(Section):
    """One scoring function."""

    use: str
    """A built-in (math, code, choice, exact, judge, ...: see docs/rewards.md) or `module:function`, also one written for TRL or
    verl; its arguments are filled by column name."""
    weight: float = 1.0
    """Its share in the sample's reward; 0 logs it as a metric only."""
    args: dict[str, Any] = Field(default={})
    """Fixed keyword arguments of the function."""
    group: bool = False
    """Call the function once for all samples of a prompt, with lists, instead of once per sample."""


RewardSpec = str | RewardConfig | list[str | RewardConfig]


def normalise(spec: RewardSpec) -> list[RewardConfig]:
    """`exact`, `{use: exact}` and `[exact]` all mean the same list."""
    items = spec if isinstance(spec, list) else [spec]
    return [RewardConfig(use=item) if isinstance(item, str) else item for item in items]
