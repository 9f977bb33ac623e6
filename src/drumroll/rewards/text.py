"""Built-in rewards on the completion's text: cheap, pure, never raising on odd input."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from drumroll.rewards import REWARDS

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?", re.ASCII)
ARTICLES = frozenset({"a", "an", "the"})


@REWARDS.register("unscored")
def unscored(completion: str) -> float:
    """0 for every completion, for pipelines that need no reward."""
    return 0.0


@REWARDS.register("exact")
def exact(completion: str, answer: object) -> float:
    """1 when the completion is the answer, white space at the ends aside."""
    return float(completion.strip() == str(answer).strip())


@REWARDS.register("normalised")
def normalised(completion: str, answer: str | Sequence[str]) -> float:
    """1 when the completion is the answer (or one of several), case, punctuation, articles and white space aside."""
    accepted = [answer] if isinstance(answer, str) else answer
    return float(words_of(completion) in {words_of(str(one)) for one in accepted})


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
def length(completion: str, target: int = 100, free: int = 0) -> float:
    """1 up to `free` characters, falling to 0 at `target` characters."""
    return min(1.0, max(0.0, (target - len(completion)) / max(1, target - free)))


@REWARDS.register("repetition")
def repetition(completion: str, words: int = 3) -> float:
    """Minus the share of runs of so many words that were there before: 0 is none, near -1 is a loop."""
    said = completion.split()
    runs = [tuple(said[i : i + words]) for i in range(len(said) - words + 1)]
    return len(set(runs)) / len(runs) - 1.0 if runs else 0.0


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


def words_of(text: str) -> str:
    """A text's words, one space between them, so that texts which read the same are equal."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    kept = "".join(c if c.isalnum() or unicodedata.combining(c) else " " for c in folded).split()
    return " ".join([w for w in kept if w not in ARTICLES] or kept)


def _value(text: str) -> float:
    return float(text.replace(",", ""))
