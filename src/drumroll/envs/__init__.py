"""Environments: what a policy talks to, turn by turn, until the episode is over.

An environment is made for one episode and thrown away after it. `reset` gets the seed that all members of a group share
and the row's columns; `step` gets the text the policy wrote in its turn. Both may be plain functions or coroutines. All
randomness comes from the seed: no global generator, no `hash()`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

from drumroll.registry import Registry
from drumroll.sample import Message

Observation = str | list[Message]
"""What the policy reads next: a text (a user's turn), or messages."""


class Step(NamedTuple):
    """What a step brings. `info` may name `success` (bool), `effective` (bool: the action did something), `malformed`
    (bool: it could not be read), `tool_error` (a text) and `state` (a text: equal states of a group are compared)."""

    observation: Observation
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = {}


class Environment(Protocol):
    """One episode."""

    def reset(self, seed: int, **row: Any) -> Observation | Awaitable[Observation]:
        """Begin; the first observation, with the rules."""
        ...

    def step(self, text: str) -> Step | Awaitable[Step]:
        """The policy's turn, as text. A malformed action is no error: it is answered, with `effective: False`."""
        ...

    def close(self) -> None:
        """Free what the episode held."""
        ...


class Playable(Environment, Protocol):
    """An environment that can also show a right move and a random one."""

    def oracle(self) -> str:
        """An action on the way to success from here."""
        ...

    def random_action(self) -> str:
        """Any well-formed action, by the episode's own generator."""
        ...


ENVIRONMENTS: Registry[Callable[..., Environment]] = Registry("environment")
"""By name. The trait `runs` says where: `inline` (microseconds), `thread` (waits for others), `process` (computes, may crash)."""
