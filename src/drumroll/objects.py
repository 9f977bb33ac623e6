"""Objects that a Python program gives a run: functions, classes and rows. A config names them `python:NAME`.

`take` replaces the objects in a mapping by names. While a run uses them, `held` lets `registry.import_path` find them.
`pack` and `unpack` bring functions and classes to other processes, by cloudpickle. Rows stay in the controller.
"""

from __future__ import annotations

import inspect
import pickle
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from drumroll.errors import ConfigError

PREFIX = "python:"
NAMED = re.compile(r"(?:[\w.]+:)?python:\w+(?:\s*,\s*[\w.]+:\w+)*")
"""A config value that names objects: `python:NAME`, `agent:python:NAME`, `tools:python:NAME,python:NAME`."""
DATASETS = (("data", "train"), ("eval", "sets"))
AGENT_ARGUMENTS = {"client", "base_url"}
"""A function with one of these arguments is an agent, not the maker of an environment."""

_held: dict[str, Any] = {}
_users: Counter[str] = Counter()
_packed: dict[str, bytes | str] = {}  # an object as it travels, or the reason why it cannot


# --- from a mapping with objects to a config with names ---


def take(recipe: Mapping[str, Any], taken: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replace the objects in a config by names that are not `taken`; return the config, and the objects by name.

    A function or class of a module that can be imported gets the name `module:name`, by which a later resume finds it.
    """
    objects, folders = dict(taken), dict[str, None]()

    def name(value: Any, wish: str) -> str:
        if (found := _import_path(value)) is not None:
            path, folder = found
            folders[folder] = None
            return path
        free = (wish if n == 1 else f"{wish}_{n}" for n in range(1, len(objects) + 2))
        chosen = next(n for n in free if n not in objects or objects[n] is value)
        objects[chosen] = value
        return PREFIX + chosen

    def walk(value: Any, path: tuple[str, ...]) -> Any:
        if _is_source(path) and not isinstance(value, str | Path | None):
            return name(value, _name_of(value) if callable(value) else re.sub(r"\W", "_", path[-2]))
        if path[:2] in DATASETS and len(path) < 4 and hasattr(value, "__len__") and not isinstance(value, (Mapping, str)):
            raise ConfigError(f"{'.'.join(path)} is a {type(value).__name__}; give rows as {_example(path)}.")
        if isinstance(value, Mapping):
            return {key: walk(v, (*path, str(key))) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [walk(v, path) for v in value]
        if not callable(value):
            return value
        _check_place(value, path)
        return ("agent:" if _is_agent(value, path) else "") + name(value, _name_of(value))

    values = walk(recipe, ())
    if folders:
        values["import_from"] = [*(values.get("import_from") or ()), *folders]
    return values, {n: value for n, value in objects.items() if n not in taken}


def _import_path(value: Any) -> tuple[str, str] | None:
    """The `module:name` of a function or class, and the folder that the module is imported from; None for others."""
    module, name = _module(value), getattr(value, "__qualname__", "")
    folder = _folder(module) if module is not None and getattr(module, name, None) is value else None
    return None if module is None or folder is None else (f"{module.__name__}:{name}", folder)


def _module(value: Any) -> ModuleType | None:
    return sys.modules.get(getattr(value, "__module__", None) or "")


def _folder(module: ModuleType) -> str | None:
    """The folder of `sys.path` from which another process can import a module; None for `__main__` and others without one."""
    file, parts = getattr(module, "__file__", None), tuple(module.__name__.split("."))
    if file is None or parts == ("__main__",):
        return None
    place = Path(file).resolve().with_suffix("")
    place = place.parent if place.name == "__init__" else place
    folder = place.parents[len(parts) - 1]
    known = {str(Path(p).resolve()) for p in sys.path}
    return str(folder) if place.parts[-len(parts) :] == parts and str(folder) in known else None


def _is_source(path: tuple[str, ...]) -> bool:
    return len(path) == 4 and path[:2] in DATASETS and path[3] == "source"


def _example(path: tuple[str, ...]) -> str:
    return ".".join(path[:2]) + f": {{'{path[2] if len(path) > 2 else 'NAME'}': {{'source': rows}}}}"


def _is_agent(value: Any, path: tuple[str, ...]) -> bool:
    """Whether a callable that stands for an environment is an agent."""
    if inspect.isclass(value) or not (path == ("environment", "use") or (len(path) == 4 and path[3] == "environment")):
        return False
    return inspect.iscoroutinefunction(value) or not AGENT_ARGUMENTS.isdisjoint(inspect.signature(value).parameters)


def _check_place(value: Any, path: tuple[str, ...]) -> None:
    if inside := next((key for key in path if key.endswith("args")), None):
        raise ConfigError(
            f"{'.'.join(path)} is {_kind(value)} '{_name_of(value)}', but {inside} holds plain values only; "
            "bind it to the part itself, for example with functools.partial."
        )


def _name_of(value: Any) -> str:
    """A name for a callable: its own, or that of the function or class that it is made of."""
    while isinstance(value, partial):
        value = value.func
    own = getattr(value, "__name__", None) or type(value).__name__
    return re.sub(r"\W", "", own) or "function"


def named(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield the key and the name of every object that a config names."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from named(value, (*path, str(key)))
    elif isinstance(values, list):
        for value in values:
            yield from named(value, path)
    elif isinstance(values, str) and NAMED.fullmatch(values):
        yield from ((".".join(path), name) for name in re.findall(r"python:(\w+)", values))


def select(values: Any, objects: Mapping[str, Any], within: tuple[str, ...] = ("",)) -> dict[str, Any]:
    """Return the objects that a config names in the given sections; if one is missing, say which to pass."""
    wanted = [(key, name) for key, name in named(values) if key.startswith(within)]
    missing = dict.fromkeys(name for _, name in wanted if name not in objects)
    if missing:
        keys = " and ".join(dict.fromkeys(f"{key} is {PREFIX}{name}" for key, name in wanted if name in missing))
        raise ConfigError(f"{keys}: {_remedy(*missing)}")
    return {name: objects[name] for _, name in wanted}


def _remedy(*names: str) -> str:
    given = ", ".join(f"'{name}': ..." for name in names)
    return (
        f"only Python can give {'this object' if len(names) == 1 else 'these objects'}; pass objects={{{given}}} to drumroll.train, "
        "evaluate or rescore, or name a module:function or a file instead."
    )


# --- finding objects, here and in other processes ---


@contextmanager
def held(objects: Mapping[str, Any]) -> Generator[None]:
    """Keep objects findable by their names."""
    if other := next((n for n, value in objects.items() if _users[n] and _held[n] is not value), None):
        raise ConfigError(f"a run of this process still uses another object named '{other}'; wait for its end, or rename one.")
    _held.update(objects)
    _users.update(list(objects))
    try:
        yield
    finally:
        for name in objects:
            _users[name] -= 1
            if not _users[name]:
                del _held[name]
                _packed.pop(name, None)


def find(name: str, what: str) -> Any:
    """Return an object by its name."""
    sent = _packed.get(name)
    if name not in _held and isinstance(sent, bytes):
        try:
            _held[name] = pickle.loads(sent)
        except Exception as error:
            raise ConfigError(
                f"{what}: '{PREFIX}{name}' cannot be opened in another process: {type(error).__name__}: {error}."
            ) from error
    if name in _held:
        return _held[name]
    raise ConfigError(f"{what}: {_sealed(name, sent)}" if sent else f"{what} is {PREFIX}{name}: {_remedy(name)}")


def _sealed(name: str, reason: bytes | str) -> str:
    return (
        f"'{PREFIX}{name}' cannot be sent to another process: {reason!s}; make what it uses inside the function, "
        "or write it as a coroutine (async def), which runs in this process."
    )


def check_sent(name: str, what: str) -> None:
    """Refuse an object that other processes need and that cannot be sent to them."""
    if isinstance(reason := pack().get(name), str):
        raise ConfigError(f"{what}: {_sealed(name, reason)}")


def pack() -> dict[str, bytes | str]:
    """Return the functions and classes of this process as they travel to another; with one that cannot, the reason."""
    for name, value in _held.items():
        if name not in _packed and callable(value):
            _packed[name] = _pickled(value)
    return dict(_packed)


def _pickled(value: Any) -> bytes | str:
    import cloudpickle

    module = _module(value)
    lost = module is not None and module.__name__ != "__main__" and _folder(module) is None
    try:
        if lost:  # another process could not import it
            cloudpickle.register_pickle_by_value(module)
        return cloudpickle.dumps(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if lost:
            cloudpickle.unregister_pickle_by_value(module)


def unpack(packed: Mapping[str, bytes | str]) -> None:
    """Take over the objects of another process; each is opened when it is first asked for."""
    for name in packed.keys() & _held.keys() - +_users:
        del _held[name]
    _packed.update(packed)


# --- records ---


def describe(value: Any) -> dict[str, Any]:
    """Describe an object for the record of a run: its kind, and its source or its number of rows."""
    if not callable(value):
        return {"kind": _kind(value), "rows": len(value) if hasattr(value, "__len__") else None}
    try:
        source = textwrap.dedent(inspect.getsource(value.func if isinstance(value, partial) else value))
    except (OSError, TypeError):
        source = None
    return {"kind": _kind(value), "source": source}


def changed(recorded: Mapping[str, Any], objects: Mapping[str, Any]) -> list[str]:
    """The names of objects that a run describes in another way, or not at all."""
    return [name for name, value in objects.items() if recorded.get(name) != describe(value)]


def _kind(value: Any) -> str:
    if inspect.isclass(value):
        return "class"
    return "function" if inspect.isroutine(value) else type(value).__name__
