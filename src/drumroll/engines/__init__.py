"""The engine contract: what generates tokens. One file per backend beside this one.

To add a backend, write a class with the methods of `Engine` and an `EngineBackend` that makes it and declares its traits;
`roles.rollout.backend: module:NAME` names the `EngineBackend`.

Log-probs are of the distribution sampled from, at the request's temperature, so that the learner can reproduce
them. Random numbers are keyed by the request's seed and the token's position, never by the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from drumroll.config.engines import ENGINES, KEY, EngineTraits
from drumroll.config.roles import LoraConfig, RolloutRole
from drumroll.errors import ConfigError
from drumroll.registry import import_path
from drumroll.sample import StopReason, Version

if TYPE_CHECKING:
    from torch import Tensor

    from drumroll.models.loading import LoadedModel


class EngineLost(Exception):
    """The engine is gone: its process died, or it cannot be reached. Its requests may be sent to another."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens. `temperature` 0 is greedy."""

    temperature: float = 1.0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One completion wanted. Requests with equal `tokens` may share the prompt's computation.

    `place` is its place in the draw order; in deterministic mode it fixes the row in which the request is computed.
    """

    id: str
    tokens: tuple[int, ...]
    sampling: Sampling
    seed: int
    place: int = 0


@dataclass(slots=True)
class Completion:
    """What the model wrote: per token its log-prob and the version of the weights that sampled it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    stop: StopReason = StopReason.LENGTH


class Engine(Protocol):
    """Generates completions for many requests at once."""

    async def generate(self, request: Request) -> Completion:
        """Complete one request; returns early with `StopReason.ABORTED` when aborted."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request now; unknown ids are ignored."""
        ...

    def interrupt(self) -> None:
        """End all requests now, each with what it has (`StopReason.ABORTED`); they may be sent again to go on."""
        ...

    def set_version(self, version: Version) -> None:
        """Name the weights that the engine holds from now on."""
        ...

    def load(self, version: Version, weights: Mapping[str, Tensor], *, recompute: bool) -> None:
        """Switch to new weights between two tokens; running requests go on, their keys and values kept or recomputed."""
        ...

    def load_adapter(
        self, version: Version, adapter: Mapping[str, Tensor], config: Mapping[str, Any], *, recompute: bool
    ) -> None:
        """Switch to new weights of the LoRA adapters, named and configured as PEFT does, as `load` does to all weights.

        Only backends with the trait `adapters` are asked.
        """
        ...

    def sleep(self) -> None:
        """Leave the device to others: end all requests as `interrupt` does, and free what can be made again."""
        ...

    def wake(self) -> None:
        """Take the device again."""
        ...

    def capacity(self) -> int:
        """How many requests it works on at once."""
        ...

    def close(self) -> None:
        """Stop and free everything."""
        ...


@dataclass(frozen=True)
class EngineSetup:
    """What a backend makes an engine from."""

    role: RolloutRole
    model: str
    """The actor's model: a built-in, a directory or a hub id."""
    load: Callable[[], LoadedModel]
    """The actor's model in this process, with its adapters: the learner's own weights, or weights for this engine alone."""
    device: str
    dtype: str
    lora: LoraConfig | None
    context: int
    """Tokens of the longest request with its completion."""
    deterministic: bool


@dataclass(frozen=True)
class EngineBackend:
    """A kind of engine: how to make one, and its traits."""

    make: Callable[[EngineSetup], Engine]
    traits: EngineTraits


def find_backend(name: str) -> EngineBackend:
    """The `BACKEND` of a built-in's file, imported only now as it may not be installed, or the user's `module:NAME`."""
    found = import_path(f"{__name__}.{name}:BACKEND" if name in ENGINES else name, KEY)
    if not isinstance(found, EngineBackend):
        raise ConfigError(f"{KEY}: '{name}' is a {type(found).__name__}, not a drumroll.engines.EngineBackend.")
    return found
