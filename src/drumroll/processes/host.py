"""The memory of this machine, as the kernel's files and this process's cgroups say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 2**60


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that this process may use, in bytes; `limited` if a cgroup allows less than the machine has."""

    total: int
    available: int | None = None
    limited: bool = False


def read_memory(root: Path) -> Memory | None:
    """Read the machine's memory, or the part that the cgroup allows. File pages that can be dropped count as available."""
    found = {name: first_number(value) for name, _, value in lines_of(root / "proc" / "meminfo", ":")}
    total, available = (kib * 1024 if (kib := found.get(key)) is not None else None for key in ("MemTotal", "MemAvailable"))
    if total is None:
        try:
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return None
    limited = False
    for folder in cgroups(root, "memory"):
        limit = number_of(folder, "memory.max", "memory.limit_in_bytes")
        if limit is None or limit >= UNLIMITED:
            continue
        used = number_of(folder, "memory.current", "memory.usage_in_bytes") or 0
        stat = {name: value for name, _, value in lines_of(folder / "memory.stat", " ")}
        droppable = int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)
        left = max(0, limit - max(0, used - droppable))
        available = left if available is None else min(available, left)
        total, limited = min(total, limit), limited or limit < total
    return Memory(total, available, limited)


def cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroups with this controller, innermost first; cgroup versions 1 and 2."""
    mounts = root / "sys" / "fs" / "cgroup"
    for line in text_of(root / "proc" / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mount = mounts / controllers if (mounts / controllers).is_dir() else mounts / controller
        inner = Path(path.strip("/"))
        yield from dict.fromkeys(mount / part for part in (inner, *inner.parents))


def text_of(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def lines_of(path: Path, separator: str) -> list[tuple[str, str, str]]:
    """Return the lines of a file, each cut at the separator."""
    return [line.partition(separator) for line in text_of(path).splitlines()]


def number_of(folder: Path, *names: str) -> int | None:
    """Return the number in the first of these files that holds one."""
    return next((int(text) for name in names if (text := text_of(folder / name).strip()).isdigit()), None)


def first_number(text: str) -> int | None:
    """Return the number that a text begins with."""
    words = text.replace(",", " ").split()
    return int(words[0]) if words and words[0].isdigit() else None
