"""Supervised training: imitate given answers, loss on the answer only, rows packed without padding.

The same learner, checkpoints and evaluation as reinforcement learning. Rows come from files, from generators, or from
a teacher's demonstrations (`drumroll.data.problems:demonstrations` is a systematically flawed one).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from drumroll import stages
from drumroll.algorithms.aggregations import token_mean
from drumroll.algorithms.losses import SFTLoss
from drumroll.batch import Batch, pack
from drumroll.components import open_renderer
from drumroll.config import SFTConfig
from drumroll.data.render import Renderer
from drumroll.data.source import PromptSource, Reader
from drumroll.errors import BadRow, DataError
from drumroll.learners import Update
from drumroll.pipelines import Pipeline
from drumroll.pipelines.held_out import measure, open_held_out
from drumroll.sample import Group, Owner, Prompt, Sample, Trace
from drumroll.session import Session
from drumroll.workers.runtime import Workers

ONLY_RL = ("train/mismatch", "train/kl_behaviour")


class Demonstrations:
    """Draws batches of prompts with their answers. A row that cannot be used is skipped, counted and told once a dataset."""

    def __init__(self, config: SFTConfig, renderer: Renderer, notice: Callable[[str], None] = lambda text: None) -> None:
        self.config = config
        self.source = PromptSource(config.data, config.seed, renderer, tolerant=True)
        self.skipped: Counter[str] = Counter()
        self._notice = notice
        self._sound = False
        longest = config.data.max_prompt_tokens
        self.held_out = open_held_out(config.held_out, renderer, self._held_out, longest, config.batch)

    def batch(self) -> Batch:
        """The next rows, packed."""
        return pack([self.group(index) for index in range(self.config.batch)])

    def group(self, index: int) -> Group:
        """The next row, at its place in the batch."""
        return self._imitated(*self._draw(), index)

    def _held_out(self, reader: Reader, prompt: Prompt, index: int) -> Group:
        return self._imitated(prompt, reader.answers(prompt), index)

    def _imitated(self, prompt: Prompt, answers: list[tuple[Owner, list[int]]], index: int) -> Group:
        trace, told = Trace(), list(prompt.tokens)
        longest = max(self.config.max_tokens, len(told) + 1)
        first = 1 if self.config.observations else len(told)  # nothing comes before the first token
        pieces = ((Owner.PROMPT, told[:first]), (Owner.PROMPT, told[first:]), *answers)
        for number, (owner, piece) in enumerate(pieces):
            tokens = piece[: longest - len(trace.tokens)]
            if owner is Owner.POLICY or (self.config.observations and number):
                trace.extend(tokens, Owner.POLICY, [0.0] * len(tokens), [0] * len(tokens))
            else:
                trace.extend(tokens, owner)
        return Group(prompt, index, [Sample(prompt, index, 0, traces=[trace], reward=0.0)])

    def _draw(self) -> tuple[Prompt, list[tuple[Owner, list[int]]]]:
        """The next usable row; the first must be one, and so must one of a thousand."""
        for _ in range(1000):
            prompt, reader = self.source.draw_with_reader()
            defect = prompt.defect
            try:
                if not defect:
                    answers, self._sound = reader.answers(prompt), True
                    return prompt, answers
            except BadRow as error:
                if not self._sound:
                    raise
                defect = str(error)
            if not self.skipped[reader.name]:
                self._notice(f"a row is skipped: {defect}")
            self.skipped[reader.name] += 1
        raise DataError(f"{reader.name}: 1000 rows in a row cannot be used; the last: {defect}")

    def state(self) -> dict[str, Any]:
        """The place in the row order, and the rows skipped before it."""
        return {**self.source.state(), "skipped": dict(self.skipped)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to a place in the row order."""
        self.source.restore(state)
        self.skipped = Counter(state.get("skipped", {}))
        self._sound = True


def open_demonstrations(config: SFTConfig, workers: Workers) -> Demonstrations:
    """The rows to imitate."""
    return Demonstrations(config, open_renderer(config, workers), lambda text: workers.notify(text))


async def train(session: Session, config: SFTConfig, demonstrations: Demonstrations) -> None:
    """Imitate batch after batch; until the steps are done."""
    workers = session.workers
    session.watch(demonstrations=demonstrations)
    if demonstrations.held_out:
        session.measure(partial(measure, workers, demonstrations.held_out))

    await session.start()
    while session.step < config.steps and not demonstrations.source.exhausted():
        async with session.stage("data"):
            batch = demonstrations.batch()
        async with session.stage("train"), workers.training():
            metrics = await stages.train(workers, workers.actor, workers.actor.put(Update(batch, SFTLoss(), token_mean)))
        async with session.stage("publish"):
            await workers.publish(session.step + 1)
        skipped = {"data/skipped": float(demonstrations.skipped.total())} if demonstrations.skipped else {}
        await session.commit({k: v for k, v in metrics.items() if k not in ONLY_RL} | skipped)
    await session.finish()


PIPELINE = Pipeline(SFTConfig, open_demonstrations, train)
