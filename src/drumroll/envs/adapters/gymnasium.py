"""`gymnasium:FrozenLake-v1`: any gymnasium environment whose observations and actions can be expressed as text."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator

from drumroll.envs import Step
from drumroll.envs.adapters.chance import Chance
from drumroll.envs.adapters.spaces import describe, in_words, read, written
from drumroll.envs.episode import action_in
from drumroll.errors import ConfigError

COLOURED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", re.DOTALL)
"""Text renderings colour the important cell; without colours, brackets mark it."""


class Gymnasium:
    """A gymnasium environment.

    `rules` are shown first. `actions` names discrete actions, as a list or as name: number. `render` shows the
    environment's own text rendering in place of the observation (default: if it has one). Other settings are passed to
    the environment.
    """

    def __init__(
        self,
        name: str,
        rules: str = "",
        actions: Sequence[str] | Mapping[str, int] | None = None,
        render: bool | None = None,
        **settings: Any,
    ) -> None:
        self.name, self.rules, self.given, self.settings = name, rules, actions, settings
        try:
            module, _, known = name.rpartition(":")
            if module:  # the module registers its environments, as in gymnasium.make
                importlib.import_module(module)
            entry = gymnasium.spec(known).entry_point
            creator = entry if callable(entry) else load_env_creator(str(entry))
        except (gymnasium.error.Error, ImportError) as error:
            raise ConfigError(f"environment gymnasium:{name}: {error}") from None
        textual = "ansi" in getattr(creator, "metadata", {}).get("render_modes", ())
        if render and not textual:
            raise ConfigError(f"environment gymnasium:{name} has no text rendering (render mode ansi); leave `render` out.")
        self.render = textual if render is None else render
        self.env: Any = None
        self.total = 0.0

    def reset(self, seed: int, **row: Any) -> str:
        """Make a new environment and return the rules, how to act, and the first observation."""
        self.chance = Chance(seed)
        with self.chance.own():
            settings: dict[str, Any] = self.settings | ({"render_mode": "ansi"} if self.render else {})
            self.env = gymnasium.make(self.name, disable_env_checker=True, **settings)
            if not self.render:
                describe(self.env.observation_space)  # raises before anything is played if the space cannot be described
            self.names = self._named()
            self.env.action_space.seed(seed)
            observation, _ = self.env.reset(seed=seed)
            self.how = self._how()
            shown = self._show(observation)
        self.state, self.total = repr(observation), 0.0
        return "\n\n".join(part for part in (self.rules, self.how, shown) if part)

    def step(self, text: str) -> Step:
        """Play one action."""
        action = self._action(action_in(text))
        if action is None:
            return Step(f"That is no action. {self.how}", info={"effective": False, "malformed": True, "state": self.state})
        with self.chance.own():
            observation, reward, terminated, truncated, reported = self.env.step(action)
            shown = self._show(observation)
        reward, over = float(reward), bool(terminated or truncated)
        self.total += reward
        before, self.state = self.state, repr(observation)
        info: dict[str, Any] = {"effective": over or reward != 0 or self.state != before, "state": self.state}
        if over:
            info["success"] = self._success(reported)
        return Step(shown, reward, bool(terminated), bool(truncated), info)

    def random_action(self) -> str:
        """Return any action from the space's generator, which the episode's seed has set."""
        return f"<answer>{self._say(self.env.action_space.sample())}</answer>"

    def close(self) -> None:
        """Free the environment."""
        if self.env is not None:
            self.env.close()

    def _success(self, reported: Mapping[str, Any]) -> bool | None:
        """Return the success that the environment reports, else whether the return reaches the registered reward threshold."""
        own = reported.get("success", reported.get("is_success"))
        bound = self.env.spec.reward_threshold if self.env.spec else None
        return bool(own) if own is not None else None if bound is None else self.total >= bound

    def _named(self) -> dict[str, int]:
        space, given, inner = self.env.action_space, self.given, self.env.unwrapped
        if not isinstance(space, gymnasium.spaces.Discrete):
            return {}
        if given is None:
            meanings = getattr(inner, "get_action_meanings", None)  # arcade games
            given = meanings() if meanings else [each.name for each in getattr(inner, "actions", ())]  # grid worlds: an enum
        if not isinstance(given, Mapping):
            given = {str(name): int(space.start) + place for place, name in enumerate(given)}
        if strange := [name for name, number in given.items() if not space.contains(number)]:
            raise ConfigError(f"environment gymnasium:{self.name}: the action '{strange[0]}' is not {describe(space)}.")
        return {name.lower(): number for name, number in given.items()}

    def _how(self) -> str:
        space = self.env.action_space
        what = f"one of {', '.join(self.names)}" if self.names else describe(space)
        if isinstance(space, gymnasium.spaces.Dict):
            what = f"a JSON object with {what}"
        elif isinstance(space, (gymnasium.spaces.Tuple, gymnasium.spaces.Sequence)):
            what = f"a JSON list of {what}"
        example = copy.deepcopy(space)
        example.seed(0)  # the same example in every episode
        return f"Answer with {what}, like <answer>{self._say(example.sample())}</answer>."

    def _say(self, action: Any) -> str:
        by_number = {number: name for name, number in self.names.items()}
        return by_number[int(action)] if by_number else written(self.env.action_space, action)

    def _action(self, said: str) -> Any:
        found = {name for name in self.names if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", said.lower())}
        return self.names[found.pop()] if len(found) == 1 else read(self.env.action_space, said)

    def _show(self, observation: Any) -> str:
        if not self.render:
            return in_words(self.env.observation_space, observation)
        return COLOURED.sub(r"[\1]", str(self.env.render())).strip("\n")
