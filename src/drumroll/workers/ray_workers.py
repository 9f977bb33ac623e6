"""What sits in a worker's process around the worker: its end of the weight bus, its threads, its memory."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

from drumroll.config import AnyConfig
from drumroll.engines import Completion, Engine, Request
from drumroll.learners.ranks import Ranks
from drumroll.mesh import Mesh
from drumroll.models.adapters import peft_config
from drumroll.placement.devices import Device, Kind
from drumroll.processes.deadline import CpuTimeExceeded
from drumroll.processes.memory import peak_gb
from drumroll.processes.pool import KillablePool, RemoteError
from drumroll.registry import search
from drumroll.rewards.model import Classifier
from drumroll.sample import Version
from drumroll.weights import Packing, Receiver, Sender, WeightManifest, settle
from drumroll.weights.broadcast import BroadcastReceiver, BroadcastSender, Meeting
from drumroll.weights.choice import Transport
from drumroll.weights.shared_memory import SharedReceiver, SharedSender
from drumroll.workers import roles
from drumroll.workers.batch_builder import BatchBuilder
from drumroll.workers.ray_actors import RayGroup
from drumroll.workers.runtime import configure_torch, open_algorithm
from drumroll.workers.server import WorkerLost

Meet = tuple[str, int, Sequence[str]]
"""Where ranks meet: host and port of their store, and the address of each rank."""


def make_worker(
    make: str, config: AnyConfig, device: Device, rank: int, count: int, meeting: Meet | None = None
) -> LearnerWorker | EngineWorker | Classifier:
    """Make the worker of a role in this process, which sees its own GPUs only; `device` is the first of it."""
    search(config.import_from)
    configure_torch(config, device.threads)
    where = "cuda" if device.kind is Kind.CUDA else "cpu"
    sections = {
        name: getattr(config.roles, name) for name in ("actor", "reference", "teacher", "critic", "judge", "reward_model")
    }
    on = {name: section.model_copy(update={"devices": where}) for name, section in sections.items() if section is not None}
    config = config.model_copy(update={"roles": config.roles.model_copy(update=on)})
    if make in ("make_engine", "make_judge"):
        return EngineWorker(getattr(roles, make)(config), config)
    if make == "make_reward_model":
        return roles.make_reward_model(config)
    role = cast(roles.LearnerRole, make.removeprefix("make_"))
    mesh = Mesh(data=count, rank=rank)
    ranks = Ranks(mesh)
    if meeting is not None and role not in ("reference", "teacher"):
        host, port, addresses = meeting
        seconds = config.cluster.collective_timeout
        patience = max(seconds, config.cluster.start_timeout)  # processes of one group may start minutes apart
        ranks = Ranks.meet(mesh, host, port, device=where, seconds=seconds, address=addresses[rank], patience=patience)
    return LearnerWorker(roles.open_learner(config, role, ranks))


def make_batch_builder(config: AnyConfig) -> BatchBuilder:
    """The batch builder, which looks a user's own parts up as every worker does."""
    search(config.import_from)
    return BatchBuilder(open_algorithm(config))


class LearnerWorker:
    """A learner; the actor's first rank sends weights. All else is the learner's own."""

    def __init__(self, learner: Any) -> None:
        self.learner = learner
        self._sender: Sender | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["learner"], name)

    def open_transport(self, transport: Transport, run: str, packing: Packing, size: int, address: str) -> Meeting | None:
        """Be ready to send to so many, ourselves counted, from our address; what we had before is closed. None: they need not meet."""
        if self._sender is not None:
            with suppress(Exception):
                self._sender.close()
        if transport.kind == "shared":
            self._sender = SharedSender(run, packing)
            return None
        settle(self.learner.backend.working)
        sender = BroadcastSender(Meeting(transport.host, 0, size, transport.device, seconds=120.0), packing, address=address)
        self._sender = sender
        return sender.meeting

    def send(self) -> WeightManifest | None:
        """Offer the weights as they are; the count of updates is their version. All ranks bring them together, the first sends."""
        if self._sender is not None:
            return self._sender.send(self.learner.step, self.learner.weights())
        for _ in self.learner.weights():
            pass
        return None

    def sent(self) -> None:
        """Wait until the weights may change again."""
        assert self._sender is not None
        self._sender.wait()

    def memory(self) -> float:
        """GB at most since the last call."""
        return peak_gb()

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()


class EngineWorker:
    """An engine that receives weights."""

    def __init__(self, engine: Engine, config: AnyConfig) -> None:
        self.engine = engine
        self._lora = config.roles.actor.lora if config.roles.rollout.backend == "vllm" else None
        self._receiver: Receiver | None = None

    async def generate(self, request: Request) -> Completion:
        return await self.engine.generate(request)

    def open_transport(self, meeting: Meeting | None, index: int, address: str) -> None:
        """Be ready to receive at our address."""
        if self._receiver is not None:
            with suppress(Exception):
                self._receiver.close()
        self._receiver = SharedReceiver() if meeting is None else BroadcastReceiver(meeting, index, address)

    def receive(self, manifest: WeightManifest, *, recompute: bool) -> None:
        """Switch to the weights of a manifest between two tokens."""
        assert self._receiver is not None
        weights = dict(self._receiver.receive(manifest))
        if self._lora is not None:
            from drumroll.engines.vllm import VllmEngine

            assert isinstance(self.engine, VllmEngine)
            self.engine.load_adapter(manifest.version, weights, peft_config(self._lora), recompute=recompute)
        else:
            self.engine.load(manifest.version, weights, recompute=recompute)

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    def interrupt(self) -> None:
        self.engine.interrupt()

    def set_version(self, version: Version) -> None:
        self.engine.set_version(version)

    def capacity(self) -> int:
        return self.engine.capacity()

    def memory(self) -> float:
        """GB at most since the last call."""
        return peak_gb()

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def close(self) -> None:
        self.engine.close()


class RewardWorker:
    """One process for rewards that can be killed, on whatever machine this actor is."""

    def __init__(self) -> None:
        self.pool: KillablePool | None = None

    async def run(self, path: str, arguments: dict[str, Any], seconds: float, cpu: bool, search: list[str]) -> Any:
        self.pool = self.pool or KillablePool(1, search)
        return await self.pool.call(path, arguments, seconds, cpu)

    async def close(self) -> None:
        """End the process."""
        if self.pool is not None:
            await self.pool.close()


class RewardPool:
    """`KillablePool` over actors: the same calls, on the machines of a cluster."""

    def __init__(
        self,
        group: RayGroup[RewardWorker],
        search: list[str],
        notify: Callable[[str], None] = lambda text: None,
        struck: Counter[str] | None = None,
    ) -> None:
        self.group = group
        self.search = search
        self.notify = notify
        self.restarts = 0
        self.struck: Counter[str] = Counter() if struck is None else struck
        self._free = list(range(group.size))
        self._places = asyncio.Semaphore(group.size)

    async def call(self, path: str, arguments: dict[str, Any], seconds: float, cpu: bool = False) -> Any:
        """The function's result; a machine that is lost costs another try elsewhere."""
        while True:
            async with self._places:
                rank = self._free.pop()
                try:
                    return await self.group.call(rank, RewardWorker.run, path, arguments, seconds, cpu, self.search)
                except WorkerLost as lost:
                    self.restarts += 1
                    self.notify(str(lost))
                    await self.group.replace(rank)
                except RemoteError:
                    raise
                except CpuTimeExceeded:
                    self.struck["cpu"] += 1
                    raise
                except BaseException as error:
                    self.restarts += 1  # `RewardWorker` has killed the process
                    self.struck["wall"] += isinstance(error, TimeoutError)
                    raise
                finally:
                    self._free.append(rank)

    async def close(self) -> None:
        """End all processes."""
        await self.group.close()
