"""The `ray` runtime: the workers of a role as Ray actors, behind the same calls as in one process.

A run holds one placement group with a bundle per device of its pool; roles on the same device share its bundle.
Nothing is named or detached, so runs on one cluster never meet, and all of it goes when the run closes or dies.
What Ray says of a failure is translated here and nowhere else. This file must never know what a worker does.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Concatenate, cast

from typing_extensions import override

from drumroll.config.accelerators import FAMILIES, USUAL
from drumroll.errors import DrumrollError, MissingExtra
from drumroll.placement.devices import Device, DeviceSet, Kind, Pool, ranges
from drumroll.processes import lifeline
from drumroll.processes.network import address_of
from drumroll.workers.group import P, R, ReplaceableGroup, Role, T, W
from drumroll.workers.server import About, Failure, WorkerError, WorkerLost, WorkerServer, WorkerTimeout

os.environ.setdefault(  # Ray reads it when it is imported: what it prints of deaths, which we tell in a sentence
    "RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed|has been marked dead|killed due to memory pressure"
)
try:
    import ray
except ImportError:
    raise MissingExtra("the ray runtime", "ray") from None
import psutil  # installed or Ray's own copy
from ray._private import ray_constants
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from drumroll.workers.ray_tensors import view_tensors

SHARE = 0.01
"""The part of a GPU that one worker books, so that a hundred may share it; its memory is theirs to divide."""
CALLS = 20_000
"""How many calls an actor takes at once. Ray's default of 1000 would hold an interrupt back behind that many requests."""
FAREWELL = 5.0
"""Seconds a worker has to close itself before its process is ended."""

DEATHS = {
    r"receives a (SIG[A-Z]+)": "its process got {}",
    r"low on memory": "Ray ended it because its node ran out of memory",
    r"node has died|node was terminated": "its node is gone",
    r"ray\.kill": "it was ended by ray.kill",
    r"connection error code 2": "its process ended without a word, by SIGKILL (as when memory runs out) or os._exit",
    r"[Ee]xit code:? (\d+)": "its process ended with exit code {}",
    r"is unavailable": "it cannot be reached, as when its node is gone",
}
"""What Ray's text of an actor's death means, the first that fits."""


class ClusterError(DrumrollError):
    """A Ray cluster that cannot be joined, or that lacks what the run asks for."""


class _Server(WorkerServer):
    @override
    async def open(self, factory: Callable[[], Any]) -> About | Failure:
        about = await super().open(factory)
        view_tensors()
        return about


def _gpu(variable: str) -> str:
    return os.environ[variable]


NICENESS = "RAY_worker_niceness"
"""Ray starts workers at niceness 15: beside any other work on the machine they would hardly run."""
GPU: Any = ray.remote(_gpu)
ADDRESS: Any = ray.remote(address_of)


@cache
def _actor(name: str) -> Any:
    """An actor class of its own for each worker: Ray gives a process, and the dashboard its entry, the name of the class."""
    return ray.remote(type(name, (_Server,), {}))


class RayRuntime:
    """A run's part of a Ray cluster: the connection, and a bundle for each device of its pool."""

    _open: ClassVar[set[RayRuntime]] = set()
    _connected: ClassVar[bool] = False

    def __init__(
        self,
        pool: Pool | None = None,
        *,
        name: str = "run",
        address: str | None = None,
        seconds: float = 60,
        choose: Callable[[], Pool] | None = None,
        interface: str | None = None,
    ) -> None:
        """Join the cluster at `address` or RAY_ADDRESS, or start one here; then wait so long for the devices.

        Without a pool, `choose` names one once the cluster is there; by default all its devices. `interface` names the
        network whose addresses `host_of` gives; by default those that Ray knows.
        """
        self.name = f"drumroll-{name}-{uuid.uuid4().hex[:8]}"
        if not ray.is_initialized():
            _connect(address or os.environ.get("RAY_ADDRESS"), pool, self.name)
            RayRuntime._connected = True
        view_tensors()
        self.pool = pool or (choose or pool_of_cluster)()
        self.groups: list[RayGroup[Any]] = []
        shapes = [{"CPU": float(d.threads)} | ({"GPU": 1.0} if d.kind is not Kind.CPU else {}) for d in self.pool.devices]
        self.bundles = placement_group(shapes, strategy="PACK", name=self.name)
        RayRuntime._open.add(self)
        if not self.bundles.wait(seconds):
            have, free = ray.cluster_resources(), ray.available_resources()
            sums = {r: sum(s.get(r, 0) for s in shapes) for r in ("GPU", "CPU")}
            text = ", ".join(f"{v:g} {r} (it has {have.get(r, 0):g}, free {free.get(r, 0):g})" for r, v in sums.items() if v)
            self._release()
            raise ClusterError(f"The Ray cluster did not give the run its devices in {seconds:g} s: it asks for {text}.")
        self._bundle = self._order()
        self._gpus: dict[int, str] = {}
        self._patience = seconds
        self._interface, self._addresses = interface, dict[str, str]()

    def _order(self) -> dict[int, int]:
        """Bundle by device. Ray packs bundles as it likes; here the pool's fullest node becomes the one with most of them."""
        order = {node["NodeID"]: n for n, node in enumerate(_nodes())}
        placed: dict[int, str] = placement_group_table(self.bundles)["bundles_to_node_id"]
        bundle_of: dict[int, int] = {}
        for shape in {(d.kind, d.threads) for d in self.pool.devices}:
            alike = [d for d in self.pool.devices if (d.kind, d.threads) == shape]
            asked = Counter(d.node for d in alike)
            given = Counter(placed[d.index] for d in alike)
            devices = sorted(alike, key=lambda d: (-asked[d.node], d.node, d.local))
            bundles = sorted(alike, key=lambda d: (-given[placed[d.index]], order[placed[d.index]], d.index))
            bundle_of |= {device.index: bundle.index for device, bundle in zip(devices, bundles, strict=True)}
        return bundle_of

    def options(self, devices: DeviceSet) -> dict[str, Any]:
        """How Ray is to start a worker on its devices. On several GPUs it sits in the bundle of the first and sees all."""
        common = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": CALLS}
        if not devices:
            return common | {"scheduling_strategy": "SPREAD"}
        if len({self._node_of(device) for device in devices}) > 1:
            where = ranges([device.index for device in devices])
            raise ClusterError(
                f"Devices {where} are to work as one engine, but lie on several machines; use smaller parallel sizes."
            )
        env = {
            "OMP_NUM_THREADS": str(devices[0].threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # those who wait leave the cores to others
            "RAY_kill_child_processes_on_worker_exit": "false",  # Python's tracker frees vLLM's shared memory after its processes
        }
        if devices[0].kind is Kind.CPU:
            env[FAMILIES[USUAL].visible] = ""
        elif len(devices) > 1:
            visible = FAMILIES[devices[0].kind].visible
            env |= {visible: self._seen_by(devices), f"RAY_EXPERIMENTAL_NOSET_{visible}": "1"}
        return common | {"runtime_env": {"env_vars": env}} | self._on(devices[0])

    def _on(self, device: Device) -> dict[str, Any]:
        """What puts a worker into a device's bundle."""
        bundle = PlacementGroupSchedulingStrategy(self.bundles, placement_group_bundle_index=self._bundle[device.index])
        return {"num_gpus": SHARE if device.kind is not Kind.CPU else 0, "scheduling_strategy": bundle}

    def _seen_by(self, devices: DeviceSet) -> str:
        """The GPUs of a device set as their machine counts them, which Ray tells only to those who run there."""
        new = [device for device in devices if device.index not in self._gpus]
        asked = [GPU.options(num_cpus=0, **self._on(device)).remote(FAMILIES[device.kind].visible) for device in new]
        try:
            told: list[str] = ray.get(asked, timeout=self._patience)
        except RayError as error:
            raise ClusterError(
                f"The GPUs of devices {ranges([d.index for d in devices])} could not be asked: {error}"
            ) from error
        self._gpus |= {device.index: gpu for device, gpu in zip(new, told, strict=True)}
        return ",".join(self._gpus[device.index] for device in devices)

    def host_of(self, device: Device | None = None) -> str:
        """The address of a device's machine (without one, of ours) for every store and group of the run."""
        nodes: dict[str, str] = {node["NodeID"]: node["NodeManagerAddress"] for node in _nodes()}
        own = ray.get_runtime_context().get_node_id()
        node = own if device is None else self._node_of(device)
        known = nodes.get(node) or nodes.get(own) or str(ray.util.get_node_ip_address())
        if self._interface is None:
            return known
        if known not in self._addresses:
            self._addresses[known] = self._ask(node, known)
        return self._addresses[known]

    def _ask(self, node: str, known: str) -> str:
        """The address of our interface on a machine, which must differ from that of the others."""
        assert self._interface is not None
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        try:
            found: str = ray.get(
                ADDRESS.options(num_cpus=0, scheduling_strategy=there).remote(self._interface), timeout=self._patience
            )
        except RayTaskError as error:
            raise ClusterError(f"{error.cause} (the machine that Ray knows as {known})") from None
        except RayError as error:
            raise ClusterError(f"The machine at {known} could not be asked for its interfaces: {error}") from error
        for other, address in self._addresses.items():
            if address == found:
                raise ClusterError(
                    f"cluster.interface: '{self._interface}' has the address {found} on both {other} and {known}, so they cannot "
                    f"reach each other there; name the network that joins them."
                )
        return found

    def alive(self) -> set[int]:
        """The devices whose machines are there, by index."""
        nodes = {node["NodeID"] for node in _nodes()}
        return {d.index for d in self.pool.devices if self._node_of(d) in nodes}

    def _node_of(self, device: Device) -> str:
        placed: dict[int, str] = placement_group_table(self.bundles)["bundles_to_node_id"]
        return placed[self._bundle[device.index]]

    async def close(self) -> None:
        """Free all groups and devices. The last run of this process ends the connection, or the cluster it started."""
        for group in list(self.groups):
            await group.close()
        self._release()

    def _release(self) -> None:
        if self not in RayRuntime._open:
            return
        RayRuntime._open.remove(self)
        if ray.is_initialized():
            remove_placement_group(self.bundles)
        if RayRuntime._connected and not RayRuntime._open:
            RayRuntime._connected = False
            ray.shutdown()


def _connect(address: str | None, pool: Pool | None, namespace: str) -> None:
    """Join a cluster, or start a quiet one that only this machine can reach."""
    quiet: dict[str, Any] = {"namespace": namespace, "logging_level": "ERROR", "log_to_driver": False}
    if address:
        try:
            if found := re.fullmatch(r"([^/]+):(\d+)", address):  # Ray would try for minutes
                socket.create_connection((found[1], int(found[2])), 5).close()
            ray.init(address, **quiet)
        except (OSError, ValueError, RuntimeError) as error:
            reason = f"{error}".rstrip(".")
            raise ClusterError(
                f"There is no Ray cluster at '{address}': {reason}. Start one there with `ray start --head`, or leave cluster.address and "
                "RAY_ADDRESS out: then one is started on this machine."
            ) from error
        return
    os.environ.setdefault(NICENESS, "0")
    cpus = max(sum(d.threads for d in pool.devices) if pool else 0, os.cpu_count() or 1)
    remote, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False  # else it listens on all addresses
    try:
        ray.init("local", num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
    except Exception as error:  # Ray raises nothing narrower if its processes do not start in time
        why = str(error).strip().partition("\n")[0].rstrip(".")
        raise ClusterError(
            f"Ray did not start on this machine: {why}. Try again when it is less busy, or start Ray yourself and set cluster.address."
        ) from error
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = remote
    _guard_agents()


def _guard_agents() -> None:
    """Tie the raylet's agents to this process. Ray ends the rest when a driver is killed; these would wait a minute for its store."""
    for raylet in (child for child in psutil.Process().children() if child.name() == "raylet"):
        for agent in raylet.children():
            lifeline.guard(agent.pid)


def _nodes() -> list[dict[str, Any]]:
    """The living nodes, always in the same order."""
    return sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: (n["NodeManagerAddress"], n["NodeID"]))


def pool_of_cluster(kind: str = "auto", count: int | None = None, threads: int = 0) -> Pool:
    """Devices of the cluster, machine by machine: all its GPUs, or where there is none a slot a machine; or so many.

    Slots are alike, as large as the machines allow.
    """
    have = [node["Resources"] for node in _nodes()]
    gpus = [int(r.get("GPU", 0)) for r in have]
    found = Kind(kind) if kind != "auto" else USUAL if any(gpus) else Kind.CPU
    accelerated = found is not Kind.CPU
    cores = [int(r.get("CPU", 0)) for r in have]
    most = min((c for c in cores if c), default=1) if count is None else max(cores)
    fits = (t for t in range(most, 0, -1) if count is None or sum(c // t for c in cores) >= count)
    each = threads or (1 if accelerated else next(fits, 1))
    room = gpus if accelerated else [c // each for c in cores]
    total = sum(room) if accelerated else max(1, sum(places > 0 for places in room))
    left, taken = total if count is None else count, list[int]()
    if left > sum(room):
        what = "GPUs" if accelerated else f"slots of {each} CPU threads"
        raise ClusterError(f"cluster.devices asks for {left} {what}, but the cluster has {sum(room)}.")
    for places in room:
        taken.append(min(places, left) if count is not None or accelerated else min(places, 1))
        left -= taken[-1]
    return Pool.of([{found: n} for n in taken], each)


@dataclass(slots=True)
class _Actor:
    """A rank's actor. `order` keeps calls in order, which Ray does not for actors with coroutines."""

    server: Any
    opened: Any
    about: About | None = None
    order: asyncio.Lock = field(default_factory=asyncio.Lock)


class RayGroup(ReplaceableGroup[W]):
    """Workers in actors, one per factory and device set. Arguments may be references, from `put` or `keep`."""

    def __init__(
        self,
        runtime: RayRuntime,
        role: Role,
        factories: Sequence[Callable[[], Any]],
        device_sets: Sequence[DeviceSet] | None = None,
        *,
        urgent: Collection[str] = (),
        deadline: float = 3600.0,
        then: str = "the run stops",
    ) -> None:
        """Starts the actors and returns; `urgent` methods do not wait for others; `then` ends the sentence of a loss."""
        super().__init__(role, len(factories))
        self.runtime, self.factories, self.deadline, self.then = runtime, list(factories), deadline, then
        self.device_sets = list(device_sets) if device_sets is not None else [()] * self.size
        assert len(self.device_sets) == self.size, f"{role} has {self.size} factories, got {len(self.device_sets)} device sets"
        self.generation = 0
        self._urgent = frozenset(urgent)
        self._actors = [self._start(rank) for rank in range(self.size)]
        runtime.groups.append(self)

    def _start(self, rank: int) -> _Actor:
        server = (
            _actor(f"drumroll-{self.role}-{rank}").options(**self.runtime.options(self.device_sets[rank])).remote(self._urgent)
        )
        return _Actor(server, server.open.remote(self.factories[rank]))

    async def ready(self) -> None:
        """Wait until every worker is made; raises what its factory raised."""
        await asyncio.gather(*(self._answer(rank, "start", None) for rank in range(self.size)))

    async def _send(self, rank: int, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return await self._answer(rank, method, lambda server: server.call.remote(method, *args, **kwargs))

    @override
    async def keep(self, rank: int, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a method, leave its result in the object store, and return a reference that stands for it in other calls."""
        kept: list[Any] = []

        def submit(server: Any) -> Any:
            kept[:] = server.keep.options(num_returns=2).remote(method.__name__, *args, **kwargs)
            return kept[0]

        await self._answer(rank, method.__name__, submit)
        return cast(R, kept[1])

    @override
    def put(self, value: T) -> T:
        """A reference that stands for a large value in calls: written once, moved once to each node; arrays in it are read-only."""
        view_tensors()
        return cast(T, ray.put(value))

    async def _answer(self, rank: int, method: str, submit: Callable[[Any], Any] | None) -> Any:
        """Submit a call in its order, and wait for the answer; the deadline counts from now."""
        actor, ref, answer = self._actors[rank], None, None
        who = f"{self.role} rank {rank}"
        try:
            async with asyncio.timeout(self.deadline):
                if actor.about is None:
                    answer = await actor.opened
                    actor.about = answer if isinstance(answer, About) else None
                if actor.about is not None and submit is not None:
                    if method in actor.about.free:
                        answer = await (ref := submit(actor.server))
                    else:
                        async with actor.order:
                            answer = await (ref := submit(actor.server))
        except (TimeoutError, asyncio.CancelledError) as error:
            if ref is not None:
                ray.cancel(ref)
            if isinstance(error, TimeoutError):
                raise WorkerTimeout(f"{who} did not answer {method} in {self.deadline:g} s.") from None
            raise
        except RayActorError as error:
            raise self._gone(rank, actor, error) from None
        except RayError as error:  # an argument or result that cannot be pickled, or was lost on the way
            cause = getattr(error, "cause", None) or error
            raise WorkerError(f"{who}, {method}: {type(cause).__name__}: {cause}", str(error)) from None
        if isinstance(answer, Failure):
            answer.throw(f"{who}, {method}")
        return answer

    def _gone(self, rank: int, actor: _Actor, error: RayActorError) -> WorkerLost:
        return WorkerLost(self.role, rank, _why(str(error), actor.about.log if actor.about else ""), self.then)

    @override
    async def lost(self, rank: int) -> WorkerLost:  # without polling
        actor = self._actors[rank]
        watch = actor.server.alive.remote()
        try:
            await watch
        except RayActorError as error:
            return self._gone(rank, actor, error)
        finally:
            ray.cancel(watch)
        raise AssertionError("alive() returned")

    @override
    def kill(self, rank: int) -> None:
        ray.kill(self._actors[rank].server)

    @override
    async def replace(self, rank: int, devices: DeviceSet | None = None) -> None:
        self.kill(rank)
        self.device_sets[rank] = devices or self.device_sets[rank]
        self._actors[rank] = self._start(rank)
        await self._answer(rank, "start", None)

    async def living(self) -> bool:
        """Whether the process of every worker is there."""
        try:
            await asyncio.gather(
                *(self._answer(rank, "ping", lambda server: server.ping.remote()) for rank in range(self.size))
            )
        except WorkerLost:
            return False
        return True

    async def renew(self, factories: Sequence[Callable[[], Any]]) -> None:
        """Make all workers anew as the next generation of the group; what the old ones held is lost."""
        for rank in range(self.size):
            self.kill(rank)
        self.factories, self.generation = list(factories), self.generation + 1
        self._actors = [self._start(rank) for rank in range(self.size)]
        await self.ready()

    async def close(self) -> None:
        if self in self.runtime.groups:
            self.runtime.groups.remove(self)
            await asyncio.gather(*(self._end(actor) for actor in self._actors))
            for actor in self._actors:  # a handle that outlives its cluster ends the actor of the same number on the next one
                actor.server = actor.opened = None

    async def _end(self, actor: _Actor) -> None:
        if actor.about is not None:
            with suppress(TimeoutError, RayError):
                await asyncio.wait_for(actor.server.call.remote("close"), FAREWELL)
        ray.kill(actor.server)


def _why(error: str, log: str) -> str:
    """The cause of a death, as far as Ray and the worker's own log tell."""
    words = ""
    with suppress(OSError):  # the log of a worker on another machine
        words = Path(log).read_text(errors="replace")[-20_000:]
    if found := re.search(r"\*\*\* (SIG[A-Z]+) received", words):
        return f"its process got {found[1]}"
    for sign, meaning in DEATHS.items():
        if found := re.search(sign, error):
            return meaning.format(*found.groups())
    return " ".join(error.split())[:200]
