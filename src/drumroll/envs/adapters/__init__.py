"""Adapters: environments of other libraries, and tools, under names like `gymnasium:FrozenLake-v1`.

What stands before the first colon names the adapter, the rest is the library's own name. An adapter's module is imported
when it is first used, and its library with it; one that is not installed is told with the command that installs it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

from drumroll.envs import Environment
from drumroll.errors import MissingExtra
from drumroll.registry import import_path


class Adapter(NamedTuple):
    """Where an adapter is, where its episodes run, the package it needs and the extra that brings it."""

    path: str
    runs: str
    package: str | None = None
    extra: str = ""


ADAPTERS = {
    "gymnasium": Adapter("drumroll.envs.adapters.gymnasium:Gymnasium", "process", "gymnasium", "gym"),
    "gem": Adapter("drumroll.envs.adapters.gem:Gem", "process", "gem", "gem"),
    "textarena": Adapter("drumroll.envs.adapters.textarena:TextArena", "process", "textarena", "textarena"),
    "reasoning_gym": Adapter("drumroll.envs.adapters.reasoning_gym:Reasoning", "process", "reasoning_gym", "reasoning-gym"),
    "openenv": Adapter("drumroll.envs.adapters.openenv:OpenEnv", "inline", "websockets", "openenv"),
    "trl": Adapter("drumroll.envs.adapters.trl:ToolClass", "process"),
    "tools": Adapter("drumroll.envs.adapters.tools:Functions", "process"),
    "mcp": Adapter("drumroll.envs.adapters.mcp:Mcp", "thread", "mcp", "mcp"),
}
OWN_CODE = ("tools", "trl")
"""Adapters of `module:name`; with one colon only, the user has a module of that name."""


def adapter_of(use: str) -> Adapter | None:
    """The adapter that a name asks for, if any."""
    kind, _, name = use.partition(":")
    return ADAPTERS.get(kind) if name and (kind not in OWN_CODE or ":" in name) else None


def adapted(use: str) -> Callable[..., Environment] | None:
    """What makes the environment of such a name, or None for a name of another kind."""
    adapter = adapter_of(use)
    if adapter is None:
        return None
    if adapter.package is not None and importlib.util.find_spec(adapter.package) is None:
        raise MissingExtra(f"The environment {use}", adapter.extra)
    return functools.partial(import_path(adapter.path, "environment"), use.partition(":")[2])
