"""Thousands of seeded worlds; and proof that the simulator would find bugs if there were some."""

import asyncio
import math
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest
from world import FAULTS, SAMPLES, play

from drumroll.engines.router import Router
from drumroll.rollout.sample_runner import SampleRunner
from drumroll.rollout.scheduler import Rollouts
from drumroll.sample import Fate


def chunk(seeds):
    return [play(seed) for seed in seeds]


def test_thousands_of_worlds_hold_every_invariant(request):
    count = request.config.getoption("--worlds")
    chunks = [range(i, min(i + 50, count)) for i in range(0, count, 50)]
    with ProcessPoolExecutor(2) as pool:
        reports = [report for found in pool.map(chunk, chunks) for report in found]
    assert len(reports) == count
    assert min(r.samples for r in reports) >= SAMPLES
    assert min(r.faults.total() for r in reports) >= FAULTS
    ended = Counter(r.ended for r in reports)
    assert ended["completed"] > 0.9 * count, ended
    met = sum((r.faults for r in reports), Counter())
    kinds = {"crash", "rest", "join", "leave", "network cut", "cut reply", "unreachable", "lost reply", "delayed reply"}
    kinds |= {"group reward failure", "group reward hang", "bad value"}
    kinds |= {"duplicated reply", "reward failure", "reward hang", "environment hang", "environment crash", "controller killed"}
    assert kinds <= set(met), kinds - set(met)
    assert max(r.lives for r in reports) > 2


def test_the_same_seed_gives_the_same_event_log():
    for seed in range(20):
        assert play(seed).log == play(seed).log
    assert play(0).log != play(1).log


def broken_release(monkeypatch):
    monkeypatch.setattr(Router, "_release", lambda self, route: None)


def broken_over_age(monkeypatch):
    monkeypatch.setattr(Rollouts, "_drop_over_age", lambda self: None)


def broken_state(monkeypatch):
    """Forgets the draws that are open at a commit."""
    monkeypatch.setattr(
        Rollouts,
        "state",
        lambda self: {
            "draw": self._draws._next_draw,
            "settled": [],
            "source": self.source.state(),
            "version": self.version,
            "owed": self._admission.owed,
        },
    )


def broken_deadline(monkeypatch):
    import drumroll.engines.router as router

    original = Router.generate

    async def patient(self, request, key, priority, seconds, started):
        return await original(self, request, key, priority, math.inf, started)

    monkeypatch.setattr(router.Router, "generate", patient)


def broken_admission(monkeypatch):
    monkeypatch.setattr(
        Rollouts,
        "_pump",
        lambda self, pump=Rollouts._pump: (pump(self), self._open and self._start(self._draws.next(set(self.source.shares)))),
    )


def broken_trained(monkeypatch):
    """Gives every trained draw its fate twice."""
    original = Rollouts.trained

    def twice(self, groups):
        original(self, groups)
        for group in groups:
            self._transitions.draw(group, Fate.TRAINED, "")

    monkeypatch.setattr(Rollouts, "trained", twice)


def broken_close(monkeypatch):
    """Leaves the environments of samples that are given up open."""
    act = SampleRunner._act

    async def leaving(self, sample, action):
        try:
            return await act(self, sample, action)
        except asyncio.CancelledError:
            action.__self__.close = lambda: None
            raise

    monkeypatch.setattr(SampleRunner, "_act", leaving)


def broken_mixture(monkeypatch):
    """Gives the first stream's places to the others."""
    from drumroll.rollout import admission

    def crooked(count, shares, owed, round_=admission._round):
        whole, due = round_(count, shares, owed)
        first, *others = whole
        return whole | ({first: whole[first] - 3, others[0]: whole[others[0]] + 3} if others and whole[first] > 3 else {}), due

    monkeypatch.setattr(admission, "_round", crooked)


def broken_group(monkeypatch):
    """Calls a group's reward without waiting for all samples."""
    from drumroll.rewards.group_calls import GroupCalls

    monkeypatch.setattr(GroupCalls, "expect", lambda self, index: None)


def broken_leave(monkeypatch):
    """Waits for samples that have failed."""
    from drumroll.rewards.group_calls import GroupCalls

    monkeypatch.setattr(GroupCalls, "leave", lambda self, sample: None)


PLANTED = [
    broken_group,
    broken_leave,
    broken_close,
    broken_release,
    broken_over_age,
    broken_state,
    broken_deadline,
    broken_admission,
    broken_trained,
    broken_mixture,
]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda f: f.__name__)
def test_the_simulator_finds_planted_bugs(plant, monkeypatch):
    plant(monkeypatch)
    found = None
    for seed in range(40):
        try:
            play(seed)
        except BaseException as error:
            found = error
            break
    assert found is not None, f"{plant.__name__} was not found in 40 worlds"
    assert any("replay with" in note for note in found.__notes__)
