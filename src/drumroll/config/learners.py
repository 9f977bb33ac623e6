"""The learner backends by name, and what config and placement must know of a backend before they open it."""

from __future__ import annotations

from dataclasses import dataclass

AXES = ("data", "shard", "pipeline", "context", "tensor", "expert")
"""The fields of `roles.<role>.parallel` that are numbers of devices."""


@dataclass(frozen=True, slots=True)
class LearnerTraits:
    """What a learner backend is, and which parts of the config it supports."""

    title: str
    """Its name in sentences."""
    axes: tuple[str, ...] = AXES
    """The axes along which it divides a model or a batch."""
    choices: tuple[str, ...] = ()
    """The other fields of `roles.<role>.parallel` that it takes."""
    shares_weights: bool = True
    """Engines of its process can generate with its working weights, so it runs on the local runtime too."""
    adapters: bool = True
    """It trains LoRA adapters."""
    families: tuple[str, ...] = ()
    """The model types that it trains, as transformers names them; empty: all."""
    extra: str | None = None
    """What of drumroll must be installed beside it."""


LEARNERS: dict[str, LearnerTraits] = {
    "torch": LearnerTraits("plain PyTorch", ("data", "shard", "context", "tensor"), ("reshard", "accumulate")),
    "megatron": LearnerTraits(
        "Megatron-Core",
        ("data", "pipeline", "tensor", "expert"),
        ("sequence",),
        shares_weights=False,
        adapters=False,
        families=("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"),
        extra="megatron",
    ),
    "deepspeed": LearnerTraits("DeepSpeed", ("shard",), ("zero", "offload"), shares_weights=False, extra="deepspeed"),
}
"""The built-in backends; `learners/backends/<name>.py` implements each."""


def known_learner(backend: str) -> str:
    """Refuse a name that is neither a built-in backend nor an import path."""
    if backend not in LEARNERS and ":" not in backend:
        raise ValueError(f"input should be {' or '.join(map(repr, LEARNERS))}, or your own backend as module:function")
    return backend


def learner_traits(backend: str) -> LearnerTraits:
    """The traits of a backend; one of the user's own (`module:function`) has all of them."""
    choices = tuple({choice for traits in LEARNERS.values() for choice in traits.choices})
    return LEARNERS.get(backend) or LearnerTraits(backend, choices=choices)


def who_takes(field: str) -> str:
    """The built-in backends that take a field of `roles.<role>.parallel`, for sentences."""
    return " or ".join(name for name, traits in LEARNERS.items() if field in (*traits.axes, *traits.choices))
