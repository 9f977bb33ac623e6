"""Rollouts: draws prompts, starts their samples, scores each the moment it ends, hands out complete groups.

Plain asyncio against an injected source, generator, scorer and clock. It decides the fate of samples and tells
listeners of every transition; it writes nothing and knows no model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from drumroll.config.rollout import RolloutConfig
from drumroll.engines import Completion, Request, Sampling
from drumroll.errors import RolloutError
from drumroll.rollout.lifecycle import Event, Listener, Stage, legal
from drumroll.sample import Fate, Group, Owner, Prompt, Sample, State, Trace, sample_seed

Generate = Callable[[Request], Awaitable[Completion]]
Decode = Callable[[list[int]], str]


class Source(Protocol):
    """Where prompts come from."""

    def draw(self) -> Prompt: ...
    def exhausted(self) -> bool: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


class Score(Protocol):
    """What gives a sample its reward or its failure."""

    async def score(self, sample: Sample) -> None: ...


async def attempt(sample: Sample, request: Request, generate: Generate, decode: Decode) -> None:
    """Let the model write one completion, token by token as sampled."""
    completion = await generate(request)
    trace = Trace()
    trace.extend(list(request.tokens), Owner.PROMPT)
    trace.extend(completion.tokens, Owner.POLICY, completion.logprobs, completion.versions)
    sample.traces = [trace]
    sample.stop = completion.stop
    sample.completion = decode(completion.tokens)


class Rollouts:
    """The stream of complete, scored groups, in the order in which their prompts were drawn."""

    def __init__(
        self,
        config: RolloutConfig,
        seed: int,
        source: Source,
        generate: Generate,
        scorer: Score,
        decode: Decode,
        *,
        listeners: Sequence[Listener] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.seed = seed
        self.source = source
        self.generate = generate
        self.scorer = scorer
        self.decode = decode
        self.listeners = listeners
        self.clock = clock
        self.draws = 0
        self.failed: list[Sample] = []
        self.sampling = Sampling(config.temperature, config.max_tokens, tuple(config.stop))

    async def take(self, count: int) -> list[Group]:
        """The next `count` groups that can be trained on. A group with fewer than two scored samples is replaced."""
        self.failed = []
        groups = await asyncio.gather(*(self._group() for _ in range(count)))
        useful = [g for g in groups if g is not None]
        for _ in range(count):
            if len(useful) == count or not useful:
                break
            replacements = await asyncio.gather(*(self._group() for _ in range(count - len(useful))))
            useful += [g for g in replacements if g is not None]
        if not useful:
            self._explain_failure()
        return useful

    def trained(self, groups: Sequence[Group]) -> None:
        """Close the books on groups that an update has used."""
        for group in groups:
            for sample in group.samples:
                if isinstance(sample.state, State):
                    self._move(sample, Fate.TRAINED)

    def state(self) -> dict[str, Any]:
        """The place in the draw order, kept in checkpoints."""
        return {"draws": self.draws, "source": self.source.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the draw order where a checkpoint left it."""
        self.draws = state["draws"]
        self.source.restore(state["source"])

    async def _group(self) -> Group | None:
        prompt, draw = self.source.draw(), self.draws
        self.draws += 1
        samples = [Sample(prompt, draw, index) for index in range(self.config.samples)]
        async with asyncio.TaskGroup() as tasks:
            for sample in samples:
                tasks.create_task(self._live(sample))
        scored = [s for s in samples if s.state is State.SCORED]
        self.failed += [s for s in samples if s.state is Fate.FAILED]
        usable = len(scored) >= min(2, self.config.samples)
        for sample in scored:
            self._move(sample, State.ACCEPTED if usable else Fate.ABORTED)
        return Group(prompt, draw, scored) if usable else None

    async def _live(self, sample: Sample) -> None:
        """From queued to scored or failed."""
        seed = sample_seed(self.seed, "train", sample.draw, sample.index)
        self._move(sample, State.GENERATING)
        place = sample.draw * self.config.samples + sample.index
        request = Request(sample.id, sample.prompt.tokens, self.sampling, seed, place)
        await attempt(sample, request, self.generate, self.decode)
        self._move(sample, State.SCORING)
        await self.scorer.score(sample)
        self._move(sample, Fate.FAILED if sample.failure else State.SCORED)

    def _move(self, sample: Sample, after: Stage) -> None:
        before = sample.state
        assert legal(before, after), f"sample {sample.id} cannot go from {before} to {after}"
        now = self.clock()
        sample.state = after
        sample.times[after] = now
        event = Event(now, sample, before, after)
        for listener in self.listeners:
            listener(event)

    def _explain_failure(self) -> None:
        first = self.failed[0]
        raise RolloutError(
            f"all {len(self.failed)} samples of the step failed, so there is nothing to train on. "
            f"The first, {first.id} of domain '{first.prompt.domain}': {first.failure}"
        )
