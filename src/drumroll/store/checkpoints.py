"""Checkpoints: whole or absent. The newest, the best and the last few are kept."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from drumroll.runfiles.durable import new_folder, remove_folder, write_text

STATE = "state.json"
BEST = "best.json"


class Checkpoints:
    """The `checkpoints/` folder of a run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, oldest first."""
        found = (p.name.removeprefix("step-") for p in self.folder.glob("step-*") if (p / STATE).exists())
        return sorted(int(number) for number in found if number.isdecimal())

    async def save(self, step: int, write: Callable[[Path], Awaitable[None]], state: Mapping[str, Any]) -> None:
        """Write a checkpoint; it exists only once all of it is on disk."""
        with new_folder(self.path(step)) as folder:
            await write(folder)
            (folder / STATE).write_text(json.dumps({"step": step, **state}, indent=2))

    def amend(self, step: int, state: Mapping[str, Any]) -> None:
        """Replace the controller's part of a checkpoint; the weights are those that were saved."""
        write_text(self.path(step) / STATE, json.dumps({"step": step, **state}, indent=2))

    def prune(self) -> None:
        """Delete those no longer kept. Call it once the newest is committed: until then an older one is the way back."""
        kept = {*self.steps()[-self.keep :], self.best_step()}
        for old in self.steps():
            if old not in kept:
                remove_folder(self.path(old))

    def restore_best(self, best: Mapping[str, Any] | None) -> None:
        """Make `best.json` say what a checkpoint recorded, if that checkpoint still exists."""
        if best is not None and best["step"] in self.steps():
            if best["step"] != self.best_step():
                self.mark_best(best["step"], best["score"])
        elif self.best_step() not in self.steps():
            (self.folder / BEST).unlink(missing_ok=True)

    def state(self, step: int) -> dict[str, Any]:
        """The controller's part of a checkpoint."""
        return json.loads((self.path(step) / STATE).read_text("utf-8"))

    def best(self) -> dict[str, Any] | None:
        """Step and score of the best checkpoint so far."""
        path = self.folder / BEST
        return json.loads(path.read_text("utf-8")) if path.exists() else None

    def best_step(self) -> int | None:
        """The step of the best checkpoint so far."""
        best = self.best()
        return best["step"] if best else None

    def best_score(self) -> float:
        """The score of the best checkpoint so far."""
        best = self.best()
        return best["score"] if best else float("-inf")

    def mark_best(self, step: int, score: float) -> None:
        """Remember a checkpoint as the best."""
        write_text(self.folder / BEST, json.dumps({"step": step, "score": score}))
