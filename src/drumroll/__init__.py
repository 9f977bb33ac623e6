"""Reinforcement learning of language models, from a laptop without a GPU to a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drumroll.api import evaluate, train
    from drumroll.store.run import Run

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "evaluate", "train"]


def __getattr__(name: str) -> Any:
    """Import the heavy parts when they are first asked for, so that the command line answers at once."""
    if name in ("evaluate", "train"):
        from drumroll import api

        return getattr(api, name)
    if name == "Run":
        from drumroll.store.run import Run

        return Run
    raise AttributeError(f"module 'drumroll' has no attribute '{name}'")
