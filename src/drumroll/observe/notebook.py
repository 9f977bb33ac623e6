"""Shows a run in a notebook while it trains: a progress bar, the newest metrics and the curves so far, in one output."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from html import escape
from typing import Any

from typing_extensions import override

from drumroll.observe.headline import headline
from drumroll.observe.progress import Metrics, Quiet
from drumroll.runfiles.charts import plot
from drumroll.runfiles.reader import RunReader


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


class Notebook(Quiet):
    """Replaces its output after every step."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._first, self._began = 0, time.monotonic()
        self._rows: list[dict[str, float]] = []
        self._notices: list[str] = []
        self._output: Any = None

    @override
    def begin(self, step: int, before: Metrics) -> None:
        self._first, self._began = step, time.monotonic()
        self._add(step, before)

    @override
    def committed(self, step: int, metrics: Metrics) -> None:
        self._add(step, metrics)

    @override
    def notice(self, text: str) -> None:
        self._notices.append(text)
        self._show(self._html())

    @override
    def finish(self, run: RunReader, summary: Mapping[str, Any]) -> None:
        self._show(self._html(f"{summary['steps']} steps in {summary['seconds']:.0f} s, saved in {run.path}"))

    def _add(self, step: int, metrics: Metrics) -> None:
        self._rows.append({**metrics, "step": step})
        self._show(self._html())

    def _html(self, ending: str = "") -> str:
        step = int(self._rows[-1]["step"]) if self._rows else 0
        rest = (time.monotonic() - self._began) / max(1, step - self._first) * (self.steps - step)
        state = ending or f"step {step} of {self.steps}" + (f", about {rest:.0f} s left" if step > self._first else "")
        shown = " · ".join(f"{name} {value}" for name, value in headline(self._rows[-1])) if self._rows else ""
        lines = "".join(f"<div>{escape(line)}</div>" for line in (shown, *self._notices))
        bar = f'<progress value="{step}" max="{max(1, self.steps)}"></progress> {escape(state)}'
        return f"<div>{bar}{lines}{plot(self._rows, ()).svg if len(self._rows) > 1 else ''}</div>"

    def _show(self, html: str) -> None:
        from IPython.display import HTML, display

        if self._output is None:
            self._output = display(HTML(html), display_id=True)
        else:
            self._output.update(HTML(html))
