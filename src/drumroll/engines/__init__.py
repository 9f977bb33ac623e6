"""The engine contract: engines generate tokens. Each engine is one file in this package.

Log-probs are those of the distribution that the engine samples from, at the request's temperature, so that the learner
can reproduce them. Random numbers are keyed by the request's seed and the token's position, never by the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from drumroll.sample import StopReason, Version

if TYPE_CHECKING:
    from torch import Tensor


class EngineLost(Exception):
    """The engine is gone: its process died, or it cannot be reached. Its requests may be sent to another engine."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. `temperature` 0 is greedy."""

    temperature: float = 1.0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one completion. Requests with equal `tokens` may share the computation of the prompt.

    `place` is its position in the draw order; in deterministic mode it fixes the row in which the request is computed.
    """

    id: str
    tokens: tuple[int, ...]
    sampling: Sampling
    seed: int
    place: int = 0


@dataclass(slots=True)
class Completion:
    """The tokens that the model wrote, each with its log-prob and the version of the weights that sampled it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    stop: StopReason = StopReason.LENGTH


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

    def load(self, version: Version, weights: Mapping[str, Tensor], *, recompute: bool) -> None:
        """Switch to new weights between two tokens. Running requests continue; their keys and values are kept or recomputed."""
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
