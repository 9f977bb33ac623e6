"""`gem:game:GuessTheNumber-v0-easy`: the environments of GEM (axon-rl/gem), which speak text themselves.

GEM's graders of mathematics evaluate the answer as Python, and its code environments run it as a program with the rights of
this process. Both are refused unless `unsafe: true`.
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
"""Modules of environments that execute what the policy writes, with the reason."""
ROUNDING = 1e-6
"""Rewards in parts of 1/n sum to the full reward within this."""


class Gem:
    """`unsafe` allows environments that execute what the policy writes. Other settings are the environment's own."""

    random_action: Callable[[], str] | None = None
    """Where the environment has one."""

    def __init__(self, name: str, unsafe: bool = False, **settings: Any) -> None:
        if name not in ENV_REGISTRY:
            raise ConfigError(f"environment gem:{name} does not exist.{did_you_mean(name, ENV_REGISTRY)}")
        if not unsafe and (why := executes(name)):
            raise ConfigError(f"environment gem:{name} is refused: {why}. Set environment.args.unsafe: true to allow it.")
        self.name, self.settings, self.total = name, settings, 0.0

    def reset(self, seed: int, **row: Any) -> str:
        """Make the environment anew; it draws its task from the seed."""
        self.chance = Chance(seed)
        with self.chance.own():
            self.env = gem.make(self.name, **self.settings)
            observation, info = self.env.reset(seed=seed % NUMPY_SEEDS)
        self.total = 0.0
        if type(self.env).sample_random_action is not gem.Env.sample_random_action:
            self.random_action = self._random_action
        return _shown(observation, info)

    def step(self, text: str) -> Step:
        """The turn as it is: the environment finds the action in it."""
        with self.chance.own():
            observation, reward, terminated, truncated, info = self.env.step(text)
        reward, over = float(reward), bool(terminated or truncated)
        self.total += reward
        malformed = reward == LanguageGameReward.format_error_reward
        told: dict[str, Any] = {"effective": not malformed, "malformed": malformed}
        if over:
            told["success"] = max(reward, self.total) >= LanguageGameReward.success_reward - ROUNDING
        return Step(_shown(observation, {} if over else info), reward, bool(terminated), bool(truncated), told)

    def _random_action(self) -> str:
        with self.chance.own():
            return str(self.env.sample_random_action())

    def close(self) -> None:
        """Nothing is held."""


def executes(name: str) -> str | None:
    """Why a registered environment executes the policy's text, or None if it does not."""
    task = name.removeprefix("rg:")
    if task != name and task in EVALUATED:
        return f"its scorer evaluates the answer as Python in this process, which reasoning_gym:{task} does not"
    return UNSAFE.get(str(ENV_REGISTRY[name].entry_point).partition(":")[0])


def _shown(observation: Any, info: dict[str, Any]) -> str:
    """An observation between what the environment wants before and after it."""
    if observation == TERMINAL_STATE:
        return ""
    parts = (info.get("prefix"), observation, info.get("suffix"))
    return "\n".join(str(part).strip("\n") for part in parts if part)
