"""The rollout scheduler: how many prompts to start, which groups are complete, which are trained on.

Plain asyncio against an injected source, router, scorer, environment and clock: no sleep, no polling, no lock, no file,
no model. The same code runs on a virtual-time event loop in simulation. `draws.py` keeps the draw order,
`sample_runner.py` runs each sample; this file starts groups and decides on them.

- A group starts only while groups in flight plus groups accepted and not yet trained are below `capacity`, and only if
  it can still be used: at staleness 0 nothing starts between `take` and `publish`.
- A sample is scored the moment its generation ends; its slot goes to the next sample at once. Rewards that score a group
  together wait for its last sample, which holds no slot either.
- In draw order a step's batch is the first useful groups in the order drawn, whatever was started beyond them:
  oversampling is speculation, and draws given up as surplus are attempted again. In arrival order it is the first to
  complete, and the surplus is let go.
- A source may have several streams with shares: every batch then has each stream's share to within one group, also
  when groups are dropped. What holds of the draw order holds within each stream.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drumroll.config.rollout import RolloutConfig
from drumroll.engines import Sampling
from drumroll.engines.router import Router
from drumroll.errors import RolloutError
from drumroll.lifecycle import Listener, OpenEpisode, Transitions, answered_once
from drumroll.rewards.group_calls import GroupCalls
from drumroll.rollout.admission import Admission
from drumroll.rollout.draws import DrawnPrompt, Draws, Source
from drumroll.rollout.filters import Filter, find_filter
from drumroll.rollout.sample_runner import Decode, SampleRunner, Score
from drumroll.rollout.stats import RunningStats, StepStats
from drumroll.sample import GREEDY, Fate, Group, Sample, State, Version

Verdict = tuple[Fate, str] | None
"""The fate of a complete group that is not trained on, with the reason; None accepts it."""


@dataclass(frozen=True)
class SamplingPlan:
    """How a domain is sampled and judged."""

    samples: int
    sampling: Sampling
    filter: Filter | None

    @classmethod
    def of(cls, config: RolloutConfig) -> SamplingPlan:
        found = find_filter(config.filter, config.filter_args) if config.filter else None
        sampling = Sampling(
            config.temperature, config.length_limit, tuple(config.stop), max_thinking=config.max_thinking_tokens
        )
        return cls(config.samples, sampling, found)


@dataclass(eq=False)
class _Flight:
    """A group on its way."""

    group: Group
    plan: SamplingPlan
    version: Version
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    unsettled: int = 0
    replacements: int = 0
    calls: GroupCalls = field(default_factory=GroupCalls)


class Rollouts:
    """The stream of complete, scored, useful groups that a training loop takes its batches from."""

    def __init__(
        self,
        config: RolloutConfig,
        seed: int,
        source: Source,
        router: Router,
        scorer: Score,
        decode: Decode,
        *,
        spell: Decode | None = None,
        episodes: OpenEpisode = answered_once,
        greedy: bool = False,
        closing: Sequence[int] = (),
        listeners: Sequence[Listener] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self.source = source
        self.router = router
        self.greedy = greedy  # every group has one greedy sample more, for a baseline
        self.version: Version = 0
        self.stats = StepStats()  # of the last step
        self._running = running = RunningStats()  # since its batch was taken
        self._transitions = moves = Transitions(listeners, clock)
        self._runner = SampleRunner(
            config, seed, router, scorer, decode, spell or decode, episodes, moves, running, greedy=greedy, closing=closing
        )
        self._common = SamplingPlan.of(config)
        self._plans = {domain: SamplingPlan.of(config.of(domain)) for domain in config.domains}
        self._draws = Draws(source, ordered=config.order == "draw")
        self._admission = Admission(config.capacity, source.shares)
        self._flights: dict[int, _Flight] = {}
        self._complete: dict[int, tuple[Group, Verdict]] = {}  # draw order: results that wait for earlier draws
        self._ready: dict[str, deque[Group]] = {stream: deque() for stream in source.shares}
        self._wanted: dict[str, int] = {}  # groups that `take` is waiting for, by stream
        self._training: list[Group] = []
        self._open = False
        self._step_draws = 0
        self._changed = asyncio.Event()
        self._broken: Exception | None = None
        router.on_hopeless = self._changed.set

    @property
    def listeners(self) -> list[Listener]:
        """The functions that receive every event."""
        return self._transitions.listeners

    # --- the controller's side ---

    async def take(self, count: int) -> list[Group]:
        """Return the next `count` useful groups, fewer only when the data ends. At staleness 0, give up the surplus at once."""
        assert not self._training, "call `trained` with the groups of the last `take` first"
        self._open, self._step_draws = True, 0
        self._wanted = self._admission.quotas(count)
        self._advance()
        self._pump()
        while any(self._short(stream) for stream in self._wanted) and not self._dry():
            self._raise_if_hopeless(count)
            self._changed.clear()
            await self._changed.wait()
        groups = self._pick()
        self._wanted = {}
        assert self.config.overage == "mask" or not any(_over_age(g, self.oldest_trainable()) for g in groups), "over-age group"
        self._training = groups
        if self.config.lag_limit == 0:
            self._open = False
            self._give_up_surplus(groups)
        elif self.config.partial:
            self.router.pause()
        self.stats = self._running.end_step(groups)
        self._pump()
        return groups

    def trained(self, groups: Sequence[Group]) -> None:
        """Record the fate of groups that an update has used."""
        for group in groups:
            self._end(group, Fate.TRAINED, "")
        self._training = []
        self._pump()

    def publish(self, version: Version) -> None:
        """Set the version that engines generate with, and drop groups that are now too old (or leave them to the batch's mask)."""
        self.version = version
        if self.config.overage == "drop":
            self._drop_over_age()
        self.router.resume()
        self._pump()

    def oldest_trainable(self) -> Version:
        """Return the oldest version whose tokens may be trained on."""
        return self.version - self.config.lag_limit

    def exhausted(self) -> bool:
        """Whether the data has ended and nothing is left to train on."""
        return self._dry() and not any(self._ready.values())

    @property
    def failed(self) -> list[Sample]:
        """The samples that have failed since the last batch was taken."""
        return list(self._running.step.failed)

    def _dry(self) -> bool:
        """Whether no further group can become ready."""
        return self._draws.exhausted() and not (self._flights or self._complete)

    def _short(self, stream: str) -> bool:
        """Whether `take` waits for more groups of a stream than are ready."""
        return len(self._ready[stream]) < self._wanted.get(stream, 0)

    def _all_ready(self) -> list[Group]:
        return [group for ready in self._ready.values() for group in ready]

    def _pick(self) -> list[Group]:
        """Return the batch: of each stream, as many of the ready groups as `take` wants."""
        chosen = [(self._ready[stream], count) for stream, count in self._wanted.items()]
        groups = [ready.popleft() for ready, count in chosen for _ in range(min(count, len(ready)))]
        return sorted(groups, key=lambda group: group.draw) if self.config.order == "draw" else groups

    def state(self) -> dict[str, Any]:
        """Return the place in the draw order, for a checkpoint."""
        return {**self._draws.state(), "version": self.version, "owed": dict(self._admission.owed)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where a checkpoint left the draw order: open draws are attempted again, settled ones are not."""
        assert not self._flights, "restore before anything is started"
        self._admission.owed |= state["owed"]
        self.version = state["version"]
        self._draws.restore(state)

    async def close(self) -> None:
        """Abort all work under way."""
        self._open = False
        flights = list(self._flights.values())
        for flight in flights:
            self._abort(flight, Fate.ABORTED, "the run ended")
        for group in [*self._training, *self._all_ready(), *(group for group, _ in self._complete.values())]:
            self._end(group, Fate.ABORTED, "the run ended")
        await asyncio.gather(*(t for f in flights for t in f.tasks.values()), return_exceptions=True)

    # --- starting ---

    def _pump(self) -> None:
        """Start groups while admission allows."""
        while self._open and self._step_draws < self.config.draw_limit and (room := self._admission.free()):
            drawn = self._draws.next(room)
            if drawn is None:
                return
            self._start(drawn)

    def _start(self, drawn: DrawnPrompt) -> None:
        group = Group(drawn.prompt, drawn.draw, [], drawn.attempt)
        flight = _Flight(group, self._plans.get(drawn.prompt.domain, self._common), self.version)
        self._draws.open[drawn.draw] = drawn
        self._flights[drawn.draw] = flight
        self._admission.take(drawn.draw, drawn.prompt.stream)
        self._step_draws += 1
        self._transitions.draw(group, None, "")
        for index in [*range(flight.plan.samples), *([GREEDY] if self.greedy else [])]:
            self._start_sample(flight, index)

    def _start_sample(self, flight: _Flight, index: int) -> None:
        group = flight.group
        sample = Sample(group.prompt, group.draw, index, attempt=group.attempt)
        self._transitions.begin(sample)
        if index == GREEDY:
            group.greedy = sample
        else:
            group.samples.append(sample)
        flight.unsettled += 1
        flight.calls.expect(index)
        flight.tasks[index] = asyncio.get_running_loop().create_task(self._run(flight, sample))
        self._running.step.started += 1

    async def _run(self, flight: _Flight, sample: Sample) -> None:
        """Run a sample. Errors that belong to no sample (bad data, full disk, bugs) abort the step: `take` raises them."""
        try:
            await self._runner.run(sample, flight.plan.sampling, flight.calls)
            self._settled(flight, sample)
        except Exception as error:
            self._break(error)
        except asyncio.CancelledError:
            if isinstance(sample.state, State):  # `_abort` gives a sample its fate first
                self._break(RolloutError(f"the task of sample {sample.id} was cancelled by code that it called."))
            raise

    def _break(self, error: Exception) -> None:
        self._broken = self._broken or error
        self._changed.set()

    # --- from samples to groups ---

    def _settled(self, flight: _Flight, sample: Sample) -> None:
        """Count a scored or failed sample, replace it if the config says so, and judge the group after its last."""
        flight.unsettled -= 1
        del flight.tasks[sample.index]
        if sample.failure is not None:
            if self.config.on_failure == "give_up" or sample.index == GREEDY:
                self._complete_group(flight, f"{sample.failure.boundary} failed: {sample.failure.text}")
                return
            if self.config.on_failure == "replace" and flight.replacements < flight.plan.samples:
                flight.replacements += 1
                self._start_sample(flight, len(flight.group.samples))
        flight.calls.leave(sample)
        if not flight.unsettled:
            self._complete_group(flight, None)

    def _complete_group(self, flight: _Flight, failure: str | None) -> None:
        """Find the verdict on a group, and decide on it when its turn in the order has come."""
        group, plan = flight.group, flight.plan
        scored = [s for s in group.samples if s.state is State.SCORED]
        if failure is None and len(scored) < min(2, plan.samples):
            failure = "fewer than two samples were scored"
        verdict: Verdict = (Fate.FAILED, failure) if failure else None
        if verdict is None and plan.filter is not None:
            reason = plan.filter(group.rewards)
            verdict = (Fate.FILTERED, reason) if reason else None
        self._land(flight)
        if verdict is not None:
            self._admission.give_back(group.draw)
        if self.config.order == "arrival":
            self._decide(group, verdict)
        else:
            self._complete[group.draw] = (group, verdict)
            self._advance()
        self._pump()
        self._changed.set()

    def _land(self, flight: _Flight) -> None:
        """Take a group out of flight, and stop the samples of it that still run."""
        self._flights.pop(flight.group.draw, None)
        self.router.forget((flight.group.draw, flight.group.attempt))
        for index, task in list(flight.tasks.items()):
            sample = flight.group.greedy if index == GREEDY else flight.group.samples[index]
            assert sample is not None
            if isinstance(sample.state, State):
                self._transitions.move(sample, Fate.ABORTED)
            task.cancel()

    def _advance(self) -> None:
        """In draw order, decide on complete groups up to the first open draw of the stream, and no more than `take` wants.

        Groups beyond the batch stay undecided, so that at staleness 0 they can all be attempted again.
        """
        for stream, queue in self._draws.undecided.items():
            while queue and queue[0] in self._complete and self._short(stream):
                self._decide(*self._complete.pop(queue.popleft()))

    def _decide(self, group: Group, verdict: Verdict) -> None:
        """Accept a complete group, or give it the fate of its verdict."""
        if verdict is not None:
            self._running.step.drop(group, *verdict)
            self._end(group, *verdict)
            return
        group.samples = [s for s in group.samples if s.state is State.SCORED]
        for sample in group.everyone():
            self._transitions.move(sample, State.ACCEPTED)
        self._ready[group.prompt.stream].append(group)

    def _end(self, group: Group, fate: Fate, reason: str) -> None:
        """Give a group and its samples their fate; the scored samples of a failed group end as aborted."""
        for sample in group.everyone():
            if isinstance(sample.state, State):
                own = Fate.BASELINE if fate is Fate.TRAINED and sample is group.greedy else fate
                self._transitions.move(sample, Fate.ABORTED if fate is Fate.FAILED else own)
        self._draws.open.pop(group.draw, None)
        self._admission.give_back(group.draw)
        self._transitions.draw(group, fate, reason)

    # --- giving up ---

    def _abort(self, flight: _Flight, fate: Fate, reason: str) -> None:
        group = flight.group
        for sample in group.everyone():
            if isinstance(sample.state, State):
                self._transitions.move(sample, fate)
        self._land(flight)
        self._running.step.drop(group, fate, reason)
        self._end(group, fate, reason)
        if self.config.order == "draw" and fate is Fate.STALE:
            self._draws.undecided[group.prompt.stream].remove(group.draw)
            self._advance()

    def _give_up_surplus(self, taken: Sequence[Group]) -> None:
        """Abort all groups beyond the batch: at staleness 0 they cannot be used.

        In draw order they are attempted again in the next step, so that no draw is passed over. In arrival order they
        are not: the stragglers would hold up the next step as well.
        """
        begun = dict(self._draws.open)
        for flight in list(self._flights.values()):
            self._abort(flight, Fate.ABORTED, "surplus")
        for group in [*self._all_ready(), *(group for group, _ in self._complete.values())]:
            self._running.step.drop(group, Fate.ABORTED, "surplus")
            self._end(group, Fate.ABORTED, "surplus")
        for ready in self._ready.values():
            ready.clear()
        self._complete.clear()
        kept = {group.draw for group in taken}
        for draw, drawn in begun.items():
            if draw not in kept and self.config.order == "draw":
                self._draws.start_later(replace(drawn, attempt=drawn.attempt + 1))

    def _drop_over_age(self) -> None:
        """Make groups stale, complete or not, that are too old to be trained on."""
        oldest, reason = self.oldest_trainable(), "older than max_staleness"
        for flight in [f for f in self._flights.values() if f.version < oldest]:
            self._abort(flight, Fate.STALE, reason)
        for draw, (group, verdict) in self._complete.items():
            if verdict is None and _over_age(group, oldest):
                self._complete[draw] = (group, (Fate.STALE, reason))
                self._admission.give_back(draw)
        for group in [g for g in self._all_ready() if _over_age(g, oldest)]:
            self._ready[group.prompt.stream].remove(group)
            self._running.step.drop(group, Fate.STALE, reason)
            self._end(group, Fate.STALE, reason)

    def _raise_if_hopeless(self, count: int) -> None:
        """Raise the reason why the step cannot be completed, if there is one."""
        if self._broken is not None:
            raise self._broken
        if self.router.hopeless is not None:
            raise self.router.hopeless
        step = self._running.step
        failed = sum(n for (_, fate, _), n in step.dropped.items() if fate == Fate.FAILED)
        others = sum(n for (_, fate, _), n in step.dropped.items() if fate != Fate.FAILED)
        if failed >= count and not others and not any(self._ready.values()) and step.failed:
            first = step.failed[0]
            assert first.failure is not None
            raise RolloutError(
                f"all {len(step.failed)} samples of the step failed, so there is nothing to train on. "
                f"The first, {first.id} of domain '{first.prompt.domain}': {first.failure.told()}"
            )
        if not self._flights and self._step_draws >= self.config.draw_limit:
            reasons = "; ".join(f"{n} {fate} in {domain} ({why})" for (domain, fate, why), n in step.dropped.most_common(5))
            short = [stream for stream in self._wanted if stream and self._short(stream)]
            lacking = f" and lacks groups of {', '.join(short)}, whose share data.mixture fixes" if short else ""
            raise RolloutError(
                f"the step has {len(self._all_ready())} of {count} groups{lacking} after {self._step_draws} prompts "
                f"(rollout.max_draws_per_step={self.config.draw_limit}): {reasons}."
            )


def _over_age(group: Group, oldest: Version) -> bool:
    """Whether older weights than `oldest` wrote a token of the group; one without tokens of the policy never is."""
    return any(version is not None and version < oldest for version in (s.oldest_version() for s in group.samples))
