"""Parses tool calls in the Hermes style: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` within the text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"
_CALL = re.compile(re.escape(BEGIN) + r"(.*?)(?:" + re.escape(END) + r"|\Z)", re.DOTALL)


def split(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the text before the first tool call, and the calls as {name, arguments}.

    A call that cannot be parsed stays text.
    """
    found: list[dict[str, Any]] = []
    for match in _CALL.finditer(text):
        try:
            call = json.loads(match.group(1))
            found.append({"name": str(call["name"]), "arguments": call.get("arguments") or {}})
        except (ValueError, KeyError, TypeError, AttributeError):
            return text, []
    return (text[: text.index(BEGIN)].rstrip(), found) if found else (text, [])


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
    return text.rstrip() if tools else text
