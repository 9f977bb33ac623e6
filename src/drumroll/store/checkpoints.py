"""Writes checkpoints, each complete or absent. Keeps the newest, the best and the last few."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from drumroll.processes.threads import beside
from drumroll.runfiles.checkpoints import BEST, STATE, CheckpointFolder
from drumroll.runfiles.durable import new_folder, remove_folder, sync_tree, write_text


class Checkpoints(CheckpointFolder):
    """The `checkpoints/` folder of a run. The ledger names each checkpoint when it is complete."""

    def __init__(self, folder: Path, keep: int) -> None:
        super().__init__(folder)
        self.keep = keep

    async def save(self, step: int, parts: Mapping[str, Callable[[Path], Awaitable[None]]], state: Mapping[str, Any]) -> None:
        """Write a checkpoint: each part writes into its own subfolder ("" is the checkpoint's folder itself).

        The checkpoint appears under its name when all of it is on disk, and replaces one of the same step.
        """
        with new_folder(self.path(step)) as folder:
            for part, write in parts.items():
                (folder / part).mkdir(exist_ok=True)
                await write(folder / part)
            (folder / STATE).write_text(json.dumps({"step": step, **state}, indent=2))
            await beside(partial(sync_tree, folder))  # then `new_folder` need not wait for the disk

    def amend(self, step: int, state: Mapping[str, Any]) -> None:
        """Replace the controller's state in a checkpoint; its weights stay."""
        write_text(self.path(step) / STATE, json.dumps({"step": step, **state}, indent=2))

    def newest(self, named: Collection[int], committed: Collection[int]) -> int | None:
        """Return the step to resume from: the newest complete checkpoint that the ledger names.

        Where the ledger names none, or has lost the commit of a newer complete checkpoint, that checkpoint counts too.
        """
        complete = self.steps()
        known = [step for step in complete if step in named]
        lost = [step for step in complete if not known or (step > known[-1] and step not in committed)]
        return max((*known, *lost), default=None)

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints of steps that a resume at `step` does again, and folders that a killed process left."""
        for stray in self.folder.glob(".step-*"):
            shutil.rmtree(stray, ignore_errors=True)
        for superseded in self.steps():
            if superseded > step:
                remove_folder(self.path(superseded))

    def prune(self, named: Collection[int]) -> None:
        """Delete old checkpoints. Only those that the ledger names count, and only those are deleted."""
        complete = [step for step in self.steps() if step in named]
        kept = {*complete[-self.keep :], self.best_step()}
        for old in complete:
            if old not in kept:
                remove_folder(self.path(old))

    def restore_best(self, best: Mapping[str, Any] | None) -> None:
        """Restore `best.json` from a checkpoint's state, if the checkpoint that it names still exists."""
        if best is not None and best["step"] in self.steps():
            if best["step"] != self.best_step():
                self.mark_best(**best)
        elif self.best_step() not in self.steps():
            (self.folder / BEST).unlink(missing_ok=True)

    def mark_best(self, step: int, score: float, by: str | None = None) -> None:
        """Record a checkpoint as the best; `by`: the metric that the score is."""
        write_text(self.folder / BEST, json.dumps({"step": step, "score": score} | ({"by": by} if by else {})))
