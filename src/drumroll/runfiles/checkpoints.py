"""Reads the checkpoints of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STATE = "state.json"
BEST = "best.json"


class CheckpointFolder:
    """The `checkpoints/` folder of a run. A checkpoint that is being written has another name until it is complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, oldest first."""
        found = (p.name.removeprefix("step-") for p in self.folder.glob("step-*") if (p / STATE).exists())
        return sorted(int(number) for number in found if number.isdecimal())

    def state(self, step: int) -> dict[str, Any]:
        """Return the controller's state in a checkpoint."""
        return json.loads((self.path(step) / STATE).read_text("utf-8"))

    def best(self) -> dict[str, Any] | None:
        """Return step and score of the best checkpoint so far."""
        try:
            return json.loads((self.folder / BEST).read_text("utf-8"))
        except FileNotFoundError:
            return None

    def best_step(self) -> int | None:
        """Return the step of the best checkpoint so far."""
        best = self.best()
        return best["step"] if best else None

    def best_score(self) -> float:
        """Return the score of the best checkpoint so far."""
        best = self.best()
        return best["score"] if best else float("-inf")
