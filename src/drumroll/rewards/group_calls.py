"""Rewards that score a group together: the call is made once, when every sample that can still be scored has arrived.

A sample that fails on the way is not waited for; its replacement is. A sample that arrives after a call (a replacement, a
retry) is scored in a call with the samples scored before, whose values stay as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from drumroll.rewards.signatures import BadReward, Outcome
from drumroll.sample import GREEDY, Sample

Outcomes = list[Outcome | BadReward]
Call = Callable[[list[Sample]], Awaitable[Outcomes]]
Arrival = tuple[Sample, asyncio.Future[Any]]
"""A sample and its turn: the sample's outcome, or all arrivals if the sample is to make the call."""


@dataclass
class _Meeting:
    """The samples that have arrived at one reward, and those that it has scored."""

    arrived: dict[int, Arrival] = field(default_factory=dict)
    scored: dict[int, tuple[Sample, Outcome]] = field(default_factory=dict)


class GroupCalls:
    """The calls of group rewards for the samples of one group. The task of one sample makes the call for all of them."""

    def __init__(self, running: Iterable[int] = ()) -> None:
        self._running = set(running)
        self._meetings: dict[int, _Meeting] = {}  # by reward

    def expect(self, index: int) -> None:
        """Wait for one more sample."""
        self._running.add(index)

    def leave(self, sample: Sample) -> None:
        """Wait no longer for a sample: it is scored, or it has failed. `expect` its replacement first, if it has one."""
        self._running.discard(sample.index)
        if sample.failure is not None:
            for meeting in self._meetings.values():
                meeting.scored.pop(sample.index, None)
        self._check()

    async def score(self, reward: int, sample: Sample, call: Call) -> Outcome:
        """Return the sample's outcome. Raises what the call raised, for every sample that it was made for."""
        meeting = self._meetings.setdefault(reward, _Meeting())
        if sample.index in meeting.scored:
            return meeting.scored[sample.index][1]
        arrival: Arrival = (sample, asyncio.get_running_loop().create_future())
        meeting.arrived[sample.index] = arrival
        self._check()
        found = await arrival[1]
        return found if isinstance(found, Outcome) else await self._lead(meeting, found, call)

    def _check(self) -> None:
        """Let the first of the samples at a reward make the call, if nobody else is on the way there."""
        for meeting in self._meetings.values():
            arrived = meeting.arrived
            if arrived and all(index in arrived or index in meeting.scored for index in self._running):
                meeting.arrived = {}
                first, *others = sorted(arrived.values(), key=lambda arrival: _place(arrival[0]))
                first[1].set_result([first, *others])

    async def _lead(self, meeting: _Meeting, arrived: list[Arrival], call: Call) -> Outcome:
        samples = sorted((*(s for s, _ in meeting.scored.values()), *(s for s, _ in arrived)), key=_place)
        (first, _), *others = arrived
        try:
            found = dict(zip((s.index for s in samples), await call(samples), strict=True))
        except BaseException as error:
            for _, waiting in others:
                if isinstance(error, asyncio.CancelledError):
                    waiting.cancel()
                elif not waiting.done():
                    waiting.set_exception(error)
            raise
        for sample, waiting in arrived:
            outcome = found[sample.index]
            if isinstance(outcome, Outcome):
                meeting.scored[sample.index] = (sample, outcome)
            if waiting.done():
                continue
            if isinstance(outcome, Outcome):
                waiting.set_result(outcome)
            else:
                waiting.set_exception(outcome)
        self._check()
        own = found[first.index]
        if isinstance(own, BadReward):
            raise own
        return own


def _place(sample: Sample) -> tuple[bool, int]:
    """Samples by index, the greedy one last."""
    return sample.index == GREEDY, sample.index
