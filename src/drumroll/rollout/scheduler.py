"""The rollout scheduler: how many prompts to start, what becomes of each sample, which groups are trained on.

Plain asyncio against an injected source, router, scorer, environment and clock: no sleep, no polling, no lock, no file,
no model. The same code runs on a virtual-time event loop in simulation.

- A group starts only while groups in flight plus groups accepted and not yet trained are below `capacity`, and only if
  it can still be used: at staleness 0 nothing starts between `take` and `publish`.
- A sample is scored the moment its generation ends; its slot goes to the next sample at once.
- In draw order a step's batch is the first useful groups in the order drawn, whatever was started beyond them:
  oversampling is speculation, and draws given up as surplus are attempted again. In arrival order it is the first to
  complete, and the surplus is let go.
- A source may have several streams with shares: every batch then has each stream's share to within one group, also
  when groups are dropped. What holds of the draw order holds within each stream.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from drumroll.config.rollout import RolloutConfig
from drumroll.engines import Completion, Request, Sampling
from drumroll.engines.continuation import Continuation
from drumroll.engines.router import Router
from drumroll.errors import BadRow, RolloutError, being_cancelled, user_frames
from drumroll.lifecycle import DrawEvent, Event, Listener, OpenEpisode, Phase, SampleFailed, answered_once, legal
from drumroll.rollout.admission import Admission
from drumroll.rollout.filters import Filter, find_filter
from drumroll.rollout.stats import LengthBias, StepStats
from drumroll.sample import (
    GREEDY,
    Failure,
    Fate,
    Group,
    Owner,
    Prompt,
    Sample,
    State,
    Trace,
    Version,
    sample_seed,
)

Decode = Callable[[list[int]], str]


class Source(Protocol):
    """Where prompts come from: one row of draws, each prompt of a stream with a share in every batch."""

    @property
    def shares(self) -> Mapping[str, float]: ...
    def draw(self) -> Prompt: ...
    def exhausted(self) -> bool: ...
    def metrics(self) -> dict[str, float]: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


class Score(Protocol):
    """What gives a sample its reward or its failure, within a deadline of its own."""

    async def score(self, sample: Sample) -> None: ...


@dataclass(eq=False)
class _Flight:
    """A group on its way."""

    group: Group
    version: Version
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    unsettled: int = 0
    replacements: int = 0


@dataclass(frozen=True)
class SamplingPlan:
    """How a domain is sampled and judged."""

    samples: int
    sampling: Sampling
    filter: Filter | None

    @classmethod
    def of(cls, config: RolloutConfig) -> SamplingPlan:
        found = find_filter(config.filter, config.filter_args) if config.filter else None
        return cls(config.samples, Sampling(config.temperature, config.max_tokens, tuple(config.stop)), found)


@dataclass(frozen=True)
class _Pending:
    """A drawn prompt that waits to be started, and where the source stood before it was drawn."""

    draw: int
    prompt: Prompt
    attempt: int
    before: dict[str, Any]


class Rollouts:
    """The stream of complete, scored, useful groups."""

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
        listeners: Sequence[Listener] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self.seed = seed
        self.source = source
        self.router = router
        self.scorer = scorer
        self.decode = decode
        self.spell = spell or decode  # with special tokens, in which stop strings are looked for
        self.episodes = episodes
        self.greedy = greedy  # every group has one greedy sample more, for a baseline
        self.listeners = list(listeners)
        self.clock = clock
        self.version: Version = 0
        self._common = SamplingPlan.of(config)
        self._plans = {domain: SamplingPlan.of(config.of(domain)) for domain in config.domains}
        self._next_draw = 0
        self._again: dict[str, list[tuple[int, _Pending]]] = {}  # by stream, heaps by draw: drawn, and to be started
        self._begun: dict[int, _Pending] = {}  # draws whose fate is open
        self._flights: dict[int, _Flight] = {}
        self._admission = Admission(config.capacity, source.shares)
        self._complete: dict[int, tuple[Group, _Verdict]] = {}  # draw order: results that wait for earlier draws
        self._queues: dict[str, deque[int]] = {}  # draw order: by stream, the draws that are not decided
        self._wanted: dict[str, int] = {}  # groups that `take` is waiting for, by stream
        self._settled_before: set[int] = set()  # draws that had their fate when the run was resumed
        self._ready: dict[str, deque[Group]] = {stream: deque() for stream in source.shares}
        self._training: list[Group] = []
        self._open = False
        self._step_draws = 0
        self._changed = asyncio.Event()
        self._broken: Exception | None = None
        self.stats = StepStats()  # of the last step
        self._current = StepStats()  # since its batch was taken
        self._lengths = LengthBias()
        router.on_hopeless = self._changed.set

    # --- the controller's side ---

    async def take(self, count: int) -> list[Group]:
        """The next `count` useful groups (fewer only when the data ends); surplus at staleness 0 is given up at once."""
        assert not self._training, "the groups taken before were not told to be trained"
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
        self._lengths.accepted(groups, self._current)
        if self.config.lag_limit == 0:
            self._open = False
            self._give_up_surplus(groups)
        elif self.config.partial:
            self.router.pause()
        self.stats, self._current = self._current, StepStats()
        self._pump()
        return groups

    def trained(self, groups: Sequence[Group]) -> None:
        """Record the fate of groups that an update has used."""
        for group in groups:
            self._end(group, Fate.TRAINED, "")
        self._training = []
        self._pump()

    def publish(self, version: Version) -> None:
        """New weights are generated with from now on. What has become too old is dropped (or masked in the batch)."""
        self.version = version
        if self.config.overage == "drop":
            self._drop_over_age()
        self.router.resume()
        self._pump()

    def oldest_trainable(self) -> Version:
        """Tokens of older versions may not be trained on."""
        return self.version - self.config.lag_limit

    def exhausted(self) -> bool:
        """Whether the data has ended and nothing is left to train on."""
        return self._dry() and not any(self._ready.values())

    @property
    def failed(self) -> list[Sample]:
        """The samples that have failed since the last batch was taken."""
        return list(self._current.failed)

    def _dry(self) -> bool:
        """Whether no further group can become ready."""
        return self.source.exhausted() and not (any(self._again.values()) or self._flights or self._complete)

    def _short(self, stream: str) -> bool:
        """Whether `take` waits for more groups of a stream than are ready."""
        return len(self._ready[stream]) < self._wanted.get(stream, 0)

    def _all_ready(self) -> list[Group]:
        return [group for ready in self._ready.values() for group in ready]

    def _pick(self) -> list[Group]:
        """The batch: of each stream as many of the ready groups as were wanted."""
        chosen = [(self._ready[stream], count) for stream, count in self._wanted.items()]
        groups = [ready.popleft() for ready, count in chosen for _ in range(min(count, len(ready)))]
        return sorted(groups, key=lambda group: group.draw) if self.config.order == "draw" else groups

    def state(self) -> dict[str, Any]:
        """The place in the draw order: every draw before `draw` is settled, and so are those in `settled`."""
        opened = [*self._begun.values(), *(pending for heap in self._again.values() for _, pending in heap)]
        common = {"version": self.version, "owed": dict(self._admission.owed)}
        if not opened:
            return {"draw": self._next_draw, "settled": [], "source": self.source.state(), **common}
        first = min(opened, key=lambda pending: pending.draw)
        still_open = {pending.draw for pending in opened}
        settled = [d for d in range(first.draw, self._next_draw) if d not in still_open]
        return {"draw": first.draw, "settled": settled, "source": first.before, **common}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the draw order where a checkpoint left it: open draws are attempted again, settled ones are not."""
        assert not self._flights, "restore before anything is started"
        self._next_draw = state["draw"]
        self._admission.owed |= state["owed"]
        self._settled_before = set(state["settled"])
        self.version = state["version"]
        self.source.restore(state["source"])

    async def close(self) -> None:
        """Give up all work under way."""
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
            pending = self._next_prompt(room)
            if pending is None:
                return
            self._start(pending)

    def _next_prompt(self, streams: Set[str]) -> _Pending | None:
        """The first draw of these streams that is to be started. Draws of others on the way to it wait for their turn."""
        waiting = [heap for stream in streams if (heap := self._again.get(stream))]
        if waiting:
            return heapq.heappop(min(waiting, key=lambda heap: heap[0][0]))[1]
        while not self.source.exhausted():
            draw, before = self._next_draw, self.source.state()
            prompt = self.source.draw()
            self._next_draw += 1
            if draw in self._settled_before:  # before a resume
                self._settled_before.discard(draw)
                continue
            if self.config.order == "draw":
                self._queues.setdefault(prompt.stream, deque()).append(draw)
            pending = _Pending(draw, prompt, 0, before)
            if prompt.stream in streams:
                return pending
            self._start_later(pending)
        return None

    def _start_later(self, pending: _Pending) -> None:
        heapq.heappush(self._again.setdefault(pending.prompt.stream, []), (pending.draw, pending))

    def _start(self, pending: _Pending) -> None:
        group = Group(pending.prompt, pending.draw, [], pending.attempt)
        flight = _Flight(group, self.version)
        self._begun[pending.draw] = pending
        self._flights[pending.draw] = flight
        self._admission.take(pending.draw, pending.prompt.stream)
        self._step_draws += 1
        self._tell(DrawEvent(self.clock(), group, None, ""))
        for index in [*range(self._plan(group).samples), *([GREEDY] if self.greedy else [])]:
            self._start_sample(flight, index)

    def _plan(self, group: Group) -> SamplingPlan:
        return self._plans.get(group.prompt.domain, self._common)

    def _start_sample(self, flight: _Flight, index: int) -> None:
        group = flight.group
        sample = Sample(group.prompt, group.draw, index, attempt=group.attempt)
        now = self.clock()
        sample.history.append((State.QUEUED, now))
        self._tell(Event(now, sample, State.QUEUED, State.QUEUED))
        if index == GREEDY:
            group.greedy = sample
        else:
            group.samples.append(sample)
        flight.unsettled += 1
        flight.tasks[index] = asyncio.get_running_loop().create_task(self._guarded(flight, sample))
        self._current.started += 1

    # --- the life of a sample ---

    async def _live(self, flight: _Flight, sample: Sample) -> None:
        """From queued to scored or failed. An abort gives the sample its fate and then cancels this task."""
        try:
            if sample.prompt.defect:
                raise SampleFailed(Failure(BadRow.__name__, "data", sample.prompt.defect))
            await self._episode(flight, sample)
            await self._score(sample)
        except SampleFailed as failed:
            sample.failure = failed.failure
            self._current.failed.append(sample)
            self._move(sample, Fate.FAILED)
        self._settled(flight, sample)

    async def _guarded(self, flight: _Flight, sample: Sample) -> None:
        """Errors that belong to no sample (bad data, full disk, bugs) abort the step: `take` raises them."""
        try:
            await self._live(flight, sample)
        except Exception as error:
            self._break(error)
        except asyncio.CancelledError:
            if isinstance(sample.state, State):  # `_abort` gives a sample its fate first
                self._break(RolloutError(f"the task of sample {sample.id} was cancelled by code that it called."))
            raise

    def _break(self, error: Exception) -> None:
        self._broken = self._broken or error
        self._changed.set()

    async def _episode(self, flight: _Flight, sample: Sample) -> None:
        """Turns of environment and generation until one of them ends it; without an environment, one generation."""
        episode = self.episodes(sample)
        if episode is None:
            trace = Trace()
            trace.extend(list(sample.prompt.tokens), Owner.PROMPT)
            sample.traces = [trace]
            await self._generate(flight, sample)
            sample.completion = self.decode(trace.policy_tokens())
            return
        try:
            has_next_turn = await self._act(sample, episode.begin)
            while has_next_turn:
                self._move(sample, State.QUEUED)
                await self._generate(flight, sample)
                has_next_turn = await self._act(sample, episode.answer)
        finally:
            episode.close()

    async def _generate(self, flight: _Flight, sample: Sample) -> None:
        """One turn. An interrupted one goes on from its tokens; a lost or late one is tried again, within the budget."""
        trace, number = sample.traces[-1], len(sample.traces) - 1
        manner, key = self._plan(flight.group), (sample.draw, sample.attempt)
        seed = sample_seed(self.seed, f"train/{number}" if number else "train", sample.draw, sample.index)
        place = sample.draw * (self.config.most_samples + self.greedy) + sample.index + self.greedy
        how = replace(manner.sampling, temperature=0.0) if sample.index == GREEDY else manner.sampling
        turn = Continuation(f"{sample.id}#{number}", tuple(trace.tokens), how, seed, self.spell, place)
        limit = self.config.generation_timeout

        def send(request: Request) -> Awaitable[Completion]:
            return self.router.generate(request, key, place, limit, lambda: self._move(sample, State.GENERATING))

        def failed(error: Exception, tries: int) -> None:
            if tries > self.config.retries:
                raise _failed(error, "generation", limit) from None
            self._current.retried += 1
            self._move(sample, State.QUEUED)

        async def grown(part: Completion) -> None:
            trace.extend(part.tokens, Owner.POLICY, part.logprobs, part.versions)
            sample.stop = part.stop
            if not turn.done:
                self._move(sample, State.QUEUED)

        await turn.run(send, failed=failed, grown=grown)

    async def _act(self, sample: Sample, action: Callable[[], Awaitable[bool]]) -> bool:
        self._move(sample, State.ACTING)
        try:
            return await action()
        except SampleFailed:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            raise _failed(error, "environment") from None
        finally:
            _end_if_cancelled()

    async def _score(self, sample: Sample) -> None:
        """Rewards, tried again only after a deadline: an exception would come again."""
        self._move(sample, State.SCORING)
        for tries in range(self.config.retries + 1):
            sample.failure = None
            await self.scorer.score(sample)
            _end_if_cancelled()
            if sample.failure is None or not sample.failure.passing or tries == self.config.retries:
                break
            self._current.retried += 1
            self._move(sample, State.SCORING)
        if sample.failure is not None:
            raise SampleFailed(sample.failure)
        self._lengths.finished(sample)
        self._move(sample, State.SCORED)

    # --- from samples to groups ---

    def _settled(self, flight: _Flight, sample: Sample) -> None:
        """A sample has been scored or has failed; when all have, the group is judged."""
        flight.unsettled -= 1
        del flight.tasks[sample.index]
        if sample.failure is not None:
            if self.config.on_failure == "give_up" or sample.index == GREEDY:
                self._complete_group(flight, f"{sample.failure.boundary} failed: {sample.failure.text}")
                return
            if self.config.on_failure == "replace" and flight.replacements < self._plan(flight.group).samples:
                flight.replacements += 1
                self._start_sample(flight, len(flight.group.samples))
        if not flight.unsettled:
            self._complete_group(flight, None)

    def _complete_group(self, flight: _Flight, failure: str | None) -> None:
        group, manner = flight.group, self._plan(flight.group)
        scored = [s for s in group.samples if s.state is State.SCORED]
        if failure is None and len(scored) < min(2, manner.samples):
            failure = "fewer than two samples were scored"
        verdict: _Verdict = (Fate.FAILED, failure) if failure else None
        if verdict is None and manner.filter is not None:
            reason = manner.filter(group.rewards)
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
        """The group is no longer in flight; what still runs in it is stopped."""
        self._flights.pop(flight.group.draw, None)
        self.router.forget((flight.group.draw, flight.group.attempt))
        for index, task in list(flight.tasks.items()):
            sample = flight.group.greedy if index == GREEDY else flight.group.samples[index]
            assert sample is not None
            if isinstance(sample.state, State):
                self._move(sample, Fate.ABORTED)
            task.cancel()

    def _advance(self) -> None:
        """Draw order: decide on complete groups, as far as no earlier draw of the stream is open and as many as are wanted.

        Nothing is decided beyond the batch, so at staleness 0 all that lies beyond can be attempted again.
        """
        for stream, queue in self._queues.items():
            while queue and queue[0] in self._complete and self._short(stream):
                self._decide(*self._complete.pop(queue.popleft()))

    def _decide(self, group: Group, verdict: _Verdict) -> None:
        """A complete group is accepted, or gets the fate that was found for it."""
        domain = group.prompt.domain
        if verdict is not None:
            fate, reason = verdict
            self._current.dropped[(domain, fate.value, reason)] += 1
            self._end(group, fate, reason)
            return
        group.samples = [s for s in group.samples if s.state is State.SCORED]
        for sample in group.everyone():
            self._move(sample, State.ACCEPTED)
        self._ready[group.prompt.stream].append(group)

    def _end(self, group: Group, fate: Fate, reason: str) -> None:
        """Give a group and its samples their fate. A failed group's scored samples end as aborted."""
        for sample in group.everyone():
            if isinstance(sample.state, State):
                own = Fate.BASELINE if fate is Fate.TRAINED and sample is group.greedy else fate
                self._move(sample, Fate.ABORTED if fate is Fate.FAILED else own)
        self._begun.pop(group.draw, None)
        self._admission.give_back(group.draw)
        self._tell(DrawEvent(self.clock(), group, fate, reason))

    # --- giving up ---

    def _abort(self, flight: _Flight, fate: Fate, reason: str) -> None:
        group = flight.group
        for sample in group.everyone():
            if isinstance(sample.state, State):
                self._move(sample, fate)
        self._land(flight)
        self._current.dropped[(group.prompt.domain, fate.value, reason)] += 1
        self._end(group, fate, reason)
        if self.config.order == "draw" and fate is Fate.STALE:
            self._queues[group.prompt.stream].remove(group.draw)
            self._advance()

    def _give_up_surplus(self, taken: Sequence[Group]) -> None:
        """What was begun beyond the batch cannot be used at staleness 0: stop it now.

        In draw order it is attempted again next step, so nothing is passed over. In arrival order it is let go: the
        stragglers would hold up the next step as well.
        """
        begun = dict(self._begun)
        for flight in list(self._flights.values()):
            self._abort(flight, Fate.ABORTED, "surplus")
        for group in [*self._all_ready(), *(group for group, _ in self._complete.values())]:
            self._current.dropped[(group.prompt.domain, Fate.ABORTED.value, "surplus")] += 1
            self._end(group, Fate.ABORTED, "surplus")
        for ready in self._ready.values():
            ready.clear()
        self._complete.clear()
        kept = {group.draw for group in taken}
        for draw, pending in begun.items():
            if draw not in kept and self.config.order == "draw":
                self._start_later(replace(pending, attempt=pending.attempt + 1))

    def _drop_over_age(self) -> None:
        """Groups that could no longer be trained on, complete or not, become stale."""
        oldest, reason = self.oldest_trainable(), "older than max_staleness"
        for flight in [f for f in self._flights.values() if f.version < oldest]:
            self._abort(flight, Fate.STALE, reason)
        for draw, (group, verdict) in self._complete.items():
            if verdict is None and _over_age(group, oldest):
                self._complete[draw] = (group, (Fate.STALE, reason))
                self._admission.give_back(draw)
        for group in [g for g in self._all_ready() if _over_age(g, oldest)]:
            self._ready[group.prompt.stream].remove(group)
            self._current.dropped[(group.prompt.domain, Fate.STALE.value, reason)] += 1
            self._end(group, Fate.STALE, reason)

    def _raise_if_hopeless(self, count: int) -> None:
        """A step that cannot be completed ends with the reason, not with a hang."""
        if self._broken is not None:
            raise self._broken
        if self.router.hopeless is not None:
            raise self.router.hopeless
        failed = sum(n for (_, fate, _), n in self._current.dropped.items() if fate == Fate.FAILED)
        others = sum(n for (_, fate, _), n in self._current.dropped.items() if fate != Fate.FAILED)
        if failed >= count and not others and not any(self._ready.values()) and self._current.failed:
            first = self._current.failed[0]
            assert first.failure is not None
            raise RolloutError(
                f"all {len(self._current.failed)} samples of the step failed, so there is nothing to train on. "
                f"The first, {first.id} of domain '{first.prompt.domain}': {first.failure.told()}"
            )
        if not self._flights and self._step_draws >= self.config.draw_limit:
            reasons = "; ".join(
                f"{n} {fate} in {domain} ({why})" for (domain, fate, why), n in self._current.dropped.most_common(5)
            )
            short = [stream for stream in self._wanted if stream and self._short(stream)]
            lacking = f" and lacks groups of {', '.join(short)}, whose share data.mixture fixes" if short else ""
            raise RolloutError(
                f"the step has {len(self._all_ready())} of {count} groups{lacking} after {self._step_draws} prompts "
                f"(rollout.max_draws_per_step={self.config.draw_limit}): {reasons}."
            )

    # --- telling ---

    def _move(self, sample: Sample, after: Phase) -> None:
        before = sample.state
        if before is after and after is State.QUEUED:
            return
        assert legal(before, after), f"sample {sample.id} cannot go from {before} to {after}"
        now = self.clock()
        sample.state = after
        sample.history.append((after, now))
        self._tell(Event(now, sample, before, after))

    def _tell(self, event: Event | DrawEvent) -> None:
        for listener in self.listeners:
            listener(event)


_Verdict = tuple[Fate, str] | None


def _failed(error: BaseException, boundary: str, seconds: float = 0.0) -> SampleFailed:
    text = f"took longer than {seconds:g} s" if isinstance(error, TimeoutError) and seconds else str(error)
    return SampleFailed(Failure(type(error).__name__, boundary, text, user_frames(error)))


def _end_if_cancelled() -> None:
    """End a task that was cancelled while it ran code of the user, whatever that code made of it."""
    if being_cancelled():
        raise asyncio.CancelledError


def _over_age(group: Group, oldest: Version) -> bool:
    """Whether older weights than `oldest` wrote a token of the group; one without tokens of the policy never is."""
    return any(version is not None and version < oldest for version in (s.oldest_version() for s in group.samples))
