"""The `local` runtime: all roles in this process, on one device; for a laptop, one GPU, and pdb.

At staleness 0 the engines generate with the learner's own working weights, so publishing a version moves nothing. Above 0
each engine has a working copy of its own, switched between two tokens when a version is published.
"""

from __future__ import annotations

import copy
import dataclasses
from contextlib import suppress
from pathlib import Path

from typing_extensions import override

from drumroll.algorithms import REFERENCE, TEACHER, VALUES
from drumroll.config import RunConfig
from drumroll.engines import Completion, Engine, EngineLost, Request
from drumroll.engines.router import Router
from drumroll.errors import ConfigError
from drumroll.learners import Learner
from drumroll.models import attention
from drumroll.models.loading import LoadedModel, load_tokenizer
from drumroll.models.lora import peft_config
from drumroll.placement.layout import adapters_off
from drumroll.processes.memory import merge, peak_gb
from drumroll.processes.pool import KillablePool
from drumroll.rewards.judge_client import open_judge
from drumroll.rewards.model import RewardModel
from drumroll.sample import Version
from drumroll.workers.batch_builder import BatchBuilder
from drumroll.workers.group import LocalGroup, Role
from drumroll.workers.roles import (
    make_engine,
    make_judge,
    make_reward_model,
    open_learner,
)
from drumroll.workers.runtime import Workers, configure_torch, needs_of, open_algorithm


class LocalWorkers(Workers):
    """Loads the models of all roles."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        configure_torch(config)
        rollout, learner = config.rollout_section(), open_learner(config, "actor")
        model = learner.backend.model
        if model is None:
            raise ConfigError(
                f"roles.actor.backend: {config.roles.actor.backend} keeps its weights where engines of this process cannot use them; "
                "use cluster.runtime: ray."
            )
        self._trained: list[Learner] = [learner]
        self.tokenizer = model.tokenizer
        self.actor = LocalGroup(Role.ACTOR, [learner])
        self._shared = rollout.max_staleness == 0 and config.engine_traits().shares_weights
        self._recompute, self._lora = rollout.kv_at_switch == "recompute", config.roles.actor.lora
        engines: list[Engine] = [
            make_engine(config, lambda: model if self._shared else _copy(model))
            for _ in range(0 if config.trains_scores() else config.roles.rollout.workers)
        ]
        self.rollout = LocalGroup(Role.ROLLOUT, engines)
        self.router = Router(rollout.engine_timeout)
        _join(self.router, self.rollout, engines)
        self.batch_builder = LocalGroup(Role.BATCH_BUILDER, [BatchBuilder(open_algorithm(config))])
        self.needs = needs_of(config)
        if REFERENCE in self.needs:
            self.reference = (
                self.actor if adapters_off(config) else LocalGroup(Role.REFERENCE, [open_learner(config, "reference")])
            )
        if TEACHER in self.needs:
            self.teacher = LocalGroup(Role.TEACHER, [open_learner(config, "teacher")])
        if VALUES in self.needs:
            self._trained.append(open_learner(config, "critic"))
            self.critic = LocalGroup(Role.CRITIC, self._trained[1:])
        self._scorers(config)

    def _scorers(self, config: RunConfig) -> None:
        """The roles that rewards may ask."""
        run, asked, model = Path(config.output) / config.name, config.roles.judge, config.roles.reward_model
        if asked is not None and asked.url is None:
            engines: LocalGroup[Engine] = LocalGroup(Role.JUDGE, [make_judge(config)])
            router = Router()
            _join(router, engines, engines.workers)
            self.judge = open_judge(asked, run, router, load_tokenizer(asked.model))
            self.closing.append(engines.close)
        elif asked is not None:
            self.judge = open_judge(asked, run)
            self.closing.append(self.judge.close)
        if model is not None:
            group = LocalGroup(Role.REWARD_MODEL, [make_reward_model(config)])
            self.reward_model = RewardModel(model, group, load_tokenizer(model.model), alone=config.deterministic)
            self.closing.append(self.reward_model.close)

    @override
    async def publish(self, version: Version) -> None:
        if self._shared:
            await self.rollout.broadcast(Engine.set_version, version)
            return
        for rank in range(self.rollout.size):
            weights = await self.actor.call(0, Learner.weights)
            with suppress(EngineLost):  # the router learns of it with the next request
                if self._lora is None:
                    await self.rollout.call(rank, Engine.load, version, weights, recompute=self._recompute)
                else:
                    adapter = peft_config(self._lora)
                    await self.rollout.call(rank, Engine.load_adapter, version, weights, adapter, recompute=self._recompute)

    @override
    async def renew_learners(self) -> None:
        """Learners of this process are never lost."""

    @override
    def interrupt(self) -> None:
        for learner in self._trained:
            learner.interrupt()

    @override
    def open_pool(self, size: int) -> KillablePool:
        return KillablePool(size, struck=self.struck)

    @override
    async def memory(self) -> dict[str, float]:
        return merge("process", [peak_gb()])

    @override
    async def close(self) -> None:
        await super().close()
        for group in (self.rollout, self.actor, self.critic, self.reference, self.teacher, self.batch_builder):
            if group is not None:
                await group.close()


def _join(router: Router, group: LocalGroup[Engine], engines: list[Engine]) -> None:
    """The engines behind one queue."""
    for rank, engine in enumerate(engines):

        async def generate(request: Request, rank: int = rank) -> Completion:
            return await group.call(rank, Engine.generate, request)

        router.join(f"{group.role}-{rank}", generate, engine.capacity(), engine.interrupt)


def _copy(model: LoadedModel) -> LoadedModel:
    """A second working copy, for an engine that generates while the learner trains."""
    module = copy.deepcopy(model.module)
    module.set_attn_implementation(attention.NAME)
    return dataclasses.replace(model, module=module.eval().requires_grad_(False))
