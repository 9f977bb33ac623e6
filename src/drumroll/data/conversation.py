"""An episode's texts as tokens: a turn that stays as it was sampled is never tokenised again.

A chat template is applied to text only. Between two turns the whole conversation is rendered. As far as it begins with what
was rendered and written before, the tokens stay; only the rest becomes tokens (`grow`, which the endpoint uses too). A
template that rewrites earlier turns, for example drops their thoughts, departs before the first rewritten turn.

An environment with tools shows them in a message of the role `tools` at the beginning (`tools`: schemas, `content`: the same in
words), and their results in messages of the role `tool`. Templates that know tools get both as they are; for others the
words stand before the task, and results are a user's turn.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from drumroll.data.controls import Controls
from drumroll.data.render import Renderer, Tools
from drumroll.errors import DataError, TemplateError
from drumroll.sample import Message

Observation = str | list[Message]
TOOLS = "tools"
"""The role of the message that shows an environment's tools."""
STAND_IN = f"turn{secrets.token_hex(8)}x"
"""Stands for a turn of the policy while a template is applied, to find what the template adds after it; no result depends on it."""


@dataclass(frozen=True)
class Part:
    """A part of a trace: text of the template, or a turn of the policy. The text is escaped (`Controls.escape`)."""

    text: str
    tokens: int
    """The number of its tokens."""
    turn: bool = False
    last: int | None = None
    """The token with which the policy ended its turn; None if the turn was cut."""

    def end(self, whole: str, start: int) -> int | None:
        """Return where the part ends in a rendered text if it stands at `start`, else None.

        A template may strip blanks around a turn.
        """
        text = self.text
        forms = (text, text.strip(), text.lstrip(), text.rstrip()) if self.turn else (text,)
        return next((start + len(form) for form in forms if whole.startswith(form, start)), None)


def grow(
    controls: Controls, parts: Sequence[Part], whole: str, stand_in: Callable[[], str] | None = None
) -> tuple[list[Part], list[int]]:
    """Continue a trace up to the end of a rendered conversation.

    Returns the parts that the rendered text begins with, one new part for the rest of it, and the new part's tokens. If the
    text departs from the parts, `stand_in` keeps them all: it renders the conversation with `STAND_IN` for every turn,
    and the text after the last of these is the rest.
    """
    kept, at = 0, 0
    for part in parts:
        end = part.end(whole, at)
        if end is None:
            break
        kept, at = kept + 1, end
    rest = whole[at:]
    if kept < len(parts) and stand_in is not None:
        _, found, rest = stand_in().rpartition(STAND_IN)
        if not found:
            raise TemplateError(
                "the chat template does not show earlier turns, so they cannot be shown as they were sampled: "
                "set environment.earlier_turns: template."
            )
        kept = len(parts)
    tokens = controls.rendered(rest)
    last = parts[kept - 1].last if kept else None
    if tokens and tokens[0] == last:
        tokens = tokens[1:]  # the policy ended its turn itself
    return [*parts[:kept], Part(rest, len(tokens))], tokens


class Conversation:
    """Observations and turns in order, by a chat template or as plain text.

    `sampled` shows earlier turns as they were sampled, also where the template would rewrite them.
    """

    def __init__(
        self,
        renderer: Renderer,
        first: Observation,
        *,
        chat: bool | None = None,
        system: str | None = None,
        sampled: bool = False,
    ) -> None:
        self.renderer = renderer
        self.sampled = sampled
        self.chat = system is not None or (renderer.has_template if chat is None else chat)
        self.system = system
        self.tools: Tools = None
        self.observations: list[Observation] = [first]
        self.turns: list[str] = []
        self._parts: list[Part] = []  # all up to where the policy writes next
        if self.chat and not renderer.has_template:
            raise TemplateError(
                f"the tokenizer of {renderer.name} has no chat template: give the dataset no `system` and no `chat: true`."
            )
        if self.chat and not isinstance(first, str) and first[0]["role"] == TOOLS:
            self._teach(first[0], first[1:] or [{"role": "user", "content": ""}])

    def prompt(self) -> list[int]:
        """Tokens of the first observation, up to the policy's first turn."""
        if not self.chat:
            tokens = self.window(0)
            self._parts = [Part("", len(tokens))]
        else:
            self._parts, tokens = grow(self.renderer.controls, [], self._render())
        return tokens

    def window(self, history: int, *, keep_first: bool = True) -> list[int]:
        """Tokens of the first observation (if kept), the last `history` turns and the present observation."""
        first = max(0, len(self.turns) - history)
        shown = [self._messages(number) for number in ([0, first] if first and keep_first else [first])]
        for turn, text in enumerate(self.turns[first:], first):
            shown += [[{"role": "assistant", "content": text}], self._messages(turn + 1)]
        messages = [message for part in shown for message in part]
        if self.chat:
            return list(self.renderer.prompt(tuple(_joined(messages)), chat=True, system=self.system, tools=self.tools))
        return list(self.renderer.prompt("".join(_text(m) for m in messages), chat=False))

    def advance(self, turn: str, size: int, observation: Observation, last: int | None) -> tuple[int, list[int]]:
        """Take a turn of `size` tokens, which the policy ended with the token `last` (None: it was cut), and its answer.

        Returns how many of the tokens before the next turn stay as they were, and the tokens that follow them.
        """
        self.add(turn, observation)
        controls = self.renderer.controls
        before = [*self._parts, Part(controls.escape(turn), size, True, last)]
        if self.chat:
            self._parts, tokens = grow(controls, before, self._render(), self._stand_in if self.sampled else None)
        else:
            tokens = self.renderer.encode("".join(_text(m) for m in self._messages(-1)))
            self._parts = [*before, Part("", len(tokens))]
        return sum(part.tokens for part in self._parts[:-1]), tokens

    def follow(self, turn: str, observation: Observation, last: int | None) -> list[int]:
        """Tokens between a turn and the next one, as `advance` gives them; a template that rewrites turns is refused."""
        parts = [*self._parts, Part(self.renderer.controls.escape(turn), 0, True)]
        _, tokens = self.advance(turn, 0, observation, last)
        if len(self._parts) <= len(parts):
            raise self._unstable(parts)
        return tokens

    def add(self, turn: str, observation: Observation) -> None:
        """Note a turn of the policy and what was answered."""
        self.turns.append(turn)
        self.observations.append(observation)

    def _teach(self, tools: Message, task: list[Message]) -> None:
        """Show the tools as the template does, or in words."""
        if self.renderer.takes_tools:
            self.tools = tools["tools"]
        elif self.system is not None:
            self.system = f"{self.system}\n\n{_text(tools)}"
        else:
            task = [{**task[0], "content": f"{_text(tools)}\n\n{_text(task[0])}"}, *task[1:]]
        self.observations[0] = task

    def _unstable(self, parts: Sequence[Part]) -> TemplateError:
        """Describe the first part that the template shows differently now."""
        was, now = parts[len(self._parts) - 1].text, self._parts[-1].text
        at = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), min(len(was), len(now)))
        return TemplateError(
            f"the chat template of {self.renderer.name} is not prefix-stable: it showed {was[at : at + 40]!r} where the conversation "
            f"of {len(self.turns)} turns now reads {now[at : at + 40]!r}; give every turn as a row of its own."
        )

    def _stand_in(self) -> str:
        return self._render([STAND_IN] * len(self.turns))

    def _render(self, turns: Sequence[str] | None = None) -> str:
        messages: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages += self._messages(0)
        for turn, text in enumerate(self.turns if turns is None else turns):
            messages += [{"role": "assistant", "content": text}, *self._messages(turn + 1)]
        return self.renderer.text(messages, self.tools)

    def _messages(self, number: int) -> list[Message]:
        observation = self.observations[number]
        if isinstance(observation, str):
            return [{"role": "user", "content": observation}]
        if not self.chat or self.renderer.takes_tools or not any(m["role"] == "tool" for m in observation):
            return list(observation)
        return _joined([_as_user(m) if m["role"] == "tool" else m for m in observation])


def _as_user(result: Message) -> Message:
    return {"role": "user", "content": f"<tool_response>\n{_text(result)}\n</tool_response>"}


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
LOOK = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
SCHEMA = {"type": "function", "function": {"name": "look", "description": "Look at it.", "parameters": LOOK}}
WORDS: list[tuple[str, Observation]] = [("two", "three"), ("four", "five")]
THOUGHTS: list[tuple[str, Observation]] = [(f"<think>\n{turn}\n</think>\n\n{turn}", seen) for turn, seen in WORDS]
CALLS: list[tuple[str, Observation]] = [
    (f"<think>\ntwo\n</think>\n\n{CALL}", [{"role": "tool", "name": "look", "content": "three"}]),
    ("<think>\nfour\n</think>\n\nfive", "six"),
]
SHOWN_TOOLS: Observation = [{"role": TOOLS, "content": "look", "tools": [SCHEMA]}, {"role": "user", "content": "one"}]


def check_template(
    renderer: Renderer, *, chat: bool | None, system: str | None, sampled: bool = False, tools: bool = False
) -> bool:
    """Hold conversations of plain words, of thoughts and of tool calls before anything is generated.

    Returns whether the template rewrites earlier turns. One that refuses a conversation raises an error; that of tool calls
    only if the environment has `tools`.
    """

    def rewrites(first: Observation, turns: Sequence[tuple[str, Observation]]) -> bool:
        trial = Conversation(renderer, first, chat=chat, system=system, sampled=sampled)
        seen, found = len(trial.prompt()), False
        for turn, observation in turns:
            kept, tokens = trial.advance(turn, 1, observation, None)
            found = found or kept <= seen
            seen = kept + len(tokens)
        return found

    found = [rewrites("one", WORDS), rewrites("one", THOUGHTS)]
    with suppress(*(() if tools else (DataError,))):
        found.append(rewrites(SHOWN_TOOLS, CALLS))
    return any(found)


def tools_in_words(messages: Sequence[Message], words: str = "") -> list[Message]:
    """A conversation for a template that knows no tools: their description within the first message, results as a user's turns."""
    shown = [_as_user(m) if m["role"] == "tool" else {"role": m["role"], "content": _text(m)} for m in messages]
    if words and shown:
        first = _text(shown[0])
        system = shown[0]["role"] == "system"
        shown[0]["content"] = f"{first}\n\n{words}" if system else f"{words}\n\n{first}"
    return _joined(shown)


def _text(message: Message) -> str:
    return str(message["content"])


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role become one message: many templates want roles to alternate."""
    joined: list[Message] = []
    for message in messages:
        if joined and joined[-1]["role"] == message["role"] and joined[-1].keys() == message.keys() == {"role", "content"}:
            joined[-1] = {**message, "content": f"{_text(joined[-1])}\n{_text(message)}"}
        else:
            joined.append(message)
    return joined
