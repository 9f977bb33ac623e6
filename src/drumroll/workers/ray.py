"""The `ray` runtime: each rank of a role in a process of its own, on the devices that the layout gives it.

Weights go from the actor's first rank to every engine (`weights/`). Engines and judges that are lost are replaced while the
run goes on; a lost learner ends it. Engines on devices that also train rest while an update runs.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from drumroll import objects
from drumroll.algorithms import REFERENCE
from drumroll.config import RunConfig
from drumroll.config.roles import LearnerRole
from drumroll.engines import EngineLost
from drumroll.engines.router import Router
from drumroll.errors import ConfigError, NoEngines
from drumroll.learners import Learner
from drumroll.mesh import Mesh
from drumroll.models.loading import load_tokenizer
from drumroll.models.shape import find_shape
from drumroll.placement.devices import Device, DeviceSet, Kind, Layout
from drumroll.placement.layout import arrange, joins, pool_of, threads_of
from drumroll.processes import accelerator
from drumroll.processes.memory import Peak, merge
from drumroll.processes.rendezvous import LOOPBACK, Rendezvous, open_store
from drumroll.rewards.judge_client import open_judge
from drumroll.rewards.model import RewardModel
from drumroll.sample import Version
from drumroll.weights import Packing, WeightSyncError
from drumroll.weights.transport import End, choose
from drumroll.workers.engine_pool import EnginePool
from drumroll.workers.group import GRACE, Role
from drumroll.workers.ray_group import RayGroup, RayRuntime, pool_of_cluster
from drumroll.workers.ray_rewards import RewardPool, RewardWorker
from drumroll.workers.ray_workers import (
    Assignment,
    EngineWorker,
    LearnerWorker,
    make_batch_builder,
    make_classifier,
    make_engine_worker,
    make_learner_worker,
)
from drumroll.workers.runtime import Workers, configure_torch, needs_of
from drumroll.workers.server import WorkerLost

URGENT = ("abort", "interrupt", "set_version", "memory", "together")
"""Methods that do not wait for a running one."""
W = TypeVar("W")
LEARNING = ("actor", "critic", "reference", "teacher")
"""Roles that work while `training` lasts."""


async def open_ray(config: RunConfig) -> RayWorkers:
    """Join or start the cluster, lay the roles out, and start them."""
    pool = None
    if not joins(config):  # mistakes are told before anything starts
        pool = pool_of(config, accelerator.count(), found=accelerator.kind())
        arrange(config, pool, needs_of(config))
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
        workers = RayWorkers(config, runtime)
        await workers.start()
    except BaseException:
        await runtime.close()
        raise
    return workers


class RayWorkers(Workers):
    """Groups of actors."""

    def __init__(self, config: RunConfig, runtime: RayRuntime) -> None:
        super().__init__()
        configure_torch(config, 1)
        self.config, self.runtime = config, runtime
        self.needs = needs_of(config)
        self.layout: Layout = arrange(config, runtime.pool, self.needs)
        self.tokenizer = load_tokenizer(config.role_model("actor"))
        self._recompute = config.rollout_section().kv_at_switch == "recompute"
        self._stores: dict[str, Any] = {}  # of the present generations
        self._learner_groups: dict[LearnerRole, RayGroup[LearnerWorker]] = {}
        self._attempt, self._cause = 0, ""  # of publishing, and why the last one failed
        self._members: frozenset[int] = frozenset()  # engines connected with the actor
        self._device_lock = asyncio.Lock()  # weights, training and engines that come back exclude each other
        self._groups()

    def _groups(self) -> None:
        config, anew = self.config, self.config.cluster.replace_engines
        self._stops = f"the run stops; drumroll train --resume {config.output}/{config.name} goes on from the last checkpoint"
        self._actors = self._learners("actor")
        self.actor = self._actors
        then = "a new one is started, and its samples go on there or elsewhere" if anew else "its samples go to other engines"
        self._engines = self._group(Role.ROLLOUT, partial(make_engine_worker, Role.ROLLOUT), then)
        self.rollout = self._engines
        self._engine_pool = self._engine_pool_of(self._engines, self._renew)
        self._engine_pools = [self._engine_pool]
        if "reference" in self.layout.devices:
            self.reference = self._learners("reference")
        elif REFERENCE in self.needs:
            self.reference = self.actor
        if "teacher" in self.layout.devices:
            self.teacher = self._learners("teacher")
        if "critic" in self.layout.devices:
            self.critic = self._learners("critic")
        if "judge" in self.layout.devices:
            then = "a new one is started, and its questions are asked again" if anew else "its questions go to other judges"
            self._engine_pools.append(
                self._engine_pool_of(self._group(Role.JUDGE, partial(make_engine_worker, Role.JUDGE), then))
            )
        if "reward_model" in self.layout.devices:
            self._classifiers = self._group(Role.REWARD_MODEL, make_classifier, self._stops)
        beside, deadline = (
            self._actors.device_sets[:1],
            config.cluster.call_timeout,
        )  # no further machine that could end the run
        self.batch_builder = RayGroup(
            self.runtime, Role.BATCH_BUILDER, [partial(make_batch_builder, config)], beside, deadline=deadline, then=self._stops
        )

    def _group(self, role: Role, make: Callable[[RunConfig, Assignment], W], then: str) -> RayGroup[W]:
        device_sets, deadline = self.layout.workers(role), self.config.cluster.call_timeout
        group: RayGroup[W] = RayGroup(
            self.runtime, role, self._factories(role, make), device_sets, urgent=URGENT, deadline=deadline, then=then
        )
        group.mesh = self._mesh(role)
        return group

    def _mesh(self, role: Role) -> Mesh:
        return self.layout.meshes.get(role) or Mesh(data=max(1, len(self.layout.workers(role))))

    def _factories(self, role: Role, make: Callable[[RunConfig, Assignment], W]) -> list[Callable[[], W]]:
        """What makes each worker of a role, in rank order."""
        mesh, device_sets = self._mesh(role), self.layout.workers(role)
        return [
            partial(make, self.config, Assignment(devices[0], replace(mesh, rank=rank)))
            for rank, devices in enumerate(device_sets)
        ]

    def _learners(self, role: LearnerRole) -> RayGroup[LearnerWorker]:
        """The ranks of a learning role, which meet at a store of the controller."""
        group = self._group(Role(role), partial(make_learner_worker, role, self._rendezvous(role)), self._stops)
        self._learner_groups[role] = group
        return group

    def _rendezvous(self, role: LearnerRole) -> Rendezvous | None:
        """A new store for the next generation of a role; None for a rank alone."""
        devices = self.layout.devices[role]
        if len(devices) == 1:
            return None
        here, addresses = self.runtime.host_of(), tuple(self.runtime.host_of(d) for d in devices)
        host = LOOPBACK if set(addresses) == {here} else here
        self._stores[role] = open_store(host)
        return Rendezvous(host, self._stores[role].port, addresses)

    @override
    async def renew_learners(self) -> None:
        async with self._device_lock:
            for role, group in self._learner_groups.items():
                if await group.living() and all(await group.broadcast(LearnerWorker.together)):
                    continue
                make = partial(make_learner_worker, role, self._rendezvous(role))
                await group.renew(self._factories(Role(role), make))
                self._members = frozenset()  # engines connect with the actor's new first rank

    def _engine_pool_of(
        self, group: RayGroup[EngineWorker], prepare: Callable[[], Awaitable[None]] | None = None
    ) -> EnginePool:
        config = self.config
        return EnginePool(
            group,
            Router(config.rollout_section().engine_timeout),
            self._device_lock,
            trained={d.index for role in LEARNING for d in self.layout.devices.get(role, ())},
            replaces=config.cluster.replace_engines,
            elsewhere=partial(self._elsewhere, group.role),
            prepare=prepare,
            notify=lambda text: self.notify(text),
        )

    def _elsewhere(self, role: Role, devices: DeviceSet) -> DeviceSet:
        """Where to start an engine anew: on its own devices, or on others of its role if that one's machine is gone."""
        alive = self.runtime.alive()
        others = [p for p in self.layout.replicas(role) if p[0].kind is devices[0].kind]
        return next((p for p in (devices, *others) if all(d.index in alive for d in p)), devices)

    async def start(self) -> None:
        """Wait until every worker is there, and put the engines behind their queues."""
        await asyncio.gather(*(group.ready() for group in self.runtime.groups))
        self.router = self._engine_pool.router
        for pool in self._engine_pools:
            await pool.start()
        self._scorers()

    def _scorers(self) -> None:
        """The roles that rewards may ask."""
        config = self.config
        run, asked, model = Path(config.output) / config.name, config.roles.judge, config.roles.reward_model
        if asked is not None and asked.url is None:
            self.judge = open_judge(asked, run, self._engine_pools[1].router, load_tokenizer(asked.model))
        elif asked is not None:
            self.judge = open_judge(asked, run)
            self.closing.append(self.judge.close)
        if model is not None:
            self.reward_model = RewardModel(model, self._classifiers, load_tokenizer(model.model), alone=config.deterministic)
            self.closing.append(self.reward_model.close)

    # --- weights ---

    @override
    async def publish(self, version: Version) -> None:
        if self.rollout.size:
            self._check_experts()
            async with self._device_lock:
                await self._send()

    def _check_experts(self) -> None:
        """Refuse to publish a mixture of experts to vLLM on CPUs: measured, it generates nonsense after its first reload."""
        model, on_cpu = self.config.role_model("actor"), self._engines.device_sets[0][0].kind is Kind.CPU
        if on_cpu and self.config.roles.rollout.backend == "vllm" and (shape := find_shape(model)) and shape.experts:
            raise ConfigError(
                f"roles.rollout.backend: vLLM's CPU build does not take new weights of a mixture of experts ({model}); use native."
            )

    async def _renew(self) -> None:
        """Bring the weights to an engine that has come back; its new process is not connected yet."""
        self._members = frozenset()
        await self._send()

    async def _send(self) -> None:
        """Bring the actor's weights to all engines, in numbered attempts; its count of updates is their version."""
        for _ in range(1 + self.rollout.size):  # once more for each engine that may be lost on the way
            if not (ranks := self._engine_pool.living()):
                if self._engine_pool.coming():
                    return  # an engine that comes back receives the present weights before it gets work
                raise NoEngines("There is no engine left to publish weights to.")
            self._attempt += 1
            if frozenset(ranks) != self._members and not await self._connect(ranks):
                continue
            manifest = await self._actors.call(0, LearnerWorker.announce, self._attempt)
            sending = self._actors.broadcast(LearnerWorker.send, manifest)
            loads = (self._engines.call(r, EngineWorker.receive, manifest, recompute=self._recompute) for r in ranks)
            sent, *received = await asyncio.gather(sending, *loads, return_exceptions=True)
            if self._all_there(ranks, received, sent):
                return
        raise WeightSyncError(
            f"The weights did not reach the engines in {1 + self.rollout.size} attempts; the last one failed: {self._cause}"
        )

    def _all_there(self, ranks: list[int], results: list[Any], sent: Any = None) -> bool:
        """Whether all engines answered. Lost engines are left out from now on, until their pool brings them back.

        `sent` is the outcome at the learners: their own error is raised, as an engine's is, unless another attempt may help.
        """
        if isinstance(sent, BaseException) and not isinstance(sent, WeightSyncError):
            raise sent
        for rank, result in zip(ranks, results, strict=True):
            if isinstance(result, WorkerLost):
                self._engine_pool.lost.add(rank)
            elif isinstance(result, EngineLost):
                self._engine_pool.condemn(rank, str(result))
            elif isinstance(result, BaseException) and not isinstance(result, WeightSyncError):
                raise result
        failures = [result for result in (sent, *results) if isinstance(result, BaseException)]
        if failures:
            self._members, self._cause = frozenset(), str(failures[0])
        return not failures

    async def _connect(self, ranks: list[int]) -> bool:
        """Connect the actor's first rank with the receivers of these engines, one or more each; whether all came."""
        asked = (self._engines.call(rank, EngineWorker.receivers) for rank in ranks)
        counts: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
        if not self._all_there(ranks, counts):
            return False
        ends, first = [self._end(self._actors.device_sets[0][0])], list[int]()
        for rank, count in zip(ranks, counts, strict=True):
            first.append(len(ends))
            ends += self._ends(self._engines.device_sets[rank], count)
        transport, packing = choose(self.config.cluster.weight_sync, ends), Packing(checksum=self.config.cluster.checksum)
        meeting = await self._actors.call(
            0, LearnerWorker.open_transport, transport, self.runtime.name, packing, len(ends), ends[0].host
        )
        joins = (
            self._engines.call(rank, EngineWorker.open_transport, meeting, i, ends[i].host)
            for i, rank in zip(first, ranks, strict=True)
        )
        if not self._all_there(ranks, await asyncio.gather(*joins, return_exceptions=True)):
            return False
        self._members = frozenset(ranks)
        return True

    def _end(self, device: Device) -> End:
        return End(self.runtime.host_of(device), device.index if device.kind is not Kind.CPU else None, device.kind)

    def _ends(self, devices: DeviceSet, receivers: int) -> list[End]:
        """An engine's receivers: its processes, one on each device, or its worker, with tensors on the device or the host."""
        if len(devices) == receivers or (not receivers and not self.config.engine_traits().own_process):
            return [self._end(device) for device in devices[: receivers or 1]]
        return [End(self.runtime.host_of(devices[0]))] * max(1, receivers)

    # --- turns on shared devices ---

    @override
    @asynccontextmanager
    async def training(self) -> AsyncGenerator[None]:
        async with self._device_lock:
            await asyncio.gather(*(pool.rest() for pool in self._engine_pools))
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
        if any(pool.sharing() for pool in self._engine_pools):
            await asyncio.gather(*(group.broadcast(Learner.offload) for group in self.learners().values()))
        await asyncio.gather(*(pool.back() for pool in self._engine_pools))

    # --- the rest ---

    def open_pool(self, size: int) -> RewardPool:
        """Reward processes, spread over the machines."""
        deadline, then = self.config.cluster.call_timeout, "a new one is started, and its call is made again"
        workers = [partial(RewardWorker, objects.pack())] * size

        def open_group() -> RayGroup[RewardWorker]:
            return RayGroup(self.runtime, Role.REWARD, workers, deadline=deadline, then=then)

        return RewardPool(size, open_group, sys.path, lambda text: self.notify(text), self.struck)

    @override
    def interrupt(self) -> None:
        for group in self.learners().values():
            for rank in range(group.size):
                group.post(rank, Learner.interrupt)

    @override
    async def memory(self) -> dict[str, float]:
        engines = [self._engines.call(rank, EngineWorker.memory) for rank in self._engine_pool.living()]
        calls = {"rollout": engines} | {
            role: [group.call(rank, LearnerWorker.memory) for rank in range(group.size)]
            for role, group in self._learner_groups.items()
        }
        found: dict[str, float] = {}
        for role, asked in calls.items():
            peaks = await asyncio.gather(*asked, return_exceptions=True)
            found |= merge(role, (peak for peak in peaks if isinstance(peak, Peak)))
        return found

    @override
    async def close(self) -> None:
        for pool in self._engine_pools:
            pool.close()
        await super().close()
        await self.runtime.close()
