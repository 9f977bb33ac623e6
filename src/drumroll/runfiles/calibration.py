"""`calibration.json` of a reward model's run: the reliability of each held-out set at the last evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drumroll.algorithms.calibration import Calibration
from drumroll.runfiles.durable import write_text
from drumroll.runfiles.format import CALIBRATION


def write_calibration(run: Path, step: int, sets: Mapping[str, Calibration]) -> None:
    """Replace the file of a run directory."""
    text = json.dumps({"step": step, "sets": {name: asdict(each) for name, each in sets.items()}}, indent=1)
    write_text(run / CALIBRATION, text + "\n")


def read_calibration(run: Path) -> dict[str, Calibration]:
    """The sets by name; none if the run measured none."""
    try:
        found: dict[str, Any] = json.loads((run / CALIBRATION).read_text("utf-8"))["sets"]
        return {name: Calibration(**each) for name, each in found.items()}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}
