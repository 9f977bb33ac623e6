"""Keys of TRL, verl, ROLL and OpenRLHF with ours (`peers.yaml`): one table for "did you mean" and for docs/coming-from.md.

`python tests/unit/test_keys.py` writes the page.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

LIBRARIES = {"trl": "TRL", "verl": "verl", "roll": "ROLL", "openrlhf": "OpenRLHF"}
SHORT = {"n": "actor_rollout_ref.rollout.n", "kl_coef": "algorithm.kl_ctrl.kl_coef", "batch_size": "rollout.batch_size"}
"""Names that people write without the section, where several keys end so."""
VAGUE = frozenset({"enable", "type", "len", "path"})
"""Last parts of keys that say nothing without the section."""


@dataclass(frozen=True)
class Row:
    """Keys of others with one meaning, separated by blanks, and ours; without ours, `how` says what to do instead."""

    ours: str
    how: str
    trl: str = ""
    verl: str = ""
    roll: str = ""
    openrlhf: str = ""
    pipelines: str = ""
    """The pipelines in which the keys mean this, if others mean something else by them."""

    def fits(self, keys: Container[str]) -> bool:
        """Whether a pipeline with these keys has ours."""
        return not self.ours or any(key in keys for key in self.ours.split())


@lru_cache
def table() -> dict[str, list[Row]]:
    """The rows by the title of their section."""
    text = Path(__file__).with_name("peers.yaml").read_text("utf-8")
    return {title: [Row(**row) for row in rows] for title, rows in yaml.safe_load(text).items()}


@lru_cache
def _named() -> tuple[dict[str, list[tuple[str, Row]]], dict[str, list[tuple[str, Row]]]]:
    """Libraries and rows by a key's full name, and by its last part."""
    full: dict[str, list[tuple[str, Row]]] = {}
    last: dict[str, list[tuple[str, Row]]] = {}
    for row in (row for rows in table().values() for row in rows):
        for library in LIBRARIES:
            for key in getattr(row, library).split():
                full.setdefault(key, []).append((library, row))
                last.setdefault(key.rpartition(".")[2], []).append((library, row))
    return full, last


def translation(key: str, own: Container[str] = VAGUE, pipeline: str = "rl", keys: Container[str] | None = None) -> str:
    """A sentence about a key of a peer, or an empty string. Names in `own` are taken for a peer's only with their section.

    `keys` are those of the pipeline.
    """
    full, by_last = _named()
    last = key.rpartition(".")[2]
    vague = last in own or last in VAGUE
    rows = full.get(key) or full.get(last) or full.get(SHORT.get(last, "")) or ([] if vague else by_last.get(last, []))
    rows = [each for each in rows if not each[1].pipelines or pipeline in each[1].pipelines.split()]
    if not rows:
        return ""
    row = max((row for _, row in rows), key=lambda row: bool(row.pipelines))
    here = "here" if keys is None or row.fits(keys) else "in other pipelines"
    whose = " and ".join(dict.fromkeys(f"{LIBRARIES[library]}'s" for library, one in rows if one is row))
    if not row.ours:
        return f"{whose} {last} has no counterpart here: {row.how}."
    return f"{whose} {last} is {' and '.join(row.ours.split())} {here}: {row.how}."


def page() -> str:
    """docs/coming-from.md."""
    lines = [
        "# Coming from TRL, verl, ROLL or OpenRLHF",
        "",
        "Their keys beside ours. A recipe or an override with one of their names is refused with the same answer, so you can also just try:",
        "",
        "```",
        "$ drumroll train recipe.yaml num_generations=16",
        f"drumroll: override num_generations=16: unknown key 'num_generations'. {translation('num_generations')}",
        "$ drumroll explain rollout.samples",
        "```",
        "",
        "Reward functions of TRL and verl, and their rows, are used as they are: [rewards.md](rewards.md), [data.md](data.md). Layouts of large models:",
        "[parallelism.md](parallelism.md). verl's keys stand without `actor_rollout_ref.`. `python tests/unit/test_keys.py` writes this page, and a test compares it.",
    ]
    for title, rows in table().items():
        lines += [
            "",
            f"## {title}",
            "",
            f"| drumroll | {' | '.join(LIBRARIES.values())} | value |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            theirs = [", ".join(f"`{_short(key)}`" for key in getattr(row, library).split()) for library in LIBRARIES]
            ours = ", ".join(f"`{key}`" for key in row.ours.split()) or "–"
            lines.append(f"| {ours} | {' | '.join(theirs)} | {row.how} |")
    return "\n".join(lines) + "\n"


def _short(key: str) -> str:
    """verl's longest prefixes are left out of tables."""
    return key.removeprefix("actor_rollout_ref.")
