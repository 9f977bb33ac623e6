"""The native engine's requests: the row of a batch that each one is, and the delivery of its completion."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from drumroll.engines import Completion, Request
from drumroll.engines.pages import Chain


@dataclass(slots=True, eq=False)
class Row:
    """A running or waiting request, the future of its result, and the keys and values it holds."""

    request: Request
    future: asyncio.Future[Completion]
    completion: Completion = field(default_factory=Completion)
    chain: Chain = field(default_factory=Chain)
    arrival: int = -1
    admitted: bool = False

    @property
    def length(self) -> int:
        return len(self.request.tokens) + len(self.completion.tokens)

    @property
    def pending(self) -> int:
        """The number of tokens whose keys and values are not computed yet; a row with one is ready to decode."""
        return self.length - self.chain.length

    @property
    def last_token(self) -> int:
        return self.completion.tokens[-1] if self.completion.tokens else self.request.tokens[-1]

    def tokens(self) -> list[int]:
        return [*self.request.tokens, *self.completion.tokens]


class Chunk(NamedTuple):
    """Tokens of a row to compute now, from position `start` on, and where their keys and values go."""

    row: Row
    start: int
    tokens: list[int]
    page_slots: tuple[list[int], list[int]]


def deliver(future: asyncio.Future[Completion], outcome: Completion | Exception) -> None:
    """Deliver an outcome to the event loop that awaits it; ignored if that loop is closed."""
    with suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(_settle, future, outcome)


def _settle(future: asyncio.Future[Completion], outcome: Completion | Exception) -> None:
    if future.done():
        return
    if isinstance(outcome, Completion):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
