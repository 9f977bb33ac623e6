"""From the config to the worker of a role. The same functions on every runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from drumroll.config import RunConfig
from drumroll.config.roles import ActorRole, CriticRole, JudgeRole, LearnerRole, ReferenceRole, RewardModelRole
from drumroll.engines import Engine, EngineSetup, find_backend
from drumroll.engines.native import NativeEngine
from drumroll.learners import Learner
from drumroll.learners.backend import LearnerSpec
from drumroll.learners.backends import find_backend as find_learner_backend
from drumroll.learners.heads import LogProbHead, ScoreHead, ValueHead
from drumroll.learners.ranks import ALONE, Ranks
from drumroll.models.loading import LoadedModel, load
from drumroll.models.lora import add_adapters
from drumroll.rewards.model import Classifier
from drumroll.workers.group import Role
from drumroll.workers.runtime import context_length
from drumroll.workers.teachers import student_head, teacher_head

L = TypeVar("L", bound=Learner)


def local_device(config: RunConfig, section: ActorRole | ReferenceRole | CriticRole | JudgeRole | RewardModelRole) -> str:
    """The torch device of a role in this process: its own, else the actor's, else the accelerator where there is one."""
    return str(section.devices or config.roles.actor.devices or "auto")


def open_learner(config: RunConfig, role: LearnerRole, ranks: Ranks = ALONE, kind: Callable[..., L] = Learner) -> L:
    """A rank of a role that computes gradients or log-probs: its backend, its head, and, unless it is frozen, its optimizer."""
    section = getattr(config.roles, role)
    optim = {"actor": config.optim, "critic": config.roles.critic.optim}.get(role)
    device, teachers = local_device(config, section), config.roles.teacher.models() if role == "teacher" else []
    heads: dict[str, Callable[[], Any]] = {
        "critic": partial(ValueHead, config.role_model("critic")),
        "teacher": partial(teacher_head, config),
        "actor": partial(student_head, config, device),
    }
    if config.trains_scores():
        heads["actor"] = partial(ScoreHead, config.role_model("actor"))
    head = heads.get(role, LogProbHead)()
    spec = LearnerSpec(
        teachers[0] if teachers else config.role_model(role),
        head,
        ranks,
        optim,
        dtype=section.dtype or config.roles.actor.dtype,
        device=device,
        seed=config.seed,
        recompute_activations=getattr(section, "recompute_activations", False),
        lora=config.roles.actor.lora if role == "actor" else None,
        parallel=config.parallel(role),
    )
    make = find_learner_backend(config.learner_backend(role))
    learner = kind(make(spec), optim, head, total_steps=config.steps)
    if teachers and config.roles.teacher.domains:
        others = [make(replace(spec, name=model)) for model in teachers[1:]]
        learner.teachers = [learner.backend, *others], config.roles.teacher.number
    return learner


def make_engine(config: RunConfig, load_model: Callable[[], LoadedModel] | None = None) -> Engine:
    """An engine of the config's backend; by default with weights for itself alone, those that training starts from."""
    actor = config.roles.actor
    setup = EngineSetup(
        role=config.roles.rollout,
        model=config.role_model("actor"),
        load=load_model or (lambda: _frozen_actor(config)),
        device=local_device(config, actor),
        dtype=actor.dtype,
        lora=actor.lora,
        context=context_length(config),
        deterministic=config.deterministic,
        neighbours=config.cluster.devices or 1 if config.cluster.runtime == "ray" else config.roles.rollout.workers,
    )
    return find_backend(setup.role.backend).make(setup)


def _frozen_actor(config: RunConfig) -> LoadedModel:
    """The weights that training starts from, with adapters where the actor has some."""
    actor = config.roles.actor
    model = load(config.role_model("actor"), dtype=actor.dtype, device=local_device(config, actor), seed=config.seed)
    if actor.lora is not None:
        add_adapters(model, actor.lora)
    model.module.requires_grad_(False)
    return model


def make_reward_model(config: RunConfig) -> Classifier:
    """The classifier that rewards may ask."""
    assert config.roles.reward_model is not None
    return Classifier(config.roles.reward_model, local_device(config, config.roles.reward_model))


def make_judge(config: RunConfig) -> Engine:
    """The engine that rewards may ask."""
    role = config.roles.judge
    assert role is not None
    model = load(role.model, dtype=role.dtype, device=local_device(config, role), seed=config.seed)
    model.module.requires_grad_(False)
    context = role.max_prompt_tokens + role.max_tokens
    return NativeEngine(model, slots=role.slots, context=context, fixed_shape=config.deterministic)


ENGINES: dict[Role, Callable[[RunConfig], Engine]] = {Role.ROLLOUT: make_engine, Role.JUDGE: make_judge}
"""Roles that generate."""
