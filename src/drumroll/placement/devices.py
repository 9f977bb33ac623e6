"""Assigns devices to roles: the pool of devices, each role's request, and the resulting layout.

Pure arithmetic on plain data, done before anything starts: no Ray, no torch, no hardware queries. Ranges are parsed,
never evaluated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby, product

from drumroll.config.accelerators import Kind
from drumroll.errors import ConfigError, did_you_mean
from drumroll.mesh import AXES, Mesh

ANCHOR = "actor"
"""The role whose devices the others share when they name none; without it, the first role."""
AUTO = "auto"
"""The word for the default, where a range, a count or the name of a role may stand; never a role."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or a slot of CPU threads. `index` counts in the pool, `local` on the node among those of its kind.

    `memory` is what it has, in bytes; None where nobody has asked it yet.
    """

    index: int
    kind: Kind
    node: int = 0
    local: int = 0
    threads: int = 1
    memory: int | None = None


DeviceSet = tuple[Device, ...]
"""The devices of one worker, all on one machine. An empty set means that the worker may run anywhere."""


@dataclass(frozen=True, slots=True)
class Pool:
    """All devices of a run, numbered from 0: node by node, GPUs before CPU slots."""

    devices: tuple[Device, ...]

    @classmethod
    def of(cls, nodes: Iterable[Mapping[Kind, int]], threads: int = 1, memory: int | None = None) -> Pool:
        """The devices of these machines, given how many of each kind they have; all have the same `memory`."""
        found: list[Device] = []
        for n, node in enumerate(nodes):
            for kind in Kind:
                found += [Device(len(found) + i, kind, n, i, threads, memory) for i in range(node.get(kind, 0))]
        return cls(tuple(found))


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """What a role asks for. `devices`: a range ("0-7,12"), a count, the name of a role to share with, or `auto` (also None).

    `parallel` sizes multiply to one replica; replicas fill the devices in order. An engine's replica is one process;
    of a role that `spreads`, as learners do, each device is a process of its own, and replicas are the mesh's `data` axis.
    """

    role: str
    devices: str | int | None = None
    parallel: Mapping[str, int] = field(default_factory=dict)
    spreads: bool = False

    @property
    def is_auto(self) -> bool:
        """Whether it takes the default: the anchor all devices, other roles the anchor's."""
        return self.devices is None or (isinstance(self.devices, str) and self.devices.strip() == AUTO)

    @property
    def replica(self) -> int:
        """The number of devices that one replica takes."""
        shared = ("data", "expert") if self.spreads else ()  # `data` counts replicas, `expert` regroups their ranks
        return math.prod(size for axis, size in self.parallel.items() if axis not in shared)


class Sharing(StrEnum):
    """How the devices of two roles overlap."""

    WHOLE = "wholly"
    PART = "partly"
    NONE = "disjoint"


@dataclass(frozen=True)
class Layout:
    """The devices of each role, in rank order; for roles without devices, the node of each worker."""

    devices: Mapping[str, tuple[Device, ...]]
    replica: Mapping[str, int]
    meshes: Mapping[str, Mesh] = field(default_factory=dict)  # of the roles whose devices are processes of their own

    def replicas(self, role: str) -> list[tuple[Device, ...]]:
        """Return the role's devices, split into replicas."""
        devices, size = self.devices.get(role, ()), self.replica.get(role, 1)
        return [devices[i : i + size] for i in range(0, len(devices), size)]

    def workers(self, role: str) -> list[DeviceSet]:
        """The devices of each worker process of a role, in rank order; none of a role that does not run."""
        return [(device,) for device in self.devices[role]] if role in self.meshes else self.replicas(role)

    def sharing(self, one: str, other: str) -> Sharing:
        """Return whether two roles use the same devices, some of the same, or none."""
        a, b = set(self.devices[one]), set(self.devices[other])
        return Sharing.WHOLE if a == b else Sharing.PART if a & b else Sharing.NONE

    def describe(self) -> str:
        """Return the layout as a table for people."""
        rows = [("role", "devices", "ranks", "shares with")]
        for role, devices in self.devices.items():
            others = [(o, self.sharing(role, o)) for o in self.devices if o != role]
            shares = ", ".join(o if how is Sharing.WHOLE else f"{o} (part)" for o, how in others if how is not Sharing.NONE)
            kinds = "+".join(dict.fromkeys(d.kind.value for d in devices))
            size = self.replica[role]
            ranks = f"{len(devices)}" if size in (1, len(devices)) else f"{len(devices)} = {len(devices) // size} × {size}"
            if role in self.meshes and (size > 1 or self.meshes[role].expert > 1):
                mesh = self.meshes[role]
                ranks = f"{len(devices)} = {_product({axis: getattr(mesh, axis) for axis in AXES})}"
                ranks += f", expert {mesh.expert}" if mesh.expert > 1 else ""
            rows.append((role, f"{kinds} {ranges([d.index for d in devices])}", ranks, shares or "-"))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows)


def ranges(indices: Sequence[int]) -> str:
    """Format [0, 1, 2, 5] as 0-2,5: the inverse of `parse`."""
    runs = [[v for _, v in run] for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def parse(text: str, key: str, size: int) -> list[int]:
    """Return the device numbers that a range string names, in its order, in a pool of this size."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part, re.ASCII)
        if match is None:
            raise ConfigError(f"{key}: '{text}' has a part '{part}' that is neither a device nor a range such as 0-7.")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"{key}: the range {part.strip()} runs backwards; write {last}-{first}.")
        if last >= size:
            has = f"{size} devices (0-{size - 1})" if size > 1 else "1 device (0)"
            raise ConfigError(f"{key}: {text} names device {last}, but the pool has {has}.")
        if twice := set(found) & set(range(first, last + 1)):
            raise ConfigError(f"{key}: '{text}' names device {min(twice)} twice.")
        found += range(first, last + 1)
    return found


def lay_out(pool: Pool, requests: Sequence[DeviceRequest]) -> Layout:
    """Assign devices to every role, or explain in numbers why that is impossible. Order: ranges, then counts, then sharing."""
    assert pool.devices, "an empty pool"
    asked = {r.role: r for r in requests}
    assert len(asked) == len(requests), "a role asks twice"
    anchor = ANCHOR if ANCHOR in asked else next(iter(asked), ANCHOR)
    named = {r.role: r.devices for r in requests if isinstance(r.devices, str) and not r.devices.strip()[:1].isalpha()}
    size = len(pool.devices)
    given = {role: tuple(pool.devices[i] for i in parse(text, _key(role), size)) for role, text in named.items()}
    given |= _counted(pool, {r.role: r.devices for r in requests if isinstance(r.devices, int)}, given)
    if anchor in asked and asked[anchor].is_auto:  # GPUs where there are any: a default never mixes kinds
        gpus = tuple(d for d in pool.devices if d.kind is not Kind.CPU)
        given[anchor] = gpus or pool.devices
    layout = {role: given[_shared(request, asked, anchor, given)] for role, request in asked.items()}
    for role, request in asked.items():
        _check_parallel(request, layout[role])
    meshes = {role: _mesh(request, len(layout[role])) for role, request in asked.items() if request.spreads}
    return Layout(layout, {role: request.replica for role, request in asked.items()}, meshes)


def _mesh(request: DeviceRequest, devices: int) -> Mesh:
    """The mesh of a role whose devices are processes of their own; replicas are its `data` axis."""
    key, data, sizes = f"roles.{request.role}.parallel", devices // request.replica, dict(request.parallel)
    if sizes.setdefault("data", data) != data:
        raise ConfigError(
            f"{key}: data {sizes['data']} × {request.replica} devices of a replica = {sizes['data'] * request.replica}, but the role "
            f"has {devices} devices; data {data} would fit, and is the default."
        )
    regrouped = data * sizes.get("shard", 1) * sizes.get("tensor", 1)
    if regrouped % sizes.get("expert", 1):
        raise ConfigError(
            f"{key}: expert {sizes['expert']} does not divide data × shard × tensor = {regrouped}, the ranks over which experts are "
            f"spread; expert {common_divisors(regrouped, regrouped)} does."
        )
    return Mesh(**sizes)


def common_divisors(count: int, other: int) -> str:
    """The sizes that divide both, for sentences."""
    return " or ".join(str(size) for size in range(1, math.gcd(count, other) + 1) if count % size == 0 and other % size == 0)


def _key(role: str) -> str:
    return f"roles.{role}.devices"


def _counted(pool: Pool, counts: Mapping[str, int], named: Mapping[str, tuple[Device, ...]]) -> dict[str, tuple[Device, ...]]:
    """Assign to each count the lowest devices that no range claims, in the order of the roles."""
    for role, count in counts.items():
        if count < 1:
            raise ConfigError(
                f"{_key(role)}: a count of devices is at least 1; device number 0 alone is written 0-0, got {count}."
            )
    free = [d for d in pool.devices if not any(d in devices for devices in named.values())]
    if (total := sum(counts.values())) > len(free):
        asks = ", ".join(f"{role} {count}" for role, count in counts.items())
        held = "".join(f"; {role} holds {ranges([d.index for d in devices])}" for role, devices in named.items())
        raise ConfigError(
            f"roles ask for {total} devices by count, but only {len(free)} of {len(pool.devices)} are free: {asks}{held}. "
            f"Ask for fewer, or let a role share those of another by its name."
        )
    given: dict[str, tuple[Device, ...]] = {}
    for role, count in counts.items():
        given[role], free = tuple(free[:count]), free[count:]
    return given


def _shared(
    request: DeviceRequest, asked: Mapping[str, DeviceRequest], anchor: str, given: Mapping[str, tuple[Device, ...]]
) -> str:
    """Follow the chain of sharing and return the role whose devices this role uses in the end."""
    path = [request.role]
    while (role := path[-1]) not in given:
        request = asked[role]
        other = anchor if request.is_auto else str(request.devices).strip()
        if other not in asked:
            others = [r for r in asked if r != role]
            known = ", ".join(others) or "there is none"
            hint = did_you_mean(other, [*others, AUTO])
            raise ConfigError(f"{_key(role)}: '{other}' is no role with devices to share ({known}).{hint}")
        if other in path:
            circle = " → ".join([*path[path.index(other) :], other])
            raise ConfigError(f"{_key(role)}: {circle} share in a circle; give one of them devices of its own.")
        path.append(other)
    return path[-1]


def _check_parallel(request: DeviceRequest, devices: tuple[Device, ...]) -> None:
    key = f"roles.{request.role}.parallel"
    for name, size in request.parallel.items():
        if size < 1:
            raise ConfigError(f"{key}.{name}: {size} must be at least 1.")
    asked = _product(request.parallel)
    asked += f" = {request.replica}" if "×" in asked and not {"data", "expert"} & set(request.parallel) else ""
    if len(devices) % request.replica:
        raise ConfigError(f"{key}: {asked} does not divide {len(devices)} devices; nearest: {_nearest(request, len(devices))}.")
    for start in range(0, len(devices), request.replica):
        replica = devices[start : start + request.replica]
        if len(kinds := dict.fromkeys(d.kind for d in replica)) > 1:
            where = ranges([d.index for d in replica])
            raise ConfigError(f"{key}: {asked} puts one replica on devices {where}, which mix {' and '.join(kinds)}.")


def _product(sizes: Mapping[str, int]) -> str:
    """Format sizes as shard 4 × tensor 2; those of 1 are left out, unless all are."""
    named = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    return " × ".join(named or [f"{axis} {size}" for axis, size in sizes.items()][:1])


def _nearest(request: DeviceRequest, devices: int) -> str:
    """The sizes of a replica that divide the devices and differ least, by ratio, from those asked for."""
    axes = [axis for axis, size in request.parallel.items() if size > 1 and axis not in ("data", "expert")]
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    fitting = [sizes for sizes in product(divisors, repeat=len(axes)) if devices % math.prod(sizes) == 0]
    asked = [request.parallel[axis] for axis in axes]
    best = min(fitting, key=lambda sizes: sum(abs(math.log(a / b)) for a, b in zip(sizes, asked, strict=True)))
    return _product(dict(zip(axes, best, strict=True)))
