"""The life of a sample as a table: which state may follow which. An illegal step is a bug, found by assertion.

Listeners (ledger, metrics, timeline) are told of every transition of a sample, and of the beginning and end of every
draw. They must not change anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from drumroll.sample import Failure, Fate, Group, Sample, State

Phase = State | Fate

ENDINGS: frozenset[Phase] = frozenset({Fate.FAILED, Fate.ABORTED, Fate.STALE, Fate.SUPERSEDED})
"""What can happen to a sample at any moment before it has its fate."""

NEXT: dict[State, frozenset[Phase]] = {
    State.QUEUED: ENDINGS | {State.GENERATING, State.ACTING},
    State.GENERATING: ENDINGS | {State.ACTING, State.SCORING, State.QUEUED},
    State.ACTING: ENDINGS | {State.QUEUED, State.SCORING},
    State.SCORING: ENDINGS | {State.SCORED, State.SCORING},
    State.SCORED: ENDINGS | {State.ACCEPTED, Fate.FILTERED},
    State.ACCEPTED: ENDINGS | {Fate.TRAINED, Fate.BASELINE},
}


class SampleFailed(Exception):
    """Ends a sample: what failed, at which boundary."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Event:
    """One transition of one sample."""

    time: float
    sample: Sample
    before: Phase
    after: Phase


@dataclass(frozen=True, slots=True)
class DrawEvent:
    """A drawn prompt begins its attempt (`fate` is None), or ends it."""

    time: float
    group: Group
    fate: Fate | None
    reason: str


Listener = Callable[[Event | DrawEvent], None]


def legal(before: Phase, after: Phase) -> bool:
    """Whether a sample may go from one stage to another; a fate is final."""
    return isinstance(before, State) and after in NEXT[before]


class Episode(Protocol):
    """A sample's dealings with its environment; both calls keep deadlines of their own."""

    async def begin(self) -> bool:
        """Give the sample its first trace; whether the policy has a turn."""
        ...

    async def answer(self) -> bool:
        """Take the turn that stands at the end of the sample's last trace; whether the policy has another."""
        ...

    def close(self) -> None: ...


OpenEpisode = Callable[[Sample], Episode | None]


def answered_once(sample: Sample) -> Episode | None:
    """No environment: a prompt gets one answer."""
    return None
