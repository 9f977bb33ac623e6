"""The scorers of reasoning-gym as a reward."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from drumroll.rewards import REWARDS

TAGGED = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
NAMED = re.compile(r"answer(?: is)?\s*[:=]?\s+(.+?)\.?\s*$", re.IGNORECASE)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@REWARDS.register("reasoning_gym", isolated=True, requires=("reasoning_gym", "reasoning-gym"))
def reasoning_gym(
    completion: str, answer: object, task: str, metadata: Any = None, prompt: Any = None, partial: bool = False
) -> float:
    """1 when the task's own scorer gives full marks to what is extracted from the completion; `partial` keeps lower marks.

    What the scorer cannot read scores 0.
    """
    entry = {"question": prompt, "answer": answer, "metadata": metadata}
    best = max((_score(task, text, entry) for text in extracted(completion, str(answer))), default=0.0)
    return best if partial else float(best >= 1.0)


def extracted(completion: str, answer: str) -> list[str]:
    """What to score: the last marked answer; without one the whole text, and the last number if a number is asked for."""
    for mark in (TAGGED, BOXED):
        if found := mark.findall(completion):
            return [found[-1].strip()]
    text = completion.strip()
    named = NAMED.search(text)
    candidates = [text, *([named[1]] if named else [])]
    if NUMBER.fullmatch(answer.strip()):
        candidates += NUMBER.findall(text.replace(",", ""))[-1:]
    return [candidate for candidate in candidates if candidate]


def _score(task: str, text: str, entry: dict[str, Any]) -> float:
    try:
        return min(1.0, max(0.0, float(_scorer(task)(text, entry))))
    except Exception:  # its scorers parse, evaluate and index what a model wrote
        return 0.0


@cache
def _scorer(task: str) -> Any:
    from reasoning_gym.factory import get_score_answer_fn

    return get_score_answer_fn(task)
