"""The built-in environments by name. Importing this module registers them."""

from __future__ import annotations

from typing import Any

from drumroll.envs import ENVIRONMENTS, Environment, frozen_lake, lookup, python_math, sokoban, tic_tac_toe, webshop
from drumroll.envs.adapters import adapted
from drumroll.errors import ConfigError

BUILT_IN = (frozen_lake, lookup, python_math, sokoban, tic_tac_toe, webshop)


def make(name: str, **settings: Any) -> Environment:
    """A new environment for one episode: built-in, an adapter's, or a user's own as `module:class`."""
    try:
        return (adapted(name) or ENVIRONMENTS.get(name))(**settings)
    except TypeError as error:
        raise ConfigError(f"environment {name}: it could not be made with the settings {settings}: {error}.") from error
