"""Environments: the programs that a policy interacts with, turn by turn, until the episode ends.

An environment instance plays one episode and is then discarded. `reset` receives the seed that all members of a group
share, and the columns of the row. `step` receives the text that the policy wrote in its turn. Both may be plain
functions or coroutines. All randomness must come from the seed: no global generator, no `hash()`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

from drumroll.registry import Registry
from drumroll.sample import Message

Observation = str | list[Message]
"""The next input of the policy: a text, which becomes a user message, or a list of messages."""


class Step(NamedTuple):
    """The result of a step.

    `info` may hold `success` (bool), `effective` (bool: the action changed something), `malformed` (bool: the action
    could not be parsed), `tool_error` (str) and `state` (str: group members in equal states are compared).
    """

    observation: Observation
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = {}


class Environment(Protocol):
    """One episode."""

    def reset(self, seed: int, **row: Any) -> Observation | Awaitable[Observation]:
        """Start the episode and return the first observation, including the rules."""
        ...

    def step(self, text: str) -> Step | Awaitable[Step]:
        """Apply the policy's turn, given as text. A malformed action is not an error: answer it, with `effective: False`."""
        ...

    def close(self) -> None:
        """Free the episode's resources."""
        ...


class Playable(Environment, Protocol):
    """An environment that can also produce a correct action and a random action."""

    def oracle(self) -> str:
        """Return an action that leads towards success from the current state."""
        ...

    def random_action(self) -> str:
        """Return any well-formed action, drawn from the episode's own generator."""
        ...


ENVIRONMENTS: Registry[Callable[..., Environment]] = Registry("environment")
"""Environments by name.

The trait `runs` says where the code runs: `inline` (takes microseconds), `thread` (waits for I/O), `process` (computes,
may crash).
"""
