"""`tools:my_tools:add,my_tools:search`: plain Python functions as tools.

A turn with tool calls is answered with their results; a turn without is the final answer and ends the episode. Errors
of a tool are returned to the policy as text and counted; too many end the episode.
"""

from __future__ import annotations

import functools
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from drumroll.data.tools import teach
from drumroll.envs import Step
from drumroll.envs.adapters.calls import Call, Unreadable, calls_in, written
from drumroll.envs.adapters.schema import BadCall, Schema, Tool
from drumroll.envs.episode import action_in
from drumroll.envs.runner import awaited
from drumroll.errors import did_you_mean
from drumroll.registry import import_path
from drumroll.sample import Message

SAMPLES: dict[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
"""The value that the random player passes for an argument of each type; a text for all others."""


class ToolError(Exception):
    """A tool failed; the text is the tool's message."""


class ToolEpisode(ABC):
    """Base of all tool environments.

    `prompt` is the task if the row has none; `teach: false` leaves the tools out of it. `score`, your own
    `module:function` of the answer and the row's columns, scores the final answer. By default the answer is compared
    with the row's `answer`, if there is one.
    """

    from_rows = True
    """The row, not the seed, determines how an episode starts."""

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
        """Call a tool and return its result; the policy is shown any error that it raises."""

    def begin(self, seed: int, row: dict[str, Any], more: str = "") -> list[Message]:
        """Return the tools and the row's task, followed by `more`."""
        self.errors, self.row, self.rng = 0, row, random.Random(f"tools/{seed}")
        task = row.get("prompt", row.get("messages", self.prompt))
        messages: list[Message] = [{"role": "user", "content": task}] if isinstance(task, str) else [dict(m) for m in task]
        messages[-1]["content"] = f"{messages[-1]['content']}{more}"
        if not self.teach or not self.schemas:
            return messages
        return [{"role": "tools", "content": teach(self.schemas), "tools": self.schemas}, *messages]

    async def step(self, text: str) -> Step:
        """Run the calls and return their results, or score the final answer."""
        calls = calls_in(text)
        if not calls:
            return await self.finish(action_in(text))
        info: dict[str, Any] = {"effective": False, "malformed": False}
        answers = [await self._answer(call, info) for call in calls]
        over = self.errors >= self.max_errors
        if info["effective"]:
            info["malformed"] = False
        return Step(answers, 0.0, False, over, info | ({"success": False} if over else {}))

    async def finish(self, answer: str) -> Step:
        """Score the final answer and end the episode."""
        marks: Any = None
        if self.scorer is not None:
            marks = await awaited(self.scorer(answer, **self.row))
        elif (right := self.row.get("answer")) is not None:
            marks = same(answer, str(right))
        info = {"effective": True} | ({} if marks is None else {"success": marks >= 1})
        return Step("", 0.0 if marks is None else float(marks), True, info=info)

    async def _answer(self, call: Call | Unreadable, info: dict[str, Any]) -> Message:
        """Return a call's result as a message; records its outcome in `info`."""
        name = call.name if isinstance(call, Call) else "unknown"
        try:
            if isinstance(call, Unreadable):
                info["malformed"] = True
                raise ToolError(f"the call could not be read: {call.reason}")
            known = [schema["function"]["name"] for schema in self.schemas]
            if name not in known:
                raise ToolError(f"there is no tool '{name}', only {', '.join(known)}.{did_you_mean(name, known)}")
            content = shown(await self.call(name, call.arguments))
            info["effective"] = True
        except Exception as error:
            self.errors += 1
            kind = "" if isinstance(error, (ToolError, BadCall)) else f"{type(error).__name__}: "
            content = info["tool_error"] = f"error: {kind}{error}"
        if len(content) > self.max_output:
            content = f"{content[: self.max_output]}… ({len(content) - self.max_output} characters more)"
        return {"role": "tool", "name": name, "content": content}

    def random_action(self) -> str:
        """Return a call of any tool with plain arguments, or a final answer."""
        if not self.schemas or self.rng.random() < 0.2:
            return "<answer>0</answer>"
        tool = self.rng.choice(self.schemas)["function"]
        parts = tool["parameters"].get("properties", {})
        wanted = tool["parameters"].get("required", [])
        return written(Call(tool["name"], {name: SAMPLES.get(parts[name].get("type"), "text") for name in wanted}))

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Free the episode's resources; most environments hold none."""


def shown(result: Any) -> str:
    """Format a result as text."""
    return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)


def same(answer: str, right: str) -> float:
    """Return 1 if both are the same text or number, else 0."""
    try:
        return float(answer.strip() == right.strip() or float(answer.replace(",", "")) == float(right.replace(",", "")))
    except ValueError:
        return 0.0


_tool = functools.cache(Tool)  # an environment is made for every episode, its schemas only once


class Functions(ToolEpisode):
    """Functions named `module:function`, separated by commas."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__(**settings)
        found = [_tool(import_path(path.strip(), "tool")) for path in name.split(",")]
        self.tools = {tool.name: tool for tool in found}
        self.schemas = [tool.schema for tool in found]

    def reset(self, seed: int, **row: Any) -> list[Message]:
        """Return the row's task."""
        return self.begin(seed, row)

    @override
    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call the function; await it if it is a coroutine."""
        tool = self.tools[name]
        return await awaited(tool.function(**tool.bind(arguments)))
