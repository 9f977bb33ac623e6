"""What a key means, what it is now and who set it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from drumroll.config.keys import all_keys, held, section_at, type_name
from drumroll.config.loading import Loaded
from drumroll.config.pipelines import DEFAULT, config_class
from drumroll.config.suggest import suggestion
from drumroll.errors import ConfigError

__all__ = ["all_keys", "explain"]


def explain(key: str, loaded: Loaded | None, pipeline: str = DEFAULT) -> str:
    """Meaning, type, default, and (with a recipe) the value and where it is set. A section lists its keys."""
    *path, last = key.split(".")
    top = type(loaded.config) if loaded else config_class(pipeline)
    parent = section_at(top, path)
    field = parent.model_fields.get(last) if parent else None
    if field is None:
        section = section_at(top, [*path, last])
        if section is None:
            raise ConfigError(f"there is no key '{key}'.{suggestion(top, path, last, whole=True)}")
        return _section(key, section)
    lines = [f"{key}: {type_name(field.annotation)}", f"  {field.description or ''}", f"  default: {_default(field)}"]
    if loaded is not None:
        value: Any = loaded.config
        for part in key.split("."):
            value = _inside(value, part)
        shown = "(section)" if isinstance(value, BaseModel) else repr(value)
        above = (loaded.origins.get(k, "") for k in _upwards(key)[1:])
        origin = loaded.origins.get(key) or next((o for o in above if o.startswith("override")), "default")
        lines.append(f"  value:   {shown}, set by {origin}")
    section, place = held(field.annotation)
    return "\n".join(lines) + (f"\n{_section(f'{key}.{place}'.rstrip('.'), section)}" if section else "")


def _inside(value: Any, part: str) -> Any:
    if isinstance(value, list):
        return value[int(part)] if part.isdigit() and int(part) < len(value) else None
    return value.get(part) if isinstance(value, dict) else getattr(value, part, None)


def _section(key: str, section: type[BaseModel]) -> str:
    rows = [
        (f"{key}.{name}", _default(field), (field.description or "").split("\n")[0])
        for name, field in section.model_fields.items()
    ]
    width = max(len(name) for name, _, _ in rows)
    return "\n".join(f"  {name:<{width}}  {default:<12}  {text}" for name, default, text in rows)


def _upwards(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "(required)" if field.default_factory is None else "(made anew)"
    return "(section)" if isinstance(field.default, BaseModel) else repr(field.default)
