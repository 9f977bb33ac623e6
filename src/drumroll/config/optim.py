"""`optim`: the optimizer and how a batch is cut into steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from drumroll.config.section import Section

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up; linear and cosine end at 0 at the last step."""
    warmup: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's moment decay rates."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay; norms and biases are spared."""
    grad_clip: float = Field(1.0, ge=0)
    """Largest gradient norm; 0 switches clipping off."""
    minibatch: int | None = Field(None, ge=1)
    """Samples per optimizer step. Default: the whole batch, which keeps the update on-policy."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch."""
    micro_tokens: int = Field(16384, ge=1)
    """Most tokens in one forward pass; bounds memory, does not change the result. Gradients of several passes add up in float32."""
