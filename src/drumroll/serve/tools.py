"""Parses tool calls in an answer, as tool environments do in training, and finds the final part of an unfinished text."""

from __future__ import annotations

from collections.abc import Sequence

from drumroll.envs.adapters.calls import TAGGED, Call, Unreadable, calls_in
from drumroll.envs.episode import THOUGHT

BEGIN = "<tool_call>"
BARE = ("{", "[", "<|python_tag|>")
"""How an answer begins that may be one bare call."""


def split(text: str) -> tuple[str, list[Call]]:
    """Return the text before the first tool call, and the calls. If one cannot be parsed, all stays text."""
    found = calls_in(text)
    calls = [call for call in found if not isinstance(call, Unreadable)]
    if not found or len(calls) < len(found):
        return text, []
    spoken = _without_thoughts(text)
    tagged = TAGGED.search(spoken)
    return text[: tagged.start() if tagged else _start(spoken)].rstrip(), calls


def cut(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    return text[: min([text.index(stop) for stop in stops if stop in text], default=len(text))]


def settled(text: str, stops: Sequence[str], *, tools: bool) -> str:
    """Return the part of an unfinished text that is final.

    The end of the text is held back while it may still become a stop string, a tool call or a character.
    """
    ends = [*stops, BEGIN] if tools else list(stops)
    text = cut(text, ends)
    held = max((size for end in ends for size in range(1, len(end)) if text.endswith(end[:size])), default=0)
    text = text[: len(text) - held].rstrip("\ufffd")
    if not tools:
        return text
    spoken = _without_thoughts(text)
    start = _start(spoken)
    if any(spoken.startswith(begin, start) or begin.startswith(spoken[start:]) for begin in BARE):
        text = text[:start]
    return text.rstrip()


def _without_thoughts(text: str) -> str:
    """Return the text with blanks in place of its thoughts."""
    return THOUGHT.sub(lambda thought: " " * len(thought[0]), text)


def _start(text: str) -> int:
    return len(text) - len(text.lstrip())
