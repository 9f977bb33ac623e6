"""From the config to the worker of a role. The same functions on every runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from drumroll.config import RunConfig
from drumroll.config.roles import ActorRole, CriticRole, JudgeRole, ReferenceRole, RewardModelRole
from drumroll.engines import Engine, EngineSetup, find_backend
from drumroll.engines.native import NativeEngine
from drumroll.errors import ConfigError
from drumroll.learners.critic import TorchCritic
from drumroll.learners.ranks import ALONE, Ranks
from drumroll.learners.torch import TorchLearner
from drumroll.models.adapters import add_adapters
from drumroll.models.loading import LoadedModel, load, load_tokenizer
from drumroll.models.value import value_model
from drumroll.rewards.model import Classifier
from drumroll.workers.group import Role
from drumroll.workers.runtime import context_length


def _model(config: RunConfig, role: Literal["actor", "reference", "teacher", "critic"]) -> LoadedModel:
    section = getattr(config.roles, role)
    recompute = getattr(section, "recompute_activations", False)
    dtype = section.dtype or config.roles.actor.dtype
    return load(
        config.role_model(role),
        dtype=dtype,
        device=local_device(config, section),
        seed=config.seed,
        recompute_activations=recompute,
    )


def local_device(config: RunConfig, section: ActorRole | ReferenceRole | CriticRole | JudgeRole | RewardModelRole) -> str:
    """The torch device of a role in this process: its own, else the actor's, else CUDA where there is one."""
    return str(section.devices or config.roles.actor.devices or "auto")


def actor_model(config: RunConfig) -> LoadedModel:
    """The policy as it is trained, with its adapters if it has some."""
    model = _model(config, "actor")
    if config.roles.actor.lora is not None:
        add_adapters(model, config.roles.actor.lora)
    return model


def make_actor(config: RunConfig, ranks: Ranks = ALONE) -> TorchLearner:
    """The policy being trained."""
    return TorchLearner(actor_model(config), config.optim, total_steps=config.steps, ranks=ranks)


def make_critic(config: RunConfig, ranks: Ranks = ALONE) -> TorchCritic:
    """The value model, with an optimizer of its own."""
    optim = config.roles.critic.optim
    return TorchCritic(value_model(_model(config, "critic")), optim, total_steps=config.steps, ranks=ranks)


def make_reference(config: RunConfig, ranks: Ranks = ALONE) -> TorchLearner:
    """The frozen policy."""
    return TorchLearner(_model(config, "reference"), None, ranks=ranks)


def make_teacher(config: RunConfig, ranks: Ranks = ALONE) -> TorchLearner:
    """The frozen policy to learn from."""
    model = _model(config, "teacher")
    if model.tokenizer.get_vocab() != load_tokenizer(config.role_model("actor")).get_vocab():
        raise ConfigError(
            f"roles.teacher.model: {config.role_model('teacher')} has other tokens than the actor, so their log-probs cannot be compared."
        )
    return TorchLearner(model, None, ranks=ranks)


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
    )
    return find_backend(setup.role.backend).make(setup)


def _frozen_actor(config: RunConfig) -> LoadedModel:
    model = actor_model(config)
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


LEARNERS: dict[Role, Callable[[RunConfig, Ranks], TorchLearner]] = {
    Role.ACTOR: make_actor,
    Role.CRITIC: make_critic,
    Role.REFERENCE: make_reference,
    Role.TEACHER: make_teacher,
}
"""Roles that train or score tokens."""
ENGINES: dict[Role, Callable[[RunConfig], Engine]] = {Role.ROLLOUT: make_engine, Role.JUDGE: make_judge}
"""Roles that generate."""
