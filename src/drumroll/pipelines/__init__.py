"""The pipeline contract: what trains, from its config to its loop. One file per pipeline beside this one.

To add a pipeline, write three things and tie them together in a `Pipeline`, which `pipeline: module:NAME` names:

- a subclass of `RunConfig`: the recipe's own keys, and the methods of `RunConfig` that say how evaluation samples, which
  columns training rows have, and which passes (and so which roles) the loop needs;
- `open(config, workers)`: opens data and other parts. It runs before the run directory is made, so that a recipe with a
  mistake leaves nothing behind;
- `train(session, config, parts)`: the loop. It calls `session.watch` for what checkpoints keep, then `session.start`, once a
  step `session.commit`, and at the end `session.finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from drumroll.config import RunConfig
from drumroll.config.pipelines import CONFIGS
from drumroll.data.render import Renderer
from drumroll.errors import ConfigError
from drumroll.registry import import_path
from drumroll.session import Session
from drumroll.workers.runtime import Workers

C = TypeVar("C", bound=RunConfig)
P = TypeVar("P")


@dataclass(frozen=True)
class Pipeline(Generic[C, P]):
    """A way to train: the class of its configs, the parts that it opens, and its loop."""

    config: type[C]
    open: Callable[[C, Workers], P]
    train: Callable[[Session, C, P], Coroutine[Any, Any, None]]
    show: Callable[[C, Renderer], Iterator[str]] | None = None
    """Yields the first training row as it is trained on, for `--dry-run`."""


def find_pipeline(name: str) -> Pipeline[Any, Any]:
    """The `PIPELINE` of a built-in's file, or the user's `module:NAME`."""
    found = import_path(f"{__name__}.{name}:PIPELINE" if name in CONFIGS else name, "pipeline")
    if not isinstance(found, Pipeline):
        raise ConfigError(f"pipeline: '{name}' is a {type(found).__name__}, not a drumroll.pipelines.Pipeline.")
    return found
