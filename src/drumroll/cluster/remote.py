"""The `ray` runtime: each rank of a role in a process of its own, on the devices that the layout gives it.

Weights go over the bus, from the actor's first rank to every engine. Engines that are lost are replaced while the run goes
on; a lost learner ends it. Engines on devices that also train rest while an update runs.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from drumroll.cluster.bus import BusError, Packing
from drumroll.cluster.devices import Device, Layout, lay_out
from drumroll.cluster.group import Role
from drumroll.cluster.host import WorkerLost
from drumroll.cluster.layout import joins, pool_of, requests
from drumroll.cluster.ray import RayGroup, RayRuntime, pool_of_cluster
from drumroll.cluster.seats import EngineSeat, LearnerSeat, PoolSeat, RemotePool, make_desk, make_seat
from drumroll.cluster.workers import Workers, configure_torch, open_algorithm
from drumroll.config import AnyConfig, RLConfig
from drumroll.engines import Completion, Engine, EngineLost, Request
from drumroll.learners import Learner
from drumroll.models.loading import load_tokenizer
from drumroll.rewards.asking import open_judge
from drumroll.rewards.model import RewardModel
from drumroll.rollout.router import Router
from drumroll.sample import Version

URGENT = ("abort", "interrupt", "set_version", "memory")
"""Methods that do not wait for a running one."""


async def open_remote(config: AnyConfig) -> RemoteWorkers:
    """Join or start the cluster, lay the roles out, and start them."""
    pool = None
    if not joins(config):  # mistakes are told before anything starts
        pool = pool_of(config, torch.cuda.device_count())
        lay_out(pool, requests(config))
    wanted = config.cluster
    runtime = RayRuntime(
        pool,
        name=config.name,
        address=wanted.address,
        seconds=wanted.start_timeout,
        choose=lambda: pool_of_cluster(wanted.kind, wanted.devices, wanted.threads),
    )
    try:
        workers = RemoteWorkers(config, runtime)
        await workers.start()
    except BaseException:
        await runtime.close()
        raise
    return workers


class RemoteWorkers(Workers):
    """Groups of actors."""

    def __init__(self, config: AnyConfig, runtime: RayRuntime) -> None:
        super().__init__()
        configure_torch(config, 1)
        self.config, self.runtime = config, runtime
        self.layout: Layout = lay_out(runtime.pool, requests(config))
        self.tokenizer = load_tokenizer(config.role_model("actor"))
        self._recompute = isinstance(config, RLConfig) and config.rollout.kv_at_switch == "recompute"
        self._watching: list[asyncio.Task[None]] = []
        self._stores: list[Any] = []
        self._members: frozenset[int] = frozenset()  # engines on the bus
        self._lost: set[int] = set()
        self._publishing = asyncio.Lock()
        self._groups()

    def _groups(self) -> None:
        config = self.config
        self._actors: RayGroup[Any] = self._learners(Role.ACTOR)
        self.actor = self._actors
        self._engines: RayGroup[Any] = self._group(
            Role.ROLLOUT, "make_engine", [replica[0] for replica in self.layout.replicas("rollout")],
            then="its samples go to other engines" + (" and a new one is started" if config.cluster.replace_engines else ""),
        )  # fmt: skip
        self.rollout = self._engines
        if "reference" in self.layout.devices:
            self.reference = self._learners(Role.REFERENCE)
        elif isinstance(config, RLConfig) and config.algorithm.needs_reference():
            self.reference = self.actor
        if "critic" in self.layout.devices:
            self.critic = self._learners(Role.CRITIC)
        if "judge" in self.layout.devices:
            self._judges = self._group(Role.JUDGE, "make_judge", list(self.layout.devices["judge"]), then="the run stops")
        if "reward_model" in self.layout.devices:
            devices = list(self.layout.devices["reward_model"])
            self._classifiers = self._group(Role.REWARD_MODEL, "make_reward_model", devices, then="the run stops")
        algorithm = open_algorithm(config)
        self.needs = algorithm.needs
        self.desk = RayGroup(self.runtime, Role.DESK, [partial(make_desk, config)], deadline=config.cluster.call_timeout)

    def _group(self, role: Role, make: str, devices: list[Device], *, then: str, **more: Any) -> RayGroup[Any]:
        count, deadline = len(devices), self.config.cluster.call_timeout
        factories = [partial(make_seat, make, self.config, device, rank, count, **more) for rank, device in enumerate(devices)]
        return RayGroup(self.runtime, role, factories, devices, urgent=URGENT, deadline=deadline, then=then)

    def _learners(self, role: Role) -> RayGroup[Learner]:
        """Data-parallel ranks, which meet at a store of ours."""
        devices, meeting = list(self.layout.devices[role]), None
        if len(devices) > 1:
            host = self.runtime.host_of(None)
            self._stores.append(dist.TCPStore(host, 0, is_master=True, wait_for_workers=False))
            meeting = (host, self._stores[-1].port)
        then = (
            f"the run stops; drumroll train --resume {self.config.output}/{self.config.name} goes on from the last checkpoint"
        )
        return self._group(role, f"make_{role}", devices, then=then, meeting=meeting)

    async def start(self) -> None:
        """Wait until every worker is there, and put the engines behind their queues."""
        asked = (getattr(self, "_judges", None), getattr(self, "_classifiers", None))
        groups = [self.actor, self.rollout, self.desk, self.reference, self.critic, *asked]
        await asyncio.gather(*(g.ready() for g in groups if isinstance(g, RayGroup)))
        config = self.config
        self.router = Router(config.rollout.engine_timeout) if isinstance(config, RLConfig) else Router()
        for rank in range(self.rollout.size):
            await self._join(self.router, self._engines, rank)
            self._watching.append(asyncio.ensure_future(self._watch(rank)))
        await self._scorers()

    async def _scorers(self) -> None:
        """The roles that rewards may ask."""
        config = self.config
        run, asked, model = Path(config.output) / config.name, config.roles.judge, config.roles.reward_model
        if asked is not None and asked.url is None:
            router = Router()
            for rank in range(self._judges.size):
                await self._join(router, self._judges, rank)
            self.judge = open_judge(asked, run, router, load_tokenizer(asked.model))
        elif asked is not None:
            self.judge = open_judge(asked, run)
            self.closing.append(self.judge.close)
        if model is not None:
            self.reward_model = RewardModel(model, self._classifiers, load_tokenizer(model.model))
            self.closing.append(self.reward_model.close)

    async def _join(self, router: Router, group: RayGroup[Engine], rank: int) -> None:
        async def generate(request: Request) -> Completion:
            try:
                return await group.call(rank, Engine.generate, request)
            except WorkerLost as lost:
                raise EngineLost(str(lost)) from None

        capacity = await group.call(rank, Engine.capacity)
        router.join(_name(group.role, rank), generate, capacity, lambda: group.post(rank, Engine.interrupt))

    async def _watch(self, rank: int) -> None:
        """When an engine's process is gone: say so, send its samples elsewhere, start another."""
        while True:
            lost = await self._engines.lost(rank)
            self._lost.add(rank)
            self.router.leave(_name(Role.ROLLOUT, rank))
            self.notify(str(lost))
            if not self.config.cluster.replace_engines:
                return
            try:
                await self._engines.replace(rank, self._living(rank))
                async with self._publishing:
                    self._lost.discard(rank)
                    self._members = frozenset()  # the new process has not been on the bus
                    await self._send()
                if rank not in self._lost:
                    await self._join(self.router, self._engines, rank)
            except Exception as error:
                self._lost.add(rank)
                self.notify(f"rollout rank {rank} could not be started again: {error}")
                return

    def _living(self, rank: int) -> Device | None:
        """Where to start an engine anew: its own device, or another of its role if that one's node is gone."""
        alive = self.runtime.alive()
        own = self._engines.devices[rank]
        if own is None or own.index in alive:
            return own
        return next((d for d in self.layout.devices["rollout"] if d.index in alive), own)

    # --- weights ---

    @override
    async def publish(self, version: Version) -> None:
        async with self._publishing:
            await self._send()

    async def _send(self) -> None:
        """The actor's weights to all engines; its count of updates is their version."""
        for _ in range(1 + self.rollout.size):  # once more for each engine that may be lost on the way
            ranks = [r for r in range(self.rollout.size) if r not in self._lost]
            if frozenset(ranks) != self._members and not await self._open_bus(ranks):
                continue
            parcel = await self._actors.call(0, LearnerSeat.send)
            loads = (self._engines.call(r, EngineSeat.receive, parcel, recompute=self._recompute) for r in ranks)
            if self._all_there(ranks, await asyncio.gather(*loads, return_exceptions=True)):
                await self._actors.call(0, LearnerSeat.sent)
                return

    def _all_there(self, ranks: list[int], results: list[Any]) -> bool:
        """Whether all engines answered. Those that are lost leave the bus, and `_watch` takes care of them."""
        for rank, result in zip(ranks, results, strict=True):
            if isinstance(result, (WorkerLost, EngineLost)):
                self._lost.add(rank)
            elif isinstance(result, BaseException) and not isinstance(result, BusError):
                raise result
        if any(isinstance(result, BaseException) for result in results):
            self._members = frozenset()
            return False
        return True

    async def _open_bus(self, ranks: list[int]) -> bool:
        """Connect the actor's first rank with these engines, by shared memory if all are on its machine; whether all came."""
        actor = self._actors.devices[0]
        nodes = {self.runtime.host_of(d) for d in [actor, *(self._engines.devices[r] for r in ranks)]}
        kind = self.config.cluster.bus if self.config.cluster.bus != "auto" else ("shared" if len(nodes) == 1 else "broadcast")
        packing = Packing(checksum=self.config.cluster.checksum)
        host = self.runtime.host_of(actor)
        meeting = await self._actors.call(0, LearnerSeat.open_bus, kind, self.runtime.name, packing, 1 + len(ranks), host)
        joins = (self._engines.call(rank, EngineSeat.open_bus, kind, meeting, 1 + i) for i, rank in enumerate(ranks))
        if not self._all_there(ranks, await asyncio.gather(*joins, return_exceptions=True)):
            return False
        self._members = frozenset(ranks)
        return True

    # --- turns on shared devices ---

    @override
    @asynccontextmanager
    async def training(self) -> AsyncGenerator[None]:
        trained = {d.index for role in ("actor", "critic") for d in self.layout.devices.get(role, ())}
        replicas = self.layout.replicas("rollout")
        lent = [r for r, devices in enumerate(replicas) if r not in self._lost and trained & {d.index for d in devices}]
        for rank in lent:
            self.router.rest(_name(Role.ROLLOUT, rank))
        await asyncio.gather(*(self.rollout.call(rank, Engine.sleep) for rank in lent), return_exceptions=True)
        await asyncio.gather(*(group.broadcast(Learner.reload) for group in self.learners().values()))
        try:
            yield
        finally:
            if lent:
                with suppress(WorkerLost):
                    await asyncio.gather(*(group.broadcast(Learner.offload) for group in self.learners().values()))
            await asyncio.gather(*(self.rollout.call(rank, Engine.wake) for rank in lent), return_exceptions=True)
            for rank in lent:
                self.router.back(_name(Role.ROLLOUT, rank))

    # --- the rest ---

    def open_pool(self, size: int) -> RemotePool:
        """Reward processes, spread over the machines."""
        group: RayGroup[PoolSeat] = RayGroup(
            self.runtime, Role.REWARD, [PoolSeat] * size, deadline=self.config.cluster.call_timeout
        )
        return RemotePool(group, sys.path)

    @override
    def interrupt(self) -> None:
        for group in self.learners().values():
            for rank in range(group.size):
                group.post(rank, Learner.interrupt)

    @override
    async def memory(self) -> dict[str, float]:
        groups: dict[str, Any] = {
            "actor": self.actor,
            "rollout": self.rollout,
            "critic": self.critic,
            "reference": self.reference,
        }
        found: dict[str, float] = {}
        for role, group in groups.items():
            if isinstance(group, RayGroup) and (role == "actor" or group is not self.actor):
                with suppress(WorkerLost):
                    found[role] = sum(await group.broadcast(LearnerSeat.memory))
        return found

    @override
    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        await super().close()
        await self.runtime.close()


def _name(role: Role, rank: int) -> str:
    return f"{role}-{rank}"
