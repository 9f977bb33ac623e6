"""Draws metrics of a run as SVG, which notebooks and browsers show without another package."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from typing_extensions import override

from drumroll.errors import StoreError, did_you_mean

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 240, 52, 12, 44, 28
COLOURS = ("#2a78c2", "#d1603d", "#3d8f5f", "#8a63b8", "#b8892b", "#3a9aa6", "#c14f84", "#6b6b6b")
Rows = Sequence[Mapping[str, float]]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Plot:
    """A chart as SVG. Notebooks show it; `save` writes it to a file."""

    title: str
    svg: str

    def save(self, path: str | Path) -> None:
        """Write the SVG to a file."""
        Path(path).write_text(self.svg, "utf-8")

    @override
    def __repr__(self) -> str:
        return f"<Plot of {self.title}; save('plot.svg') writes it>"

    def _repr_html_(self) -> str:
        return self.svg


def plot(rows: Rows, names: Sequence[str]) -> Plot:
    """Draw one panel per name: a metric, or all metrics of a family (`reward` stands for every `reward/...`)."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key != "step"))
    panels = [(name, _members(name, keys)) for name in names] if names else _overview(keys)
    drawn = [_panel(title, members, rows, place) for place, (title, members) in enumerate(panels)]
    width = WIDTH * max(1, len(panels))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        f'style="max-width:100%;height:auto" font-family="sans-serif" font-size="11" fill="currentColor">{"".join(drawn)}</svg>'
    )
    return Plot(", ".join(title for title, _ in panels) or "no metrics", svg)


def _overview(keys: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Rewards by domain and scores of held-out sets; a run without them shows its loss."""
    found = [(name, [k for k in keys if k.startswith(f"{name}/") and k.count("/") == 1]) for name in ("reward", "eval")]
    loss = [("train/loss", [k for k in keys if k == "train/loss" or (k.startswith("eval/") and k.endswith("/loss"))])]
    return [panel for panel in found if panel[1]] or [panel for panel in loss if panel[1]]


def _members(name: str, keys: Sequence[str]) -> list[str]:
    found = [key for key in keys if key == name] or [key for key in keys if key.startswith(f"{name.rstrip('/')}/")]
    if not found:
        raise StoreError(f"the run has no metric '{name}'; it has {', '.join(sorted(keys))}.{did_you_mean(name, keys)}")
    return found


def _panel(title: str, keys: Sequence[str], rows: Rows, place: int) -> str:
    """Draw the lines of some metrics over the steps, with axes and a legend."""
    lines = {k: [(r["step"], r[k]) for r in rows if k in r and math.isfinite(r[k])] for k in keys}
    xs, ys = (
        zip(*(point for points in lines.values() for point in points), strict=True) if any(lines.values()) else ((0,), (0,))
    )
    x_axis, y_axis = _ticks(min(xs), max(xs), whole=True), _ticks(min(ys), max(ys))

    def x(value: float) -> float:
        return LEFT + (value - x_axis[0]) / (x_axis[-1] - x_axis[0]) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_axis[0]) / (y_axis[-1] - y_axis[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="14" font-weight="bold">{escape(title)}</text>']
    parts += [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}" stroke="currentColor" stroke-opacity="0.15"/>'
        f'<text x="{LEFT - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{v:g}</text>'
        for v in y_axis
    ]
    parts += [f'<text x="{x(v):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{v:g}</text>' for v in x_axis]
    across = LEFT
    for number, (key, points) in enumerate(lines.items()):
        colour, label = COLOURS[number % len(COLOURS)], key.removeprefix(f"{title.rstrip('/')}/")
        parts.append(_line([(x(step), y(value)) for step, value in points], colour))
        if len(lines) > 1 or label != title:
            parts.append(f'<text x="{across}" y="30" fill="{colour}">{escape(label)}</text>')
            across += 7 * len(label) + 12
    return f'<g transform="translate({WIDTH * place} 0)">{"".join(parts)}</g>'


def _line(points: Points, colour: str) -> str:
    if len(points) == 1:
        return f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3" fill="{colour}"/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Round numbers that cover a range, about five."""
    if high - low < 1e-9 * max(1.0, abs(low)):
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough * 0.999)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, max(last, first + 1) + 1)]
