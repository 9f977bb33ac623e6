"""Names to parts: a registry per kind of part, and the import of a user's own by `module:function` or `python:NAME`."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

from drumroll import objects
from drumroll.errors import ConfigError, did_you_mean, user_frames

T = TypeVar("T")
TRAITS = "__drumroll_traits__"
"""Attribute of a part with its traits, which go with it to other processes."""


def search(folders: Iterable[str]) -> None:
    """Let modules of the user be found in these folders: after the standard library, before installed packages.

    Only verbs that run the user's code call this, and the loading of a recipe whose pipeline is the user's own. A file `random.py` beside a recipe replaces no module of Python.
    """
    own = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    library = own | {os.path.join(path, "lib-dynload") for path in own}
    last = max((at for at, path in enumerate(sys.path) if os.path.realpath(path) in library), default=len(sys.path) - 1)
    sys.path[last + 1 : last + 1] = [folder for folder in dict.fromkeys(folders) if folder not in sys.path]


def import_path(path: str, what: str) -> Any:
    """The object that `module:name` or `python:NAME` names; every way to miss it has its own sentence."""
    if path.startswith(objects.PREFIX):
        return objects.find(path.removeprefix(objects.PREFIX), what)
    module_name, _, name = path.partition(":")
    if "/" in module_name or module_name.endswith(".py"):
        plain = module_name.removeprefix("./").removesuffix(".py").replace("/", ".")
        raise ConfigError(f"{what}: '{path}' names a file; a module's name has dots and no .py, for example {plain}:{name}.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{what}: there is no module '{module_name}' (looked beside the recipe, in the current directory and in the environment)."
            ) from None
        raise ConfigError(f"{what}: importing '{module_name}' failed: {error}.") from error
    except Exception as error:
        text = f"{what}: importing '{module_name}' failed: {type(error).__name__}: {error}."
        raise ConfigError("\n".join(filter(None, (text, user_frames(error))))) from error
    if not hasattr(module, name):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(f"{what}: module '{module_name}' has no '{name}'.{did_you_mean(name, names)}")
    return getattr(module, name)


class Registry(Generic[T]):
    """Parts of one kind by name. `@registry.register("name")` adds one; `get` also takes `module:function`."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.parts: dict[str, T] = {}
        self._traits: dict[Any, dict[str, Any]] = {}

    def register(self, name: str, **traits: Any) -> Callable[[T], T]:
        """Decorator that files a part under a name, with what others must know of it."""

        def add(part: T) -> T:
            assert name not in self.parts, f"{self.what} '{name}' is registered twice"
            self.parts[name] = part
            self._traits[part] = traits
            with suppress(AttributeError, TypeError):
                setattr(part, TRAITS, traits)
            return part

        return add

    def get(self, name: str) -> T:
        """The part by name or import path."""
        if name in self.parts:
            return self.parts[name]
        if ":" in name:
            part: Any = import_path(name, self.what)
            if callable(part):
                return cast(T, part)
            raise ConfigError(f"{self.what}: '{name}' is of type {type(part).__name__}, not a function.")
        known = ", ".join(sorted(self.parts))
        raise ConfigError(
            f"{self.what}: '{name}' is not known; choose one of {known}, or name your own as module:function.{did_you_mean(name, self.parts)}"
        )

    def traits(self, name: str) -> dict[str, Any]:
        """What a part declared of itself; nothing for a plain function."""
        part = self.get(name)
        own = getattr(part, "__dict__", {}).get(TRAITS, {})  # not those of a base class
        return self._traits.get(part, own) if isinstance(part, Hashable) else own
