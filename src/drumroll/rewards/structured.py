"""`json_schema` and `tool_call`: completions that must be data of a given form."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from drumroll.rewards import REWARDS, Processes
from drumroll.rewards.extraction import after_thinking

SECONDS = 5.0
"""CPU time; a schema that needs more fails the sample."""


@REWARDS.register("json_schema", requires=("jsonschema", "json"))
async def json_schema(completion: str, schema: Mapping[str, Any] | str, processes: Processes) -> float:
    """1 when the completion is JSON (alone, in a fenced block, or after some words) that the schema accepts."""
    arguments = {"text": completion, "schema": schema if isinstance(schema, str) else json.dumps(schema)}
    return float(await processes.run("drumroll.rewards.schemas:accepts", arguments, SECONDS, cpu=True))


@REWARDS.register("tool_call")
def tool_call(completion: str, answer: Any, fraction: bool = False) -> float:
    """1 when the calls made are those of `answer` in any order: `{name, arguments}`, or a list of them.

    With `fraction`, the share that was right, of those made or wanted, whichever are more.
    """
    wanted = Counter(map(_call, _listed(load_json(answer if isinstance(answer, str) else json.dumps(answer)))))
    try:
        made = Counter(map(_call, _calls_in(after_thinking(completion))))
    except (ValueError, RecursionError):
        return 0.0
    right = (wanted & made).total()
    return right / max(1, wanted.total(), made.total()) if fraction else float(wanted == made)


def find_json(text: str) -> Any:
    """The JSON in a text: all of it, or its last fenced block, or what its first bracket opens. `ValueError` if none."""
    text = text.strip()
    with suppress(ValueError):
        return load_json(text)
    if text.count("```") >= 2:
        block = text.rpartition("```")[0].rpartition("```")[2]
        return load_json(block.partition("\n")[2] if block[:1] not in "{[" else block)
    starts = [i for i in (text.find("{"), text.find("[")) if i >= 0]
    if not starts:
        raise ValueError("there is no JSON")
    return _decoder.raw_decode(text, min(starts))[0]


def _calls_in(text: str) -> list[Any]:
    """The calls in <tool_call> tags, or else the JSON of the text."""
    if "<tool_call>" in text:
        return [load_json(part.partition("</tool_call>")[0]) for part in text.split("<tool_call>")[1:]]
    return _listed(find_json(text))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _call(value: Any) -> str:
    """A call as text that is equal for equal calls. Arguments may be JSON in a string, as in OpenAI's form."""
    if isinstance(value, dict):
        value = value.get("function", value)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call has a name and arguments")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = load_json(arguments)
    return json.dumps([value["name"], arguments or {}], sort_keys=True)


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_float=_number, parse_constant=_refuse)


def load_json(text: str) -> Any:
    """Strict JSON, without NaN; a whole float is an int."""
    return _decoder.decode(text)
