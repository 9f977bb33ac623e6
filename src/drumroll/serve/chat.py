"""Renders conversations of the OpenAI protocol as tokens: a whole one, or the part after a completion that stays as sampled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from drumroll.data.render import Renderer
from drumroll.engines import Completion
from drumroll.sample import Message, StopReason

SENTINEL = "completion-as-sampled-0f7c2"
"""Stands for the completion while a template is applied, to find what the template adds after it."""


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


def whole(renderer: Renderer, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
    """Return the tokens of a conversation up to where the model writes; without a chat template, its texts joined."""
    if not renderer.has_template:
        return list(renderer.prompt("".join(m["content"] for m in messages), chat=False))
    return renderer.controls.rendered(renderer.text([plain(m) for m in messages], tools))


def following(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Any], covered: int, written: Completion
) -> list[int] | None:
    """Return the tokens between a completion, the last of the `covered` messages, and the next one.

    Returns None if the template does not keep the completion: a template that shows earlier turns differently (for
    example without their thoughts) needs a new trace.
    """
    if not renderer.has_template:
        return renderer.encode("".join(m["content"] for m in messages[covered:]))
    turns = [plain(m) for m in messages]
    said = turns[covered - 1]
    before, now = renderer.text(turns[: covered - 1], tools), renderer.text(turns, tools)
    content = renderer.controls.escape(said["content"].strip())
    kept = now.startswith(before) and now[len(before) :].lstrip().startswith(content)
    stand_in: list[Message] = [*turns[: covered - 1], {"role": said["role"], "content": SENTINEL}, *turns[covered:]]
    shown, found, rest = renderer.text(stand_in, tools).partition(SENTINEL)
    if not (kept and found and shown == before and SENTINEL not in rest):
        return None
    tokens = renderer.controls.rendered(rest)
    ended = written.tokens[-1] if written.stop is StopReason.EOS else None
    return tokens[1:] if tokens and tokens[0] == ended else tokens  # the model ended its turn itself


def _data(arguments: Any) -> Any:
    """Parse arguments, which travel as text, into data for templates."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
