"""Run all benchmarks, keep their figures, and write docs/performance.md. Run it with nothing else running.

python benchmarks/collect.py
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BENCHMARKS = ("step.py", "scheduler.py", "weights.py", "transfer.py", "cluster.py", "environments.py")
HEAD = """# Performance

Made by `make bench`; do not edit. One JSON object per figure is in [figures.jsonl](figures.jsonl), with all that explains it.
Repeat a part with `python benchmarks/<name>.py`. Never measure beside another load.
"""


def figures(name: str) -> list[dict[str, Any]]:
    """The figures that a benchmark prints."""
    out = subprocess.run([sys.executable, str(ROOT / "benchmarks" / name)], stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in out.stdout.splitlines() if line.startswith("{")]


def row(figure: dict[str, Any]) -> str:
    """A figure as a line of a table."""
    goal = f"{figure['goal']:g}" if "goal" in figure else "–"
    holds = {True: "yes", False: "**no**", None: "–"}[figure.get("holds")]
    return f"| {figure['figure']} | {figure['value']:.4g} {figure['unit']} | {goal} | {holds} |"


def main() -> None:
    """All benchmarks, one after the other."""
    machine = f"Measured on {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}."
    lines, kept = [HEAD, machine, ""], []
    for name in BENCHMARKS:
        found = figures(name)
        kept += found
        lines += [f"## `benchmarks/{name}`", "", "| figure | value | goal | holds |", "|---|---|---|---|", *map(row, found), ""]
    docs = ROOT / "docs"
    docs.mkdir(exist_ok=True)
    (docs / "performance.md").write_text("\n".join(lines))
    (docs / "figures.jsonl").write_text("".join(json.dumps(f) + "\n" for f in kept))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
