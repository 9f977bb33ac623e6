"""Renders conversations of the OpenAI protocol as tokens: those that a conversation adds to the earlier calls of its sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from drumroll.data.conversation import STAND_IN, grow
from drumroll.data.render import Renderer
from drumroll.data.tools import in_words, plain
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


def raw(renderer: Renderer, text: str) -> list[int]:
    """Return the tokens of a prompt without chat template, in which the caller may spell control tokens.

    A model that has a first token gets it, as in training on plain prompts.
    """
    tokens, bos = renderer.controls.rendered(text), renderer.tokenizer.bos_token_id
    return tokens if bos is None or tokens[:1] == [bos] else [bos, *tokens]


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
        later = in_words(renderer, messages[path[-1].place + 1 if path else 0 :], tools, begins=not path)
        rest = "".join(m["content"] for m in later)
        return Added(path[-1], "", renderer.encode(rest)) if path else Added(None, "", list(renderer.prompt(rest, chat=False)))
    texts = {call.place: call.text for call in (*earlier, *path)}

    def rendered(texts: dict[int, str]) -> str:
        said = [{"role": "assistant", "content": texts[i]} if i in texts else m for i, m in enumerate(messages)]
        return renderer.text(in_words(renderer, said, tools), tools if renderer.takes_tools else ())

    parts = path[-1].parts(renderer.controls) if path else []
    stand_in = (lambda: rendered(dict.fromkeys(texts, STAND_IN))) if sampled else None
    now, tokens = grow(renderer.controls, parts, rendered(texts), stand_in)
    kept, rest = divmod(len(now) - 1, 2)
    parent, text = path[kept - 1] if kept else None, now[-1].text
    if rest:  # the template keeps what stands before a turn, but not the turn
        return Added(parent, path[kept].shown + text, [*path[kept].added, *tokens])
    return Added(parent, text, tokens)
