"""Admission control: how many groups may be in flight, and of which stream. The capacity is shared out by the mixture."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping


class Admission:
    """Counts the draws in flight: a draw takes a slot when it starts and returns it when it can no longer be trained on.

    Every batch holds each stream's share, rounded down or up. A stream that was rounded down is owed the difference.
    """

    def __init__(self, capacity: int, shares: Mapping[str, float]) -> None:
        total = sum(shares.values())
        self.capacity = capacity
        self.shares = {stream: share / total for stream, share in shares.items()}
        self.owed = dict.fromkeys(shares, 0.0)
        self._limits = {} if len(shares) > 1 else dict.fromkeys(shares, capacity)
        self._taken: dict[int, str] = {}
        self._count: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """The number of draws in flight, over all streams."""
        return len(self._taken)

    def quotas(self, count: int) -> dict[str, int]:
        """Return the number of groups of each stream in the next batch, and set how many of each may now be in flight."""
        quotas, self.owed = _round(count, self.shares, self.owed)
        ahead, _ = _round(max(0, self.capacity - count), self.shares, self.owed)
        self._limits = {stream: quotas[stream] + ahead[stream] for stream in quotas}
        return quotas

    def free(self) -> set[str]:
        """Return the streams of which one more draw may start."""
        if self.taken >= self.capacity:
            return set()
        return {stream for stream, limit in self._limits.items() if self._count[stream] < limit}

    def take(self, draw: int, stream: str) -> None:
        """Record that a draw starts."""
        self._taken[draw] = stream
        self._count[stream] += 1

    def give_back(self, draw: int) -> None:
        """Record that a draw was trained on or dropped; a second call has no effect."""
        stream = self._taken.pop(draw, None)
        if stream is not None:
            self._count[stream] -= 1


def _round(count: int, shares: Mapping[str, float], owed: Mapping[str, float]) -> tuple[dict[str, int], dict[str, float]]:
    """Split `count` into whole numbers by share, each rounded down or up, largest debt first; return them and the new debts."""
    exact = {stream: share * count for stream, share in shares.items()}
    whole = {stream: math.floor(value + 1e-9) for stream, value in exact.items()}
    due = {stream: exact[stream] - whole[stream] + owed[stream] for stream in shares}
    for stream in sorted(due, key=lambda stream: -due[stream])[: count - sum(whole.values())]:
        whole[stream] += 1
        due[stream] -= 1
    return whole, due
