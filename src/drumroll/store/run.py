"""A run directory: config, metrics, rollouts, checkpoints, summary. Resuming needs nothing else.

Order of a commit: metrics and rollouts of a step first, its checkpoint last. On resume whatever is newer than the
last complete checkpoint is cut off, and those steps are done again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drumroll.config import AnyConfig, dump, load
from drumroll.errors import StoreError
from drumroll.sample import Sample
from drumroll.store.checkpoints import Checkpoints
from drumroll.store.files import explained, write_text
from drumroll.store.rollouts import read_samples, write_samples

CONFIG, METRICS, SUMMARY, LEDGER = "config.yaml", "metrics.jsonl", "summary.json", "ledger.sqlite"


class Run:
    """An open run directory. `metrics`, `samples` and `model_path` are what a finished run is asked for."""

    def __init__(self, path: Path, config: AnyConfig) -> None:
        self.path = path
        self.config = config
        self.checkpoints = Checkpoints(path / "checkpoints", config.checkpoint.keep)

    @staticmethod
    def check_free(config: AnyConfig, *, overwrite: bool = False) -> Path:
        """Where the run will be; a directory that holds something is refused unless it is a run to be overwritten."""
        path = Path(config.output) / config.name
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            if not (path / CONFIG).exists():
                hint = "It is not a run directory, so nothing in it was touched; choose another name=... or output=..."
                raise StoreError(f"{path} is not empty. {hint}")
            if not overwrite:
                raise StoreError(
                    f"{path} is not empty. Continue it with --resume, choose another name=..., or replace it with --overwrite."
                )
        return path

    @classmethod
    def create(cls, config: AnyConfig, *, overwrite: bool = False) -> Run:
        """Start a new run directory."""
        path = cls.check_free(config, overwrite=overwrite)
        if path.is_dir():
            shutil.rmtree(path)
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
        write_text(path / CONFIG, dump(config))
        return cls(path, config)

    @classmethod
    def open(cls, path: Path | str) -> Run:
        """Open an existing run directory."""
        path = Path(path)
        if not (path / CONFIG).exists():
            what = "there is no such directory" if not path.exists() else f"it has no {CONFIG}"
            raise StoreError(f"{path} is not a run directory: {what}.")
        return cls(path, load(path / CONFIG).config)

    def reconfigured(self, config: AnyConfig) -> Run:
        """This run under a changed config, which is kept: overrides given on resuming hold from then on."""
        write_text(self.path / CONFIG, dump(config))
        return Run(self.path, config)

    # --- what a finished run is asked for ---

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One dict per step; step 0 holds the first evaluation."""
        path = self.path / METRICS
        lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]  # a crash may tear the last line

    @property
    def samples(self) -> list[dict[str, Any]]:
        """All recorded samples as plain rows, oldest first."""
        return list(self.iter_samples())

    def iter_samples(self) -> Iterator[dict[str, Any]]:
        """Recorded samples, file by file."""
        for file in sorted((self.path / "rollouts").glob("*.parquet")):
            yield from read_samples(file)

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
        path = self.path / METRICS
        with explained(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def write_rollouts(self, name: str, step: int, samples: Sequence[Sample]) -> None:
        """Record samples with their tokens, log-probs, versions and rewards."""
        path = self.path / "rollouts" / f"{name}-{step:06d}.parquet"
        with explained(path):
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_suffix(".tmp")
            write_samples(temporary, step, name, samples)
            os.replace(temporary, path)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        write_text(self.path / SUMMARY, json.dumps(summary, indent=2) + "\n")

    def rewind(self, step: int) -> None:
        """Forget everything newer than a checkpoint."""
        kept = [line for line in self.metrics if line["step"] <= step]
        write_text(self.path / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        for file in (self.path / "rollouts").glob("*.parquet"):
            if int(file.stem.rpartition("-")[2]) > step:
                file.unlink()
        for stray in (self.path / "rollouts").glob("*.tmp"):
            stray.unlink()
        self.checkpoints.rewind(step)
        (self.path / SUMMARY).unlink(missing_ok=True)
