"""Evaluates the model on held-out sets: avg@k and pass@k, each set with its own sampling parameters."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from drumroll.config.environment import NONE, EnvironmentConfig
from drumroll.config.eval import EvalConfig, EvalSetConfig
from drumroll.config.rollout import RolloutConfig
from drumroll.data.render import Renderer
from drumroll.data.rows import read
from drumroll.data.source import Reader, RequiredColumns
from drumroll.engines import Completion, EngineLost, Request, Sampling
from drumroll.engines.continuation import Continuation
from drumroll.engines.router import Router
from drumroll.envs.episodes import Episodes
from drumroll.envs.metrics import measures
from drumroll.errors import DataError, NoEngines
from drumroll.lifecycle import SampleFailed
from drumroll.rewards.group_calls import GroupCalls
from drumroll.rollout.sample_runner import Decode, Score
from drumroll.sample import Owner, Prompt, Sample, Trace, sample_seed


@dataclass
class EvalSet:
    """A held-out set, read once. Its problems do not depend on the run's seed."""

    name: str
    config: EvalSetConfig
    prompts: list[Prompt]


def open_sets(
    config: EvalConfig,
    renderer: Renderer,
    required: RequiredColumns,
    longest: int,
    environment: EnvironmentConfig = NONE,
) -> list[EvalSet]:
    """Read all sets. A prompt longer than `longest` raises an error: dropping it would change what is measured."""
    sets = []
    for name, each in config.sets.items():
        reader = Reader(f"eval.sets.{name}", each, renderer, required, environment)
        rows = list(read(reader.name, each, seed=0))
        if not rows:
            raise DataError(f"eval.sets.{name} holds no rows.")
        prompts = [reader.prompt(row, i) for i, row in enumerate(rows)]
        for i, prompt in enumerate(prompts):
            if len(prompt.tokens) > longest:
                raise DataError(
                    f"eval.sets.{name}: the prompt of row {i + 1} has {len(prompt.tokens)} tokens, more than data.max_prompt_tokens={longest}; "
                    "raise that, or leave long rows out of the set."
                )
        sets.append(EvalSet(name, each, prompts))
    return sets


class Evaluator:
    """Generates and scores the held-out sets."""

    def __init__(
        self,
        config: EvalConfig,
        sets: list[EvalSet],
        router: Router,
        scorer: Score,
        decode: Decode,
        seed: int,
        rollout: RolloutConfig,
        episodes: Episodes | None = None,
        spell: Decode | None = None,
        closing: Sequence[int] = (),
    ) -> None:
        self.config = config
        self.sets = sets
        self.router = router
        self.scorer = scorer
        self.decode = decode
        self.spell = spell or decode  # includes special tokens, for finding stop strings
        self.closing = closing  # the closing tag of thoughts
        self.seed = seed
        self.rollout = rollout
        self.episodes = episodes

    async def run(self, step: int) -> tuple[dict[str, float], list[Sample]]:
        """Return the metrics of all sets, and their samples (without the additional `sampled` ones)."""
        metrics: dict[str, float] = {}
        samples: list[Sample] = []
        for each in self.sets:
            config = each.config
            longest, stop = config.max_tokens or self.rollout.length_limit, tuple(self.rollout.stop)
            thinking = config.max_thinking_tokens or self.rollout.max_thinking_tokens
            own = Sampling(config.temperature, longest, stop, config.top_p, config.top_k, config.min_p, max_thinking=thinking)
            found = await self._measure(each, own, config.samples, f"eval/{each.name}/{step}")
            metrics |= self._metrics(f"eval/{each.name}", found, config.samples)
            if thinking is not None:
                metrics[f"eval/{each.name}/thoughts_cut"] = sum(s.thought_was_cut() for s in found) / len(found)
            samples += found
            if config.sampled:
                plain = Sampling(1.0, longest, stop, max_thinking=thinking)
                sampled = await self._measure(each, plain, config.sampled, f"sampled/{each.name}/{step}")
                metrics |= self._metrics(f"eval/{each.name}/sampled", sampled, config.sampled)
        return metrics, samples

    async def _measure(self, each: EvalSet, sampling: Sampling, count: int, stream: str) -> list[Sample]:
        samples = [Sample(prompt, draw, i) for draw, prompt in enumerate(each.prompts) for i in range(count)]
        groups = [GroupCalls(range(count)) for _ in each.prompts]

        async def one(sample: Sample) -> None:
            await self.attempt(sample, sampling, count, each.name, stream)
            if sample.failure is None:
                await self._score(sample, groups[sample.draw])
            groups[sample.draw].leave(sample)

        await asyncio.gather(*(one(sample) for sample in samples))
        return samples

    async def _score(self, sample: Sample, group: GroupCalls) -> None:
        """Score a sample; retry after a time-out, because a failure counts as 0 and a busy machine is no wrong answer."""
        for _ in range(self.rollout.retries + 1):
            sample.failure = None
            await self.scorer.score(sample, group)
            if sample.failure is None or not sample.failure.passing:
                break

    async def attempt(self, sample: Sample, sampling: Sampling, count: int, name: str, stream: str) -> None:
        """Generate one completion, or play one episode, which starts the same at every step."""
        episode = self.episodes.open(sample, f"eval/{name}", sampling) if self.episodes is not None else None
        if episode is None:
            trace = Trace()
            trace.extend(list(sample.prompt.tokens), Owner.PROMPT)
            sample.traces = [trace]
            await self._turn(sample, sampling, count, stream)
            sample.completion = self.decode(trace.tokens[len(sample.prompt.tokens) :])
            return
        try:
            has_next_turn = await episode.begin()
            while has_next_turn:
                await self._turn(sample, sampling, count, stream)
                has_next_turn = await episode.answer()
        except SampleFailed as failed:
            sample.failure = failed.failure
        finally:
            episode.close()

    async def _turn(self, sample: Sample, sampling: Sampling, count: int, stream: str) -> None:
        """Let the policy write at the end of the last trace. If its engine is lost, another engine continues the turn."""
        trace, number = sample.traces[-1], len(sample.traces) - 1
        seed = sample_seed(self.seed, f"{stream}/{number}" if number else stream, sample.draw, sample.index)
        order = sample.draw * count + sample.index
        name = f"{stream}/{sample.id}#{number}"

        def send(request: Request) -> Awaitable[Completion]:
            return self.router.generate(request, sample.prompt.id, order, math.inf, lambda: None)

        def failed(error: Exception, tries: int) -> None:
            if not isinstance(error, EngineLost):
                raise error
            if self.router.hopeless is not None:
                raise NoEngines(f"the evaluation cannot go on: {self.router.hopeless}") from None

        turn = Continuation(name, tuple(trace.tokens), sampling, seed, self.spell, order, self.closing)
        done = await turn.run(send, failed=failed)
        done.add_to(trace)
        sample.stop = done.stop

    def _metrics(self, name: str, samples: list[Sample], count: int) -> dict[str, float]:
        """Return the metrics of a set. A failed sample counts as 0: an evaluation must not improve by failing."""
        rewards = [s.reward or 0.0 for s in samples]
        metrics = {name: sum(rewards) / len(rewards)}
        if count > 1:
            groups = [rewards[i : i + count] for i in range(0, len(rewards), count)]
            passed = [max(g) > self.config.pass_threshold for g in groups]
            metrics[f"{name}/pass@{count}"] = sum(passed) / len(passed)
        return metrics | {f"{name}/{kind}": value for kind, value in measures(samples).items()}
