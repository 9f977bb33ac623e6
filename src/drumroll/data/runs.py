"""Rows from the samples of a run: answers to imitate, or preferences: the best against the worst of each group, by reward.

The columns `recorded` and `recorded_traces` hold the tokens as they were sampled: a model with the same tokenizer is trained on
exactly these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drumroll.config.data import DatasetConfig
from drumroll.data.split import Row
from drumroll.data.turns import Pieces
from drumroll.errors import BadRow, DataError
from drumroll.runfiles.conditions import SampleCondition
from drumroll.runfiles.format import CONFIG, FORMAT_FILE
from drumroll.runfiles.reader import RunReader
from drumroll.sample import Owner

COLUMNS = ("id", "domain", "prompt", "completion", "columns", "reward", "traces")
RECORDED, TRACES = "recorded", "recorded_traces"
Recorded = dict[str, Any]
"""A recorded sample."""


def is_run(path: Path) -> bool:
    """Whether a path is a run directory."""
    return (path / FORMAT_FILE).exists() and (path / CONFIG).exists()


def pairs(name: str, config: DatasetConfig) -> list[Row]:
    """A row per group of the run's training samples whose rewards differ."""
    if config.best is not None:
        raise DataError(f"{name}.best is for training on a run's answers; pairs are the best against the worst of each group.")
    found = [row for samples in _groups(config, once=True) if (row := _pair(samples))]
    if not found:
        raise DataError(
            f"{config.source} has no group of answers with different rewards{_said(config)}, so there is nothing to compare; "
            "episodes are left out."
        )
    return found


def answers(name: str, config: DatasetConfig) -> list[Row]:
    """A row per training sample of the run, or per one of the best of each group."""
    found = [_answer(sample) for samples in _groups(config, once=False) for sample in _best(samples, config.best)]
    if not found:
        raise DataError(f"{name}: {config.source} has no scored training sample{_said(config)}.")
    return found


def _said(config: DatasetConfig) -> str:
    return "" if config.where is None else f" for which '{config.where}' holds"


def _groups(config: DatasetConfig, *, once: bool) -> Iterator[list[Recorded]]:
    """The scored samples of each group for which the condition holds; `once` leaves episodes out."""
    reader = RunReader.open(Path(config.source).expanduser())
    condition = None if config.where is None else SampleCondition(config.where)
    columns = tuple(dict.fromkeys((*COLUMNS, *sorted(condition.needed if condition else ()))))
    for file in reader.rollouts(kind="train"):
        samples = list(reader.select(columns, step=file.step, kind="train"))
        wanted = set(range(len(samples)) if condition is None else condition.matches(samples))
        groups: dict[str, list[Recorded]] = {}
        for number, sample in enumerate(samples):
            answered = sample["reward"] is not None and sample["completion"].strip() and sample["traces"]
            if number in wanted and answered and (not once or _answered_once(sample)):
                groups.setdefault(sample["id"].partition(".")[0], []).append(sample)
        yield from groups.values()


def _best(samples: list[Recorded], count: int | None) -> list[Recorded]:
    """The samples with the highest rewards, the first of equal ones, in their order."""
    ranked = sorted(range(len(samples)), key=lambda i: (-samples[i]["reward"], i))
    return [samples[i] for i in sorted(ranked[:count])]


def _answered_once(sample: Recorded) -> bool:
    """Whether a sample is a prompt and one answer."""
    return len(sample["traces"]) == 1 and Owner.ENVIRONMENT not in sample["traces"][0]["owners"]


def _answer(sample: Recorded) -> Row:
    return sample["columns"] | {
        "prompt": _content(sample["prompt"]),
        "domain": sample["domain"],
        "completion": sample["completion"],
        "reward": sample["reward"],
        TRACES: [(trace["tokens"], trace["owners"]) for trace in sample["traces"]],
    }


def recorded_traces(row: Mapping[str, Any], tokenizer: Any) -> list[Pieces]:
    """The recorded tokens of a row in parts; none if the row is of no run, or of a run with another tokenizer."""
    found: list[Pieces] = []
    for tokens, owners in row.get(TRACES) or ():
        cuts = [i for i, owner in enumerate(owners) if not i or owner != owners[i - 1]]
        found.append([(Owner(owners[a]), tokens[a:b]) for a, b in zip(cuts, [*cuts[1:], len(owners)], strict=True)])
    if not found:
        return []
    last = next(tokens for owner, tokens in reversed(found[-1]) if owner is Owner.POLICY)
    said, completion = tokenizer.decode(last, skip_special_tokens=True), str(row["completion"])
    if len(found) == 1 and [owner for owner, _ in found[0]] == [Owner.PROMPT, Owner.POLICY]:
        return found if said == completion else []
    if said.strip() not in completion and completion.strip() not in said:
        raise BadRow("an episode can only be imitated by its tokens, and they are of another tokenizer.")
    return found


def _pair(samples: list[Recorded]) -> Row | None:
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


def _tokens(sample: Recorded) -> tuple[list[int], list[int]]:
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
