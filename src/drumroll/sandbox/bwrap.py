"""Sandbox boxes made by bubblewrap and kept ready: a run is a fork of a process that waits inside a box.

A box that dies, hangs or cannot be wiped clean is discarded with everything in it, and another takes its place.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from drumroll.config.sandbox import SandboxConfig
from drumroll.errors import ConfigError
from drumroll.processes.deadline import Deadline, RunTimeExceeded
from drumroll.sandbox import SandboxError, box, seccomp
from drumroll.sandbox.grading import Grader, Job, read_reply
from drumroll.sandbox.inside.supervisor import BEGUN
from drumroll.sandbox.inside.zygote import READY

TREE = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
TRIES = 3
GRACE = 15.0
"""Seconds of run time beyond its limit after which a run's box counts as hung."""
START_SECONDS = 60.0
FIRST_UID, UIDS = 61000, 180
"""User ids for boxes when we are root: a range that Debian and systemd leave free."""
UNSHARED = ("user", "ipc", "pid", "uts", "net", "cgroup-try")
INSTALL = "install it (apt-get install bubblewrap, or dnf install bubblewrap)"
OTHERWISE = (
    "or name another sandbox.backend: http (a SandboxFusion server), or unsafe-subprocess, "
    "which runs the programs with all your rights"
)


class BwrapSandbox(Grader):
    """Runs up to `workers` boxes, started on demand."""

    def __init__(self, config: SandboxConfig, struck: Counter[str] | None = None) -> None:
        super().__init__(config, struck)
        self.python = interpreter(config.python)
        self.workers = config.workers or os.cpu_count() or 1
        self.started = 0
        self.grace = GRACE
        self._idle: list[Box] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(self.workers)
        probe(self.python)

    @override
    async def carry(self, job: Job) -> dict[str, Any] | None:
        if job.needs_pytest:
            box.pytest()
        async with self._slots:
            for _ in range(TRIES):
                slot = self._idle.pop() if self._idle else await self._start()
                try:
                    reply = await slot.run(job, self.grace)
                except BoxLost:  # before the program began
                    self._end(slot)
                    continue
                except BaseException:
                    self._end(slot)
                    raise
                if slot.ready:
                    self._idle.append(slot)
                else:
                    self._end(slot)
                return reply
        raise SandboxError(f"{TRIES} boxes in a row were lost before a program began in them: is the machine out of memory?")

    async def _start(self) -> Box:
        self.started += 1
        uid = FIRST_UID + self.started % UIDS if os.geteuid() == 0 else None
        return await Box.start(self.python, uid)

    def _end(self, slot: Box) -> None:
        task = asyncio.ensure_future(slot.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    @override
    async def close(self) -> None:
        """End all boxes."""
        for slot in self._idle:
            self._end(slot)
        self._idle.clear()
        await asyncio.gather(*self._ending, return_exceptions=True)


class BoxLost(Exception):
    """A box ended before its program began."""


class Box:
    """One bubblewrap process, with a zygote inside."""

    def __init__(self, process: asyncio.subprocess.Process, first: int) -> None:
        self.process = process
        self.first = first
        self.ready = True

    @classmethod
    async def start(cls, python: str, uid: int | None) -> Box:
        """Start a box that waits for work."""
        with _files() as fds, _pipe() as (told, tell):
            command = arguments(python, fds, tell)
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(*fds.values(), tell),
                start_new_session=True,
                cwd="/",
                env={},
                **_user(uid),
            )
            assert process.stdout is not None
            try:
                async with asyncio.timeout(START_SECONDS):
                    greeting = await process.stdout.read(1)
                if greeting == READY:
                    return cls(process, json.loads(os.read(told, 4096))["child-pid"])
            except BaseException:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.communicate()
                raise
            _, said = await process.communicate()
            raise SandboxError(f"A box could not be started: {said.decode(errors='replace').strip()[-500:]}")

    async def run(self, job: Job, grace: float) -> dict[str, Any] | None:
        """Run a job and return its reply. A caller that cancels this must end the box."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        self.ready, begun, reply = False, False, None

        async def talk() -> None:
            nonlocal begun, reply
            stdin.write(job.message())
            begun = await stdout.readexactly(1) == BEGUN
            reply = await read_reply(stdout)
            self.ready = await stdout.readexactly(1) == READY

        try:
            await Deadline(job.limits.seconds + grace).wait(talk(), self.first)
        except RunTimeExceeded:
            return reply or {"late": True}
        except (asyncio.IncompleteReadError, ConnectionError):
            if not begun:
                raise BoxLost from None
        return reply

    async def end(self) -> None:
        """Kill the box's first process, and so all others; bubblewrap, which waits for it, then ends too."""
        assert self.process.stdin is not None
        with suppress(ProcessLookupError):
            if self.process.returncode is None:
                os.kill(self.first, signal.SIGKILL)
        with suppress(ConnectionError):
            await self.process.communicate()


def arguments(python: str, fds: dict[str, int], tell: int, command: tuple[str, ...] = ("/box.zip",)) -> list[str]:
    """Return the command that makes a box: nothing shared, a read-only tree, a small /tmp in memory, no capabilities."""
    made = ["bwrap", *(f"--unshare-{kind}" for kind in UNSHARED), "--disable-userns", "--die-with-parent", "--new-session"]
    made += ["--cap-drop", "ALL", "--clearenv", "--hostname", "box", "--info-fd", str(tell), "--seccomp", str(fds["seccomp"])]
    for path in map(Path, TREE):
        if path.is_symlink():
            made += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            made += ["--ro-bind", str(path), str(path)]
    made += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for prefix in _prefixes(python):
        made += ["--ro-bind", prefix, prefix]
    for name in ("box.zip", "pytest.zip", "test_program.py"):
        if name in fds:
            made += ["--perms", "0444", "--ro-bind-data", str(fds[name]), f"/{name}"]
    made += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--size", str(64 << 20), "--tmpfs", "/tmp"]
    return [*made, "--chdir", "/tmp", "--remount-ro", "/", "--", python, "-I", "-B", "-X", "utf8", *command]


@functools.cache
def _prefixes(python: str) -> list[str]:
    """Return the folders of an interpreter that is outside the common tree."""
    if python.startswith("/usr/"):
        return []
    ask = "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"
    found = subprocess.run([python, "-I", "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    return [prefix for prefix in dict.fromkeys(found) if not prefix.startswith("/usr")]


def interpreter(named: str | None) -> str:
    """Return the path of the boxes' Python interpreter."""
    if named is None:
        return "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
    found = shutil.which(named)
    if found is None:
        raise ConfigError(f"sandbox.python: there is no interpreter '{named}'.")
    return os.path.abspath(found)


def probe(python: str) -> None:
    """Make a box once and report what prevents it."""
    if shutil.which("bwrap") is None:
        raise ConfigError(f"sandbox.backend: bwrap needs bubblewrap, which is not installed: {INSTALL}, {OTHERWISE}.")
    with _files() as fds, _pipe() as (_, tell):
        uid = FIRST_UID if os.geteuid() == 0 else None
        check = "import sys; sys.exit(sys.version_info < (3, 10) and 'sandbox.python must be Python 3.10 or newer')"
        command = arguments(python, fds, tell, ("-c", check))
        tried = subprocess.run(
            command, capture_output=True, text=True, env={}, cwd="/", pass_fds=(*fds.values(), tell), check=False, **_user(uid)
        )
    if tried.returncode != 0:
        said = tried.stderr.strip()[-300:] or f"exit code {tried.returncode}"
        raise ConfigError(
            f"sandbox.backend: bwrap cannot make a box here ({said}); it needs bubblewrap 0.8, unprivileged user namespaces and a Python "
            f"3.10 that all users may read (sandbox.python: {python}), {OTHERWISE}."
        )


def _user(uid: int | None) -> dict[str, Any]:
    return {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}


@contextmanager
def _files() -> Iterator[dict[str, int]]:
    """Yield the files that bubblewrap copies into a box, each as an open file in memory."""
    contents = {"seccomp": seccomp.program(), "box.zip": box.code("main")}
    if box.has_pytest():
        contents |= {"pytest.zip": box.pytest(), "test_program.py": box.STUB}
    fds: dict[str, int] = {}
    try:
        for name, data in contents.items():
            fds[name] = os.memfd_create(name)
            with open(fds[name], "wb", closefd=False) as file:
                file.write(data)
            os.lseek(fds[name], 0, os.SEEK_SET)
        yield fds
    finally:
        for fd in fds.values():
            os.close(fd)


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)
