"""From a YAML file and overrides to a checked config, remembering where each value was set.

No string is evaluated and no environment variable is read. The user's code is imported only for the config of a pipeline of
their own. Whatever is wrong becomes a `ConfigError` that names the file and line, the key, the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from drumroll.config.keys import FIRST, readable, section_at
from drumroll.config.pipelines import DEFAULT, config_class
from drumroll.config.roles import BUILT_IN_MODELS
from drumroll.config.run import RunConfig
from drumroll.config.suggest import suggestion
from drumroll.errors import ConfigError

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


@dataclass
class Loaded:
    """A config and, per dotted key, the place that set it."""

    config: RunConfig
    origins: dict[str, str] = field(default_factory=dict)


def load(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Loaded:
    """Read a recipe (a file, or a mapping from Python), apply `key=value` overrides, check everything."""
    origins: dict[str, str] = {}
    base = Path.cwd()
    if isinstance(source, Mapping):
        values = _plain(source)
    else:
        path = Path(source)
        values = _read(path, origins)
        base = path.resolve().parent
    for override in sorted(overrides, key=lambda o: o.partition("=")[0].count(".")):  # a section before its keys
        _apply(values, override, origins)
    _resolve_paths(values, base)
    return Loaded(check(values, origins), origins)


def check(values: dict[str, Any], origins: Mapping[str, str] | None = None) -> RunConfig:
    """Validate plain values."""
    folders, pipeline = values.get("import_from"), values.get("pipeline", DEFAULT)
    top = config_class(pipeline, folders if isinstance(folders, list) else ())
    try:
        return top.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentences(error.errors(), top, origins or {}))) from None


def dump(config: RunConfig) -> str:
    """The resolved config as YAML, every key present."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(path: Path, origins: dict[str, str]) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        hint = "" if path.suffix else " Recipes are YAML files, for example recipes/quickstart/recipe.yaml."
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}.{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the recipe {path} is not a text file.") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _note_lines(node, path, "", origins)
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: a recipe is a mapping of keys to values, this is {'empty' if values is None else type(values).__name__}."
        )
    return values


def _note_lines(node: yaml.Node | None, path: Path, prefix: str, origins: dict[str, str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        where = f"{path}:{key.start_mark.line + 1}"
        if name in origins:
            raise ConfigError(f"{where}: the key '{name}' is set twice; the first time at {origins[name]}.")
        origins[name] = where
        _note_lines(value, path, f"{name}.", origins)


def _apply(values: dict[str, Any], override: str, origins: dict[str, str]) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise ConfigError(f"'{override}' is not an override; write key=value, for example optim.lr=1e-5.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(
            f"the value of override '{override}' is not valid YAML: close what it opens, and quote it for the shell."
        ) from None
    place = values
    *parents, last = key.split(".")
    for depth, (parent, below) in enumerate(pairwise([*parents, last])):
        if depth == 0 and parent == "algorithm" and isinstance(values.get(parent), str):
            values[parent] = {"preset": values[parent]}  # what a name alone stands for
        place = _inside(place, parent, override, [] if below.isdigit() else {})
        if not isinstance(place, (dict, list)):
            raise ConfigError(f"override '{override}': '{parent}' is a value, not a section.")
    if isinstance(place, list):
        _inside(place, last, override, {})
        place[int(last)] = value
    else:
        place[last] = value
    for below in [k for k in origins if k.startswith(f"{key}.")]:
        del origins[below]
    origins[key] = f"override {override}"


def _inside(place: dict[str, Any] | list[Any], part: str, override: str, missing: Any) -> Any:
    """What is at a key, or at a position of a list; `missing` is put where nothing is, also after the last of a list."""
    if isinstance(place, dict):
        if place.get(part) is None:  # also an optional section that a run's config has as null
            place[part] = missing
        return place[part]
    if not part.isdigit() or int(part) > len(place):
        raise ConfigError(f"override '{override}': '{part}' is no position in a list of {len(place)}; the first is 0.")
    if int(part) == len(place):
        place.append(missing)
    return place[int(part)]


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def _resolve_paths(values: dict[str, Any], base: Path) -> None:
    """Files, models and modules named in a recipe are found from the current directory or beside the recipe.

    Their paths become absolute: workers, and a later resume, may run elsewhere.
    """
    folders = values.get("import_from") or []
    if isinstance(folders, list):
        found = [str(base), str(Path.cwd()), *(str((base / f).resolve()) for f in folders)]
        values["import_from"] = list(dict.fromkeys(found))
    rows = values.get("demonstrations")
    rows = rows.get("data") if isinstance(rows, dict) else None
    for section, key in ((values.get("data"), "train"), (values.get("eval"), "sets"), (rows, "train")):
        sets = section.get(key) if isinstance(section, dict) else None
        for dataset in sets.values() if isinstance(sets, dict) else ():
            source = dataset.get("source") if isinstance(dataset, dict) else None
            if not isinstance(source, str):
                continue
            here, beside = Path(source).expanduser(), base / source
            if source.endswith(FILE_SUFFIXES) or here.is_dir() or beside.is_dir():
                dataset["source"] = str((beside if not here.exists() and beside.exists() else here).resolve())

    roles = values.get("roles")
    named = [values, *(roles.values() if isinstance(roles, dict) else ())]
    teachers = [role.get("domains") for role in named if isinstance(role, dict)]
    for section in (*named, *(own for domains in teachers if isinstance(domains, dict) for own in domains.values())):
        name = section.get("model") if isinstance(section, dict) else None
        if isinstance(name, str) and name not in BUILT_IN_MODELS:
            here, beside = Path(name).expanduser(), base / name
            if found := next((path for path in (here, beside) if path.exists()), None):
                exported = found / "model"  # of a run's directory
                section["model"] = str((exported if (exported / "config.json").exists() else found).resolve())


def _sentences(errors: list[ErrorDetails], top: type[RunConfig], origins: Mapping[str, str]) -> list[str]:
    """One sentence for each key. A union reports every branch that it tried: unknown keys say more than other complaints,
    and those of a branch that lacks a key, or that lie above another's, least.
    """
    lacking = {e["loc"][:-1] for e in errors if e["type"] == "missing"}
    extra = [e for e in errors if e["type"] == "extra_forbidden"]
    chosen = [e for e in extra if e["loc"][:-1] not in lacking] or extra or errors
    by_key = {tuple(readable(top, e["loc"])): e for e in reversed(chosen)}
    keys = [key for key in reversed(by_key) if not any(other[: len(key)] == key != other for other in by_key)]
    return [_sentence(list(key), by_key[key], top, origins) for key in keys[:5]]


def _sentence(location: list[str], error: ErrorDetails, top: type[RunConfig], origins: Mapping[str, str]) -> str:
    key = ".".join(location)
    below = (k for k in origins if k.startswith(f"{key}."))
    set_at = next((k for k in (*_prefixes(key), *below) if k in origins), None)
    where = f"{origins[set_at]}: " if set_at else ""
    if error["type"] == "extra_forbidden":
        return f"{where}unknown key '{key}'.{suggestion(top, location[:-1], location[-1], error['input'])}"
    if error["type"] == "missing":
        return f"{where}the key '{key}' is missing; `drumroll explain {key}` says what it is."
    message = _message(location, error, top)
    if not key:
        return f"{message}."
    named = message if message.startswith(f"{location[0]}.") else f"{key}: {message[0].lower()}{message[1:]}"
    given, said = error["input"], error["type"] == "value_error"  # our own sentences name what they are about
    shown = "" if said and (isinstance(given, dict) or (isinstance(given, str) and given in message)) else f", got {given!r}"
    return f"{where}{named}{shown}".rstrip(".") + "." * (not named.endswith("?") or bool(shown))


def _message(location: list[str], error: ErrorDetails, top: type[RunConfig]) -> str:
    """What is wrong with a value, and what it should be."""
    section = section_at(top, [*location, FIRST])
    if error["type"] == "model_type" and (own := section_at(top, location)):
        return f"it is a section with the keys {', '.join(own.model_fields)}"
    if error["type"] == "dict_type" and section:
        return f"it has names, each with a section, for example {{my_name: {{{next(iter(section.model_fields))}: ...}}}}"
    if error["type"] in ("list_type", "tuple_type"):
        return (
            f"it is a list, for example [{error['input']!r}]"
            if not section
            else f"it is a list of sections, for example [{error['input']}]"
        )
    return error["msg"].removeprefix("Value error, ")


def _prefixes(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
