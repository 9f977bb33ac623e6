"""The `ray` runtime: each rank of a role in a process of its own, on the devices that the layout gives it.

Weights go over the bus, from the actor's first rank to every engine. Engines and judges that are lost are replaced while the
run goes on; a lost learner ends it. Engines on devices that also train rest while an update runs.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from drumroll.algorithms import REFERENCE
from drumroll.config import AnyConfig, RLConfig
from drumroll.engines import EngineLost
from drumroll.engines.router import Router
from drumroll.learners import Learner
from drumroll.models.loading import load_tokenizer
from drumroll.placement.devices import Kind, Layout, Place, lay_out
from drumroll.placement.layout import joins, pool_of, requests, threads_of
from drumroll.processes.rendezvous import LOOPBACK, open_store
from drumroll.rewards.judge_client import open_judge
from drumroll.rewards.model import RewardModel
from drumroll.sample import Version
from drumroll.weights import BusError, Packing
from drumroll.weights.choice import End, choose
from drumroll.workers.engine_pool import Fleet
from drumroll.workers.group import GRACE, Role
from drumroll.workers.ray_actors import RayGroup, RayRuntime, pool_of_cluster
from drumroll.workers.ray_workers import EngineSeat, LearnerSeat, PoolSeat, RemotePool, make_desk, make_seat
from drumroll.workers.runtime import Workers, configure_torch, open_algorithm
from drumroll.workers.server import WorkerLost

URGENT = ("abort", "interrupt", "set_version", "memory")
"""Methods that do not wait for a running one."""
LEARNING = ("actor", "critic", "reference", "teacher")
"""Roles that work while `training` lasts."""


async def open_remote(config: AnyConfig) -> RemoteWorkers:
    """Join or start the cluster, lay the roles out, and start them."""
    pool = None
    if not joins(config):  # mistakes are told before anything starts
        pool = pool_of(config, torch.cuda.device_count())
        lay_out(pool, requests(config, open_algorithm(config).needs))
    wanted = config.cluster
    runtime = RayRuntime(
        pool,
        name=config.name,
        address=wanted.address,
        seconds=wanted.start_timeout,
        interface=wanted.interface,
        choose=lambda: pool_of_cluster(wanted.kind, wanted.devices, threads_of(config)),
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
        self.needs = open_algorithm(config).needs
        self.layout: Layout = lay_out(runtime.pool, requests(config, self.needs))
        self.tokenizer = load_tokenizer(config.role_model("actor"))
        self._recompute = isinstance(config, RLConfig) and config.rollout.kv_at_switch == "recompute"
        self._stores: list[Any] = []
        self._members: frozenset[int] = frozenset()  # engines on the bus
        self._turns = asyncio.Lock()  # weights, training and engines that come back exclude each other
        self._groups()

    def _groups(self) -> None:
        config, anew = self.config, self.config.cluster.replace_engines
        self._stops = f"the run stops; drumroll train --resume {config.output}/{config.name} goes on from the last checkpoint"
        self._actors: RayGroup[Any] = self._learners(Role.ACTOR)
        self.actor = self._actors
        then = "a new one is started, and its samples go on there or elsewhere" if anew else "its samples go to other engines"
        self._engines: RayGroup[Any] = self._group(Role.ROLLOUT, "make_engine", then)
        self.rollout = self._engines
        self._fleet = self._fleet_of(self._engines, self._renew)
        self._fleets = [self._fleet]
        if "reference" in self.layout.devices:
            self.reference = self._learners(Role.REFERENCE)
        elif REFERENCE in self.needs:
            self.reference = self.actor
        if "teacher" in self.layout.devices:
            self.teacher = self._learners(Role.TEACHER)
        if "critic" in self.layout.devices:
            self.critic = self._learners(Role.CRITIC)
        if "judge" in self.layout.devices:
            then = "a new one is started, and its questions are asked again" if anew else "its questions go to other judges"
            self._fleets.append(self._fleet_of(self._group(Role.JUDGE, "make_judge", then)))
        if "reward_model" in self.layout.devices:
            self._classifiers = self._group(Role.REWARD_MODEL, "make_reward_model", self._stops)
        beside, deadline = self._actors.places[:1], config.cluster.call_timeout  # no further machine that could end the run
        self.desk = RayGroup(self.runtime, Role.DESK, [partial(make_desk, config)], beside, deadline=deadline, then=self._stops)

    def _group(self, role: Role, make: str, then: str, **more: Any) -> RayGroup[Any]:
        places, deadline = self.layout.replicas(role), self.config.cluster.call_timeout
        factories = [
            partial(make_seat, make, self.config, place[0], rank, len(places), **more) for rank, place in enumerate(places)
        ]
        return RayGroup(self.runtime, role, factories, places, urgent=URGENT, deadline=deadline, then=then)

    def _learners(self, role: Role) -> RayGroup[Learner]:
        """Data-parallel ranks, which meet at a store of ours."""
        devices, meeting = self.layout.devices[role], None
        if len(devices) > 1:
            here, addresses = self.runtime.host_of(), [self.runtime.host_of(d) for d in devices]
            host = LOOPBACK if set(addresses) == {here} else here
            self._stores.append(open_store(host))
            meeting = (host, self._stores[-1].port, addresses)
        return self._group(role, f"make_{role}", self._stops, meeting=meeting)

    def _fleet_of(self, group: RayGroup[Any], prepare: Callable[[], Awaitable[None]] | None = None) -> Fleet:
        config = self.config
        return Fleet(
            group,
            Router(config.rollout.engine_timeout) if isinstance(config, RLConfig) else Router(),
            self._turns,
            trained={d.index for role in LEARNING for d in self.layout.devices.get(role, ())},
            replaces=config.cluster.replace_engines,
            elsewhere=partial(self._elsewhere, group.role),
            prepare=prepare,
            notify=lambda text: self.notify(text),
        )

    def _elsewhere(self, role: Role, place: Place) -> Place:
        """Where to start an engine anew: in its own place, or in another of its role if that one's machine is gone."""
        alive = self.runtime.alive()
        others = [p for p in self.layout.replicas(role) if p[0].kind is place[0].kind]
        return next((p for p in (place, *others) if all(d.index in alive for d in p)), place)

    async def start(self) -> None:
        """Wait until every worker is there, and put the engines behind their queues."""
        await asyncio.gather(*(group.ready() for group in self.runtime.groups))
        self.router = self._fleet.router
        for fleet in self._fleets:
            await fleet.start()
        self._scorers()

    def _scorers(self) -> None:
        """The roles that rewards may ask."""
        config = self.config
        run, asked, model = Path(config.output) / config.name, config.roles.judge, config.roles.reward_model
        if asked is not None and asked.url is None:
            self.judge = open_judge(asked, run, self._fleets[1].router, load_tokenizer(asked.model))
        elif asked is not None:
            self.judge = open_judge(asked, run)
            self.closing.append(self.judge.close)
        if model is not None:
            self.reward_model = RewardModel(model, self._classifiers, load_tokenizer(model.model))
            self.closing.append(self.reward_model.close)

    # --- weights ---

    @override
    async def publish(self, version: Version) -> None:
        async with self._turns:
            await self._send()

    async def _renew(self) -> None:
        """An engine has come back, whose process has not been on the bus."""
        self._members = frozenset()
        await self._send()

    async def _send(self) -> None:
        """The actor's weights to all engines; its count of updates is their version."""
        for _ in range(1 + self.rollout.size):  # once more for each engine that may be lost on the way
            ranks = self._fleet.living()
            if frozenset(ranks) != self._members and not await self._open_bus(ranks):
                continue
            parcel = await self._actors.call(0, LearnerSeat.send)
            loads = (self._engines.call(r, EngineSeat.receive, parcel, recompute=self._recompute) for r in ranks)
            if self._all_there(ranks, await asyncio.gather(*loads, return_exceptions=True)):
                try:
                    return await self._actors.call(0, LearnerSeat.sent)
                except BusError:
                    self._members = frozenset()
        raise BusError(f"The weights did not reach the engines in {1 + self.rollout.size} attempts.")

    def _all_there(self, ranks: list[int], results: list[Any]) -> bool:
        """Whether all engines answered. Those that are lost leave the bus, and their fleet takes care of them."""
        for rank, result in zip(ranks, results, strict=True):
            if isinstance(result, WorkerLost):
                self._fleet.lost.add(rank)
            elif isinstance(result, EngineLost):
                self._fleet.condemn(rank, str(result))
            elif isinstance(result, BaseException) and not isinstance(result, BusError):
                raise result
        if any(isinstance(result, BaseException) for result in results):
            self._members = frozenset()
            return False
        return True

    async def _open_bus(self, ranks: list[int]) -> bool:
        """Connect the actor's first rank with these engines; whether all came."""
        own = self.config.roles.rollout.backend == "native"  # vLLM's tensors are in processes of its own
        places = [self._actors.places[0], *(self._engines.places[rank] for rank in ranks)]
        ends = [
            End(self.runtime.host_of(p[0]), p[0].index if p[0].kind is Kind.CUDA and (own or not i) else None)
            for i, p in enumerate(places)
        ]
        carrier, packing = choose(self.config.cluster.bus, ends), Packing(checksum=self.config.cluster.checksum)
        meeting = await self._actors.call(0, LearnerSeat.open_bus, carrier, self.runtime.name, packing, len(ends), ends[0].host)
        joins = (
            self._engines.call(rank, EngineSeat.open_bus, meeting, i, ends[i].host) for i, rank in enumerate(ranks, start=1)
        )
        if not self._all_there(ranks, await asyncio.gather(*joins, return_exceptions=True)):
            return False
        self._members = frozenset(ranks)
        return True

    # --- turns on shared devices ---

    @override
    @asynccontextmanager
    async def training(self) -> AsyncGenerator[None]:
        async with self._turns:
            await asyncio.gather(*(fleet.rest() for fleet in self._fleets))
            await asyncio.gather(*(group.broadcast(Learner.reload) for group in self.learners().values()))
            try:
                yield
            except (asyncio.CancelledError, WorkerLost):  # the run ends: nobody waits for workers that may never answer
                raise
            except BaseException:
                with suppress(TimeoutError):  # other ranks may still wait for the one that failed
                    await asyncio.wait_for(self._give_back(), GRACE)
                raise
            await self._give_back()

    async def _give_back(self) -> None:
        if any(fleet.sharing() for fleet in self._fleets):
            await asyncio.gather(*(group.broadcast(Learner.offload) for group in self.learners().values()))
        await asyncio.gather(*(fleet.back() for fleet in self._fleets))

    # --- the rest ---

    def open_pool(self, size: int) -> RemotePool:
        """Reward processes, spread over the machines."""
        deadline, then = self.config.cluster.call_timeout, "a new one is started, and its call is made again"
        group: RayGroup[PoolSeat] = RayGroup(self.runtime, Role.REWARD, [PoolSeat] * size, deadline=deadline, then=then)
        return RemotePool(group, sys.path, lambda text: self.notify(text), self.struck)

    @override
    def interrupt(self) -> None:
        for group in self.learners().values():
            for rank in range(group.size):
                group.post(rank, Learner.interrupt)

    @override
    async def memory(self) -> dict[str, float]:
        ranks: dict[str, tuple[Any, Sequence[int]]] = {"rollout": (self.rollout, self._fleet.living())}
        others = {"critic": self.critic, "reference": self.reference, "teacher": self.teacher}
        for role, group in {"actor": self.actor, **others}.items():
            if group is not None and (role == "actor" or group is not self.actor):
                ranks[role] = (group, range(group.size))
        found: dict[str, float] = {}
        for role, (group, wanted) in ranks.items():
            peaks = await asyncio.gather(*(group.call(r, LearnerSeat.memory) for r in wanted), return_exceptions=True)
            found[role] = sum(peak for peak in peaks if isinstance(peak, float))
        return found

    @override
    async def close(self) -> None:
        for fleet in self._fleets:
            fleet.close()
        await super().close()
        await self.runtime.close()
