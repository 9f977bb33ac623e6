"""Adapters: environments of other libraries, and tools, under names like `gymnasium:FrozenLake-v1`.

The text before the first colon names the adapter, the rest is the library's own name. An adapter's module and its
library are imported on first use. If the library is not installed, the error names the command that installs it.
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
    """The import path of an adapter, where its episodes run, the package it needs, and the extra that installs the package."""

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
"""Adapters whose name is `module:name`. With only one colon, the prefix is a module of the user's."""

WITH_TOOLS = ("tools", "trl", "mcp")
"""Adapters whose environments show tools to the policy."""


def has_tools(use: str) -> bool:
    """Return whether a name refers to an adapter that shows tools."""
    return adapter_of(use) is not None and use.partition(":")[0] in WITH_TOOLS


def adapter_of(use: str) -> Adapter | None:
    """Return the adapter that a name refers to, or None."""
    kind, _, name = use.partition(":")
    return ADAPTERS.get(kind) if name and (kind not in OWN_CODE or ":" in name) else None


def adapted(use: str) -> Callable[..., Environment] | None:
    """Return a factory for the environment if the name refers to an adapter, else None."""
    adapter = adapter_of(use)
    if adapter is None:
        return None
    if adapter.package is not None and importlib.util.find_spec(adapter.package) is None:
        raise MissingExtra(f"The environment {use}", adapter.extra)
    return functools.partial(import_path(adapter.path, "environment"), use.partition(":")[2])
