"""From a row's prompt to the tokens the model sees, by the tokenizer's chat template or as plain text.

Control tokens come from the template only: the same text within a content is encoded as text (data/controls.py).
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from drumroll.data.controls import Controls
from drumroll.engines.continuation import CLOSING, OPENING
from drumroll.errors import ConfigError, DataError, TemplateError, did_you_mean
from drumroll.sample import Message

Content = str | tuple[Message, ...]
Tools = Sequence[dict[str, Any]] | None
"""OpenAI schemas."""
OURS = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now"}
"""Variables of chat templates that no config sets."""
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""transformers' own tag, which plain jinja2 does not know."""


def _first_uses(node: Any, nodes: Any) -> dict[str, str]:
    """Return for every name of a parsed template whether it is first loaded or stored.

    jinja2 counts names that are set in a branch as undeclared, too.
    """
    if isinstance(node, nodes.Name):
        return {node.name: node.ctx}
    inner = [node.node, node.target] if isinstance(node, nodes.Assign) else node.iter_child_nodes()
    found: dict[str, str] = {}
    for child in inner:
        found = _first_uses(child, nodes) | found
    return found


class Renderer:
    """Renders prompts and answers for one tokenizer. Base models without a chat template get plain text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.name = getattr(tokenizer, "name_or_path", "") or "this model"
        template = getattr(tokenizer, "chat_template", None)
        self.has_template = bool(template)
        self.controls = Controls(tokenizer)
        self.takes_tools = re.search(r"\btools\b", str(template or "")) is not None
        self.arguments: dict[str, Any] = {}

    def given(self, arguments: Mapping[str, Any], key: str) -> Renderer:
        """Return a renderer whose chat template gets these arguments too; `key` is their place in the config."""
        for name in arguments:
            if name not in self.variables:
                has = f"; it has {', '.join(self.variables)}" if self.variables else " and none that can be set"
                what = "has no variable" if self.has_template else "does not exist, so it has no variable"
                raise ConfigError(
                    f"{key}: the chat template of {self.name} {what} '{name}'{has}.{did_you_mean(name, self.variables)}"
                )
        made = copy.copy(self)
        made.arguments = {**self.arguments, **arguments}
        return made

    @functools.cached_property
    def variables(self) -> list[str]:
        """The variables of the chat template that a config can set, in alphabetical order."""
        from jinja2 import Environment, TemplateSyntaxError, nodes
        from jinja2.meta import find_undeclared_variables

        template = getattr(self.tokenizer, "chat_template", None) or ""
        environment, found = Environment(extensions=["jinja2.ext.loopcontrols"]), set[str]()
        for text in template.values() if isinstance(template, Mapping) else [template]:
            try:
                parsed = environment.parse(GENERATION.sub("", text))
                local = {name for name, context in _first_uses(parsed, nodes).items() if context != "load"}
                found |= find_undeclared_variables(parsed) - local
            except TemplateSyntaxError as error:
                raise DataError(f"the chat template of {self.name} cannot be read: {error}.") from error
        return sorted(found - OURS - set(self.tokenizer.SPECIAL_TOKENS_ATTRIBUTES))

    def prompt(
        self, content: Content, *, chat: bool | None = None, system: str | None = None, tools: Tools = None
    ) -> tuple[int, ...]:
        """Tokens up to where the model's answer begins. `chat=None` follows the tokenizer."""
        turns = self.turns(content, chat, system)
        if turns is None:
            return tuple(self._bos() + self.encode(str(content)))
        return tuple(self.controls.rendered(self.text(turns, tools)))

    def answer(self, content: Content, completion: str, *, chat: bool | None = None, system: str | None = None) -> list[int]:
        """Tokens of a given answer after its prompt, up to and including the end of the turn."""
        turns = self.turns(content, chat, system)
        if turns is None:
            return self.turn(completion)
        return self.ended(self.controls.rendered(self.exchange(turns, {"role": "assistant", "content": completion})[1]))

    def exchange(self, before: list[Message], answer: Message, tools: Tools = None) -> tuple[str, str]:
        """The text up to a given answer, and the answer's up to and including the end of the turn, with escaped contents."""
        prompt, whole = self.text(before, tools), self.whole([*before, answer], tools)
        said = whole[len(prompt) :] if whole.startswith(prompt) else self._after_opening(prompt, whole, str(answer["content"]))
        eos = str(self.tokenizer.eos_token or "")
        end = said.rfind(eos) if eos else -1
        return prompt, said[: end + len(eos)] if end >= 0 else said

    def _after_opening(self, prompt: str, whole: str, content: str) -> str:
        """A given answer to a prompt whose end opens a thought, which the template does not show in a conversation.

        The answer begins with its own thought, or with the end of an empty one.
        """
        opened = re.search(rf"{OPENING}(\s*)\Z", prompt)
        if opened is None or not whole.startswith(prompt[: opened.start()]):
            at = next(i for i, (a, b) in enumerate(zip(prompt, whole + " " * len(prompt), strict=False)) if a != b)
            raise TemplateError(
                f"the chat template of {self.name} is not prefix-stable: the prompt alone reads {prompt[at : at + 40]!r} where "
                f"the whole conversation reads {whole[at : at + 40]!r}."
            )
        shown = whole[opened.start() :]
        if CLOSING in shown:
            return shown.lstrip().removeprefix(OPENING).lstrip()
        thought, closed, _ = self.controls.escape(content).rpartition(CLOSING)
        thought = thought.lstrip().removeprefix(OPENING).lstrip()
        return f"{thought}{CLOSING}{shown}" if closed else f"{opened[1]}{CLOSING}\n\n{shown}"

    def ended(self, answer: list[int]) -> list[int]:
        """Tokens of an answer up to and including its end, which is added if the template writes none."""
        ends = [i for i, token in enumerate(answer) if token == self._eos()]
        return answer[: ends[-1] + 1] if ends else [*answer, self._eos()]

    def turn(self, completion: str) -> list[int]:
        """Tokens of an answer and of its end."""
        return [*self.encode(completion), self._eos()]

    def text(self, turns: list[Message], tools: Tools = None) -> str:
        """A conversation as text with escaped contents, up to where the model's answer begins, for `controls.rendered`.

        A template that `takes_tools` shows them its own way.
        """
        return self._apply(turns, add_generation_prompt=True, tools=tools)

    def whole(self, turns: list[Message], tools: Tools = None) -> str:
        """A conversation as text with escaped contents, up to the end of its last turn."""
        return self._apply(turns, add_generation_prompt=False, tools=tools)

    def turns(self, content: Content, chat: bool | None = None, system: str | None = None) -> list[Message] | None:
        """The conversation to render, or None for plain text."""
        if isinstance(content, str) and system is None and not (self.has_template if chat is None else chat):
            return None
        if not self.has_template:
            raise DataError(
                f"the prompt is a chat, but the tokenizer of {self.name} has no chat template; give plain-text prompts, no `system`, no `chat: true`."
            )
        turns = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        return turns if system is None else [{"role": "system", "content": system}, *turns]

    def _apply(self, turns: list[Message], *, add_generation_prompt: bool, tools: Tools = None) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                self.controls.escape(turns),
                tools=self.controls.escape(list(tools)) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.arguments,
            )
        except Exception as error:
            raise DataError(f"the chat template of {self.name} refused a conversation: {error}.") from error

    def encode(self, text: str) -> list[int]:
        """Tokens of a content, none of them a control token."""
        return self.controls.content(text)

    def _bos(self) -> list[int]:
        """A base model that was trained with a first token gets it."""
        bos = self.tokenizer.bos_token_id
        return [] if bos is None else [bos]

    def _eos(self) -> int:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise DataError(f"the tokenizer of {self.name} has no end-of-sequence token, so answers could not be ended.")
        return int(eos)
