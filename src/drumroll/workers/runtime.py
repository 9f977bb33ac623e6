"""The worker groups of a run, and what the loop asks of all of them at once. One file per runtime beside this one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, get_args

import torch

from drumroll.algorithms import Algorithm
from drumroll.algorithms.divergences import DIVERGENCES
from drumroll.config import RunConfig
from drumroll.config.learners import learner_traits
from drumroll.config.roles import BUILT_IN_MODELS, LearnerRole
from drumroll.engines import Engine
from drumroll.engines.router import Router
from drumroll.errors import ConfigError, ModelError
from drumroll.learners import Learner
from drumroll.learners.backend import BACKENDS
from drumroll.learners.backends import find_backend
from drumroll.models.loading import fetch_config
from drumroll.models.shape import architectures, find_context, is_classifier
from drumroll.processes.threads import CORES
from drumroll.registry import search
from drumroll.rewards import Pool
from drumroll.rewards.judge_client import Judge
from drumroll.rewards.model import RewardModel
from drumroll.sample import Version
from drumroll.workers.batch_builder import BatchBuilder
from drumroll.workers.group import WorkerGroup


class Workers(ABC):
    """All roles of a run, the queues in front of its engines, and the tokenizer."""

    actor: WorkerGroup[Learner]
    rollout: WorkerGroup[Engine]
    batch_builder: WorkerGroup[BatchBuilder]
    reference: WorkerGroup[Learner] | None = None
    teacher: WorkerGroup[Learner] | None = None
    critic: WorkerGroup[Learner] | None = None
    router: Router
    judge: Judge | None = None
    reward_model: RewardModel | None = None
    needs: Mapping[str, str]
    tokenizer: Any

    def __init__(self) -> None:
        self.notify: Callable[[str], None] = lambda text: None  # what a person should know
        self.struck: Counter[str] = Counter()  # deadlines of rewards, environments and programs, by their clock
        self.closing: list[Callable[[], Coroutine[Any, Any, None]]] = []

    def learners(self) -> dict[str, WorkerGroup[Learner]]:
        """The roles that are trained, by the name of their part of a checkpoint."""
        return {"": self.actor} if self.critic is None else {"": self.actor, "critic": self.critic}

    @abstractmethod
    async def publish(self, version: Version) -> None:
        """Make the actor's weights those that the engines generate with, under a new version."""

    @abstractmethod
    async def renew_learners(self) -> None:
        """Make groups of learners anew that have lost a process; they then hold the weights that training starts from."""

    @abstractmethod
    def interrupt(self) -> None:
        """End running updates before their next micro-batch; callable from any thread."""

    def metrics(self) -> dict[str, float]:
        """Counts since the last call: requests to the judge, deadlines that passed."""
        struck = {f"rollout/deadlines/{clock}": float(count) for clock, count in sorted(self.struck.items()) if count}
        self.struck.clear()
        return struck | ({} if self.judge is None else self.judge.metrics())

    @abstractmethod
    async def memory(self) -> dict[str, float]:
        """The peak memory of each role's processes since the last call, in GB; `<role>/max` is the most on one device."""

    @asynccontextmanager
    async def training(self) -> AsyncGenerator[None]:
        """Within the block, devices that training shares with generation belong to training."""
        yield

    @abstractmethod
    def open_pool(self, size: int) -> Pool:
        """Processes for functions that may hang or crash."""

    async def close(self) -> None:
        """Free all roles."""
        for close in self.closing:
            await close()


async def open_workers(config: RunConfig) -> Workers:
    """Start all roles on the config's runtime. From here on the user's modules can be imported."""
    check_roles(config)
    if config.cluster.runtime == "ray":
        from drumroll.workers.ray import open_ray

        return await open_ray(config)
    from drumroll.workers.local import LocalWorkers

    return LocalWorkers(config)


def check_roles(config: RunConfig) -> None:
    """Refuse engines, learners and models that do not exist, or cannot do what the config asks of them."""
    search(config.import_from)
    config.check_engine()
    for role in get_args(LearnerRole):
        find_backend(config.learner_backend(role))
    name = config.roles.actor.backend
    traits = replace(learner_traits(name), **BACKENDS.traits(name))
    if config.cluster.runtime == "local" and not traits.shares_weights:
        raise ConfigError(
            f"roles.actor.backend: {name} keeps its weights where engines of this process cannot use them; use cluster.runtime: ray."
        )
    if config.roles.actor.lora is not None and not traits.adapters:
        raise ConfigError(f"roles.actor.lora needs a backend that trains adapters, which roles.actor.backend: {name} does not.")
    for key, model in config.generating_models().items():
        if is_classifier(architectures(model)):
            raise ModelError(
                f"{key}: {model} is a sequence classifier (a reward model), which cannot generate text; name a language model. "
                "A reward model can be roles.reward_model.model, roles.critic.model, or the model of pipeline: reward_model."
            )
    scorer = None if config.roles.reward_model is None else config.roles.reward_model.model
    if scorer is not None and any(name.endswith("ForCausalLM") for name in architectures(scorer)):
        raise ModelError(
            f"roles.reward_model.model: {scorer} is a language model, which has no score head; name a sequence classifier, or train "
            "one by pipeline: reward_model."
        )


def open_algorithm(config: RunConfig) -> Algorithm:
    """The algorithm's parts. One update per batch needs no log-probs of the policy before it."""
    stale, divergence = config.rollout_section().max_staleness > 0, config.divergence_section()
    if divergence is not None:
        DIVERGENCES.get(divergence.use)
    return Algorithm(config.algorithm_section(), single_update=config.single_update(), longest=config.longest(), stale=stale)


def needs_of(config: RunConfig) -> dict[str, str]:
    """The passes and samples that the algorithm and the pipeline need besides the update, each with the reason."""
    return open_algorithm(config).needs | config.needs()


def with_lengths(config: RunConfig, *, fetch: bool = False) -> RunConfig:
    """Fill in the lengths that depend on the model's context; a model whose config is not at hand is taken for a long one.

    `fetch` brings the config from the hub if need be.
    """
    if config.rollout_section().max_tokens is not None:
        return config
    model = config.role_model("actor")
    if fetch and model not in BUILT_IN_MODELS:
        fetch_config(model)
    return config.with_lengths(find_context(model))


def context_length(config: RunConfig) -> int:
    """Tokens a row of the engine must hold: the longest prompt and the longest completion, or the longest episode."""
    own = config.rollout_section().longest
    evaluations = [s.max_tokens or own for s in config.eval.sets.values()]
    return max(config.longest_trace(), config.data.max_prompt_tokens + max([own, *evaluations]))


def configure_torch(config: RunConfig, threads: int = 0) -> None:
    """Threads and determinism of this process."""
    CORES.configure(threads or config.threads, fixed=config.deterministic)
    torch.use_deterministic_algorithms(config.deterministic)
    torch.manual_seed(config.seed)
