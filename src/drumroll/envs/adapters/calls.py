"""Parses tool calls in a policy's text: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number per turn.

A turn that is one bare JSON object of this form, or a list of them, counts too: some chat templates teach that.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from drumroll.data import tools
from drumroll.envs.episode import THOUGHT

TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
BARE = re.compile(r"\s*(?:\[TOOL_CALLS\]|<\|python_tag\|>)?\s*([\[{].*[\]}])\s*", re.DOTALL)


class Call(NamedTuple):
    """A tool call as the policy wrote it."""

    name: str
    arguments: dict[str, Any]


class Unreadable(NamedTuple):
    """A tool call that could not be parsed, and why."""

    reason: str


def written(call: Call) -> str:
    """Format a call as text."""
    return tools.written(*call)


def calls_in(text: str) -> list[Call | Unreadable]:
    """Return all calls of a turn in order, ignoring `<think>` blocks. A turn without calls is a final answer."""
    text = THOUGHT.sub("", text)
    tagged = TAGGED.findall(text)
    if tagged:
        return [_read(body) for body in tagged]
    bare = BARE.fullmatch(text)
    try:
        data = json.loads(bare[1]) if bare else None
    except ValueError:
        return []
    found = data if isinstance(data, list) else [data]
    named = found and all(isinstance(each, dict) and {"arguments", "parameters"} & each.keys() for each in found)
    return [_call(each) for each in found] if named else []


def _read(body: str) -> Call | Unreadable:
    try:
        return _call(json.loads(body))
    except ValueError as error:
        return Unreadable(f"it is not JSON ({error})")


def _call(data: Any) -> Call | Unreadable:
    if isinstance(data, dict) and isinstance(data.get("function"), dict):
        data = data["function"]
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return Unreadable('it must be an object with "name" and "arguments"')
    arguments = data.get("arguments", data.get("parameters", {}))
    if isinstance(arguments, str):  # some models write JSON inside JSON
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return Unreadable('"arguments" is a text that is not JSON')
    if not isinstance(arguments, dict):
        return Unreadable('"arguments" must be an object')
    return Call(data["name"], arguments)
