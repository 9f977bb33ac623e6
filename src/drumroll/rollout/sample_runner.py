"""Runs one sample: its turns of generation and environment, its rewards, and the retries of each.

A sample ends scored or failed. It waits for no other sample, except for rewards that score the group together, and knows
nothing of its group's fate, of batches or of admission: the scheduler starts it, and cancels its task to give it up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from drumroll.config.rollout import RolloutConfig
from drumroll.engines import Completion, Request, Sampling
from drumroll.engines.continuation import Continuation
from drumroll.engines.router import Router
from drumroll.errors import BadRow, being_cancelled, user_frames
from drumroll.lifecycle import OpenEpisode, SampleFailed, Transitions
from drumroll.rewards.group_calls import GroupCalls
from drumroll.rollout.stats import RunningStats
from drumroll.sample import GREEDY, Failure, Fate, Owner, Sample, State, Trace, sample_seed

Decode = Callable[[list[int]], str]


class Score(Protocol):
    """Gives a sample its reward or its failure, within a deadline of its own. Group rewards are called through `group`."""

    async def score(self, sample: Sample, group: GroupCalls | None = None) -> None: ...


class SampleRunner:
    """Takes samples from queued to scored or failed."""

    def __init__(
        self,
        config: RolloutConfig,
        seed: int,
        router: Router,
        scorer: Score,
        decode: Decode,
        spell: Decode,
        episodes: OpenEpisode,
        transitions: Transitions,
        stats: RunningStats,
        *,
        greedy: bool,
        closing: Sequence[int] = (),
    ) -> None:
        self.config = config
        self.seed = seed
        self.router = router
        self.scorer = scorer
        self.decode = decode
        self.spell = spell  # with special tokens, in which stop strings are looked for
        self.closing = closing  # the closing tag of thoughts
        self.episodes = episodes
        self.stats = stats
        self.greedy = greedy
        self._move = transitions.move

    async def run(self, sample: Sample, sampling: Sampling, group: GroupCalls) -> None:
        """Play, then score. The caller aborts a sample by giving it its fate and then cancelling this task."""
        try:
            if sample.prompt.defect:
                raise SampleFailed(Failure(BadRow.__name__, "data", sample.prompt.defect))
            await self._play(sample, sampling)
            await self._score(sample, group)
        except SampleFailed as failed:
            sample.failure = failed.failure
            self.stats.step.failed.append(sample)
            self._move(sample, Fate.FAILED)

    async def _play(self, sample: Sample, sampling: Sampling) -> None:
        """Alternate environment and generation until one of them ends the episode; without one, generate once."""
        episode = self.episodes(sample)
        if episode is None:
            trace = Trace()
            trace.extend(list(sample.prompt.tokens), Owner.PROMPT)
            sample.traces = [trace]
            await self._generate(sample, sampling)
            sample.completion = self.decode(trace.tokens[len(sample.prompt.tokens) :])
            return
        try:
            has_next_turn = await self._act(sample, episode.begin)
            while has_next_turn:
                self._move(sample, State.QUEUED)
                await self._generate(sample, sampling)
                has_next_turn = await self._act(sample, episode.answer)
        finally:
            episode.close()

    async def _generate(self, sample: Sample, sampling: Sampling) -> None:
        """Generate one turn. Continue an interrupted one from its tokens; retry a lost or late one within the budget."""
        trace, number = sample.traces[-1], len(sample.traces) - 1
        key = (sample.draw, sample.attempt)
        seed = sample_seed(self.seed, f"train/{number}" if number else "train", sample.draw, sample.index)
        order = sample.draw * (self.config.most_samples + self.greedy) + sample.index + self.greedy
        how = replace(sampling, temperature=0.0) if sample.index == GREEDY else sampling
        turn = Continuation(f"{sample.id}#{number}", tuple(trace.tokens), how, seed, self.spell, order, self.closing)
        limit = self.config.generation_timeout

        def send(request: Request) -> Awaitable[Completion]:
            return self.router.generate(request, key, order, limit, lambda: self._move(sample, State.GENERATING))

        def failed(error: Exception, tries: int) -> None:
            if tries > self.config.retries:
                raise _failed(error, "generation", limit) from None
            self.stats.step.retried += 1
            self._move(sample, State.QUEUED)

        async def grown(part: Completion) -> None:
            part.add_to(trace)
            sample.stop = part.stop
            if not turn.done:
                self._move(sample, State.QUEUED)

        await turn.run(send, failed=failed, grown=grown)

    async def _act(self, sample: Sample, action: Callable[[], Awaitable[bool]]) -> bool:
        """Let the environment begin or answer; return whether the policy has a next turn."""
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

    async def _score(self, sample: Sample, group: GroupCalls) -> None:
        """Score the sample; retry only after a deadline, because an exception would come again."""
        self._move(sample, State.SCORING)
        for tries in range(self.config.retries + 1):
            sample.failure = None
            await self.scorer.score(sample, group)
            _end_if_cancelled()
            if sample.failure is None or not sample.failure.passing or tries == self.config.retries:
                break
            self.stats.step.retried += 1
            self._move(sample, State.SCORING)
        if sample.failure is not None:
            raise SampleFailed(sample.failure)
        self.stats.lengths.finished(sample)
        self._move(sample, State.SCORED)


def _failed(error: BaseException, boundary: str, seconds: float = 0.0) -> SampleFailed:
    text = f"took longer than {seconds:g} s" if isinstance(error, TimeoutError) and seconds else str(error)
    return SampleFailed(Failure(type(error).__name__, boundary, text, user_frames(error)))


def _end_if_cancelled() -> None:
    """End a task that was cancelled while it ran the user's code, even if that code swallowed the cancellation."""
    if being_cancelled():
        raise asyncio.CancelledError
