"""Renders conversations of the OpenAI protocol as tokens: a whole one, or the part after a completion that stays as sampled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from drumroll.data.conversation import tools_in_words
from drumroll.data.render import Renderer
from drumroll.engines import Completion
from drumroll.envs.adapters.calls import Call, teach, written
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


def in_words(renderer: Renderer, messages: Sequence[Message], tools: Sequence[Any], *, begins: bool = True) -> list[Message]:
    """Return messages as templates read them. If the template shows no tools, tools, calls and results become words.

    They are the words that tool environments use in training. `begins` says whether the messages begin the conversation.
    """
    turns = [plain(message) for message in messages]
    if renderer.takes_tools or not (tools or any(m["role"] == "tool" or m.get("tool_calls") for m in turns)):
        return turns
    for turn in turns:
        calls = [Call(c["function"]["name"], c["function"]["arguments"]) for c in turn.pop("tool_calls", ())]
        turn["content"] = "\n".join(filter(None, [turn["content"], *map(written, calls)]))
    return tools_in_words(turns, teach(list(tools)) if tools and begins else "")


def raw(renderer: Renderer, text: str) -> list[int]:
    """Return the tokens of a prompt without chat template, in which the caller may spell control tokens.

    A model that has a first token gets it, as in training on plain prompts.
    """
    tokens, bos = renderer.controls.rendered(text), renderer.tokenizer.bos_token_id
    return tokens if bos is None or tokens[:1] == [bos] else [bos, *tokens]


def whole(renderer: Renderer, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
    """Return the tokens of a conversation up to where the model writes; without a chat template, its texts joined."""
    turns = in_words(renderer, messages, tools)
    if not renderer.has_template:
        return list(renderer.prompt("".join(m["content"] for m in turns), chat=False))
    return renderer.controls.rendered(renderer.text(turns, _for_template(renderer, tools)))


def following(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Any], covered: int, written: Completion
) -> list[int] | None:
    """Return the tokens between a completion, the last of the `covered` messages, and the next one.

    Returns None if the template does not keep the completion: a template that shows earlier turns differently (for
    example without their thoughts) needs a new trace.
    """
    earlier = in_words(renderer, messages[: covered - 1], tools)
    [said] = in_words(renderer, messages[covered - 1 : covered], tools, begins=False)
    later = in_words(renderer, messages[covered:], tools, begins=False)
    if not renderer.has_template:
        return renderer.encode("".join(m["content"] for m in later))
    tools = _for_template(renderer, tools)
    before, now = renderer.text(earlier, tools), renderer.text([*earlier, said, *later], tools)
    content = renderer.controls.escape(said["content"].strip())
    kept = now.startswith(before) and now[len(before) :].lstrip().startswith(content)
    stand_in: list[Message] = [*earlier, {"role": said["role"], "content": SENTINEL}, *later]
    shown, found, rest = renderer.text(stand_in, tools).partition(SENTINEL)
    if not (kept and found and shown == before and SENTINEL not in rest):
        return None
    tokens = renderer.controls.rendered(rest)
    ended = written.tokens[-1] if written.stop is StopReason.EOS else None
    return tokens[1:] if tokens and tokens[0] == ended else tokens  # the model ended its turn itself


def _for_template(renderer: Renderer, tools: Sequence[Any]) -> Sequence[Any]:
    """Return the tools that the template itself shows."""
    return tools if renderer.takes_tools else ()


def _data(arguments: Any) -> Any:
    """Parse arguments, which travel as text, into data for templates."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
