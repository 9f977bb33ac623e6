"""Generates a completion with the engines behind a router, continuing after interruptions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass

from drumroll.engines import Completion, EngineLost, Request, Sampling
from drumroll.engines.continuation import Continuation

SLICE = 16
"""Tokens per request when a listener receives the text while it is written."""
Received = Callable[[Completion], Awaitable[None]]
Generate = Callable[[Request, Hashable, int, float, Callable[[], None]], Awaitable[Completion]]
"""The signature of `Router.generate`."""


@dataclass(frozen=True)
class EngineClient:
    """A caller's access to the engines: its priority among others, its time limit and its number of retries."""

    generate: Generate
    spell: Callable[[list[int]], str]
    key: Hashable
    order: int = 0
    seconds: float = 600.0
    retries: int = 2
    closing: Sequence[int] = ()

    async def write(
        self, name: str, tokens: list[int], sampling: Sampling, seed: int, received: Received | None = None
    ) -> Completion:
        """Generate one completion.

        With `received` it is generated in slices and passed on after each; the tokens are the same.
        """
        text = Continuation(name, tokens, sampling, seed, self.spell, self.order, self.closing)

        def send(request: Request) -> Awaitable[Completion]:
            return self.generate(request, self.key, self.order, self.seconds, lambda: None)

        def failed(error: Exception, tries: int) -> None:
            if tries > self.retries or not isinstance(error, EngineLost | TimeoutError):
                raise error

        async def grown(part: Completion) -> None:
            if received is not None:
                await received(text.written)

        return await text.run(send, failed=failed, grown=grown, at_most=None if received is None else SLICE)
