"""From tokens to a completion by the engines behind a router: whatever interrupts it, it goes on from what it has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

from drumroll.engines import Completion, EngineLost, Request, Sampling
from drumroll.engines.continuation import Continuation

SLICE = 16
"""Tokens at a time where somebody listens while they are written."""
Heard = Callable[[Completion], Awaitable[None]]
Generate = Callable[[Request, Hashable, int, float, Callable[[], None]], Awaitable[Completion]]
"""As `Router.generate`."""


@dataclass(frozen=True)
class Line:
    """A caller's way to the engines: its place among others, and how long and how often it tries."""

    generate: Generate
    spell: Callable[[list[int]], str]
    key: Hashable
    place: int = 0
    seconds: float = 600.0
    retries: int = 2

    async def write(
        self, name: str, tokens: list[int], sampling: Sampling, seed: int, heard: Heard | None = None
    ) -> Completion:
        """One completion. With `heard` it is written in slices, and told after each; the tokens are the same."""
        text = Continuation(name, tokens, sampling, seed, self.spell, self.place)

        def send(request: Request) -> Awaitable[Completion]:
            return self.generate(request, self.key, self.place, self.seconds, lambda: None)

        def failed(error: Exception, tries: int) -> None:
            if tries > self.retries or not isinstance(error, EngineLost | TimeoutError):
                raise error

        async def grown(part: Completion) -> None:
            if heard is not None:
                await heard(text.written)

        return await text.run(send, failed=failed, grown=grown, at_most=None if heard is None else SLICE)
