"""Judges the facts of a machine: which parts of drumroll can run on it, which packages are missing, which limits to expect.

Pure functions of a `Machine`, and tables for the terminal. It never reads the machine itself; `machine` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from drumroll.checks.machine import FOR_CPUS, Machine

GIB = 2**30
COMMAND_WIDTH = 46
"""Characters that a terminal of 80 columns leaves for a note and its command."""
LEAST_SHARED, LEAST_MEMORY, LEAST_DISK = 1 * GIB, 2 * GIB, 5 * GIB
"""A warning appears below these sizes: for Ray and weight sync, a small model with its optimizer, a few checkpoints."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of drumroll: whether it can run here, on which device or why not, and the command that installs it."""

    name: str
    runs: bool
    note: str
    install: str = ""


# --- judgement ---


def parts(machine: Machine) -> list[Part]:
    """Return all interchangeable parts, each with whether it can run here."""
    return [
        _torch(machine, "actor: torch on CPU", _count(machine.cpu.cores, "core")),
        _gpu(machine),
        _megatron(machine),
        _deepspeed(machine),
        _torch(machine, "rollout: native", "the actor's device"),
        _tool("rollout: kernels", machine.compiler, "gcc"),
        _vllm(machine),
        Part("runtime: local", True, "one process"),
        _ray(machine),
        _optional(machine, "LoRA adapters", "peft", "drumroll[lora]"),
        _tool("sandbox: bubblewrap", machine.bwrap, "bubblewrap", machine.bwrap_problem),
        _tool("browser: chromium", machine.browser, "chromium"),
    ]


def _torch(machine: Machine, name: str, note: str) -> Part:
    if machine.versions["torch"] is None:
        return Part(name, False, "torch is not installed", "pip install torch")
    return Part(name, True, note)


def _gpu(machine: Machine) -> Part:
    name = "actor: torch on a GPU"
    if machine.gpus:
        return Part(name, True, _count(len(machine.gpus), "GPU"))
    if not machine.gpu_driver:
        return Part(name, False, "no GPU on this machine")
    wrong = machine.versions["torch"] is None or machine.gpu_problem == FOR_CPUS
    return Part(
        name, False, f"a GPU is here, but {machine.gpu_problem}", "pip install --force-reinstall torch" if wrong else ""
    )


def _megatron(machine: Machine) -> Part:
    """Judge Megatron-Core, which needs a GPU."""
    part = _optional(machine, "actor: megatron", "megatron-core", "drumroll[megatron]")
    if machine.gpus:
        return part
    return Part(part.name, False, f"{part.note}{' needs' if part.runs else ', and needs'} a GPU", part.install)


def _deepspeed(machine: Machine) -> Part:
    part = _optional(machine, "actor: deepspeed", "deepspeed", "drumroll[deepspeed]")
    return Part(part.name, True, f"{part.note}, on {'GPUs' if machine.gpus else 'the CPU'}") if part.runs else part


def _vllm(machine: Machine) -> Part:
    """Judge vLLM. A build for GPUs needs a GPU; a build for x86 CPUs needs AVX-512, or AVX2 if it has AVX2 kernels."""
    name, sets = "rollout: vllm", machine.cpu.instructions
    x86 = machine.cpu.architecture == "x86_64"
    weak = x86 and bool(sets) and not sets["avx2"]
    if machine.vllm is None:
        if not machine.gpus and weak:
            return Part(name, False, "no GPU, and the CPU lacks AVX2 and AVX-512")
        return Part(name, False, "not installed", "pip install vllm" if machine.gpus else "make vllm")
    if not machine.vllm.for_cpu:
        if machine.gpus:
            return Part(name, True, _count(len(machine.gpus), "GPU"))
        return Part(name, False, "this build needs a GPU that torch sees", "" if weak else "make vllm")
    if not x86 or not sets or sets["avx512"]:
        return Part(name, True, "on the CPU")
    if sets["avx2"] and machine.vllm.for_avx2:
        return Part(name, True, "on the CPU, by AVX2 kernels: slower than with AVX-512")
    return Part(name, False, "no GPU, and the CPU lacks AVX-512" if sets["avx2"] else "the CPU lacks AVX2 and AVX-512")


def _ray(machine: Machine) -> Part:
    ray = machine.ray
    part = _optional(machine, "runtime: ray", "ray", "drumroll[ray]")
    if not part.runs:
        return part
    if ray.address in (None, "local"):
        return Part(part.name, True, "its own cluster on this machine")
    return Part(
        part.name,
        not ray.problem,
        "the cluster at RAY_ADDRESS cannot be joined" if ray.problem else "the cluster at RAY_ADDRESS",
    )


def _optional(machine: Machine, name: str, package: str, extra: str) -> Part:
    version = machine.versions[package]
    if version is None:
        return Part(name, False, "not installed", f"pip install '{extra}'")
    return Part(name, True, f"{package} {version}")


def _tool(name: str, path: str | None, package: str, problem: str = "") -> Part:
    if path is None:
        return Part(name, False, "not found", f"apt-get install {package}")
    return Part(name, not problem, f"{path} fails: {problem}" if problem else path)


def warnings(machine: Machine) -> list[str]:
    """Return the machine's limits that will slow down or break runs, each with its remedy in a sentence or two."""
    return [*_compute_warnings(machine), *_room_warnings(machine)]


def _compute_warnings(machine: Machine) -> Iterator[str]:
    cpu, threads, most = machine.cpu, machine.omp_threads, math.ceil(machine.cpu.cores)
    if machine.gpus:
        if old := next((gpu.name for gpu in machine.gpus if not gpu.bf16), None):
            yield f"{old} has no bfloat16 units: keep dtype: float32."
    elif cpu.instructions and not cpu.instructions.get("bf16"):
        yield "The CPU has no bfloat16 instructions, so bfloat16 is slower than float32 here: keep dtype: float32."
    if cpu.cores < 2:
        yield f"Only {_count(cpu.cores, 'core')}: generation, rewards and training take turns on it."
    if threads is not None and threads > most:
        yield (
            f"OMP_NUM_THREADS={threads} is more than the {_count(cpu.cores, 'core')} usable here; threads that wait for "
            f"each other become many times slower. Set it to {most}."
        )
    elif threads is None and cpu.allowed > most:
        yield (
            f"torch starts {cpu.allowed} threads, but the cgroup allows {_count(cpu.cores, 'core')}: "
            f"set OMP_NUM_THREADS={most}."
        )


def _room_warnings(machine: Machine) -> Iterator[str]:
    shared, memory, disk = machine.shared_memory, machine.memory, machine.disk
    if shared is not None and shared.total < LEAST_SHARED:
        yield (
            f"/dev/shm has {size(shared.total)}: Ray's objects and new weights go through it, or through the disk if they "
            "do not fit. In Docker: --shm-size=8g."
        )
    elif shared is not None and shared.free < LEAST_SHARED:
        yield f"/dev/shm has only {size(shared.free)} free, and Ray's objects and new weights go through it: remove what is left there."
    if memory is not None and memory.available is not None and memory.available < LEAST_MEMORY:
        yield f"Only {size(memory.available)} of memory is available: enough for the tiny models, little more."
    if disk is not None and disk.free < LEAST_DISK:
        yield f"Only {size(disk.free)} is free on this disk, and checkpoints need room: set output to another."
    if machine.ray.address is not None and machine.ray.problem:
        yield f"The cluster at RAY_ADDRESS={machine.ray.address} cannot be joined. Without the variable each run starts its own."


# --- for people and programs ---


def as_json(machine: Machine) -> dict[str, Any]:
    """Return facts, parts and warnings as plain data; sizes are in bytes."""
    return asdict(machine) | {"parts": [asdict(part) for part in parts(machine)], "warnings": warnings(machine)}


def readiness_tables(machine: Machine) -> list[RenderableType]:
    """Return the tables for the terminal: the facts, the parts that can run, and the warnings."""
    found = Table(title="machine", title_justify="left", show_header=False)
    found.add_column(no_wrap=True)
    found.add_column(overflow="fold")
    for section in (_hardware(machine), _versions(machine.versions), {"Ray": _cluster(machine)}):
        for name, value in section.items():
            found.add_row(name, Text(value, "dim" if value == "not installed" else ""))
        found.add_section()
    able = Table("part", "runs", title="what can run here", title_justify="left")
    able.add_column("on what, or why not", overflow="fold")
    for part in parts(machine):
        text = Text(part.note)
        if part.install:
            whole = len(part.note) + len(part.install) < COMMAND_WIDTH  # else on a separate line, easy to copy
            text.append(": " if whole else ":\n").append(part.install, "bold cyan")
        able.add_row(part.name, Text("yes", "green") if part.runs else Text("no", "red"), text)
    hurts = Table.grid(padding=(0, 1))
    for warning in warnings(machine):
        hurts.add_row(Text("warning:", "bold yellow"), Text(warning))
    return [found, able, *([hurts] if hurts.row_count else [])]


def _hardware(machine: Machine) -> dict[str, str]:
    cpu, memory, disk, shared = machine.cpu, machine.memory, machine.disk, machine.shared_memory
    cores = f"{cpu.cores:g} of {cpu.present}"
    cores += " (cgroup quota)" if cpu.cores < cpu.allowed else " (affinity)" if cpu.allowed < cpu.present else ""
    have = [name for name, there in cpu.instructions.items() if there]
    lack = [name for name, there in cpu.instructions.items() if not there]
    sets = ", ".join(have) + (f" (without {', '.join(lack)})" if lack else "")
    rows = {"CPU": cpu.model, "cores usable": cores, "instructions": sets or "unknown"}
    names = [f"{gpu.name}, {size(gpu.memory)}" for gpu in machine.gpus]
    rows["GPUs"] = "\n".join(f"{i}: {name}" for i, name in enumerate(names)) or machine.gpu_problem or "none"
    if memory is not None:
        left = "" if memory.available is None else f"{size(memory.available)} available of "
        rows["memory"] = f"{left}{size(memory.total)}" + (" (cgroup limit)" if memory.limited else "")
    rows["disk here"] = "unknown" if disk is None else f"{size(disk.free)} free of {size(disk.total)}"
    rows["shared memory"] = "no /dev/shm" if shared is None else f"{size(shared.free)} free of {size(shared.total)} in /dev/shm"
    return rows


def _versions(versions: Mapping[str, str | None]) -> dict[str, str]:
    return {name: version or "not installed" for name, version in versions.items()}


def _cluster(machine: Machine) -> str:
    ray = machine.ray
    if ray.address is None:
        return "RAY_ADDRESS is not set"
    if ray.problem or machine.versions["ray"] is None:
        return f"{ray.address}: {ray.problem or 'not asked, as ray is not installed'}"
    if not ray.nodes:
        return f"{ray.address}: " + ("each run starts its own" if ray.address == "local" else "answers")
    things = ", ".join(f"{value:g} {name}" for name, value in ray.resources.items())
    return f"{ray.address}: {_count(ray.nodes, 'node')}, {things}"


def size(count: int) -> str:
    """Format bytes: 64 MiB, 1.5 GiB, 252 GiB."""
    gib = count / GIB
    return f"{count / 2**20:.0f} MiB" if gib < 1 else f"{gib:.1f} GiB" if gib < 10 else f"{gib:.0f} GiB"


def _count(count: float, thing: str) -> str:
    return f"{count:g} {thing}" + ("" if count == 1 else "s")
