"""Workers of Ray, forked from one warm process: a worker starts in a fraction of a second instead of five.

Ray runs this file in the place of its own `setup_worker.py`. It sends its arguments, environment and streams to the warm
process, which has imported torch, transformers and our parts, and has never computed anything; a fork of that process
runs Ray's own `default_worker.py`. Both live as long as each other.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DOOR = "DRUMROLL_WARM_RAY"
"""Path of the socket at which the warm process is asked."""
PRELOADED = (
    "torch.distributed",
    "transformers.models.llama.modeling_llama",
    "drumroll.api",
    "drumroll.workers.ray_workers",
    "drumroll.learners.backends.torch",
)
"""Nothing of Ray: its library reads the environment of a worker when it is loaded."""


@contextmanager
def warm_workers() -> Iterator[dict[str, Any]]:
    """Start the warm process; gives the settings of a Ray node whose workers are forked from it."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[DOOR] = f"{folder}/door"
        quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        process = subprocess.Popen(
            [sys.executable, __file__], env=os.environ | quiet, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"warm\n"
            yield {"setup_worker_path": __file__}
        finally:
            process.kill()
            process.wait()
            del os.environ[DOOR]


def serve() -> None:
    """Fork a worker for everyone who asks, until the process that started this one closes its stdin or ends."""
    for name in PRELOADED:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(os.environ[DOOR])
        door.listen(64)
        print("warm", flush=True)
        while sys.stdin not in select.select([door, sys.stdin], [], [])[0]:
            asked, _ = door.accept()
            if os.fork() == 0:
                door.close()
                work(asked)
            asked.close()


def work(asked: socket.socket) -> None:
    """Become the worker that is asked for."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(socket.recv_fds(asked, 1, 3)[1]):
        os.dup2(stream, number)
        os.close(stream)
    with asked.makefile("rb") as text:
        arguments, environment, folder = json.loads(text.readline())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    threading.Thread(target=end_with, args=(asked,), daemon=True).start()
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    sys.exit()


def end_with(other: socket.socket) -> None:
    """End this process when the other one is gone."""
    other.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def start(arguments: list[str]) -> None:
    """Ask for a worker, and live as long as it does. One whose environment an interpreter must start with is started by Ray."""
    parser = ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, rest = parser.parse_known_args(arguments)
    context = json.loads(known.serialized_runtime_env_context)
    variables = context.pop("env_vars", {})
    own = context.pop("py_executable", sys.executable) != sys.executable or any(context.values())
    if own or "PYTHONPATH" in variables:
        original = Path(rest[0]).with_name("setup_worker.py")
        os.execv(sys.executable, [sys.executable, str(original), *arguments])
    with socket.socket(socket.AF_UNIX) as warm:
        warm.connect(os.environ[DOOR])
        socket.send_fds(warm, [b"."], [0, 1, 2])
        warm.sendall(json.dumps([rest, os.environ | variables, os.getcwd()]).encode() + b"\n")
        warm.recv(1)


if __name__ == "__main__":
    start(sys.argv[1:]) if sys.argv[1:] else serve()
