"""What a key means, what it is now and who set it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from drumroll.config.loading import Loaded, section_at
from drumroll.config.pipelines import DEFAULT, config_class
from drumroll.errors import ConfigError, did_you_mean


def explain(key: str, loaded: Loaded | None, pipeline: str = DEFAULT) -> str:
    """Meaning, type, default, and (with a recipe) the value and where it is set. A section lists its keys."""
    *path, last = key.split(".")
    top = type(loaded.config) if loaded else config_class(pipeline)
    parent = section_at(top, path)
    field = parent.model_fields.get(last) if parent else None
    if field is None:
        section = section_at(top, [*path, last])
        if section is None:
            known = [name for name, _ in all_keys(top)]
            ending = min((k for k in known if k.endswith(f".{key}")), key=len, default=None)
            hint = f" Did you mean '{ending}'?" if ending else did_you_mean(key, known)
            raise ConfigError(f"there is no key '{key}'.{hint}")
        return _section(key, section)
    lines = [f"{key}: {_type_name(field)}", f"  {field.description or ''}", f"  default: {_default(field)}"]
    if loaded is not None:
        value: Any = loaded.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
            if value is None:
                break
        shown = "(section)" if isinstance(value, BaseModel) else repr(value)
        above = (loaded.origins.get(k, "") for k in _upwards(key)[1:])
        origin = loaded.origins.get(key) or next((o for o in above if o.startswith("override")), "default")
        lines.append(f"  value:   {shown}, set by {origin}")
    section = section_at(top, [*path, last])
    return "\n".join(lines) + (f"\n{_section(key, section)}" if section else "")


def _section(key: str, section: type[BaseModel]) -> str:
    rows = [
        (f"{key}.{name}", _default(field), (field.description or "").split("\n")[0])
        for name, field in section.model_fields.items()
    ]
    width = max(len(name) for name, _, _ in rows)
    return "\n".join(f"  {name:<{width}}  {default:<12}  {text}" for name, default, text in rows)


def all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key of a config model, sections included."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from all_keys(field.annotation, f"{prefix}{name}.")


def _upwards(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _type_name(field: FieldInfo) -> str:
    annotation = field.annotation
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return text.replace("typing.", "").replace("drumroll.config.", "")


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "(required)" if field.default_factory is None else "(made anew)"
    return "(section)" if isinstance(field.default, BaseModel) else repr(field.default)
