"""Caches the answers of a judge by a hash of model and question, in memory and optionally in a file."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from drumroll.runfiles.durable import explained


class Answers:
    """A cache of answers. It opens its file at the first use, because the run directory is created after the judge."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._known: dict[str, str] | None = None

    @staticmethod
    def key(model: str, question: str) -> str:
        """Return the key of a question to a model."""
        return hashlib.sha256(f"{model}\0{question}".encode()).hexdigest()

    def get(self, key: str) -> str | None:
        """Return the answer, if it is known."""
        return self._load().get(key)

    def put(self, key: str, answer: str) -> None:
        """Keep an answer."""
        self._load()[key] = answer
        if self.path is not None and self.path.parent.is_dir():
            with explained(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, answer]) + "\n")

    def _load(self) -> dict[str, str]:
        if self._known is None:
            self._known = {}
            for line in self.path.read_text("utf-8").splitlines() if self.path and self.path.exists() else ():
                with suppress(ValueError):  # a crash may have torn a line
                    key, answer = json.loads(line)
                    self._known[key] = answer
        return self._known
