"""Shared base of the built-in environments: seeded instances in two splits, parsing of actions, counting of turns.

An *instance* is the start of an episode (a map, a level, a shopping goal). Only its number and its split determine it.
The episode's seed determines later chance, such as slips on ice. So rows can name instances, and the members of a group
still share their luck.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any, TypeVar

from drumroll.data.split import is_held_out
from drumroll.envs import Step
from drumroll.errors import ConfigError, DataError

T = TypeVar("T")
SPLITS = ("train", "held_out")
STYLES = ("compact", "words")
TRIES = 10_000

THOUGHT = re.compile(r"\A(?:(?!<think>).)*?</think>|<think>.*?(?:</think>|\Z)", re.DOTALL | re.IGNORECASE)
"""A thought. The chat template may have opened the first one, so that the turn holds only its end."""
ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)


def action_in(text: str) -> str:
    """Extract the action of a policy's turn, without `<think>` blocks: the last `<answer>`, or the whole text."""
    text = THOUGHT.sub("", text)
    found = ANSWER.findall(text)
    return (found[-1] if found else text).strip()


def draw(name: str, instance: int, split: str, make: Callable[[random.Random], T | None], text: Callable[[T], str]) -> T:
    """Return the instance of a number and a split: the first one from `make` whose text hashes into that split."""
    if split not in SPLITS:
        raise DataError(f"{name}: split '{split}' does not exist; environments have 'train' and 'held_out'.")
    rng = random.Random(f"{name}/{split}/{instance}")
    for _ in range(TRIES):
        made = make(rng)
        if made is not None and is_held_out(text(made)) == (split == "held_out"):
            return made
    raise ConfigError(
        f"{name}: no instance of split '{split}' was found in {TRIES} tries; its settings allow too few, choose wider ones."
    )


def require(name: str, holds: bool, what: str) -> None:
    """Raise a ConfigError unless the setting holds."""
    if not holds:
        raise ConfigError(f"environment {name}: {what}.")


class Episode:
    """Base of the built-in environments. `style: compact` is for models that read characters, `words` for chat models."""

    name: str

    def __init__(self, style: str, split: str, max_turns: int) -> None:
        require(self.name, style in STYLES, f"style '{style}' does not exist; choose compact or words")
        require(self.name, max_turns >= 1, f"max_turns must be at least 1, got {max_turns}")
        self.style, self.split, self.max_turns = style, split, max_turns
        self.rng = random.Random()
        self.turns = 0

    def begin(self, seed: int) -> None:
        """Reset the turn counter and seed the episode's generator."""
        self.rng = random.Random(f"episode/{seed}")
        self.turns = 0

    def answered(
        self, observation: str, *, effective: bool, state: str, reward: float = 0.0, over: bool = False, **info: Any
    ) -> Step:
        """Return the result of a turn."""
        self.turns += 1
        facts = {"success": False, **info, "effective": effective, "state": state}
        return Step(observation, reward, over, not over and self.turns >= self.max_turns, facts)

    def unread(self, observation: str, state: str, **info: Any) -> Step:
        """Return the result of a malformed turn. It counts as a turn, so every episode ends by `max_turns`."""
        return self.answered(observation, effective=False, state=state, malformed=True, **info)

    def say(self, action: str) -> str:
        """Format an action as a policy of this style writes it."""
        return action if self.style == "compact" else f"<answer>{action}</answer>"

    def close(self) -> None:
        """Free the episode's resources; the built-ins hold none."""
