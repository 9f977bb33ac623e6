"""A Python function as a tool: its OpenAI schema, from type hints and docstring, and calls with validated arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from drumroll.errors import ConfigError

Schema = dict[str, Any]
DESCRIBED = re.compile(r"^\s*(?::param\s+(?:\S+\s+)*?)?(\w+)\s*(?:\([^)]*\))?\s*:\s*(\S.*)$")
"""A docstring line that describes a parameter: `name: text`, `name (int): text`, `:param name: text`."""
SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?)\s*:?\s*$")


class BadCall(Exception):
    """The arguments of a call do not fit the tool."""


class Tool:
    """A function with its schema; the first parameter of a `method` is left out."""

    def __init__(self, function: Callable[..., Any], *, method: bool = False) -> None:
        self.function = function
        self.method = method
        self.name = getattr(function, "__name__", type(function).__name__)
        about, described = _docstring(inspect.getdoc(function) or "")
        self.arguments = self._model(described)
        parameters = self.arguments.model_json_schema()
        for part in (parameters, *parameters.get("properties", {}).values()):
            part.pop("title", None)
        parameters.pop("additionalProperties", None)
        self.schema: Schema = {
            "type": "function",
            "function": {"name": self.name, "description": about, "parameters": parameters},
        }

    def _model(self, described: dict[str, str]) -> type[BaseModel]:
        """Make a model of the parameters; those without a type hint are strings."""
        fields: dict[str, Any] = {}
        try:
            hints = get_type_hints(self.function, include_extras=True)
            for name, parameter in list(inspect.signature(self.function).parameters.items())[self.method :]:
                if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                    raise ConfigError(
                        f"tool '{self.name}': the parameter '{name}' has no name of its own; tools are called by name."
                    )
                default = ... if parameter.default is parameter.empty else parameter.default
                fields[name] = (hints.get(name, str), Field(default, description=described.get(name)))
            model = create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)
            model.model_json_schema()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"tool '{self.name}': its type hints make no schema: {error}.") from error
        return model

    def bind(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Validate and convert the arguments; `BadCall` says what is wrong with them."""
        try:
            checked = self.arguments.model_validate(arguments)
        except ValidationError as error:
            raise BadCall("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())) from None
        return {name: getattr(checked, name) for name in type(checked).model_fields}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's description of the function, and of each parameter."""
    about: list[str] = []
    described: dict[str, str] = {}
    section = ""
    for line in text.splitlines():
        found = DESCRIBED.match(line)
        if heading := SECTION.match(line):
            section = heading[1]
        elif found and (section.startswith(("Arg", "Param")) or line.lstrip().startswith(":param")):
            described[found[1]] = found[2].strip()
        elif not section and not line.lstrip().startswith(":"):
            about.append(line)
    return "\n".join(about).strip(), described
