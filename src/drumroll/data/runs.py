"""Preferences from the samples of a run: the best against the worst of each group, by reward.

The column `recorded` holds the tokens as they were sampled: a model with the same tokenizer is trained on exactly these.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drumroll.data.split import Row
from drumroll.errors import DataError
from drumroll.runfiles.format import CONFIG, FORMAT_FILE
from drumroll.runfiles.reader import RunReader
from drumroll.sample import Owner

COLUMNS = ("id", "domain", "prompt", "completion", "columns", "reward", "traces")
RECORDED = "recorded"


def is_run(path: Path) -> bool:
    """Whether a path is a run directory."""
    return (path / FORMAT_FILE).exists() and (path / CONFIG).exists()


def pairs(run: Path) -> list[Row]:
    """A row per group of the run's training samples whose rewards differ."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    reader = RunReader.open(run)
    for file in reader.rollouts(kind="train"):
        for sample in reader.select(COLUMNS, step=file.step, kind="train"):
            if sample["reward"] is not None and sample["completion"].strip() and _answered_once(sample):
                groups.setdefault((file.step, sample["id"].partition(".")[0]), []).append(sample)
    found = [row for samples in groups.values() if (row := _pair(samples))]
    if not found:
        raise DataError(
            f"{run} has no group of answers with different rewards, so there is nothing to compare; episodes are left out."
        )
    return found


def _answered_once(sample: dict[str, Any]) -> bool:
    """Whether a sample is a prompt and one answer."""
    return len(sample["traces"]) == 1 and Owner.ENVIRONMENT not in sample["traces"][0]["owners"]


def _pair(samples: list[dict[str, Any]]) -> Row | None:
    """The first of the best and the first of the worst; None if all are as good."""
    best, worst = (pick(samples, key=lambda sample: sample["reward"]) for pick in (max, min))
    if best["reward"] == worst["reward"]:
        return None
    return best["columns"] | {
        "prompt": _content(best["prompt"]),
        "domain": best["domain"],
        "chosen": best["completion"],
        "rejected": worst["completion"],
        "score_chosen": best["reward"],
        "score_rejected": worst["reward"],
        RECORDED: [_tokens(sample) for sample in (best, worst)],
    }


def _tokens(sample: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Tokens of the prompt and of the answer."""
    trace = sample["traces"][0]
    begin = trace["owners"].index(Owner.POLICY)
    return trace["tokens"][:begin], trace["tokens"][begin:]


def _content(text: str) -> Any:
    """A prompt as it was read: messages are recorded as JSON."""
    if not text.startswith("[{"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
