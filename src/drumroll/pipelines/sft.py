"""Supervised training: imitate given answers, loss on chosen turns only, rows packed without padding.

The same learner, checkpoints and evaluation as reinforcement learning. Rows come from files, from generators, from the
samples of a run, or from a teacher's demonstrations (`drumroll.data.problems:demonstrations` is a systematically flawed one).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from drumroll import stages
from drumroll.algorithms.aggregations import token_mean
from drumroll.algorithms.losses import SFTLoss
from drumroll.components import open_renderer
from drumroll.config import SFTConfig
from drumroll.data.demonstrations import Demonstrations
from drumroll.data.marking import shown
from drumroll.data.render import Renderer
from drumroll.learners import Update
from drumroll.pipelines import Pipeline
from drumroll.pipelines.held_out import losses, measure_with
from drumroll.session import Session
from drumroll.workers.runtime import Workers

ONLY_RL = ("train/mismatch", "train/kl_behaviour")


def open_demonstrations(config: SFTConfig, workers: Workers) -> Demonstrations:
    """The rows to imitate."""
    return Demonstrations(config, open_renderer(config, workers), lambda text: workers.notify(text))


async def train(session: Session, config: SFTConfig, demonstrations: Demonstrations) -> None:
    """Imitate batch after batch; until the steps are done."""
    workers = session.workers
    session.watch(demonstrations=demonstrations)
    measure_with(session, demonstrations.held_out, partial(losses, workers, demonstrations.held_out, config.batch))

    await session.start()
    while session.step < config.steps:
        async with session.stage("data"):
            batch = demonstrations.batch()
        if batch is None:
            break
        async with session.stage("train"), workers.training():
            metrics = await stages.train(workers, workers.actor, workers.actor.put(Update(batch, SFTLoss(), token_mean)))
        async with session.stage("publish"):
            await workers.publish(session.step + 1)
        await session.commit({k: v for k, v in metrics.items() if k not in ONLY_RL} | demonstrations.metrics())
    await session.finish()


def show(config: SFTConfig, renderer: Renderer) -> Iterator[str]:
    """The first row, with the tokens that are trained in brackets."""
    for group in Demonstrations(config.model_copy(update={"batch": 1}), renderer).groups():
        for trace in group.samples[0].traces:
            yield from shown(renderer.tokenizer, trace, "row")


PIPELINE = Pipeline(SFTConfig, open_demonstrations, train, show)
