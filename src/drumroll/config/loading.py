"""From a YAML file and overrides to a checked config, remembering where each value was set.

No string is evaluated and no environment variable is read. The user's code is imported only for the config of a pipeline of
their own. Whatever is wrong becomes a `ConfigError` that names the file and line, the key, the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from drumroll.config.pipelines import DEFAULT, config_class
from drumroll.config.roles import BUILT_IN_MODELS
from drumroll.config.run import RunConfig
from drumroll.errors import ConfigError, did_you_mean

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
        raise ConfigError("\n".join(_sentence(e, top, origins or {}) for e in _relevant(error.errors()))) from None


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
        raise ConfigError(f"the value of override '{override}' is not valid YAML.") from None
    place = values
    *parents, last = key.split(".")
    for depth, parent in enumerate(parents):
        if depth == 0 and parent == "algorithm" and isinstance(values.get(parent), str):
            values[parent] = {"preset": values[parent]}  # what a name alone stands for
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise ConfigError(f"override '{override}': '{parent}' is a value, not a section.")
    place[last] = value
    for below in [k for k in origins if k.startswith(f"{key}.")]:
        del origins[below]
    origins[key] = f"override {override}"


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


def _relevant(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """A union reports every branch it tried; unknown keys say more than the branches' other complaints."""
    extra = [e for e in errors if e["type"] == "extra_forbidden"]
    return (extra or errors)[:5]


def _sentence(error: ErrorDetails, top: type[RunConfig], origins: Mapping[str, str]) -> str:
    location = [str(p) for p in error["loc"]]
    key = ".".join(location)
    where = next((origins[k] + ": " for k in _prefixes(key) if k in origins), "")
    if error["type"] == "extra_forbidden":
        known = _fields_at(top, location[:-1])
        prefix = ".".join(location[:-1])
        hint = did_you_mean(location[-1], known) or f" Keys {'of ' + prefix if prefix else 'at the top'}: {', '.join(known)}."
        return f"{where}unknown key '{key}'.{hint}"
    if error["type"] == "missing":
        return f"{where}the key '{key}' is missing."
    message = error["msg"].removeprefix("Value error, ")
    if not key:
        return f"{message}."
    return f"{where}{key}: {message[0].lower()}{message[1:]}, got {error['input']!r}."


def _prefixes(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def section_at(top: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """The config model that holds the keys at a dotted path (through dicts of sections), if there is one."""
    model: Any = top
    for part in path:
        field_info = model.model_fields.get(part) if isinstance(model, type) and issubclass(model, BaseModel) else None
        annotation = field_info.annotation if field_info else next(iter(get_args(model)[1:]), None)
        model = annotation
    return model if isinstance(model, type) and issubclass(model, BaseModel) else None


def _fields_at(top: type[BaseModel], path: Sequence[str]) -> list[str]:
    section = section_at(top, path)
    return list(section.model_fields) if section else []
