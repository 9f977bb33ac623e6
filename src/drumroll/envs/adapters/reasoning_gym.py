"""`reasoning_gym:chain_sum`: a task of reasoning-gym as an episode, scored by the task's own verifier.

With `tries` above 1 the policy may answer again after a wrong answer; the last answer's score counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reasoning_gym.factory import create_dataset

from drumroll.data.reasoning import DENIED, tasks
from drumroll.envs import Step
from drumroll.envs.adapters.chance import NUMPY_SEEDS, Chance
from drumroll.envs.episode import THOUGHT
from drumroll.errors import ConfigError, did_you_mean
from drumroll.rewards.reasoning import reasoning_gym as score

HOW = "Give the final answer in <answer>…</answer>."


class Reasoning:
    """A task of reasoning-gym.

    `tries`: the number of answers allowed. `partial`: whether scores below 1 count. `how`: the sentence after the
    question. Other settings are passed to the task.
    """

    oracle: Callable[[], str] | None = None
    """Returns the task's own answer; set if the task has one."""

    def __init__(self, name: str, tries: int = 1, partial: bool = False, how: str = HOW, **settings: Any) -> None:
        use, known = f"environment reasoning_gym:{name}", tasks(f"The environment reasoning_gym:{name}")
        if name in DENIED:
            raise ConfigError(f"{use} is refused: {DENIED[name]}; choose another.")
        if name not in known:
            raise ConfigError(f"{use} does not exist.{did_you_mean(name, known)}")
        self.name, self.tries, self.partial, self.how, self.settings = name, tries, partial, how, settings
        self.answered = 0

    def reset(self, seed: int, **row: Any) -> str:
        """Return the question that the seed selects."""
        with Chance(seed).own():
            try:
                self.entry = create_dataset(self.name, seed=seed % NUMPY_SEEDS, size=1, **self.settings)[0]
            except (AssertionError, TypeError, ValueError) as error:
                raise ConfigError(f"environment reasoning_gym:{self.name} does not take {self.settings}: {error}.") from error
        self.answered = 0
        if self.entry["answer"] is not None:  # otherwise only the scorer knows
            self.oracle = lambda: f"<answer>{self.entry['answer']}</answer>"
        return f"{self.entry['question']}\n{self.how}".rstrip()

    def step(self, text: str) -> Step:
        """Score an answer."""
        entry = self.entry
        with Chance(0).own():
            marks = score(
                THOUGHT.sub("", text), entry["answer"], self.name, entry["metadata"], entry["question"], partial=self.partial
            )
        self.answered += 1
        success, last = marks >= 1, self.answered >= self.tries
        info = {"success": success, "effective": bool(text.strip())}
        if success or last:
            return Step("Right." if success else "Wrong.", marks, True, info=info)
        return Step(f"That is not right. {self.how}", info=info)

    def random_action(self) -> str:
        """Return an answer that is hardly ever right."""
        return "<answer>0</answer>"

    def close(self) -> None:
        """Free the episode's resources; it holds none."""
