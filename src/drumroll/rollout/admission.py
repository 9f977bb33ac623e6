"""How many groups may be on their way, and of which stream: the capacity, shared out as the mixture says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping


class Admission:
    """A place is taken by a draw when it starts, and free again when it can no longer be trained on.

    Every batch has of each stream its share, rounded down or up: what rounding denied a stream is owed to it.
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
        """Admission taken, of all streams."""
        return len(self._taken)

    def quotas(self, count: int) -> dict[str, int]:
        """How many groups of each stream the next batch has; and, from now on, how many of each may be on their way."""
        quotas, self.owed = _round(count, self.shares, self.owed)
        ahead, _ = _round(max(0, self.capacity - count), self.shares, self.owed)
        self._limits = {stream: quotas[stream] + ahead[stream] for stream in quotas}
        return quotas

    def free(self) -> set[str]:
        """Streams of which one more may start."""
        if self.taken >= self.capacity:
            return set()
        return {stream for stream, limit in self._limits.items() if self._count[stream] < limit}

    def take(self, draw: int, stream: str) -> None:
        """A draw starts."""
        self._taken[draw] = stream
        self._count[stream] += 1

    def give_back(self, draw: int) -> None:
        """A draw has been trained on or dropped; telling it twice is no harm."""
        stream = self._taken.pop(draw, None)
        if stream is not None:
            self._count[stream] -= 1


def _round(count: int, shares: Mapping[str, float], owed: Mapping[str, float]) -> tuple[dict[str, int], dict[str, float]]:
    """`count` as whole numbers by share, each rounded down or up; what is owed goes first, and what is owed after."""
    exact = {stream: share * count for stream, share in shares.items()}
    whole = {stream: math.floor(value + 1e-9) for stream, value in exact.items()}
    due = {stream: exact[stream] - whole[stream] + owed[stream] for stream in shares}
    for stream in sorted(due, key=lambda stream: -due[stream])[: count - sum(whole.values())]:
        whole[stream] += 1
        due[stream] -= 1
    return whole, due
