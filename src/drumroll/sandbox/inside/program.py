"""The process of the code under test. Its output is never trusted; it can only print and answer calls."""

from __future__ import annotations

import atexit
import io
import math
import os
import resource
import sys
import threading
import traceback
import types
from typing import Any, NoReturn

from .link import OPERATIONS, Link, send

MEMORY_EXIT = 97
"""Exit code of a program that ran out of memory."""


def settle(limits: dict[str, Any]) -> None:
    """Start a new session, open streams on the descriptors 0, 1 and 2, and set the kernel's limits."""
    os.setsid()
    sys.stdin = _stream(0, "r", "surrogateescape")
    sys.stdout = sys.__stdout__ = _stream(1, "w", "surrogateescape")
    sys.stderr = sys.__stderr__ = _stream(2, "w", "backslashreplace", 1)
    memory, files, cpu = limits["memory_mb"] << 20, limits["file_mb"] << 20, math.ceil(limits["seconds"]) + 1
    kinds = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_FSIZE: files,
        resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_CORE: 0,
    }
    if limits["contained"]:  # outside a box it would count all processes of the user
        kinds[resource.RLIMIT_NPROC] = limits["processes"] + 4
    for kind, most in kinds.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        last = most + 1 if kind == resource.RLIMIT_CPU and most != hard else most  # SIGXCPU, which says why, before SIGKILL
        resource.setrlimit(kind, (most, last))


def _stream(fd: int, mode: str, errors: str, buffering: int = -1) -> Any:
    return open(fd, mode, buffering, "utf-8", errors, closefd=False)


def be(job: dict[str, Any]) -> NoReturn:
    """Run the program on the descriptors 0, 1 and 2; if its functions are to be called, answer on 3 and 4."""
    called = job["mode"] == "exam"
    settle(job["limits"])
    sys.argv = ["program.py"]
    name = "solution" if called else "__main__"
    module = types.ModuleType(name)
    sys.modules[name] = module
    code = _run(job["program"], module)
    if called:
        _answer(module, code)
    _leave(code)


def _run(source: str, module: types.ModuleType) -> int:
    try:
        exec(compile(source, "program.py", "exec"), module.__dict__)
    except SystemExit as stop:
        return _exit_code(stop)
    except MemoryError:
        return MEMORY_EXIT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return (stop.code or 0) & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _leave(code: int) -> NoReturn:
    """Exit like an interpreter: threads, then exit functions, then buffers; but without freeing every object."""
    try:
        threading._shutdown()  # pyrefly: ignore[missing-attribute]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except MemoryError:
        code = MEMORY_EXIT
    except BaseException:
        code = code or 1
    os._exit(code)


def _answer(module: types.ModuleType, code: int) -> None:
    """Send the names that the program defines, then answer calls until the examiner is gone."""
    output = io.StringIO()

    def printed() -> str:
        text = output.getvalue()
        output.seek(0)
        output.truncate()
        return text

    link = Link(3, 4, OPERATIONS, printed)
    if code:
        send(4, {"broken": code})
        return
    names = {}
    for name, value in list(vars(module).items()):
        if isinstance(value, types.ModuleType):
            names[name] = ["module", value.__name__]
        elif not name.startswith("__"):
            names[name] = link.pack(value)
    send(4, {"names": names})
    sys.stdout = output
    link.serve()
