"""Saves checkpoints beside the loop, one at a time.

In order: the checkpoint is complete on disk, the ledger names it, `best.json` names it if it is the best, older ones are
deleted. The loop is blocked only while a save before this one is unfinished.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from drumroll.processes.threads import beside
from drumroll.store.checkpoints import Checkpoints
from drumroll.store.ledger import Ledger

Part = Callable[[Path], Awaitable[None]]
"""Writes one part of a checkpoint into a folder."""


class BackgroundSaver:
    """Writes checkpoints of one run. `finished` is called with the seconds that each took."""

    def __init__(self, checkpoints: Checkpoints, clock: Callable[[], float], finished: Callable[[float], None]) -> None:
        self.checkpoints = checkpoints
        self._clock, self._finished = clock, finished
        self._task: asyncio.Task[None] | None = None
        self._best: Mapping[str, Any] | None = None  # of the save in flight

    def best(self) -> Mapping[str, Any] | None:
        """Return step and score of the best checkpoint so far, the one in flight included."""
        return self.checkpoints.best() if self._task is None else self._best

    def start(self, step: int, parts: Mapping[str, Part], state: Mapping[str, Any], ledger: Ledger) -> None:
        """Begin to write a checkpoint; `state["best"]` says which is the best so far. Call `wait` first."""
        assert self._task is None, "one save at a time"
        state = json.loads(json.dumps(state))  # as it is now: the loop goes on
        self._best = state["best"]
        self._task = asyncio.ensure_future(self._save(step, parts, state, ledger))

    async def _save(self, step: int, parts: Mapping[str, Part], state: Mapping[str, Any], ledger: Ledger) -> None:
        began, best = self._clock(), state["best"]
        await self.checkpoints.save(step, parts, state)
        ledger.add_checkpoint(step, self.checkpoints.path(step).name)
        if best is not None and best["step"] == step:
            self.checkpoints.mark_best(**best)
        await beside(partial(self.checkpoints.prune, ledger.checkpoints()))
        self._finished(self._clock() - began)

    async def wait(self) -> None:
        """Wait for the save in flight, and raise its failure."""
        if self._task is not None:
            await asyncio.wait([self._task])
            task, self._task = self._task, None
            task.result()

    async def check(self) -> None:
        """Raise the failure of a save that has ended; does not wait."""
        if self._task is not None and self._task.done():
            await self.wait()

    def abandon(self) -> None:
        """Give up the save in flight: its checkpoint never appears."""
        if self._task is not None:
            self._task.cancel()
