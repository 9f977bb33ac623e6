"""`roles`: which model plays which part, on what device, by what backend."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from drumroll.config.section import Section

Device = Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
Dtype = Literal["float32", "bfloat16"]


class ActorRole(Section):
    """The policy being trained."""

    model: str | None = None
    """Model of this role: a built-in (tiny, tiny-random), a Hugging Face directory or hub id. Default: the top-level `model`."""
    backend: Literal["torch"] = "torch"
    """What trains it. `torch`: one device, plain PyTorch."""
    device: Device = "auto"
    """`auto` (CUDA if there is one, else CPU), `cpu`, `cuda` or `cuda:N`."""
    dtype: Dtype = "float32"
    """Type of the working weights. With bfloat16 the optimizer keeps float32 master weights beside them."""


class RolloutRole(Section):
    """The policy generating samples."""

    backend: Literal["native"] = "native"
    """What generates. `native`: the embedded engine; in one process it shares the actor's weights, so nothing is copied."""
    workers: int = Field(1, ge=1)
    """How many engines."""
    slots: int = Field(256, ge=1)
    """How many samples an engine generates at once; bounds the memory of its key-value cache."""


class ReferenceRole(Section):
    """The frozen policy that a KL term compares with; loaded only when the algorithm needs it."""

    model: str | None = None
    """Model of this role. Default: the top-level `model`."""
    device: Device = "auto"
    """As for the actor."""
    dtype: Dtype = "float32"
    """Type of its weights."""


class RolesConfig(Section):
    """Each role with its own model, backend and device."""

    actor: ActorRole = ActorRole()
    """The policy being trained."""
    rollout: RolloutRole = RolloutRole()
    """The policy generating samples."""
    reference: ReferenceRole = ReferenceRole()
    """The frozen policy of a KL term."""
