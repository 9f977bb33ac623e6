"""`gem:game:GuessTheNumber-v0-easy`: the environments of GEM (axon-rl/gem), whose observations and actions are texts.

GEM's mathematics graders evaluate the answer as Python, and its code environments run it as a program with the rights
of this process. Both are refused unless `unsafe: true`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gem
from gem.envs.registration import ENV_REGISTRY
from gem.utils.constants import TERMINAL_STATE, LanguageGameReward

from drumroll.envs import Step
from drumroll.envs.adapters.chance import NUMPY_SEEDS, Chance
from drumroll.errors import ConfigError, did_you_mean
from drumroll.rewards.reasoning import EVALUATED

UNSAFE = {
    "gem.envs.math_env": "its grader evaluates the answer as Python in this process",
    "gem.envs.math_visual_env": "its grader evaluates the answer as Python in this process",
    "gem.envs.code_env": "it runs the answer as a program with your rights",
}
"""Modules whose environments execute the policy's text, with the reason."""
ROUNDING = 1e-6
"""Rewards in parts of 1/n add up to the full reward within this tolerance."""


class Gem:
    """A GEM environment.

    `unsafe` allows environments that execute the policy's text. Other settings are passed to the environment.
    """

    random_action: Callable[[], str] | None = None
    """Set if the environment has a random action."""

    def __init__(self, name: str, unsafe: bool = False, **settings: Any) -> None:
        if name not in ENV_REGISTRY:
            raise ConfigError(f"environment gem:{name} does not exist.{did_you_mean(name, ENV_REGISTRY)}")
        if not unsafe and (why := executes(name)):
            raise ConfigError(f"environment gem:{name} is refused: {why}. Set environment.args.unsafe: true to allow it.")
        self.name, self.settings, self.total = name, settings, 0.0

    def reset(self, seed: int, **row: Any) -> str:
        """Make a new environment, which draws its task from the seed."""
        self.chance = Chance(seed)
        with self.chance.own():
            self.env = gem.make(self.name, **self.settings)
            observation, info = self.env.reset(seed=seed % NUMPY_SEEDS)
        self.total = 0.0
        if type(self.env).sample_random_action is not gem.Env.sample_random_action:
            self.random_action = self._random_action
        return _shown(observation, info)

    def step(self, text: str) -> Step:
        """Pass the turn on unchanged: the environment extracts the action."""
        with self.chance.own():
            observation, reward, terminated, truncated, info = self.env.step(text)
        reward, over = float(reward), bool(terminated or truncated)
        self.total += reward
        malformed = reward == LanguageGameReward.format_error_reward
        facts: dict[str, Any] = {"effective": not malformed, "malformed": malformed}
        if over:
            facts["success"] = max(reward, self.total) >= LanguageGameReward.success_reward - ROUNDING
        return Step(_shown(observation, {} if over else info), reward, bool(terminated), bool(truncated), facts)

    def _random_action(self) -> str:
        with self.chance.own():
            return str(self.env.sample_random_action())

    def close(self) -> None:
        """Free the episode's resources; it holds none."""


def executes(name: str) -> str | None:
    """Return why a registered environment executes the policy's text, or None if it does not."""
    task = name.removeprefix("rg:")
    if task != name and task in EVALUATED:
        return f"its scorer evaluates the answer as Python in this process, which reasoning_gym:{task} does not"
    return UNSAFE.get(str(ENV_REGISTRY[name].entry_point).partition(":")[0])


def _shown(observation: Any, info: dict[str, Any]) -> str:
    """Return an observation between the environment's prefix and suffix."""
    if observation == TERMINAL_STATE:
        return ""
    parts = (info.get("prefix"), observation, info.get("suffix"))
    return "\n".join(str(part).strip("\n") for part in parts if part)
