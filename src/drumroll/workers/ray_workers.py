"""The workers in processes of a cluster: learners that send weights, engines that receive them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from drumroll.config import RunConfig
from drumroll.config.roles import LearnerRole, LoraConfig
from drumroll.engines import Completion, Engine, ReceivesWeights, Request
from drumroll.learners import Learner
from drumroll.learners.ranks import Ranks
from drumroll.mesh import Mesh
from drumroll.models.lora import peft_config
from drumroll.placement.devices import Device
from drumroll.processes.memory import Peak, peak_gb
from drumroll.processes.rendezvous import Rendezvous
from drumroll.registry import search
from drumroll.rewards.model import Classifier
from drumroll.sample import Version
from drumroll.weights import Meeting, Named, Packing, Receiver, Sender, WeightManifest, exhausted
from drumroll.weights.transport import Transport, open_receiver, open_sender
from drumroll.workers import roles
from drumroll.workers.batch_builder import BatchBuilder
from drumroll.workers.group import Role
from drumroll.workers.runtime import configure_torch, open_algorithm


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker is given: the first of its devices, and its rank on the mesh of its role."""

    device: Device
    mesh: Mesh

    @property
    def torch_device(self) -> str:
        """The device as torch names it in the worker's process, which sees its own GPUs only."""
        return str(self.device.kind)


def make_learner_worker(
    role: LearnerRole, rendezvous: Rendezvous | None, config: RunConfig, assigned: Assignment
) -> LearnerWorker:
    """Make a learner in this process. Ranks meet if their role is trained, or if they divide its model."""
    config, ranks, mesh = _prepare(config, assigned), Ranks(assigned.mesh), assigned.mesh
    if rendezvous is not None and (role not in ("reference", "teacher") or ranks.divided):
        seconds = config.cluster.collective_timeout
        patience = max(seconds, config.cluster.start_timeout)  # processes of one group may start minutes apart
        ranks = Ranks.meet(mesh, rendezvous, device=assigned.torch_device, seconds=seconds, patience=patience)
    return roles.open_learner(config, role, ranks, LearnerWorker)


def make_engine_worker(role: Role, config: RunConfig, assigned: Assignment) -> EngineWorker:
    """Make an engine in this process."""
    config = _prepare(config, assigned)
    return EngineWorker(roles.ENGINES[role](config), config.roles.actor.lora)


def make_classifier(config: RunConfig, assigned: Assignment) -> Classifier:
    """Make the reward model in this process."""
    return roles.make_reward_model(_prepare(config, assigned))


def _prepare(config: RunConfig, assigned: Assignment) -> RunConfig:
    """Configure this process for its worker; returns the config with every role on the worker's device."""
    search(config.import_from)
    configure_torch(config, assigned.device.threads)
    sections = {
        name: getattr(config.roles, name) for name in ("actor", "reference", "teacher", "critic", "judge", "reward_model")
    }
    where = {"devices": assigned.torch_device}
    on = {name: section.model_copy(update=where) for name, section in sections.items() if section is not None}
    return config.model_copy(update={"roles": config.roles.model_copy(update=on)})


def make_batch_builder(config: RunConfig) -> BatchBuilder:
    """The batch builder, which looks a user's own parts up as every worker does."""
    search(config.import_from)
    return BatchBuilder(open_algorithm(config))


class LearnerWorker(Learner):
    """A learner in a process of its own; the actor's first rank also sends weights."""

    _sender: Sender | None = None

    def open_transport(self, transport: Transport, run: str, packing: Packing, size: int, address: str) -> Meeting:
        """Open a sender to `size` - 1 receivers at this process's address, and close the one before.

        Returns where the receivers meet it.
        """
        if self._sender is not None:
            with suppress(Exception):
                self._sender.close()
        self._sender = open_sender(transport, run, packing, size, address)
        return self._sender.meeting

    def together(self) -> bool:
        """Whether this rank is still in its process group; a failed collective breaks it while all processes live."""
        return not self.backend.ranks.met or self.backend.ranks.group is not None

    def announce(self, attempt: int) -> WeightManifest:
        """Announce the weights in a numbered attempt; the count of updates is their version. A call to the first rank."""
        assert self._sender is not None
        return self._sender.announce(self.step, attempt)

    def send(self, manifest: WeightManifest) -> None:
        """Send the weights to all receivers. A call to all ranks: they bring the weights together, and the first sends.

        It ends on each rank when the last weight is taken, so nothing else that the ranks do together comes between.
        """
        with exhausted(self.weights()) as weights:
            if self._sender is not None:
                self._sender.send(manifest, weights)
            else:
                for _ in weights:
                    pass

    def memory(self) -> Peak:
        """Peak memory since the last call."""
        return peak_gb()

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()


class EngineWorker:
    """Implements `Engine` by the engine of this process, and receives weights for it: all, or those of the adapters."""

    def __init__(self, engine: Engine, lora: LoraConfig | None) -> None:
        self.engine = engine
        self._lora = lora
        self._receiver: Receiver | None = None

    async def generate(self, request: Request) -> Completion:
        return await self.engine.generate(request)

    def _receiving(self) -> ReceivesWeights | None:
        """The engine, if its own processes receive the weights; adapters, which are small, go through this process."""
        return self.engine if self._lora is None and isinstance(self.engine, ReceivesWeights) else None

    def receivers(self) -> int:
        """The number of processes of the engine that receive weights themselves; 0 if this one receives them for it."""
        own = self._receiving()
        return 0 if own is None else own.receivers()

    def open_transport(self, meeting: Meeting, first: int, address: str) -> None:
        """Meet a sender at our address, as its receivers `first` and following."""
        if (own := self._receiving()) is not None:
            own.connect(meeting, first, address)
            return
        if self._receiver is not None:
            with suppress(Exception):
                self._receiver.close()
        self._receiver = open_receiver(meeting, first, address)

    def receive(self, manifest: WeightManifest, *, recompute: bool) -> None:
        """Switch to the weights of a manifest between two tokens, as they come."""
        if (own := self._receiving()) is not None:
            own.receive(manifest, recompute=recompute)
            return
        assert self._receiver is not None
        with exhausted(self._receiver.receive(manifest)) as weights:  # the others wait for an engine that refuses them
            if self._lora is None:
                self.load(manifest.version, weights, recompute=recompute)
            else:
                self.load_adapter(manifest.version, weights, peft_config(self._lora), recompute=recompute)

    def load(self, version: Version, weights: Named, *, recompute: bool) -> None:
        self.engine.load(version, weights, recompute=recompute)

    def load_adapter(self, version: Version, adapter: Named, config: Mapping[str, Any], *, recompute: bool) -> None:
        self.engine.load_adapter(version, adapter, config, recompute=recompute)

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

    def memory(self) -> Peak:
        """Peak memory since the last call."""
        return peak_gb()

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def close(self) -> None:
        self.engine.close()
