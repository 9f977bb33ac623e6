"""Writes a run directory: config, metrics, rollouts, checkpoints, summary. Resuming needs nothing else.

Order of a step: rollouts, metrics, and the step's commit row last; of a checkpoint, which is written beside later steps: its
folder, then its ledger row. Each is on disk before the next begins. A resume cuts off all that is newer than the checkpoint
that it continues from, and does those steps again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from drumroll.config import RunConfig, dump, load
from drumroll.errors import Interrupted, StoreError
from drumroll.objects import describe
from drumroll.runfiles.durable import append_text, explained, make_folder, new_folder, sync, write_text
from drumroll.runfiles.format import (
    CHECKPOINTS,
    CONFIG,
    FORMAT_FILE,
    HINTS,
    LEDGER,
    METRICS,
    OBJECTS,
    OUTCOME,
    REPORT,
    ROLLOUTS,
    SUMMARY,
    TRACKERS,
    read_format,
    write_format,
)
from drumroll.runfiles.reader import RunReader, read_metrics
from drumroll.runfiles.rollouts import rollout_path, write_samples
from drumroll.sample import Sample
from drumroll.store.checkpoints import Checkpoints
from drumroll.store.lock import LOCK

BEFORE_CONFIG = {LOCK, FORMAT_FILE, OBJECTS, *(f".{name}.tmp" for name in (FORMAT_FILE, OBJECTS, CONFIG))}
"""Files of a run directory whose creation was interrupted."""
BEFORE_A_STEP = {
    *(*BEFORE_CONFIG, CONFIG, METRICS, ROLLOUTS, CHECKPOINTS, LEDGER, f"{LEDGER}-wal", f"{LEDGER}-shm"),
    *("judge.jsonl", "tensorboard", "wandb", TRACKERS, REPORT, OUTCOME, HINTS, f".{HINTS}.tmp"),
}
"""Files of a run that ended before its first step."""


class Run(RunReader):
    """A run directory with its checked config, to write and to read. `drumroll.train` and `drumroll.load` return one."""

    def __init__(self, path: Path, config: RunConfig, given: Mapping[str, Any] | None = None) -> None:
        super().__init__(path)
        self.config = config
        self.given: Mapping[str, Any] = given or {}
        """The objects that Python gave this run, by name; empty after `load`."""

    @staticmethod
    def check_free(config: RunConfig, *, overwrite: bool = False) -> Path:
        """Return the run's path; refuse a directory with something in it, unless it is a run to overwrite.

        A run that ended before its first step is no obstacle.
        """
        path = Run.check_ours(config)
        if not overwrite and path.exists() and not _has_no_step(path):
            raise StoreError(
                f"{path} is not empty. Continue it with --resume, choose another name=..., or replace it with --overwrite."
            )
        return path

    @staticmethod
    def check_ours(config: RunConfig) -> Path:
        """Return the run's path; refuse a directory with something in it that is not a run."""
        path = Path(config.output) / config.name
        foreign = path.exists() and (not path.is_dir() or {p.name for p in path.iterdir()} - BEFORE_CONFIG)
        if foreign and not (path / CONFIG).exists():
            hint = "It is not a run directory, so nothing in it was touched; choose another name=... or output=..."
            raise StoreError(f"{path} is not empty. {hint}")
        return path

    @classmethod
    def create(cls, config: RunConfig, *, overwrite: bool = False, given: Mapping[str, Any] | None = None) -> Run:
        """Start a new run directory; `given` are the objects of Python that the config names."""
        path = cls.check_free(config, overwrite=overwrite)
        make_folder(path)
        with explained(path):
            for old in sorted(
                path.iterdir(), key=lambda e: (e.name == CONFIG, e.name == FORMAT_FILE)
            ):  # a run directory to the end
                if old.is_dir() and not old.is_symlink():
                    shutil.rmtree(old)
                elif old.name != LOCK:
                    old.unlink()
        write_format(path)
        run = cls(path, config, given)
        run.write_config()
        return run

    @override
    @classmethod
    def open(cls, path: Path | str) -> Run:
        """Open an existing run directory, and check its config against today's schema."""
        read_format(Path(path))
        return cls(Path(path), load(Path(path) / CONFIG).config)

    @classmethod
    def reopen(cls, path: Path, config: RunConfig, given: Mapping[str, Any] | None = None) -> Run:
        """Open a run directory to continue it under a config, perhaps with overrides."""
        return cls(path, config, given)

    def write_config(self) -> None:
        """Keep the config: overrides given on resuming hold from then on."""
        if self.given:
            described = {name: describe(value) for name, value in self.given.items()}
            write_text(self.path / OBJECTS, json.dumps(described, indent=2) + "\n")
        write_text(self.path / CONFIG, dump(self.config))

    @property
    @override
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the run."""
        return Checkpoints(self.path / CHECKPOINTS, self.config.checkpoint.keep)

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a step's line to `metrics.jsonl`."""
        append_text(self.path / METRICS, json.dumps({"step": step, **metrics}) + "\n")

    def write_rollouts(self, kind: str, step: int, samples: Sequence[Sample]) -> None:
        """Record samples with their tokens, log-probs, versions and rewards."""
        write_samples(rollout_path(self.path / ROLLOUTS, kind, step), step, kind, samples)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        write_text(self.path / SUMMARY, json.dumps(summary, indent=2) + "\n")

    @contextmanager
    def recorded_end(self) -> Generator[None]:
        """Record in `outcome.json` how a block of training ends that does not finish: interrupted or failed, and by what."""
        (self.path / OUTCOME).unlink(missing_ok=True)
        try:
            yield
        except BaseException as error:
            stopped = isinstance(error, Interrupted) or not isinstance(error, Exception)  # Ctrl-C, a cancelled task
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            with suppress(StoreError):  # the disk may be what failed
                write_text(
                    self.path / OUTCOME, json.dumps({"state": "interrupted" if stopped else "failed", "error": text}) + "\n"
                )
            raise

    @contextmanager
    def new_model(self) -> Generator[Path]:
        """Yield a folder for a learner to export its model into; it becomes `model/` when it is complete."""
        with new_folder(self.model_path) as folder:
            yield folder

    def rewind(self, step: int) -> None:
        """Delete metrics and rollouts newer than a checkpoint."""
        kept = [line for line in self.metrics if line["step"] <= step]
        write_text(self.path / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        for file in self.rollouts():
            if file.step > step:
                file.path.unlink()
        folder = self.path / ROLLOUTS
        for stray in folder.glob(".*.tmp"):
            stray.unlink()
        (self.path / SUMMARY).unlink(missing_ok=True)
        for changed in (self.path, folder):
            if changed.exists():
                sync(changed)


def _has_no_step(path: Path) -> bool:
    """Whether a run directory holds only the files of a run that ended before its first step."""
    files = {entry.name for entry in path.iterdir()}
    if not files <= BEFORE_A_STEP or any((path / CHECKPOINTS).glob("step-*")):
        return False
    if METRICS not in files:  # `drumroll rollout` writes rollouts without metrics
        return ROLLOUTS not in files
    return all(line["step"] == 0 for line in read_metrics(path / METRICS))
