"""The life of a sample as a table: which state may follow which. An illegal step is a bug, found by assertion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drumroll.sample import Fate, Sample, State

Stage = State | Fate

ENDINGS: frozenset[Stage] = frozenset({Fate.FAILED, Fate.ABORTED, Fate.SUPERSEDED})
"""What can happen to a sample at any moment before it has its fate."""

NEXT: dict[State, frozenset[Stage]] = {
    State.QUEUED: ENDINGS | {State.GENERATING},
    State.GENERATING: ENDINGS | {State.ACTING, State.SCORING, State.QUEUED},
    State.ACTING: ENDINGS | {State.GENERATING, State.SCORING, State.QUEUED},
    State.SCORING: ENDINGS | {State.SCORED},
    State.SCORED: ENDINGS | {State.ACCEPTED, Fate.FILTERED, Fate.STALE},
    State.ACCEPTED: ENDINGS | {Fate.TRAINED, Fate.STALE},
}


@dataclass(frozen=True, slots=True)
class Event:
    """One transition of one sample."""

    time: float
    sample: Sample
    before: Stage
    after: Stage


Listener = Callable[[Event], None]


def legal(before: Stage, after: Stage) -> bool:
    """Whether a sample may go from one stage to another; a fate is final."""
    return isinstance(before, State) and after in NEXT[before]
