"""Writes the report of a run: one HTML file with scores, curves, failures and samples, which needs no server and no network.

It reads the run directory only, so it can be written at any moment of a run, and again later. It must never load
anything from elsewhere, never let a model's text become markup or script, and never change what it reports on.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from drumroll.config.best import MEASURED, lower_is_better
from drumroll.observe.failures import FailureCause, by_cause
from drumroll.observe.legend import meaning
from drumroll.observe.reliability import reliability, x_of, y_of
from drumroll.observe.runs import HELD_OUT, model_text, setting
from drumroll.observe.samples import CONTROLS, RECORDED, Row, gold_text, rewards_text, with_dialogues
from drumroll.runfiles.durable import write_text
from drumroll.runfiles.format import REPORT
from drumroll.runfiles.reader import RunReader

SINGLES = {
    "train/entropy": "Entropy",
    "train/kl_reference": "KL to the reference",
    "train/grad_norm": "Gradient norm",
    "train/mismatch": "Log-prob mismatch",
    "rollout/length": "Completion tokens",
    "rollout/tokens_per_s": "Generated tokens/s",
}
FROM_ZERO = ("rollout/length", "rollout/tokens_per_s")
NOT_STAGES = ("time/step", "time/tokens_per_s", "time/checkpoint_write")  # A sum, a speed, and work beside the stages.
COLOURS = 8  # As many as the template has; a chart with more series is split.
FAMILIES = ("reward/", "eval/", "environment/", "train/expert_load/", "critic/expert_load/")  # Drawn together, by name.
STEPS_DRAWN = 1500
FAILURE_FILES = 2000
ROWS_PER_FILE, FAILED_PER_FILE = 32, 8
HEAD, TAIL = 3000, 1000  # Characters shown of a long text; its end often holds the answer.
TURNS = 40  # Turns shown of a dialogue.


@dataclass(frozen=True)
class Series:
    """A line of a chart. Colour 0 is for a line alone; a name keeps its colour in all charts."""

    key: str
    label: str
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines that share their axes."""

    title: str
    series: Sequence[Series]
    zero: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Outcome:
    """A held-out set before and after training."""

    name: str
    kind: str
    """Empty for a score; else `sampled`, `loss`, ..."""
    lower: bool
    """Whether lower is better."""
    before: float | None
    after: float | None


def write_report(run: RunReader) -> Path:
    """Write `report.html` into the run directory. The report of an unfinished run shows the steps so far."""
    settings, summary, rows = run.settings, run.summary, _by_step(run.metrics)
    drawn = _thinned(rows)
    overview, rest = _charts(list(dict.fromkeys(key for row in rows for key in row if key != "step")))
    charts = [asdict(chart) for chart in (*overview, *rest)]
    columns = {s["key"]: [_finite(row.get(s["key"])) for row in drawn] for chart in charts for s in chart["series"]}
    broken = {key: sum(key in row and _finite(row[key]) is None for row in rows) for key in columns}
    environment = Environment(loader=PackageLoader("drumroll", "observe"), autoescape=True, undefined=StrictUndefined)
    environment.filters["visible"] = _visible
    html = environment.get_template("report.html.j2").render(
        name=settings.get("name", run.path.name),
        config_text=run.config_text,
        facts=_facts(settings, summary, rows) | {"model/": model_text(run)},
        finished=bool(summary),
        outcomes=_outcomes(summary, rows),
        overview=overview,
        rest=rest,
        stride=_stride(rows),
        legend=_legend(columns),
        hints=run.hints,
        reliability=reliability(run),
        place={"x": x_of, "y": y_of},
        failures=_failures(run),
        samples=[_shown(row) for row in with_dialogues(run, list(_samples(run)))],
        data={"steps": [row["step"] for row in drawn], "columns": columns, "broken": broken, "charts": charts},
    )
    # Pure ASCII, so that neither the writer's locale nor a stray surrogate can spoil the file.
    write_text(run.path / REPORT, html.translate(CONTROLS).encode("ascii", "xmlcharrefreplace").decode())
    return run.path / REPORT


def _by_step(metrics: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Merge the lines of each step: the last evaluation is a separate line of the metrics."""
    rows: dict[float, dict[str, float]] = {}
    for line in metrics:
        rows.setdefault(line["step"], {}).update(line)
    return [rows[step] for step in sorted(rows)]


def _stride(rows: Sequence[object]) -> int:
    return max(1, math.ceil(len(rows) / STEPS_DRAWN))


def _thinned(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Drop steps until there are few enough to draw; evaluations and the last step always stay."""
    return [row for i, row in enumerate(rows) if i % _stride(rows) == 0 or row is rows[-1] or any(map(HELD_OUT.fullmatch, row))]


def _finite(value: float | None) -> float | None:
    """Round a number to six digits; return None for a missing one and one that JSON cannot hold."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def _charts(keys: Sequence[str]) -> tuple[list[Chart], list[Chart]]:
    """Return the charts of the overview, and the rest: every metric is in exactly one chart."""

    def name_of(key: str) -> str:
        return held_out[key][1] if key in held_out else key.split("/")[1]

    rewards = [key for key in keys if re.fullmatch("reward/[^/]+", key)]
    held_out = {key: found for key in keys if (found := HELD_OUT.fullmatch(key))}
    evals = [key for key, found in held_out.items() if found[2] not in MEASURED]
    answered = {kind: [key for key, found in held_out.items() if found[2] == kind] for kind in MEASURED}
    successes = [key for key in keys if re.fullmatch("environment/[^/]+/success", key)]
    names = list(dict.fromkeys(name_of(key) for key in (*rewards, *evals, *chain(*answered.values()))))
    stages = [key for key in keys if key.startswith("time/") and key not in NOT_STAGES]

    def named(key: str) -> Series:
        variant = " sampled" if key.endswith("/sampled") else ""
        return Series(key, name_of(key) + variant, names.index(name_of(key)) % COLOURS + 1, dashed=bool(variant))

    overview = [
        *_split("Reward", [named(key) for key in rewards], zero=True, wide=True),
        *_split("Success", _numbered(successes, "environment/"), zero=True, wide=True),
        *_split("Held out", [named(key) for key in evals], zero=True, wide=True),
        *(chart for kind, own in answered.items() for chart in _split(f"Held-out {kind}", [named(key) for key in own])),
        # A policy's loss says little; where there is no reward, the loss is the whole story.
        *(Chart("Loss", [Series(key, key)]) for key in keys if key == "train/loss" and not rewards),
        *(Chart(title, [Series(key, title)], zero=key in FROM_ZERO) for key, title in SINGLES.items() if key in keys),
        *_split("Seconds per stage", _numbered(stages, "time/"), zero=True, wide=True),
    ]
    shown = {series.key for chart in overview for series in chart.series}
    families: dict[str, list[str]] = {}
    for key in sorted(set(keys) - shown):
        families.setdefault(key.rpartition("/")[0] if key.startswith(FAMILIES) else "", []).append(key)
    rest = [chart for name, members in families.items() if name for chart in _split(name, _numbered(members, f"{name}/"))]
    return overview, rest + [Chart(key, [Series(key, key)]) for key in families.get("", ())]


def _numbered(keys: Sequence[str], prefix: str) -> list[Series]:
    return [Series(key, key.removeprefix(prefix), i % COLOURS + 1) for i, key in enumerate(keys)]


def _split(title: str, series: Sequence[Series], *, zero: bool = False, wide: bool = False) -> list[Chart]:
    return [Chart(title, series[i : i + COLOURS], zero, wide) for i in range(0, len(series), COLOURS)]


def _legend(keys: Iterable[str]) -> dict[str, list[str]]:
    """The names of metrics by their meaning, in a fixed order."""
    found: dict[str, list[str]] = {}
    for key in sorted(keys):
        if text := meaning(key):
            found.setdefault(text, []).append(key)
    return found


def _outcomes(summary: Mapping[str, Any], rows: Sequence[Mapping[str, float]]) -> list[Outcome]:
    """Take scores from the summary; before there is one, from the first evaluation and the latest."""

    def summarised(when: str) -> dict[tuple[str, str], float]:
        kinds = {"": when, **{kind: f"{when}_{kind}" for kind in ("sampled", *MEASURED)}}
        return {(name, kind): v for kind, key in kinds.items() for name, v in (summary.get(key) or {}).items()}

    first, latest = summarised("before"), summarised("after")
    for row in rows if not summary else ():
        for match in filter(None, map(HELD_OUT.fullmatch, row)):
            key = (match[1], match[2] or "")
            (latest if key in first else first)[key] = row[match[0]]
    return [
        Outcome(*key, lower_is_better(key[1]), _finite(first.get(key)), _finite(latest.get(key)))
        for key in sorted({**first, **latest})
    ]


def _facts(settings: Mapping[str, Any], summary: Mapping[str, Any], rows: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Facts for the head of the report; those that the config of another version does not have are left out."""

    def at(key: str) -> Any:
        return setting(settings, key)

    step, prompts, rate = summary.get("steps", rows[-1]["step"] if rows else 0), at("rollout.prompts"), at("optim.lr")
    facts = {
        "model": at("roles.actor.model") or at("model"),
        "steps": f"{step:,}" + (f" of {at('steps'):,}" if isinstance(at("steps"), int) else ""),
        "time": _duration(summary["seconds"]) if "seconds" in summary else None,
        "samples per step": None if prompts is None else f"{prompts} × {at('rollout.samples')}",
        "advantage": at("algorithm.advantage"),
        "pipeline": at("pipeline"),
        "learning rate": f"{rate:g}" if isinstance(rate, (int, float)) else rate,
        "seed": at("seed"),
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def _duration(seconds: float) -> str:
    minutes = int(seconds) // 60
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {int(seconds) % 60:02} s" if minutes else f"{seconds:.3g} s"


def _failures(run: RunReader) -> list[FailureCause]:
    """Group the failures of the recorded steps, of very many those of the newest, by cause."""
    files = sorted(run.rollouts(), key=lambda file: (file.step, file.kind == "eval"))[-FAILURE_FILES:]
    return by_cause(run.failures(files))


def _samples(run: RunReader) -> Iterator[dict[str, Any]]:
    """Yield some rows of the first and the last recorded step and of the last evaluation; open no other file."""
    files = sorted(run.rollouts(), key=lambda file: file.step)
    evals = [file for file in files if file.kind == "eval"]
    steps = [file for file in files if file.kind != "eval"]
    for file in dict.fromkeys([*steps[:1], *steps[-1:], *evals[-1:]]):
        rows = list(run.select(RECORDED, step=file.step, kind=file.kind))
        # At random, since every n-th may be of one domain. Failures are few and tell most, so they go first.
        order = random.Random(0).sample(range(len(rows)), len(rows))
        failed = [i for i in order if rows[i]["failure"]][:FAILED_PER_FILE]
        yield from (rows[i] for i in sorted(list(dict.fromkeys(failed + order))[:ROWS_PER_FILE]))


def _shown(row: Row) -> Row:
    """Divide a dialogue into prompt and what followed; leave the middle out of one with very many turns."""
    turns = row["dialogue"]
    first = next((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), 0) if row["turns"] else len(turns) - 1
    followed = turns[first:]
    if len(followed) > TURNS:
        gap = {"role": "…", "content": f"{len(followed) - TURNS} turns left out"}
        followed = [*followed[: TURNS // 2], gap, *followed[-TURNS // 2 :]]
    parts = rewards_text(row).splitlines()[1:]
    return row | {"prompt": turns[:first], "completion": followed, "gold": gold_text(row), "parts": parts}


def _visible(text: str) -> Markup:
    """Escape a text and make its line ends, tabs and outer blanks visible; cut the middle out of a long one."""
    if len(text) > HEAD + TAIL:
        left_out = f"\n[… {len(text) - HEAD - TAIL:,} characters left out …]\n"
        text = text[:HEAD] + left_out + text[-TAIL:]
    core = text.strip(" ")
    lead = len(text) - len(text.lstrip(" ")) if core else len(text)
    blank = Markup('<i class="blank"> </i>')
    body = escape(core)
    body = body.replace("\n", Markup('<i class="newline"></i>\n')).replace("\t", Markup('<i class="tab"></i>\t'))
    return blank * lead + body + blank * (len(text) - lead - len(core))
