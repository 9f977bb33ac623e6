"""What a terminal shows at the end of a run."""

import io
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console

from drumroll.observe.progress import ending

SUMMARY = {
    "name": "lake",
    "steps": 3,
    "seconds": 9.6,
    "before": {"ice": 0.1, "late": 0.2},
    "after": {"ice": 0.9},
    "before_sampled": {},
}
EPISODES = {
    "before_success": {"ice": 0.25},
    "after_success": {"ice": 0.75},
    "before_turns": {"ice": 9},
    "after_turns": {"ice": 4},
}


def shown(summary):
    console = Console(width=100, file=io.StringIO())
    console.print(ending(SimpleNamespace(path=Path("runs/lake"), model_path=Path("runs/lake/model")), summary))
    return console.file.getvalue()


def test_what_was_measured_has_a_column_each_and_nothing_else():
    text = shown(SUMMARY | EPISODES)
    assert "lake: 3 steps in 10 s" in text
    assert "0.100 → 0.900" in text
    assert "0.250 → 0.750" in text
    assert "9.000 → 4.000" in text
    assert "success" in text
    assert "sampled" not in text
    assert "effective" not in text
    assert next(line for line in text.splitlines() if "late" in line).count("–") == 3


def test_without_held_out_sets_there_is_no_table():
    text = shown(SUMMARY | {"before": {}, "after": {}})
    assert text.startswith("run      runs/lake")
