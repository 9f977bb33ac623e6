"""Built-in rewards on the completion's text: cheap, pure, never raising on odd input."""

from __future__ import annotations

import re

from drumroll.rewards import REWARDS

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@REWARDS.register("exact")
def exact(completion: str, answer: object) -> float:
    """1 when the completion is the answer, white space at the ends aside."""
    return float(completion.strip() == str(answer).strip())


@REWARDS.register("contains")
def contains(completion: str, answer: object) -> float:
    """1 when the answer occurs in the completion."""
    return float(str(answer).strip() in completion)


@REWARDS.register("number")
def number(completion: str, answer: object) -> float:
    """1 when the last number in the completion equals the answer."""
    found, wanted = NUMBER.findall(completion), NUMBER.findall(str(answer))
    if not found or not wanted:
        return 0.0
    return float(_value(found[-1]) == _value(wanted[-1]))


@REWARDS.register("length")
def length(completion: str, target: int = 100) -> float:
    """1 for an empty completion, falling to 0 at `target` characters."""
    return max(0.0, 1.0 - len(completion) / target)


def _value(text: str) -> float:
    return float(text.replace(",", ""))
