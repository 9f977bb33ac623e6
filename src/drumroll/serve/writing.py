"""From tokens to a completion by the engines behind a router: whatever interrupts it, it goes on from what it has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, replace

from drumroll.engines import Completion, EngineLost, Request, Sampling
from drumroll.sample import StopReason

SLICE = 16
"""Tokens at a time where somebody listens while they are written."""
Heard = Callable[[Completion], Awaitable[None]]
Generate = Callable[[Request, Hashable, int, float, Callable[[], None]], Awaitable[Completion]]
"""As `Router.generate`."""


@dataclass(frozen=True)
class Line:
    """A caller's way to the engines: its place among others, and how long and how often it tries."""

    generate: Generate
    decode: Callable[[list[int]], str]
    key: Hashable
    place: int = 0
    seconds: float = 600.0
    retries: int = 2

    async def write(
        self, name: str, tokens: list[int], sampling: Sampling, seed: int, heard: Heard | None = None
    ) -> Completion:
        """One completion. With `heard` it is written in slices, and told after each; the tokens are the same."""
        done, tries = Completion(), 0
        while True:
            left = sampling.max_tokens - len(done.tokens)
            limited = replace(sampling, max_tokens=left if heard is None else min(left, SLICE))
            request = Request(f"{name}#{tries}.{len(done.tokens)}", (*tokens, *done.tokens), limited, seed, self.place)
            try:
                part = await self.generate(request, self.key, self.place, self.seconds, lambda: None)
            except (EngineLost, TimeoutError):
                tries += 1
                if tries > self.retries:
                    raise
                continue
            self._join(done, part, sampling)
            if heard is not None:
                await heard(done)
            if done.stop not in (StopReason.ABORTED, StopReason.LENGTH):
                return done
            if len(done.tokens) >= sampling.max_tokens:
                done.stop = StopReason.LENGTH
                return done

    def _join(self, done: Completion, part: Completion, sampling: Sampling) -> None:
        """Append what was written; a stop string that began before it ends the completion where it is complete."""
        before = len(done.tokens)
        done.tokens += part.tokens
        done.logprobs += part.logprobs
        done.versions += part.versions
        done.stop = part.stop
        longest = max((len(stop) for stop in sampling.stop), default=0)
        for end in range(before + 1, min(before + longest, len(done.tokens)) + 1 if before else 0):
            tail = self.decode(done.tokens[max(0, end - longest - 4) : end])
            if any(stop in tail for stop in sampling.stop):
                del done.tokens[end:], done.logprobs[end:], done.versions[end:]
                done.stop = StopReason.STOP_STRING
                return
