"""Given conversations as tokens, of which chosen turns are trained.

The text of a conversation up to a turn is what the model is shown when it is to write that turn, so a trained turn follows
exactly the tokens that it follows in generation. As long as the chat template shows earlier turns as they were, all turns stand in
one trace. Where it rewrites them, for example drops their thoughts, a further trace begins; no turn is trained twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drumroll.data.render import Renderer
from drumroll.data.tools import KEPT, in_words
from drumroll.errors import BadRow, TemplateError
from drumroll.sample import Message, Owner

Pieces = list[tuple[Owner, list[int]]]
"""Tokens of a trace in parts; those of the policy are trained."""
MARKS = ("train", "weight")
"""Keys of a message that say whether it is trained: axolotl's, and OpenAI's."""
ALL = "all"
"""Stands for all roles: every token is trained, those of the template included."""


class Turns:
    """One conversation, rendered up to any of its turns."""

    def __init__(self, renderer: Renderer, messages: Sequence[Message], tools: Sequence[Any] = ()) -> None:
        self.renderer, self.messages = renderer, messages
        self.tools = tools
        self._kept = tuple(dict.fromkeys((*KEPT, *(key for m in messages for key in m if key not in (*MARKS, "tool_calls")))))

    def traces(self, chosen: Sequence[bool]) -> list[Pieces]:
        """The tokens up to the last chosen turn; a further trace begins where the template departs from the text before."""
        found: list[Pieces] = []
        done, numbers = "", [number for number, is_chosen in enumerate(chosen) if is_chosen]
        for number in numbers:
            before, turn = self._turn(number)
            if not found or not before.startswith(done):
                found.append([])
                done = ""
            between, tokens = (self.renderer.controls.rendered(text) for text in (before[len(done) :], turn))
            if not before:  # nothing comes before the first token
                between, tokens = tokens[:1], tokens[1:]
            found[-1] += [(Owner.ENVIRONMENT if done else Owner.PROMPT, between), (Owner.POLICY, tokens)]
            done = before + turn
        if numbers and self.messages[numbers[-1]]["role"] == "assistant":
            found[-1][-1] = (Owner.POLICY, self.renderer.ended(found[-1][-1][1]))
        return found

    def _turn(self, number: int) -> tuple[str, str]:
        """The text before a turn, and the turn's."""
        said, message = self._said(number + 1), self.messages[number]
        tools = self.tools if self.renderer.takes_tools else None
        if message["role"] == "assistant":
            before, turn = self.renderer.exchange(said[:-1], said[-1], tools)
            lost = next((call for call in message.get("tool_calls") or () if call["function"]["name"] not in turn), None)
            if lost is not None:
                raise TemplateError(
                    f"the chat template of {self.renderer.name} does not show the call of '{lost['function']['name']}'."
                )
            return before, turn
        whole = self.renderer.whole(said, tools)
        before = self.renderer.whole(self._said(number), tools) if number else ""
        if not whole.startswith(before):
            raise TemplateError(
                f"the chat template of {self.renderer.name} is not prefix-stable: the conversation before message {number + 1}, which "
                f"is trained, changes with it; leave the role '{message['role']}' out of train_on."
            )
        return before, whole[len(before) :]

    def _said(self, count: int) -> list[Message]:
        """The first messages, as the template reads them."""
        return in_words(self.renderer, self.messages[:count], self.tools, kept=self._kept)


def conversation(value: Any, what: str) -> list[Message]:
    """Messages as a row gives them, with their keys checked. A text is the assistant's message."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    listed = list(value) if isinstance(value, Sequence) else [value]
    if wrong := [message for message in listed if not _is_message(message)]:
        raise BadRow(
            f"{what} must have role and content (a text, or parts of type text), or tool_calls with the function's name and arguments; got {wrong[0]!r:.80}."
        )
    return [{**message, "content": _text(message.get("content"))} for message in listed]


def _text(content: Any) -> str | None:
    """The text of a message, which may come in parts; anything else is passed on, to be refused."""
    if isinstance(content, Sequence) and not isinstance(content, str) and all(map(_is_text_part, content)):
        return "".join(part["text"] for part in content)
    return content


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_message(message: Any) -> bool:
    if not isinstance(message, Mapping) or "role" not in message:
        return False
    calls = message.get("tool_calls") or ()
    functions = [call.get("function") if isinstance(call, Mapping) else None for call in calls]
    sound = all(isinstance(f, Mapping) and {"name", "arguments"} <= f.keys() for f in functions)
    content = _text(message.get("content"))
    return sound and (isinstance(content, str) or (content is None and bool(functions)))


def tools_of(row: Mapping[str, Any], what: str) -> list[dict[str, Any]]:
    """The schemas in a row's column `tools`: a list, or JSON."""
    value = row.get("tools")
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = value
    if found is not None and not (isinstance(found, Sequence) and all(isinstance(tool, Mapping) for tool in found)):
        raise BadRow(f"{what} must list OpenAI's schemas of tools, got {value!r:.80}.")
    return [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in found or ()]


def chosen_turns(messages: Sequence[Message], first: int, roles: Sequence[str], flags: Any, what: str) -> list[bool]:
    """Which messages are trained: by a row's `flags`, by a message's own mark, or by its role from the `first` message on."""
    if flags is not None:
        if not isinstance(flags, Sequence) or len(flags) != len(messages):
            raise BadRow(f"{what} must have a true or false for each of {len(messages)} messages, got {flags!r:.80}.")
        return [_flag(flag, what) for flag in flags]
    return list(_marked(messages, first, roles, what))


def _marked(messages: Sequence[Message], first: int, roles: Sequence[str], what: str) -> Iterator[bool]:
    for number, message in enumerate(messages):
        mark = next((message[key] for key in MARKS if message.get(key) is not None), None)
        yield (message["role"] in roles and number >= first) if mark is None else _flag(mark, what)


def _flag(value: Any, what: str) -> bool:
    if value not in (0, 1):
        raise BadRow(f"{what}: the mark that says whether a message is trained must be true, false, 0 or 1, got {value!r:.40}.")
    return bool(value)
