"""The process that runs the tests. The program's names are `Remote` objects here; it writes a verdict for each test."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import math
import os
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from .link import Gone, Link, Remote, call, receive, send
from .program import settle

PROGRAM_ENDED = "the program ended before its tests"
MODULES = "cmath collections copy datetime decimal fractions functools itertools json math operator os random re statistics sys time typing"
ALWAYS_OWN = {"pytest", "solution", *dir(builtins), *MODULES.split()}
"""Names that mean the same in every assert, even if a program redefines them."""
LINK_IN, LINK_OUT, VERDICTS = 3, 4, 5
PYTEST_FILE = "/test_program.py"
PYTEST_OPTIONS = ["--noconftest", "--assert=plain", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:terminal"]


def be(limits: dict[str, Any], private: dict[str, Any]) -> NoReturn:
    """Run all tests, or those up to the first that fails."""
    settle(limits)
    link = Link(LINK_IN, LINK_OUT, {"call": call, "next": next})
    try:
        names = _names(link)
        solution = types.ModuleType("solution")
        fit = {k: v for k, v in names.items() if _fit_for_star(k)}
        vars(solution).update({**names, "__all__": list(fit)})
        sys.modules["solution"] = solution
        namespace = {"__name__": "tests", **fit, **{name: importlib.import_module(name) for name in MODULES.split()}}
        for test in private["tests"]:
            if "pytest" in test:
                _pytest(link, test["pytest"])
            elif not _one(link, test, names, namespace) and private["stop"]:
                break
    except Gone:
        pass
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(0)


def _names(link: Link) -> dict[str, Any]:
    """Return the names that the program defines; a module is imported here by its own name."""
    hello = receive(LINK_IN)
    if "names" not in hello:
        raise Gone
    names: dict[str, Any] = {}
    for name, data in hello["names"].items():
        try:
            module = isinstance(data, list) and data[0] == "module"
            names[name] = importlib.import_module(data[1]) if module else link.unpack(data)
        except Exception:
            continue
    return names


def _fit_for_star(name: str) -> bool:
    """Return whether `from solution import *` may import a name: not one that tests use themselves, or that pytest collects."""
    return name not in ALWAYS_OWN and not name.startswith(("test", "Test", "pytest"))


def _verdict(passed: bool, why: str = "") -> None:
    send(VERDICTS, {"passed": passed, "why": why[:500]})


def _one(link: Link, test: dict[str, Any], names: dict[str, Any], namespace: dict[str, Any]) -> bool:
    try:
        if "call" in test:
            why = _wrong(link.unpack(test["call"]), names)
        else:
            exec(compile(test["assert"], "test", "exec"), namespace)
            why = ""
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
    why = PROGRAM_ENDED if link.gone else why
    _verdict(not why, why)
    return not why


def _wrong(test: dict[str, Any], names: dict[str, Any]) -> str:
    """Return why the function's value is not the expected one; empty if it is."""
    name: str = test["function"]
    first, *path = name.split(".")
    if first not in names and "Solution" in names:
        function = getattr(names["Solution"](), name)
    elif first in names:
        function = names[first]
        for part in path:
            function = getattr(function() if isinstance(function, Remote) else function, part)
    else:
        return f"the program defines no '{name}'"
    args = test["args"]
    value = function(**args) if isinstance(args, dict) else function(*args)
    if isinstance(value, Remote):
        value = list(value)
    return "" if same(value, test["expected"]) else f"{name} returned {value!r:.200}"


def same(value: Any, expected: Any) -> bool:
    """Compare as JSON does: tuples equal lists, keys are text, sets have no order; floats may differ by a millionth."""
    if isinstance(expected, (list, tuple)):
        if isinstance(value, (set, frozenset)):
            return len(value) == len(expected) and all(v in value for v in expected)
        fits = isinstance(value, (list, tuple)) and len(value) == len(expected)
        return fits and all(same(v, e) for v, e in zip(value, expected, strict=True))
    if isinstance(expected, dict) and isinstance(value, dict):
        if all(isinstance(k, str) for k in expected) and len({str(k) for k in value}) == len(value):
            value = {str(k): v for k, v in value.items()}
        return value.keys() == expected.keys() and all(same(v, expected[k]) for k, v in value.items())
    if isinstance(expected, float) or isinstance(value, float):
        numbers = isinstance(value, (int, float)) and isinstance(expected, (int, float))
        return numbers and (value == expected or math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9))
    return bool(value == expected)


class _Recorder:
    """A pytest plugin that writes each test's verdict as it arrives."""

    def __init__(self, gone: Callable[[], bool]) -> None:
        self.gone = gone
        self.failed: set[str] = set()

    def pytest_collection_finish(self, session: Any) -> None:
        send(VERDICTS, {"collected": len(session.items)})

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "setup" and report.skipped:
            send(VERDICTS, {"collected": -1})
        elif report.when == "call" and report.passed and not self.gone():
            _verdict(True)
        elif (report.failed or report.when == "call") and report.nodeid not in self.failed:
            self.failed.add(report.nodeid)
            _verdict(False, PROGRAM_ENDED if self.gone() else f"{report.nodeid.rpartition('::')[2]}: {report.longreprtext}")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            _verdict(False, PROGRAM_ENDED if self.gone() else report.longreprtext)


def _pytest(link: Link, text: str) -> None:
    import pytest  # loaded before the fork

    sys.modules["tests"] = module = types.ModuleType("tests")
    vars(module)["text"] = text
    path = PYTEST_FILE if os.path.exists(PYTEST_FILE) else os.path.abspath(PYTEST_FILE[1:])
    pytest.main([path, "-c", os.devnull, "--rootdir", os.path.dirname(path), *PYTEST_OPTIONS], [_Recorder(lambda: link.gone)])
