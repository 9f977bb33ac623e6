"""The roles of a run on the `local` runtime: who shares which weights.

At staleness 0 in one process the engine generates with the learner's own working weights, so publishing a version
moves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from drumroll.cluster.group import LocalGroup, Role, WorkerGroup
from drumroll.config import AnyConfig, RLConfig
from drumroll.engines import Engine
from drumroll.engines.native import NativeEngine
from drumroll.learners import Learner
from drumroll.learners.torch import TorchLearner
from drumroll.models.loading import LoadedModel, load
from drumroll.sample import Version


@dataclass
class Workers:
    """The worker groups of a run, and the tokenizer they share."""

    actor: WorkerGroup[Learner]
    rollout: WorkerGroup[Engine]
    reference: WorkerGroup[Learner] | None
    tokenizer: Any
    interrupt: Callable[[], None]

    async def publish(self, version: Version) -> None:
        """Make the actor's weights those that the engines generate with, under a new version."""
        await self.rollout.broadcast(Engine.set_version, version)

    async def close(self) -> None:
        """Free all roles."""
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
    engine = NativeEngine(
        model, slots=config.roles.rollout.slots, context=context_length(config), fixed_shape=config.deterministic
    )
    reference: LocalGroup[Learner] | None = None
    if isinstance(config, RLConfig) and config.algorithm.kl > 0:
        reference = LocalGroup(Role.REFERENCE, [_frozen(config)])
    return Workers(
        LocalGroup(Role.ACTOR, [learner]), LocalGroup(Role.ROLLOUT, [engine]), reference, model.tokenizer, learner.interrupt
    )


def _frozen(config: RLConfig) -> Learner:
    role = config.roles.reference
    model: LoadedModel = load(config.role_model("reference"), dtype=role.dtype, device=role.device, seed=config.seed)
    return TorchLearner(model, config.optim, total_steps=config.steps)


def configure_torch(config: AnyConfig) -> None:
    """Threads and determinism of this process."""
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    torch.use_deterministic_algorithms(config.deterministic)
    torch.manual_seed(config.seed)
