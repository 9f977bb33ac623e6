"""`tools:my_tools:add,my_tools:search`: plain Python functions as tools.

A turn with tool calls gets their results; a turn without is the final answer and ends the episode. What goes wrong in a tool
is answered as text and counts; too much of it ends the episode.
"""

from __future__ import annotations

import functools
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from drumroll.envs import Step
from drumroll.envs.adapters.calls import Call, Unreadable, calls_in, teach, written
from drumroll.envs.adapters.schema import BadCall, Schema, Tool
from drumroll.envs.episode import action_in
from drumroll.envs.runner import awaited
from drumroll.errors import did_you_mean
from drumroll.registry import import_path
from drumroll.sample import Message

SAMPLES: dict[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
"""What a random player gives for an argument of a type; else a text."""


class ToolError(Exception):
    """What a tool said when it failed."""


class ToolEpisode(ABC):
    """What all tool environments share. `prompt` is the task where a row brings none; `teach: false` leaves the tools out of it.

    The final answer is scored by `score`, your own `module:function` of the answer and the row's columns; by default it is compared
    with the row's `answer`, if there is one.
    """

    from_rows = True
    """The row, not the seed, decides how an episode begins."""

    def __init__(
        self,
        prompt: str = "",
        max_errors: int = 3,
        max_output: int = 4000,
        score: str | None = None,
        teach: bool = True,
    ) -> None:
        self.prompt, self.max_errors, self.max_output, self.teach = prompt, max_errors, max_output, teach
        self.scorer: Callable[..., Any] | None = import_path(score, "score") if score else None
        self.errors = 0
        self.row: dict[str, Any] = {}
        self.rng = random.Random()
        self.schemas: list[Schema] = []

    @abstractmethod
    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """What a tool gives back; whatever it raises is told to the policy."""

    def begin(self, seed: int, row: dict[str, Any], more: str = "") -> list[Message]:
        """The tools and the row's task, `more` after it."""
        self.errors, self.row, self.rng = 0, row, random.Random(f"tools/{seed}")
        task = row.get("prompt", row.get("messages", self.prompt))
        messages: list[Message] = [{"role": "user", "content": task}] if isinstance(task, str) else [dict(m) for m in task]
        messages[-1]["content"] = f"{messages[-1]['content']}{more}"
        if not self.teach or not self.schemas:
            return messages
        return [{"role": "tools", "content": teach(self.schemas), "tools": self.schemas}, *messages]

    async def step(self, text: str) -> Step:
        """Calls and their results, or the final answer."""
        calls = calls_in(text)
        if not calls:
            return await self.finish(action_in(text))
        told: dict[str, Any] = {"effective": False, "malformed": False}
        answers = [await self._answer(call, told) for call in calls]
        over = self.errors >= self.max_errors
        if told["effective"]:
            told["malformed"] = False
        return Step(answers, 0.0, False, over, told | ({"success": False} if over else {}))

    async def finish(self, answer: str) -> Step:
        """The episode is over."""
        marks: Any = None
        if self.scorer is not None:
            marks = await awaited(self.scorer(answer, **self.row))
        elif (right := self.row.get("answer")) is not None:
            marks = same(answer, str(right))
        info = {"effective": True} | ({} if marks is None else {"success": marks >= 1})
        return Step("", 0.0 if marks is None else float(marks), True, info=info)

    async def _answer(self, call: Call | Unreadable, told: dict[str, Any]) -> Message:
        """A call's result as a message; `told` learns what became of it."""
        name = call.name if isinstance(call, Call) else "unknown"
        try:
            if isinstance(call, Unreadable):
                told["malformed"] = True
                raise ToolError(f"the call could not be read: {call.reason}")
            known = [schema["function"]["name"] for schema in self.schemas]
            if name not in known:
                raise ToolError(f"there is no tool '{name}', only {', '.join(known)}.{did_you_mean(name, known)}")
            content = shown(await self.call(name, call.arguments))
            told["effective"] = True
        except Exception as error:
            self.errors += 1
            kind = "" if isinstance(error, (ToolError, BadCall)) else f"{type(error).__name__}: "
            content = told["tool_error"] = f"error: {kind}{error}"
        if len(content) > self.max_output:
            content = f"{content[: self.max_output]}… ({len(content) - self.max_output} characters more)"
        return {"role": "tool", "name": name, "content": content}

    def random_action(self) -> str:
        """A call of any tool with plain arguments, or an end."""
        if not self.schemas or self.rng.random() < 0.2:
            return "<answer>0</answer>"
        tool = self.rng.choice(self.schemas)["function"]
        parts = tool["parameters"].get("properties", {})
        wanted = tool["parameters"].get("required", [])
        return written(Call(tool["name"], {name: SAMPLES.get(parts[name].get("type"), "text") for name in wanted}))

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Nothing is held."""


def shown(result: Any) -> str:
    """A result as text."""
    return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)


def same(answer: str, right: str) -> float:
    """1 for the same text or number, else 0."""
    try:
        return float(answer.strip() == right.strip() or float(answer.replace(",", "")) == float(right.replace(",", "")))
    except ValueError:
        return 0.0


_tool = functools.cache(Tool)  # an environment is made for every episode, a schema once


class Functions(ToolEpisode):
    """Functions named `module:function`, separated by commas."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__(**settings)
        found = [_tool(import_path(path.strip(), "tool")) for path in name.split(",")]
        self.tools = {tool.name: tool for tool in found}
        self.schemas = [tool.schema for tool in found]

    def reset(self, seed: int, **row: Any) -> list[Message]:
        """The row's task."""
        return self.begin(seed, row)

    @override
    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call the function; a coroutine is awaited."""
        tool = self.tools[name]
        return await awaited(tool.function(**tool.bind(arguments)))
