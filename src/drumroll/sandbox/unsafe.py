"""Runs programs as plain processes with the rights of the user: for trusted programs on machines that cannot make a box."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from drumroll.config.sandbox import SandboxConfig
from drumroll.processes.deadline import Deadline, RunTimeExceeded
from drumroll.sandbox import box
from drumroll.sandbox.grading import Grader, Job, read_reply

GRACE = 30.0
LEAVE = 10.0
"""Seconds that a process has to end by itself."""


class UnsafeSandbox(Grader):
    """Starts a fresh interpreter for each run: limits hold for honest programs, and nothing is hidden from others."""

    def __init__(self, config: SandboxConfig, struck: Counter[str] | None = None) -> None:
        super().__init__(config, struck)
        self.python = config.python or sys.executable
        self._slots = asyncio.Semaphore(config.workers or os.cpu_count() or 1)

    @override
    async def carry(self, job: Job) -> dict[str, Any] | None:
        async with self._slots:
            with tempfile.TemporaryDirectory(prefix="drumroll-", ignore_cleanup_errors=True) as folder:
                (Path(folder) / "box.zip").write_bytes(box.code("once"))
                if job.needs_pytest:
                    (Path(folder) / "pytest.zip").write_bytes(box.pytest())
                    (Path(folder) / "test_program.py").write_bytes(box.STUB)
                return await self._once(job, folder)

    async def _once(self, job: Job, folder: str) -> dict[str, Any] | None:
        process = await asyncio.create_subprocess_exec(
            *(self.python, "-I", "-B", "-X", "utf8", "box.zip"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            cwd=folder,
            env={},
        )
        try:
            return await Deadline(job.limits.seconds + GRACE).wait(_talk(process, job), process.pid)
        except RunTimeExceeded:
            return {"late": True}
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        finally:
            await _end(process)

    @override
    async def close(self) -> None:
        """Free nothing: no process outlives its run."""


async def _talk(process: asyncio.subprocess.Process, job: Job) -> dict[str, Any]:
    """Send the supervisor its job and read the reply."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(job.message())
    await process.stdout.readexactly(1)
    reply = await read_reply(process.stdout)
    await process.wait()
    return reply


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask a process to kill everything that its program started and end; kill it if it does not."""
    for end in (process.terminate, process.kill):
        with suppress(ProcessLookupError):
            end()
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(LEAVE):
                await process.communicate()
                return
