"""A run directory: config, metrics, rollouts, checkpoints, summary. Resuming needs nothing else.

Order of a commit: metrics and rollouts of a step first, then its checkpoint, the ledger's row last; each is on disk before
the next is begun. On resume whatever is newer than the last complete checkpoint is cut off, and those steps are done again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drumroll.config import RunConfig, dump, load
from drumroll.errors import StoreError
from drumroll.runfiles.durable import append_text, explained, make_folder, new_file, sync, write_text
from drumroll.runfiles.rollouts import read_outcomes, read_samples, write_samples
from drumroll.sample import Sample
from drumroll.store.checkpoints import Checkpoints
from drumroll.store.lock import LOCK

CONFIG, METRICS, SUMMARY, LEDGER = "config.yaml", "metrics.jsonl", "summary.json", "ledger.sqlite"
ROLLOUTS = "rollouts"
BEFORE_A_STEP = {
    *(CONFIG, METRICS, ROLLOUTS, "checkpoints", LEDGER, f"{LEDGER}-wal", f"{LEDGER}-shm", LOCK),
    *("judge.jsonl", "tensorboard", "wandb", "report.html"),
}
"""What a run may leave that ended before its first step."""


class Run:
    """An open run directory. `metrics`, `samples` and `model_path` are what a finished run is asked for."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.path = path
        self.config = config
        self.checkpoints = Checkpoints(path / "checkpoints", config.checkpoint.keep)

    @staticmethod
    def check_free(config: RunConfig, *, overwrite: bool = False) -> Path:
        """Return the run's path; a directory with something in it is refused, unless it is a run to overwrite.

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
        """Return the run's path; a directory with something in it that is not a run is refused."""
        path = Path(config.output) / config.name
        if path.exists() and not (path / CONFIG).exists() and (not path.is_dir() or {p.name for p in path.iterdir()} - {LOCK}):
            hint = "It is not a run directory, so nothing in it was touched; choose another name=... or output=..."
            raise StoreError(f"{path} is not empty. {hint}")
        return path

    @classmethod
    def create(cls, config: RunConfig, *, overwrite: bool = False) -> Run:
        """Start a new run directory."""
        path = cls.check_free(config, overwrite=overwrite)
        make_folder(path)
        with explained(path):
            for old in sorted(path.iterdir(), key=lambda entry: entry.name == CONFIG):  # a run directory to the end
                if old.is_dir() and not old.is_symlink():
                    shutil.rmtree(old)
                elif old.name != LOCK:
                    old.unlink()
        write_text(path / CONFIG, dump(config))
        return cls(path, config)

    @classmethod
    def open(cls, path: Path | str) -> Run:
        """Open an existing run directory."""
        path = Path(path)
        if not (path / CONFIG).exists():
            what = "there is no such directory" if not path.exists() else f"it has no {CONFIG}"
            raise StoreError(f"{path} is not a run directory: {what}.")
        return cls(path, load(path / CONFIG, import_code=False).config)

    def reconfigured(self, config: RunConfig) -> Run:
        """This run under a changed config, which is kept: overrides given on resuming hold from then on."""
        write_text(self.path / CONFIG, dump(config))
        return Run(self.path, config)

    # --- what a finished run is asked for ---

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One dict per step; step 0 holds the first evaluation."""
        return _read_metrics(self.path / METRICS)

    @property
    def samples(self) -> list[dict[str, Any]]:
        """All recorded samples as plain rows, oldest first."""
        return list(self.iter_samples())

    def iter_samples(self) -> Iterator[dict[str, Any]]:
        """Recorded samples, file by file."""
        for file in sorted((self.path / ROLLOUTS).glob("*.parquet")):
            yield from read_samples(file)

    def outcomes(self, steps: Iterable[int]) -> Iterator[dict[str, Any]]:
        """What the ledger records of the training samples of some steps."""
        for step in steps:
            if (file := self._rollouts("train", step)).exists():
                yield from read_outcomes(file)

    @property
    def model_path(self) -> Path:
        """The trained model: a plain Hugging Face directory."""
        return self.path / "model"

    @property
    def summary(self) -> dict[str, Any]:
        """Before and after, steps and seconds; empty while the run is unfinished."""
        path = self.path / SUMMARY
        return json.loads(path.read_text("utf-8")) if path.exists() else {}

    # --- writing ---

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step's line."""
        append_text(self.path / METRICS, json.dumps({"step": step, **metrics}) + "\n")

    def write_rollouts(self, name: str, step: int, samples: Sequence[Sample]) -> None:
        """Record samples with their tokens, log-probs, versions and rewards."""
        path = self._rollouts(name, step)
        make_folder(path.parent)
        with new_file(path) as temporary:
            write_samples(temporary, step, name, samples)

    def _rollouts(self, name: str, step: int) -> Path:
        return self.path / ROLLOUTS / f"{name}-{step:06d}.parquet"

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        write_text(self.path / SUMMARY, json.dumps(summary, indent=2) + "\n")

    def rewind(self, step: int) -> None:
        """Forget metrics and rollouts newer than a checkpoint."""
        kept = [line for line in self.metrics if line["step"] <= step]
        write_text(self.path / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        folder = self.path / ROLLOUTS
        for file in folder.glob("*.parquet"):
            if int(file.stem.rpartition("-")[2]) > step:
                file.unlink()
        for stray in folder.glob(".*.tmp"):
            stray.unlink()
        (self.path / SUMMARY).unlink(missing_ok=True)
        for changed in (self.path, folder):
            if changed.exists():
                sync(changed)


def _has_no_step(path: Path) -> bool:
    """Whether a run directory holds nothing but the beginnings of a run that ended before its first step."""
    files = {entry.name for entry in path.iterdir()}
    if not files <= BEFORE_A_STEP or any((path / "checkpoints").glob("step-*")):
        return False
    if METRICS not in files:  # rollouts without metrics were made by `drumroll rollout`
        return ROLLOUTS not in files
    return all(line["step"] == 0 for line in _read_metrics(path / METRICS))


def _read_metrics(path: Path) -> list[dict[str, float]]:
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # a crash may tear the last line
