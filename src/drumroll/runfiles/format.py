"""The format of a run directory: its version, and the names of its files and folders.

`format.json` names the version of the format and of the library that made the run. The reader opens every version from 1
up to `FORMAT`. Raise `FORMAT` when today's reader would misread what tomorrow's writer leaves; a new file, table or
column needs no new version.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import version as installed
from pathlib import Path

from drumroll.errors import StoreError
from drumroll.runfiles.durable import write_text

FORMAT = 1
"""The version of the format that this library writes, and the newest that it reads."""
FORMAT_FILE, OBJECTS = "format.json", "objects.json"
CONFIG, METRICS, SUMMARY, LEDGER, REPORT = "config.yaml", "metrics.jsonl", "summary.json", "ledger.sqlite", "report.html"
HINTS, TRACKERS, CALIBRATION = "hints.json", "trackers.json", "calibration.json"
ROLLOUTS, CHECKPOINTS, MODEL, RESCORED = "rollouts", "checkpoints", "model", "rescored"
OUTCOME = "outcome.json"
"""How a process that trained in the run ended, if it did not finish: its `state` (interrupted, failed) and `error`."""


@dataclass(frozen=True)
class RunFormat:
    """The version of a run directory's format, and the version of the library that made it."""

    version: int
    library: str


def write_format(path: Path) -> None:
    """Write `format.json` into a new run directory."""
    write_text(path / FORMAT_FILE, json.dumps({"format": FORMAT, "drumroll": installed("drumroll")}) + "\n")


def read_format(path: Path) -> RunFormat:
    """Read the format of a run directory; refuse a directory that is no run, and a format that this library cannot read."""
    if not (path / CONFIG).exists():
        what = "there is no such directory" if not path.exists() else f"it has no {CONFIG}"
        raise StoreError(f"{path} is not a run directory: {what}.")
    file = path / FORMAT_FILE
    try:
        text = file.read_text("utf-8")
    except FileNotFoundError:
        raise StoreError(
            f"{path} has no format version ({FORMAT_FILE} is missing), so a drumroll older than run format 1 made it: "
            "open it with that version, or train it again with this one."
        ) from None
    try:
        found = json.loads(text)
        version, library = found["format"], str(found.get("drumroll"))
    except (ValueError, TypeError, KeyError, AttributeError):
        version, library = None, ""
    if not isinstance(version, int) or version < 1:
        raise StoreError(
            f'{file} names no format version: it holds {text.strip()[:80]!r}, but should hold {{"format": 1}} or a later '
            "version; restore it from a copy of the run."
        )
    if version > FORMAT:
        raise StoreError(
            f"{path} was made by a newer drumroll: version {library} wrote run format {version}, and version "
            f"{installed('drumroll')} reads formats up to {FORMAT}; upgrade drumroll to open it."
        )
    return RunFormat(version, library)
