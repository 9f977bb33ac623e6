"""Parses a row's `tests` column into tests. Several forms are common:

- a list of `{"input", "output"}`, `{"call": {"function", "args", "expected"}}`, `{"assert": code}`, `{"pytest": code}`;
- a list of code: asserts, as in MBPP;
- `{"inputs": [...], "outputs": [...]}`, with `"fn_name"` for calls, as in APPS, TACO and verl;
- code: a pytest file if it defines `test_...`, as in KodCode, else one assert;
- any of these as JSON text.
"""

from __future__ import annotations

import json
import re
from typing import Any

from drumroll.errors import DataError
from drumroll.sandbox import Assert, Call, Pytest, Stdio, Test

TEST_FUNCTION = re.compile(r"^\s*(async\s+)?def test|^class Test", re.MULTILINE)


def read_tests(column: Any) -> list[Test]:
    """Return the tests of a row."""
    if isinstance(column, str):
        return read_tests(found) if (found := _json(column)) is not None else [_code(column)]
    if isinstance(column, dict):
        return _pairs(column) if "inputs" in column else [_test(column)]
    if isinstance(column, (list, tuple)) and column:
        return [_test(item) for item in column]
    raise DataError(f"`tests` must be a list of tests, a mapping or code, and not empty; got {column!r:.100}.")


def _json(text: str) -> Any:
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def _code(text: str) -> Test:
    return Pytest(text) if TEST_FUNCTION.search(text) else Assert(text)


def _test(item: Any) -> Test:
    if isinstance(item, str):
        return _code(item)
    given = {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else {}
    if "output" in given:
        return Stdio(_text(given.get("input", "")), _text(given["output"]))
    if "call" in given and {"function", "args"} <= set(given["call"]):
        call = given["call"]
        return Call(call["function"], call["args"], call.get("expected"))
    if "assert" in given:
        return Assert(str(given["assert"]))
    if "pytest" in given:
        return Pytest(str(given["pytest"]))
    raise DataError(
        f'A test must be {{"input", "output"}}, {{"call": {{"function", "args", "expected"}}}}, {{"assert"}} or {{"pytest"}}; got {item!r:.100}.'
    )


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _pairs(column: dict[str, Any]) -> list[Test]:
    pairs = list(zip(column["inputs"], column.get("outputs") or [], strict=False))
    if not pairs:
        raise DataError("`tests` has `inputs` without `outputs`.")
    if not (function := column.get("fn_name")):
        return [Stdio(_text(given), _text(wanted)) for given, wanted in pairs]
    return [Call(function, _arguments(given), _value(wanted)) for given, wanted in pairs]


def _arguments(given: Any) -> Any:
    """Parse arguments: a list, or text with JSON on each line."""
    return [_value(line) for line in given.splitlines()] if isinstance(given, str) else given


def _value(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text
