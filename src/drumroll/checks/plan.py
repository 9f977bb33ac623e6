"""Plans a recipe without running it: computes its device layout, and simulates its rollout schedule on virtual time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

from drumroll.checks.machine import read_gpus, read_memory
from drumroll.checks.memory import check_memory, memory_lines, memory_plan
from drumroll.config import RunConfig
from drumroll.config.accelerators import USUAL, Kind
from drumroll.config.rollout import RolloutConfig
from drumroll.mesh import Mesh
from drumroll.placement.devices import Layout
from drumroll.placement.layout import arrange, joins, pool_of, requests
from drumroll.rollout.simulation import Workload, barrier, simulate
from drumroll.rollout.virtual import run
from drumroll.workers.runtime import needs_of

COLUMNS = ("schedule", "time per step", "useful utilisation", "samples started", "controller CPU per sample")


def simulation_table(config: RunConfig, engines: int, steps: int, facts: Mapping[str, Any]) -> Table:
    """Compare the recipe's schedule with a batch-level barrier loop and with other settings, on the same draws."""
    work = Workload(engines=engines, slots=config.roles.rollout.slots, seed=config.seed, **facts)
    table = Table(
        title=f"{engines} engines × {work.slots} slots, {steps} steps, times in median generations", title_justify="left"
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "schedule" else "right")
    rollout = config.rollout_section()
    own = _settings(rollout, {})
    base = barrier(work, own, steps)
    table.add_row("batch-level barrier", f"{base.seconds / steps:.2f}", f"{base.utilisation:.1%}", str(base.started), "–")
    others = (
        {"order": "draw", "max_staleness": 0.0},
        {"order": "draw", "max_staleness": 1.0},
        {"order": "arrival", "max_staleness": 1.0},
    )
    rows = [
        ("this recipe", own),
        *((f"{o['order']} order, staleness {o['max_staleness']:g}", _settings(rollout, o)) for o in others),
    ]
    for name, settings in rows:
        began = time.process_time()
        out = run(simulate(work, settings, steps))
        cost = (time.process_time() - began) / max(1, out.started)
        table.add_row(name, f"{out.seconds / steps:.2f}", f"{out.utilisation:.1%}", str(out.started), f"{cost * 1e6:.0f} µs")
    return table


def _settings(config: RolloutConfig, changes: Mapping[str, Any]) -> RolloutConfig:
    """Adapt the recipe's settings to simulated time: no deadlines, room for long samples, `partial` only if staleness allows it."""
    fixed = {
        "generation_timeout": 1e9,
        "max_tokens": 10**6,
        "filter": "zero_variance" if config.filter else None,
        "filter_args": {},
    }
    merged: dict[str, Any] = config.model_dump() | fixed | dict(changes)
    merged["partial"] = merged["partial"] and merged["max_staleness"] >= 1
    return RolloutConfig.model_validate(merged)


def planned(config: RunConfig) -> Layout | None:
    """Return the device layout, computed without the cluster; None if the run joins a cluster."""
    try:
        gpus = len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        gpus = 0
    needs = needs_of(config)
    if config.cluster.runtime == "local":
        asked = config.roles.actor.devices
        on_gpu = asked != "cpu" if gpus else False
        alone = config.cluster.model_copy(update={"devices": 1, "kind": USUAL if on_gpu else Kind.CPU.value})
        pool = pool_of(config.model_copy(update={"cluster": alone}), gpus, *_memory())
        made = requests(config, needs)
        return Layout(
            {r.role: pool.devices for r in made}, {r.role: 1 for r in made}, {r.role: Mesh() for r in made if r.spreads}
        )
    if joins(config):
        return None
    if config.cluster.kind not in ("auto", Kind.CPU):  # a plan for GPUs of another machine
        gpus = max(gpus, config.cluster.devices or 0)
    return arrange(config, pool_of(config, gpus, *_memory()), needs)


def _memory() -> tuple[int | None, int | None]:
    """Bytes of this machine's smallest GPU, and of its host memory."""
    gpus, host = read_gpus(version("torch"))[0], read_memory(Path("/"))
    return min((gpu.memory for gpu in gpus), default=None), None if host is None else host.total


def plan_lines(config: RunConfig) -> Iterator[str]:
    """Yield the layout and the memory of each device, for people; raise if the memory does not suffice."""
    layout = planned(config)
    if layout is None:
        return
    if config.cluster.runtime == "ray":
        yield from layout.describe().splitlines()
    plan = memory_plan(config, layout)
    yield from memory_lines(plan)
    check_memory(config, plan, layout)
