"""`checkpoint` and `trackers`: what a run leaves behind."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from drumroll.config.section import Section


class CheckpointConfig(Section):
    """Resumable states under `checkpoints/`."""

    every: int = Field(50, ge=0)
    """Save every so many steps; 0 only at the end. The best and the last are kept whatever `keep` says."""
    keep: int = Field(2, ge=1)
    """How many of the newest to keep."""


class TrackerConfig(Section):
    """Where metrics go besides `metrics.jsonl`."""

    kind: Literal["tensorboard", "wandb"]
    """TensorBoard event files in the run directory, or Weights & Biases."""
    project: str = "drumroll"
    """Project name (wandb)."""
    mode: Literal["online", "offline"] = "online"
    """wandb without a network: offline."""
    required: bool = False
    """Stop before the first step when it cannot be opened (no login, no network). Default: the run goes on without it and says so."""
