"""The engine contract: what generates tokens. One file per backend beside this one.

To add a backend, write a class with the methods of `Engine` and an `EngineBackend` that makes it and declares its traits;
`roles.rollout.backend: module:NAME` names the `EngineBackend`.

Log-probs are those of the distribution that the engine samples from, at the request's temperature, so that the learner
can reproduce them. Random numbers are keyed by the request's seed and the token's position, never by the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from drumroll.config.engines import ENGINES, KEY, EngineTraits
from drumroll.config.roles import LoraConfig, RolloutRole
from drumroll.errors import ConfigError
from drumroll.registry import import_path
from drumroll.sample import Owner, StopReason, Trace, Version

if TYPE_CHECKING:
    from drumroll.models.loading import LoadedModel
    from drumroll.weights import Meeting, Named, WeightManifest


class EngineLost(Exception):
    """The engine is gone: its process died, or it cannot be reached. Its requests may be sent to another engine."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. `temperature` 0 is greedy.

    `max_thinking` is the longest thought in tokens; engines ignore it, `Continuation` keeps it.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_thinking: int | None = None
    top_logprobs: int = 0
    """How many of the likeliest tokens to list at each position, with their log-probs."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one completion. Requests with equal `tokens` may share the computation of the prompt.

    `order` is its position in the draw order; in deterministic mode it fixes the row in which the request is computed.
    """

    id: str
    tokens: tuple[int, ...]
    sampling: Sampling
    seed: int
    order: int = 0


@dataclass(slots=True)
class Completion:
    """The tokens that the model wrote, each with its log-prob and the version of the weights that sampled it.

    Tokens that were written for the model, to end a thought, have the log-prob 0.0 and the version -1.
    `top` lists the likeliest tokens at each position, the likeliest first, if the request asked for them.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    stop: StopReason = StopReason.LENGTH
    top: list[list[tuple[int, float]]] = field(default_factory=list)

    def add_to(self, trace: Trace) -> None:
        """Append the tokens to a trace: those of the model are the policy's, those written for it the environment's."""
        start = 0
        for sampled, run in itertools.groupby(self.versions, lambda version: version >= 0):
            end = start + sum(1 for _ in run)
            tokens = self.tokens[start:end]
            if sampled:
                trace.extend(tokens, Owner.POLICY, self.logprobs[start:end], self.versions[start:end])
            else:
                trace.extend(tokens, Owner.ENVIRONMENT)
            start = end


class Engine(Protocol):
    """Generates completions for many requests at once."""

    async def generate(self, request: Request) -> Completion:
        """Complete one request; returns early with `StopReason.ABORTED` if it is aborted."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request now; unknown ids are ignored."""
        ...

    def interrupt(self) -> None:
        """End all requests now; each returns its tokens so far (`StopReason.ABORTED`). They may be sent again to continue."""
        ...

    def set_version(self, version: Version) -> None:
        """Set the version of the weights that the engine now holds."""
        ...

    def load(self, version: Version, weights: Named, *, recompute: bool) -> None:
        """Switch to new weights between two tokens. Running requests continue; their keys and values are kept or recomputed.

        `weights` is a stream: a tensor is valid until the next one is taken, and the engine pauses until the last has
        come. It must hold every parameter once. If it breaks, or holds other tensors (`WrongWeights`), its error is raised
        here, and the engine generates nothing until it has loaded a whole version: requests wait, other calls work.
        """
        ...

    def load_adapter(self, version: Version, adapter: Named, config: Mapping[str, Any], *, recompute: bool) -> None:
        """Switch to new weights of the LoRA adapters, named and configured as PEFT does, as `load` does to all weights.

        Only backends with the trait `adapters` are asked.
        """
        ...

    def sleep(self) -> None:
        """Free the device for others: end all requests as `interrupt` does, and free everything that can be rebuilt."""
        ...

    def wake(self) -> None:
        """Use the device again."""
        ...

    def capacity(self) -> int:
        """Return how many requests the engine works on at once."""
        ...

    def close(self) -> None:
        """Stop and free everything."""
        ...


@runtime_checkable
class ReceivesWeights(Protocol):
    """An engine whose own processes receive published weights; other engines get them by `load`."""

    def receivers(self) -> int:
        """Return the number of processes that receive."""
        ...

    def connect(self, meeting: Meeting, first: int, address: str) -> None:
        """Let the processes meet a sender, as its receivers `first` and following."""
        ...

    def receive(self, manifest: WeightManifest, *, recompute: bool) -> None:
        """Switch to the announced weights, as `load` does."""
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
    neighbours: int = 1
    """Engines that share the memory of this machine, if it computes on a CPU."""


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
