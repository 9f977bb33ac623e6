"""From the config to the worker of a role. The same functions on every runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from drumroll.config import AnyConfig, RLConfig
from drumroll.config.roles import ActorRole, CriticRole, JudgeRole, ReferenceRole, RewardModelRole
from drumroll.engines import Engine
from drumroll.engines.native import NativeEngine
from drumroll.errors import ConfigError
from drumroll.learners.critic import TorchCritic
from drumroll.learners.ranks import ALONE, Ranks
from drumroll.learners.torch import TorchLearner
from drumroll.models.adapters import add_adapters
from drumroll.models.loading import LoadedModel, end_tokens, load, load_tokenizer
from drumroll.models.value import value_model
from drumroll.rewards.model import Classifier
from drumroll.workers.runtime import context_length


def _model(config: AnyConfig, role: Literal["actor", "reference", "teacher", "critic"]) -> LoadedModel:
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


def local_device(config: AnyConfig, section: ActorRole | ReferenceRole | CriticRole | JudgeRole | RewardModelRole) -> str:
    """The torch device of a role in this process: its own, else the actor's, else CUDA where there is one."""
    return str(section.devices or config.roles.actor.devices or "auto")


def actor_model(config: AnyConfig) -> LoadedModel:
    """The policy as it is trained, with its adapters if it has some."""
    model = _model(config, "actor")
    if config.roles.actor.lora is not None:
        add_adapters(model, config.roles.actor.lora)
    return model


def make_actor(config: AnyConfig, ranks: Ranks = ALONE) -> TorchLearner:
    """The policy being trained."""
    return TorchLearner(actor_model(config), config.optim, total_steps=config.steps, ranks=ranks)


def make_critic(config: RLConfig, ranks: Ranks = ALONE) -> TorchCritic:
    """The value model, with an optimizer of its own."""
    optim = config.roles.critic.optim
    return TorchCritic(value_model(_model(config, "critic")), optim, total_steps=config.steps, ranks=ranks)


def make_reference(config: RLConfig, ranks: Ranks = ALONE) -> TorchLearner:
    """The frozen policy."""
    return TorchLearner(_model(config, "reference"), None, ranks=ranks)


def make_teacher(config: RLConfig, ranks: Ranks = ALONE) -> TorchLearner:
    """The frozen policy to learn from."""
    model = _model(config, "teacher")
    if model.tokenizer.get_vocab() != load_tokenizer(config.role_model("actor")).get_vocab():
        raise ConfigError(
            f"roles.teacher.model: {config.role_model('teacher')} has other tokens than the actor, so their log-probs cannot be compared."
        )
    return TorchLearner(model, None, ranks=ranks)


def native_engine(config: AnyConfig, model: LoadedModel) -> NativeEngine:
    """The embedded engine over a model."""
    role, context = config.roles.rollout, context_length(config)
    return NativeEngine(model, slots=role.slots, context=context, fixed_shape=config.deterministic, cache_gb=role.cache_gb)


def make_engine(config: AnyConfig) -> Engine:
    """An engine in a process of its own, with the weights that training starts from."""
    role, actor = config.roles.rollout, config.roles.actor
    if role.backend == "native":
        model = actor_model(config)
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
