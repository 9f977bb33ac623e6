"""The engine contract: what generates tokens. One file per engine beside this one.

Log-probs are of the distribution sampled from, at the request's temperature, so that the learner can reproduce
them. Random numbers are keyed by the request's seed and the token's position, never by the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from drumroll.sample import StopReason, Version

if TYPE_CHECKING:
    from torch import Tensor


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
