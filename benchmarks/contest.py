"""Peers in environments of their own, taking turns with us: each is a process that does one job per line it is sent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "benchmarks" / "peers"


class Contestant:
    """A process that answers a line of JSON with a line of JSON. `environment` is a folder of `.bench`; None is our own."""

    def __init__(self, script: str, *arguments: str, environment: str | None = None) -> None:
        python = sys.executable if environment is None else str(ROOT / ".bench" / environment / "bin" / "python")
        command = [python, str(PEERS / script), *arguments]
        self.name = script
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.started = self._answer()

    def ask(self, **job: Any) -> dict[str, Any]:
        """Do one job."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()

    def _answer(self) -> dict[str, Any]:
        """The next line that is JSON; libraries print what they like around it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self.name} ended with exit code {self.process.wait()}")


def installed(environment: str) -> bool:
    """Whether `make bench-env` made it."""
    return (ROOT / ".bench" / environment / "installed").exists()
