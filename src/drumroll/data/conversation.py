"""An episode's texts as tokens: what the policy wrote is never tokenised again, what was rendered stays as it was.

A chat template is applied to text only. Between two turns the whole conversation is rendered, and must begin with what
was rendered before; only what follows the policy's turn becomes tokens.

An environment with tools shows them in a message of the role `tools` at the beginning (`tools`: schemas, `content`: the same in
words), and their results in messages of the role `tool`. Templates that know tools get both as they are; for others the
words stand before the task, and results are a user's turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from drumroll.data.render import Renderer, Tools
from drumroll.errors import TemplateError
from drumroll.sample import Message

Observation = str | list[Message]
TOOLS = "tools"
"""The role of the message that shows an environment's tools."""


class Conversation:
    """Observations and turns in order, by a chat template or as plain text."""

    def __init__(self, renderer: Renderer, first: Observation, *, chat: bool | None = None, system: str | None = None) -> None:
        self.renderer = renderer
        self.chat = system is not None or (renderer.has_template if chat is None else chat)
        self.system = system
        self.tools: Tools = None
        self.observations: list[Observation] = [first]
        self.turns: list[str] = []
        self._rendered = ""  # all up to where the policy writes next
        if self.chat and not renderer.has_template:
            raise TemplateError(
                f"the tokenizer of {renderer.name} has no chat template: give the dataset no `system` and no `chat: true`."
            )
        if self.chat and not isinstance(first, str) and first[0]["role"] == TOOLS:
            self._teach(first[0], first[1:] or [{"role": "user", "content": ""}])

    def prompt(self) -> list[int]:
        """Tokens of the first observation, up to the policy's first turn."""
        if not self.chat:
            return self.window(0)
        self._rendered = self._render()
        return self.renderer.controls.rendered(self._rendered)

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

    def follow(self, turn: str, observation: Observation, last: int | None) -> list[int]:
        """Tokens between a turn of the policy, which it ended with the token `last` (None: it was cut), and its next one."""
        self.add(turn, observation)
        if not self.chat:
            return self.renderer.encode("".join(_text(m) for m in self._messages(-1)))
        before, self._rendered = self._rendered, self._render()
        controls = self.renderer.controls
        tokens = controls.rendered(self._after(before, controls.escape(turn), self._rendered))
        return tokens[1:] if tokens and tokens[0] == last else tokens  # the policy ended its turn itself

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

    def _after(self, before: str, turn: str, whole: str) -> str:
        """What the template puts after the turn. It may strip blanks around the turn, and nothing else."""
        if not whole.startswith(before):
            raise self._unstable(before, whole)
        rest = whole[len(before) :]
        for shown in (turn, turn.strip(), turn.lstrip(), turn.rstrip()):
            if rest.startswith(shown):
                return rest[len(shown) :]
        raise self._unstable(turn, rest)

    def _unstable(self, before: str, after: str) -> TemplateError:
        at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
        return TemplateError(
            f"the chat template of {self.renderer.name} is not prefix-stable: turn {len(self.turns)} was {before[at : at + 40]!r} "
            f"where the whole conversation now reads {after[at : at + 40]!r}; use a template that keeps earlier turns as they are, "
            "or environment.mode: step."
        )

    def _render(self) -> str:
        messages: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages += self._messages(0)
        for turn, text in enumerate(self.turns):
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


def check_template(renderer: Renderer, *, chat: bool | None, system: str | None) -> None:
    """Hold two turns of plain words, so that a template that rewrites earlier ones is told before anything is generated."""
    trial = Conversation(renderer, "one", chat=chat, system=system)
    trial.prompt()
    for turn, observation in (("two", "three"), ("four", "five")):
        trial.follow(turn, observation, None)


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
