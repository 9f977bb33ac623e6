"""Walks the config models: every key there is, the section at a path, and the key that a pydantic error is about."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ANY_NAME, FIRST = "<name>", "0"
"""What stands in a listed key for a name of the user's own, and for the position in a list."""


def is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    """Whether a type is a section of the config."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def choices(annotation: Any) -> list[Any]:
    """The types that a value may have, without None."""
    if get_origin(annotation) is Annotated:
        return choices(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [one for part in get_args(annotation) for one in choices(part) if one is not type(None)]
    return [annotation]


def all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key of a config model, with those of optional sections, of lists and of sections by name."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        inner, place = held(field.annotation)
        if inner is not None:
            yield from all_keys(inner, f"{prefix}{name}.{place}")


def held(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """The section that a field has, itself or as entries of a list or mapping, and what stands before the section's keys."""
    found = choices(annotation)
    for one in found:
        if is_section(one):
            return one, ""
    for one in found:
        place = {list: f"{FIRST}.", dict: f"{ANY_NAME}."}.get(get_origin(one))
        if place is not None:
            inner, below = held(get_args(one)[-1])
            if inner is not None and not below:
                return inner, place
    return None, ""


def section_at(top: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """The section at a dotted path, also an optional one, one by name, or one in a list (where the position may be left out)."""
    here: list[Any] = [top]
    for part in path:
        here = _step(here, part)
    return next((one for one in here if is_section(one)), None)


def _step(here: list[Any], part: str) -> list[Any]:
    found: list[Any] = []
    for one in here:
        if is_section(one):
            field = one.model_fields.get(part)
            found += choices(field.annotation) if field else []
        elif get_origin(one) is dict:
            found += choices(get_args(one)[1])
        elif get_origin(one) is list:
            inner = choices(get_args(one)[0])
            found += inner if part.isdigit() else _step(inner, part)
    return found


def readable(top: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """The key that a pydantic error is about: its location without the names of the types that a union tried."""
    here, path = [top], list[str]()
    for part in map(str, location):
        if len(here) > 1 and (tagged := [one for one in here if _tag(one) == part.partition("[")[0]]):
            here = tagged
            continue
        path.append(part)
        here = _step(here, part)
    return path


def _tag(annotation: Any) -> str:
    return (
        getattr(get_origin(annotation) or annotation, "__name__", "").lower()
        if not is_section(annotation)
        else annotation.__name__
    )


def type_name(annotation: Any) -> str:
    """A type as a person writes it: `int | None`, `'draw' | 'arrival'`, `{name: DatasetConfig}`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(inner[0])
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(type_name, inner)))
    if origin is Literal:
        return " | ".join(map(repr, inner))
    if origin is list:
        return f"[{type_name(inner[0])}]"
    if origin is tuple:
        return f"[{', '.join(map(type_name, inner))}]"
    if origin is dict:
        return f"{{{'name' if inner[0] is str else type_name(inner[0])}: {type_name(inner[1])}}}"
    return "None" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))
