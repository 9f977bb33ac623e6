"""The roles of a run on the `local` runtime: who shares which weights.

At staleness 0 in one process the engines generate with the learner's own working weights, so publishing a version
moves nothing. Above 0 each engine has a working copy of its own, switched between two tokens when a version is published.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from drumroll.cluster.group import LocalGroup, Role, WorkerGroup
from drumroll.config import AnyConfig, RLConfig
from drumroll.engines import Completion, Engine, EngineLost, Request
from drumroll.engines.native import NativeEngine
from drumroll.learners import Learner
from drumroll.learners.torch import TorchLearner
from drumroll.models import attention
from drumroll.models.loading import LoadedModel, load
from drumroll.rollout.router import Router
from drumroll.sample import Version


@dataclass
class Workers:
    """The worker groups of a run, the queue in front of its engines, and the tokenizer."""

    actor: WorkerGroup[Learner]
    rollout: WorkerGroup[Engine]
    reference: WorkerGroup[Learner] | None
    tokenizer: Any
    router: Router
    interrupt: Callable[[], None]
    shared: bool
    recompute: bool = False
    closing: list[Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=list)

    async def publish(self, version: Version) -> None:
        """Make the actor's weights those that the engines generate with, under a new version."""
        if self.shared:
            await self.rollout.broadcast(Engine.set_version, version)
            return
        weights = await self.actor.call(0, Learner.weights)
        for rank in range(self.rollout.size):
            with suppress(EngineLost):  # the router learns of it with the next request
                await self.rollout.call(rank, Engine.load, version, weights, recompute=self.recompute)

    async def close(self) -> None:
        """Free all roles."""
        for close in self.closing:
            await close()
        for group in (self.rollout, self.actor, self.reference):
            if group is not None:
                await group.close()


def context_length(config: AnyConfig) -> int:
    """Tokens a row of the engine must hold: the longest prompt and the longest completion."""
    own = config.rollout.max_tokens if isinstance(config, RLConfig) else config.eval_max_tokens
    evaluations = [s.max_tokens or own for s in config.eval.sets.values()]
    return config.data.max_prompt_tokens + max([own, *evaluations])


def open_workers(config: AnyConfig) -> Workers:
    """Load the models of all roles in this process."""
    configure_torch(config)
    actor = config.roles.actor
    model = load(config.role_model("actor"), dtype=actor.dtype, device=actor.device, seed=config.seed)
    learner = TorchLearner(model, config.optim, total_steps=config.steps)
    shared = not isinstance(config, RLConfig) or config.rollout.max_staleness == 0
    engines = [_engine(config, model if shared else _copy(model)) for _ in range(config.roles.rollout.workers)]
    reference: LocalGroup[Learner] | None = None
    if isinstance(config, RLConfig) and config.algorithm.kl > 0:
        reference = LocalGroup(Role.REFERENCE, [_frozen(config)])
    rollout: LocalGroup[Engine] = LocalGroup(Role.ROLLOUT, engines)
    return Workers(
        actor=LocalGroup(Role.ACTOR, [learner]),
        rollout=rollout,
        reference=reference,
        tokenizer=model.tokenizer,
        router=_router(config, rollout, engines),
        interrupt=learner.interrupt,
        shared=shared,
        recompute=isinstance(config, RLConfig) and config.rollout.kv_at_switch == "recompute",
    )


def _router(config: AnyConfig, group: WorkerGroup[Engine], engines: Sequence[Engine]) -> Router:
    """The engines behind one queue."""
    router = Router(config.rollout.engine_timeout) if isinstance(config, RLConfig) else Router()
    for rank, engine in enumerate(engines):

        async def generate(request: Request, rank: int = rank) -> Completion:
            return await group.call(rank, Engine.generate, request)

        router.join(f"engine-{rank}", generate, engine.capacity(), engine.interrupt)
    return router


def _engine(config: AnyConfig, model: LoadedModel) -> NativeEngine:
    return NativeEngine(
        model, slots=config.roles.rollout.slots, context=context_length(config), fixed_shape=config.deterministic
    )


def _copy(model: LoadedModel) -> LoadedModel:
    """A second working copy, for an engine that generates while the learner trains."""
    module = copy.deepcopy(model.module)
    module.set_attn_implementation(attention.NAME)
    return dataclasses.replace(model, module=module.eval().requires_grad_(False))


def _frozen(config: RLConfig) -> Learner:
    role = config.roles.reference
    model: LoadedModel = load(config.role_model("reference"), dtype=role.dtype, device=role.device, seed=config.seed)
    return TorchLearner(model, config.optim, total_steps=config.steps)


def configure_torch(config: AnyConfig) -> None:
    """Threads and determinism of this process."""
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    torch.use_deterministic_algorithms(config.deterministic)
    torch.manual_seed(config.seed)
