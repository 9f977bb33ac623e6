"""Renders conversations of the OpenAI protocol as tokens: those that a conversation adds to the earlier calls of its sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from drumroll.data.conversation import STAND_IN, grow
from drumroll.data.render import Renderer
from drumroll.sample import Message
from drumroll.serve.traces import Call


def marks(messages: Sequence[Message], tools: Sequence[Any]) -> list[str]:
    """Return a key for each message that does not depend on how a client wrote it; the tools belong to the first.

    Whitespace around the model's messages is often lost on the way back and carries no meaning, so it is ignored.
    """
    found = []
    for i, message in enumerate(messages):
        same = plain(message)
        if same["role"] == "assistant":
            same["content"] = same["content"].strip()
        found.append(json.dumps([same, list(tools) if i == 0 else []], sort_keys=True))
    return found


def plain(message: Message) -> Message:
    """Return a message as templates read it: its text, tool calls with parsed arguments, no empty fields."""
    found: Message = {"role": message["role"], "content": message.get("content") or ""}
    if message.get("tool_calls"):
        found["tool_calls"] = [
            {"type": "function", "function": {"name": c["function"]["name"], "arguments": _data(c["function"]["arguments"])}}
            for c in message["tool_calls"]
        ]
    return found | {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}


class Added(NamedTuple):
    """The call that a conversation continues, and what it adds: text, as the template writes it, and tokens."""

    parent: Call | None
    text: str
    tokens: list[int]


def place(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Any], earlier: Sequence[Call], *, sampled: bool = False
) -> Added:
    """Place a conversation among the `earlier` calls that it begins with, the longest last.

    It continues the last of them as far as the chat template keeps its tokens: a template that shows earlier turns
    differently (for example without their thoughts) departs before the first of these, unless they are to be shown as they
    were `sampled`. The template gets a turn as the text that the model wrote.
    """
    path = earlier[-1].path() if earlier else []
    if not renderer.has_template:
        rest = "".join(m["content"] for m in messages[path[-1].place + 1 if path else 0 :])
        return Added(path[-1], "", renderer.encode(rest)) if path else Added(None, "", list(renderer.prompt(rest, chat=False)))
    texts = {call.place: call.text for call in (*earlier, *path)}

    def rendered(texts: dict[int, str]) -> str:
        said = ({"role": "assistant", "content": texts[i]} if i in texts else plain(m) for i, m in enumerate(messages))
        return renderer.text(list(said), tools)

    parts = path[-1].parts(renderer.controls) if path else []
    stand_in = (lambda: rendered(dict.fromkeys(texts, STAND_IN))) if sampled else None
    now, tokens = grow(renderer.controls, parts, rendered(texts), stand_in)
    kept, rest = divmod(len(now) - 1, 2)
    parent, text = path[kept - 1] if kept else None, now[-1].text
    if rest:  # the template keeps what stands before a turn, but not the turn
        return Added(parent, path[kept].shown + text, [*path[kept].added, *tokens])
    return Added(parent, text, tokens)


def _data(arguments: Any) -> Any:
    """Parse arguments, which travel as text, into data for templates."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
