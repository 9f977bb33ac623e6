"""Preferences as published datasets lay them out, mapped onto ours.

Ours: `prompt` (text or messages) with `chosen` and `rejected`, or with `completion` and `label`. An answer is a text, or
the messages that follow the prompt, the assistant's first. Layouts are recognised by their columns:

- explicit prompt: `prompt`, `chosen`, `rejected`, as texts or messages;
- implicit prompt: `chosen` and `rejected` are whole conversations, or texts, that begin alike;
- UltraFeedback: conversations beside a `prompt`, or an `instruction` with scored `completions`;
- HH: texts of turns that begin with "\\n\\nHuman:" and "\\n\\nAssistant:". They stay texts: `dialogue` makes messages of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from drumroll.data.split import Row
from drumroll.sample import Message

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


def preference(row: Row) -> Row:
    """The row in our layout, if it holds a preference; else as it is."""
    if "instruction" in row and isinstance(row.get("completions"), Sequence) and "chosen" not in row:
        row = _best_and_worst(row)
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if isinstance(chosen, str) and isinstance(rejected, str):
        return row | _texts(row.get("prompt"), chosen, rejected)
    if _is_conversation(chosen) and _is_conversation(rejected):
        return row | _conversations(row.get("prompt"), list(chosen or ()), list(rejected or ()))
    return row


def dialogue(text: str) -> list[Message]:
    """The turns of a text in the layout of HH."""
    parts = re.split(f"({HUMAN}|{ASSISTANT})", f"\n\n{text.lstrip()}")
    turns = zip(parts[1::2], parts[2::2], strict=True)
    return [{"role": "user" if who == HUMAN else "assistant", "content": said.strip()} for who, said in turns]


def _best_and_worst(row: Row) -> Row:
    """UltraFeedback with all its completions: the one with the best overall score against the one with the worst."""
    rated = [(_score(c), c["response"]) for c in row["completions"] if isinstance(c, Mapping) and c.get("response")]
    ranked = sorted(((score, text) for score, text in rated if score is not None), key=lambda each: each[0])
    if len(ranked) < 2:
        return row
    (worst, rejected), (best, chosen) = ranked[0], ranked[-1]
    found = {
        "chosen": chosen,
        "rejected": rejected if worst < best else chosen,
    }  # one score: equal answers, so that the row is dropped as `equal`
    return row | {"prompt": row["instruction"], **found, "score_chosen": best, "score_rejected": worst}


def _score(completion: Mapping[str, Any]) -> float | None:
    """The overall score of an answer; None if it has none."""
    try:
        score = float(completion["overall_score"])
    except (KeyError, TypeError, ValueError):
        return None
    return score if math.isfinite(score) else None


def _is_conversation(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and bool(value) and all(isinstance(turn, Mapping) and "role" in turn for turn in value)


def _texts(prompt: Any, chosen: str, rejected: str) -> Row:
    if all(text.lstrip().startswith(HUMAN.strip()) for text in (chosen, rejected)):
        return _hh(chosen, rejected)
    if prompt is not None:
        return {}
    alike = chosen[: _common(chosen, rejected)]
    end = max(alike.rfind(" "), alike.rfind("\n"))  # whole words
    alike = alike[:end].rstrip() if end > 0 else alike
    return {"prompt": alike or None, "chosen": chosen[len(alike) :], "rejected": rejected[len(alike) :]}


def _hh(chosen: str, rejected: str) -> Row:
    """The prompt ends with the last "Assistant:" that both texts have in common."""
    end = chosen[: _common(chosen, rejected)].rfind(ASSISTANT) + len(ASSISTANT)
    if end < len(ASSISTANT):
        return {"prompt": None}
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """How long two texts, or conversations, are the same."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def _conversations(prompt: Any, chosen: list[Message], rejected: list[Message]) -> Row:
    """Whole conversations begin with another's turn than the assistant's; the prompt is what both have in common."""
    if chosen[0]["role"] == "assistant" and rejected[0]["role"] == "assistant":
        return {}
    end = min(_common(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    while end > 0 and not (chosen[end]["role"] == rejected[end]["role"] == "assistant"):
        end -= 1
    said = chosen[:end]
    plain = len(said) == 1 and said[0]["role"] == "user" and said[0].get("content") == prompt
    return {"prompt": prompt if plain or not said else said, "chosen": chosen[end:], "rejected": rejected[end:]}
