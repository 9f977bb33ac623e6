"""From the config to the worker of a role. The same functions on every runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from drumroll.config import AnyConfig
from drumroll.config.roles import ActorRole, CriticRole, JudgeRole, ReferenceRole, RewardModelRole
from drumroll.engines import Engine
from drumroll.engines.native import NativeEngine
from drumroll.errors import ConfigError
from drumroll.learners import Learner, backends
from drumroll.learners.backend import BACKENDS, LearnerSpec
from drumroll.learners.heads import LogProbHead, ValueHead
from drumroll.learners.ranks import ALONE, Ranks
from drumroll.models.adapters import add_adapters
from drumroll.models.loading import LoadedModel, end_tokens, load, load_tokenizer
from drumroll.rewards.model import Classifier
from drumroll.workers.runtime import context_length

LearnerRole = Literal["actor", "reference", "teacher", "critic"]
"""Roles that compute gradients or log-probs."""
assert backends.__all__, "imported so that the built-in backends register"


def local_device(config: AnyConfig, section: ActorRole | ReferenceRole | CriticRole | JudgeRole | RewardModelRole) -> str:
    """The torch device of a role in this process: its own, else the actor's, else CUDA where there is one."""
    return str(section.devices or config.roles.actor.devices or "auto")


def open_learner(config: AnyConfig, role: LearnerRole, ranks: Ranks = ALONE) -> Learner:
    """A rank of a role that computes gradients or log-probs: its backend, its head, and, unless it is frozen, its optimizer."""
    section = getattr(config.roles, role)
    optim = {"actor": config.optim, "critic": config.roles.critic.optim}.get(role)
    head = ValueHead() if role == "critic" else LogProbHead()
    if role == "teacher":
        _check_tokens(config)
    spec = LearnerSpec(
        config.role_model(role),
        head,
        optim,
        dtype=section.dtype or config.roles.actor.dtype,
        device=local_device(config, section),
        seed=config.seed,
        recompute_activations=getattr(section, "recompute_activations", False),
        lora=config.roles.actor.lora if role == "actor" else None,
        ranks=ranks,
    )
    return Learner(BACKENDS.get(config.roles.actor.backend)(spec), optim, head, total_steps=config.steps)


def _check_tokens(config: AnyConfig) -> None:
    """Refuse a teacher whose log-probs cannot be compared with the actor's."""
    if load_tokenizer(config.role_model("teacher")).get_vocab() != load_tokenizer(config.role_model("actor")).get_vocab():
        raise ConfigError(
            f"roles.teacher.model: {config.role_model('teacher')} has other tokens than the actor, so their log-probs cannot be compared."
        )


def native_engine(config: AnyConfig, model: LoadedModel) -> NativeEngine:
    """The embedded engine over a model."""
    role, context = config.roles.rollout, context_length(config)
    return NativeEngine(model, slots=role.slots, context=context, fixed_shape=config.deterministic, cache_gb=role.cache_gb)


def make_engine(config: AnyConfig) -> Engine:
    """An engine in a process of its own, with the weights that training starts from."""
    role, actor = config.roles.rollout, config.roles.actor
    if role.backend == "native":
        model = load(config.role_model("actor"), dtype=actor.dtype, device=local_device(config, actor), seed=config.seed)
        if actor.lora is not None:
            add_adapters(model, actor.lora)
        model.module.requires_grad_(False)
        return native_engine(config, model)
    from drumroll.engines.vllm import VllmEngine

    sizes = {f"{name}_parallel_size": size for name, size in role.parallel.items()}
    lora = {} if actor.lora is None else {"enable_lora": True, "max_lora_rank": max(8, actor.lora.rank)}
    naps = {"enable_sleep_mode": True} if local_device(config, actor).startswith("cuda") else {}
    several = {"distributed_executor_backend": "mp"} if sizes else {}  # else it would ask the Ray around it for devices
    options = {"dtype": actor.dtype, **sizes, **several, **lora, **naps, **role.options}
    name = config.role_model("actor")
    path = Path(name).expanduser()
    return VllmEngine(
        str(path) if path.exists() else name,
        slots=role.slots,
        context=context_length(config),
        eos=end_tokens(name),
        options=options,
    )


def make_reward_model(config: AnyConfig) -> Classifier:
    """The classifier that rewards may ask."""
    assert config.roles.reward_model is not None
    return Classifier(config.roles.reward_model, local_device(config, config.roles.reward_model))


def make_judge(config: AnyConfig) -> Engine:
    """The engine that rewards may ask."""
    role = config.roles.judge
    assert role is not None
    model = load(role.model, dtype=role.dtype, device=local_device(config, role), seed=config.seed)
    model.module.requires_grad_(False)
    context = role.max_prompt_tokens + role.max_tokens
    return NativeEngine(model, slots=role.slots, context=context, fixed_shape=config.deterministic)
