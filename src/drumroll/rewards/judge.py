"""Rewards that ask a judge. `rewards/judge_client.py` reaches the judge."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from drumroll.errors import DataError
from drumroll.rewards import REWARDS, Ask
from drumroll.rewards.templates import fill
from drumroll.rewards.templates import template as template_of
from drumroll.rewards.verdicts import verdict, winner
from drumroll.sample import Sample

LABEL = "judge_label"
"""The column that holds the expected verdict (a number or yes/no). If a row has it, agreement is measured."""


def _fields(sample: Sample, more: dict[str, Any]) -> dict[str, Any]:
    return {**sample.prompt.columns, "prompt": sample.prompt.content, "completion": sample.completion, **more}


def _noted(sample: Sample, value: float | None, unreadable: float) -> float:
    """Return the reward; also record whether the verdict was readable and whether it agrees with the label."""
    sample.rewards["judge_readable"] = float(value is not None)
    label = sample.prompt.columns.get(LABEL)
    expected = None if label is None else verdict(str(label))
    if expected is not None:
        sample.rewards["judge_agreement"] = float(value is not None and (value >= 0.5) == (expected >= 0.5))
    return unreadable if value is None else value


def _check(args: Mapping[str, Any]) -> None:
    """Raise before anything starts if the template does not exist."""
    template_of(str(args.get("template", "binary")))


@REWARDS.register("judge", check=_check)
async def judge(
    sample: Sample, judge: Ask, template: str = "binary", scale: float | None = None, unreadable: float = 0.0, **fields: Any
) -> float:
    """The judge's verdict on the completion, from 0 to 1. `template`: binary, reference, score, rubric, a file or a text."""
    chosen = template_of(template)
    said = await judge(fill(chosen.text, _fields(sample, fields)))
    return _noted(sample, verdict(said, scale or chosen.scale), unreadable)


@REWARDS.register("judge_pairwise", check=_check)
async def judge_pairwise(
    sample: Sample, judge: Ask, template: str = "pairwise", against: str = "answer", swap: bool = True, **fields: Any
) -> float:
    """1 if the judge prefers the completion to the text in the column `against`, 0 if it prefers that text, else 0.5.

    The judge is asked in both orders, because judges favour the first or last answer; if the two verdicts differ, the
    reward is 0.5.
    """
    text, known = template_of(template).text, _fields(sample, fields)
    if against not in known:
        raise DataError(
            f"the completion is compared with the column '{against}', but there is only {', '.join(sorted(known))}."
        )
    mine, other = known["completion"], known[against]
    orders = ((mine, other), (other, mine))[: 2 if swap else 1]
    asked = [judge(fill(text, known | {"first": first, "second": second})) for first, second in orders]
    said = [winner(answer) for answer in await asyncio.gather(*asked)]
    values = {0.5 if side == "tie" else float(side == ours) for side, ours in zip(said, "AB", strict=False)}
    readable = None not in said
    return _noted(sample, (values.pop() if len(values) == 1 else 0.5) if readable else None, 0.5)
