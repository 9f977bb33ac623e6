"""A sandbox on a server with SandboxFusion's `/run_code`. The server is responsible for the isolation."""

from __future__ import annotations

import asyncio
import base64
import os
from collections import Counter
from typing import Any

from typing_extensions import override

from drumroll.config.sandbox import SandboxConfig
from drumroll.errors import ConfigError, MissingExtra
from drumroll.processes.deadline import Deadline
from drumroll.sandbox import SandboxError, box
from drumroll.sandbox.grading import Grader, Job, decode_reply

try:
    import httpx
except ImportError:
    raise MissingExtra("sandbox.backend: http", "code") from None

START = """import base64, os, subprocess, sys
job = base64.b64decode(sys.stdin.read())
done = subprocess.run([sys.executable, "-I", "-B", "-X", "utf8", "box.zip"], input=job, stdout=subprocess.PIPE)
print(base64.b64encode(done.stdout).decode())
"""
"""The code that the server runs: our supervisor, from a zip beside it, with the job on standard input."""
TRIES = 3
OVERHEAD = 20.0


class HttpSandbox(Grader):
    """Posts each run to `url`; retries if the server does not answer."""

    def __init__(self, config: SandboxConfig, struck: Counter[str] | None = None) -> None:
        super().__init__(config, struck)
        if config.url is None:
            raise ConfigError("sandbox.backend: http needs sandbox.url, the address of a SandboxFusion server.")
        self.url = f"{config.url.rstrip('/')}/run_code"
        self._slots = asyncio.Semaphore(config.workers or 4 * (os.cpu_count() or 1))
        self._client = httpx.AsyncClient(timeout=None)

    @override
    async def carry(self, job: Job) -> dict[str, Any] | None:
        async with self._slots:
            request = self._request(job)
            answer = await self._post(request, request["run_timeout"] + OVERHEAD)
        result = answer.get("run_result") or {}
        if result.get("status") == "TimeLimitExceeded":  # our supervisor enforces the program's own limit
            raise TimeoutError(f"sandbox.url: {self.url} gave a run up after {request['run_timeout']:g} s: it is too busy")
        return decode_reply((result.get("stdout") or "").strip())

    def _request(self, job: Job) -> dict[str, Any]:
        files = {"box.zip": box.code("once")}
        if job.needs_pytest:
            files |= {"pytest.zip": box.pytest(), "test_program.py": box.STUB}
        return {
            "language": "python",
            "code": START,
            "stdin": base64.b64encode(job.message()).decode(),
            "run_timeout": Deadline(job.limits.seconds).wall + OVERHEAD,
            "files": {name: base64.b64encode(data).decode() for name, data in files.items()},
        }

    async def _post(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        problem = ""
        for attempt in range(TRIES):
            await asyncio.sleep(attempt)
            try:
                async with asyncio.timeout(seconds):
                    response = await self._client.post(self.url, json=request)
                response.raise_for_status()
                answer: dict[str, Any] = response.json()
                if answer.get("status") != "SandboxError":
                    return answer
                problem = str(answer.get("message"))[:300]
            except (httpx.HTTPError, ValueError, TimeoutError) as error:
                problem = f"{type(error).__name__} {error}".strip()
        raise SandboxError(f"sandbox.url: {self.url} did not run a program in {TRIES} tries: {problem}.")

    @override
    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
