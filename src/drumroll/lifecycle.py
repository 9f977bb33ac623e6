"""The states of a sample and the transitions between them, as a table. An illegal transition is a bug and fails an assertion.

Listeners (ledger, metrics, timeline) receive every transition of a sample, and the start and end of every draw. They
must not change anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from drumroll.sample import Failure, Fate, Group, Sample, State

Phase = State | Fate

ENDINGS: frozenset[Phase] = frozenset({Fate.FAILED, Fate.ABORTED, Fate.STALE, Fate.SUPERSEDED})
"""The fates that a sample can meet in any state."""

NEXT: dict[State, frozenset[Phase]] = {
    State.QUEUED: ENDINGS | {State.GENERATING, State.ACTING},
    State.GENERATING: ENDINGS | {State.ACTING, State.SCORING, State.QUEUED},
    State.ACTING: ENDINGS | {State.QUEUED, State.SCORING},
    State.SCORING: ENDINGS | {State.SCORED, State.SCORING},
    State.SCORED: ENDINGS | {State.ACCEPTED, Fate.FILTERED},
    State.ACCEPTED: ENDINGS | {Fate.TRAINED, Fate.BASELINE},
}


class SampleFailed(Exception):
    """Ends a sample; holds what failed and at which boundary."""

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
    """A draw starts an attempt (`fate` is None) or ends it."""

    time: float
    group: Group
    fate: Fate | None
    reason: str


Listener = Callable[[Event | DrawEvent], None]


def legal(before: Phase, after: Phase) -> bool:
    """Return whether a sample may go from one phase to another; a fate is final."""
    return isinstance(before, State) and after in NEXT[before]


class Transitions:
    """Moves samples from state to state, and sends an event per move to all listeners."""

    def __init__(self, listeners: Sequence[Listener], clock: Callable[[], float]) -> None:
        self.listeners = list(listeners)
        self.clock = clock

    def begin(self, sample: Sample) -> None:
        """Record that a new sample is queued."""
        now = self.clock()
        sample.history.append((State.QUEUED, now))
        self.send(Event(now, sample, State.QUEUED, State.QUEUED))

    def move(self, sample: Sample, after: Phase) -> None:
        """Give a sample its next state or its fate; queueing a queued sample again is no move."""
        before = sample.state
        if before is after and after is State.QUEUED:
            return
        assert legal(before, after), f"sample {sample.id} cannot go from {before} to {after}"
        now = self.clock()
        sample.state = after
        sample.history.append((after, now))
        self.send(Event(now, sample, before, after))

    def draw(self, group: Group, fate: Fate | None, reason: str) -> None:
        """Record that a draw begins its attempt (`fate` is None), or ends it."""
        self.send(DrawEvent(self.clock(), group, fate, reason))

    def send(self, event: Event | DrawEvent) -> None:
        """Call every listener with an event."""
        for listener in self.listeners:
            listener(event)


class Episode(Protocol):
    """A sample's interaction with its environment. Both calls enforce their own deadlines."""

    async def begin(self) -> bool:
        """Give the sample its first trace; return whether the policy has a turn."""
        ...

    async def answer(self) -> bool:
        """Take the turn at the end of the sample's last trace; return whether the policy has another."""
        ...

    def close(self) -> None: ...


OpenEpisode = Callable[[Sample], Episode | None]


def answered_once(sample: Sample) -> Episode | None:
    """The default without environments: return None, because a prompt gets one answer."""
    return None
