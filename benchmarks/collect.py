"""Run all benchmarks, keep their figures, and write docs/performance.md. Run it with nothing else running.

python benchmarks/collect.py [BENCHMARK ...]     for example rollout.py "step.py --peer trl"
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from figures import limit_gflops, natural_dtype

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs"
BFLOAT16 = "step.py --peer trl --variants autocast,bfloat16 --ours all --rounds 0"
BENCHMARKS = (
    "step.py",
    "step.py --peer trl",
    BFLOAT16,
    "rollout.py",
    "train.py",
    "pipelines.py",
    "growth.py",
    "scheduler.py",
    "weights.py",
    "transfer.py",
    "parallel.py",
    "cluster.py",
    "environments.py",
    "rewards.py",
    "code.py",
    "cli.py",
)
REMARKS = {
    "growth.py": "![tokens per second and cache memory against live sequences, context and model size](growth.svg)",
    BFLOAT16: "One step each. A CPU without bfloat16 instructions emulates them, at a small part of its float32 rate; ours ran in the "
    "dtype that is natural to it, so there these ratios tell of the CPU: the fair ones are those above.",
}
HEAD = """# Performance

Made by `make bench`; do not edit. One JSON object per figure is in [figures.jsonl](figures.jsonl), with all that explains it.
Repeat a part with `python benchmarks/<name>.py`; `make bench-env smollm2` first brings the peers and the model. Peers run in
the same run as we do, by turns, in environments of their own. Never measure beside another load.
"""


def figures(name: str) -> list[dict[str, Any]]:
    """The figures that a benchmark prints."""
    script, *arguments = name.split()
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in out.stdout.splitlines() if line.startswith("{")]


def row(figure: dict[str, Any]) -> str:
    """A figure as a line of a table."""
    goal = f"{figure['goal']:g}" if "goal" in figure else "–"
    holds = {True: "yes", False: "**no**", None: "–"}[figure.get("holds")]
    return f"| {figure['figure']} | {figure['value']:.4g} {figure['unit']} | {goal} | {holds} |"


def remembered() -> dict[str, list[dict[str, Any]]]:
    """Figures measured before, by benchmark."""
    path, found = PAGES / "figures.jsonl", dict[str, list[dict[str, Any]]]()
    for line in path.read_text().splitlines() if path.exists() else ():
        figure = json.loads(line)
        found.setdefault(figure.get("benchmark", ""), []).append(figure)
    return found


def main() -> None:
    """All benchmarks, or those named, one after the other; of the others the figures measured before are kept."""
    chosen, found = sys.argv[1:] or list(BENCHMARKS), remembered()
    if unknown := set(chosen) - set(BENCHMARKS):
        sys.exit(f"there is no benchmark '{min(unknown)}'; choose among: {', '.join(BENCHMARKS)}")
    limits, failed = {dtype: limit_gflops(dtype) for dtype in {"float32": 0, natural_dtype(): 0}}, list[str]()
    for name in chosen:
        try:
            found[name] = [figure | {"benchmark": name, "measured": date.today().isoformat()} for figure in figures(name)]
        except subprocess.CalledProcessError as error:
            failed.append(f"{name} (exit code {error.returncode})")
        write(found, limits)
    print((PAGES / "performance.md").read_text())
    if failed:
        sys.exit(f"failed, with its earlier figures kept: {', '.join(failed)}")


def write(found: dict[str, list[dict[str, Any]]], limits: dict[str, float]) -> None:
    """The page and the figures behind it."""
    machine = f"Measured on {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}. "
    machine += "The limit, the best of five matrix products on all threads before anything else ran: "
    machine += ", ".join(f"{gflops:.4g} GFLOP/s in {dtype}" for dtype, gflops in limits.items()) + "."
    lines, kept = [HEAD, machine, ""], []
    for name in BENCHMARKS:
        if own := found.get(name, []):
            kept += own
            head = f"## `benchmarks/{name}`, {own[0]['measured']}"
            lines += [head, "", "| figure | value | goal | holds |", "|---|---|---|---|", *map(row, own), ""]
            lines += [REMARKS[name], ""] if name in REMARKS else []
    (PAGES / "performance.md").write_text("\n".join(lines))
    (PAGES / "figures.jsonl").write_text("".join(json.dumps(f) + "\n" for f in kept))


if __name__ == "__main__":
    main()
