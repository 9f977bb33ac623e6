"""Reads run directories: any run of format 1 or later, finished, stopped, or being written by another process.

The reader takes the config as a plain mapping. It never validates it against today's schema, never imports a user's code,
and never writes. Files that a writer replaces or removes meanwhile are read as they were, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any, cast

import yaml
from typing_extensions import override

from drumroll.errors import StoreError
from drumroll.runfiles.charts import Plot, plot
from drumroll.runfiles.checkpoints import CheckpointFolder
from drumroll.runfiles.format import (
    CHECKPOINTS,
    CONFIG,
    HINTS,
    LEDGER,
    METRICS,
    MODEL,
    OBJECTS,
    OUTCOME,
    ROLLOUTS,
    SUMMARY,
    read_format,
)
from drumroll.runfiles.frames import Frame, SampleRow
from drumroll.runfiles.ledger_queries import LedgerReader
from drumroll.runfiles.rollouts import RolloutFile, read_failures, read_outcomes, read_samples, rollout_files, rollout_path


class RunReader:
    """An open run directory: metrics, samples, checkpoints, ledger, summary. Every access reads the files anew."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: Path | str) -> RunReader:
        """Open an existing run directory; a directory without a format version, or of a newer one, is refused."""
        read_format(Path(path))
        return RunReader(Path(path))

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}: {', '.join([self._state(), *self._scores()])})"

    def _repr_html_(self) -> str:
        """State, scores and curves, for notebooks."""
        lines = "".join(f"<div>{escape(line)}</div>" for line in (self._state(), *self._scores()))
        return f"<div><b>{escape(str(self.path))}</b>{lines}{self.plot().svg if self.metrics else ''}</div>"

    def _state(self) -> str:
        lines, summary = self.metrics, self.summary
        step = f"step {lines[-1]['step'] if lines else 0:g} of {self.settings.get('steps', '?')}"
        return f"finished, {step} in {summary.get('seconds', 0):.0f} s" if summary else f"unfinished, {step}"

    def _scores(self) -> list[str]:
        """The scores of the held-out sets before and after training."""
        lines = []
        for key, before in self.summary.items():
            kind, after = key.removeprefix("before").replace("_", " "), self.summary.get(key.replace("before", "after"), {})
            if key.startswith("before"):
                lines += [f"{name}{kind} {before[name]:.3f} → {after[name]:.3f}" for name in before if name in after]
        return lines

    @property
    def settings(self) -> dict[str, Any]:
        """The config as a plain mapping, as `config.yaml` holds it."""
        try:
            values = yaml.safe_load(self.config_text)
        except yaml.YAMLError as error:
            raise StoreError(
                f"cannot read {self.path / CONFIG}: it is not valid YAML: {' '.join(str(error).split())}."
            ) from None
        if not isinstance(values, dict):
            raise StoreError(f"cannot read {self.path / CONFIG}: a config is a mapping, this is {type(values).__name__}.")
        return values

    @property
    def config_text(self) -> str:
        """The text of `config.yaml`."""
        return (self.path / CONFIG).read_text("utf-8")

    @property
    def metrics(self) -> Frame[dict[str, float]]:
        """One row per step; step 0 holds the first evaluation. `to_pandas` and `to_polars` make frames of them."""
        return Frame(read_metrics(self.path / METRICS))

    def plot(self, *metrics: str) -> Plot:
        """Draw metrics over the steps, one panel per name: a metric, or a family such as `reward`.

        Default: rewards by domain, and the scores of held-out sets.
        """
        return plot(self.metrics, metrics)

    @property
    def summary(self) -> dict[str, Any]:
        """Before and after, steps and seconds; empty while the run is unfinished."""
        try:
            return json.loads((self.path / SUMMARY).read_text("utf-8"))
        except FileNotFoundError:
            return {}

    @property
    def outcome(self) -> dict[str, Any]:
        """How the last process that trained here ended, if it did not finish: `state` and `error`; empty if nobody knows."""
        try:
            return json.loads((self.path / OUTCOME).read_text("utf-8"))
        except FileNotFoundError:
            return {}

    @property
    def hints(self) -> list[dict[str, Any]]:
        """What the run told its user to look at, each with name, step and text."""
        try:
            return json.loads((self.path / HINTS).read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            return []

    @property
    def model_path(self) -> Path:
        """The model of the last step: a plain Hugging Face directory, once the run has finished."""
        return self.path / MODEL

    @property
    def checkpoints(self) -> CheckpointFolder:
        """The checkpoints of the run."""
        return CheckpointFolder(self.path / CHECKPOINTS)

    def open_ledger(self) -> LedgerReader:
        """Open the ledger for queries."""
        return LedgerReader(self.path / LEDGER)

    @property
    def objects(self) -> dict[str, dict[str, Any]]:
        """The objects that Python gave the run, by name: each one's kind, and its source or its number of rows."""
        try:
            return json.loads((self.path / OBJECTS).read_text("utf-8"))
        except FileNotFoundError:
            return {}

    # --- samples ---

    @property
    def samples(self) -> Frame[SampleRow]:
        """All recorded samples, file by file. `select` reads some of them, or some columns."""
        return Frame(cast(SampleRow, row) for row in self.select())

    def select(
        self,
        columns: Sequence[str] | None = None,
        *,
        ids: Collection[str] | None = None,
        step: int | None = None,
        kind: str | None = None,
        domain: str | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Yield recorded samples, all or those of the given ids, step, kind and domain, with all columns or the given ones.

        Files of other steps and kinds are not opened. Of a file only the given columns are read, and only in those row
        groups (64 rows) that hold a wanted sample.
        """
        for file in self.rollouts(step=step, kind=kind):
            with suppress(FileNotFoundError):  # a resume has removed it meanwhile
                yield from read_samples(file.path, columns, ids=ids, domain=domain)

    def rollouts(self, *, step: int | None = None, kind: str | None = None) -> list[RolloutFile]:
        """List the complete files of recorded samples, by name."""
        files = rollout_files(self.path / ROLLOUTS)
        return [file for file in files if step in (None, file.step) and kind in (None, file.kind)]

    def failures(self, files: Iterable[RolloutFile] | None = None) -> Iterator[tuple[str, str, str]]:
        """Yield the failures and notes of samples: the sample's id, the text, the frames of the user's code."""
        for file in self.rollouts() if files is None else files:
            with suppress(FileNotFoundError):
                yield from read_failures(file.path)

    def outcomes(self, steps: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Yield the facts that the ledger records about the training samples of some steps."""
        for step in steps:
            with suppress(FileNotFoundError):
                yield from read_outcomes(rollout_path(self.path / ROLLOUTS, "train", step))


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read the complete lines of `metrics.jsonl`; the last is torn after a crash and while it is being written."""
    try:
        lines = path.read_text("utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]
