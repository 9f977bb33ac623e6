"""Logs calls to the endpoint in a file, one JSON line per call."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drumroll.runfiles.durable import explained


class CallLog:
    """A log file; a call is appended when it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()

    def add(self, call: Mapping[str, Any]) -> None:
        """Append a call, with the time."""
        with explained(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), **call}) + "\n")
