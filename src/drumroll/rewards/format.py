"""`format`: is the completion laid out as asked? <think>…</think><answer>…</answer>, each once, in order."""

from __future__ import annotations

import re
from collections.abc import Sequence

from drumroll.rewards import REWARDS


@REWARDS.register("format")
def format(completion: str, tags: Sequence[str] = ("think", "answer"), opened: bool = False) -> float:
    """1 when the completion is these tags and nothing else, each once, in order and not empty.

    `opened`: the prompt ends with the first opening tag, so the completion starts within it.
    """
    text = f"<{tags[0]}>{completion}" if opened else completion
    pieces = re.split(f"(</?(?:{'|'.join(map(re.escape, tags))})>)", text)
    between, inside = pieces[::4], pieces[2::4]
    wanted = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    right = pieces[1::2] == wanted and not any(map(str.strip, between)) and all(map(str.strip, inside))
    return float(right)
