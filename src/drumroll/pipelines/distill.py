"""Distillation: make the divergence from a teacher small, on given answers and on the policy's own samples.

A step trains on one or the other, as `on_policy` says. Both go through the teacher's pass and the same update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from drumroll.algorithms.aggregations import token_mean
from drumroll.algorithms.losses import DistillLoss
from drumroll.batch import Batch
from drumroll.components import open_rollouts
from drumroll.config import DistillConfig
from drumroll.config.distill import demonstrations
from drumroll.data.marking import shown
from drumroll.data.render import Renderer
from drumroll.errors import RolloutError
from drumroll.learners import Metrics
from drumroll.pipelines import Pipeline
from drumroll.pipelines.held_out import losses, measure_with
from drumroll.pipelines.sft import ONLY_RL, Demonstrations, open_demonstrations
from drumroll.rollout.scheduler import Rollouts
from drumroll.sample import Group
from drumroll.session import Session
from drumroll.stages import describe, infer, pack
from drumroll.stages import train as train_role
from drumroll.workers.batch_builder import BatchBuilder
from drumroll.workers.runtime import Workers

Parts = tuple[Rollouts | None, Demonstrations | None]


def open_parts(config: DistillConfig, workers: Workers) -> Parts:
    """The stream of the policy's own samples, and the rows with answers; those that `on_policy` and `held_out` need."""
    rollouts = open_rollouts(config, workers) if config.on_policy > 0 else None
    answered = config.on_policy < 1 or config.held_out
    return rollouts, open_demonstrations(demonstrations(config, config), workers) if answered else None


async def train(session: Session, config: DistillConfig, parts: Parts) -> None:
    """Take a batch, ask the teacher, train, publish, commit; until the steps are done."""
    workers, (rollouts, rows) = session.workers, parts
    if rollouts is not None:
        rollouts.listeners.append(session.open_ledger())
        session.watch(rollouts=rollouts)
    if rows is not None:
        session.watch(demonstrations=rows)
        measure_with(session, rows.held_out, partial(losses, workers, rows.held_out, config.batch))

    await session.start()
    try:
        while session.step < config.steps:
            own = config.is_own(session.step)
            if (taken := await _take(session, config, parts, own=own)) is None:
                break
            batch, groups, metrics = taken

            async with workers.training():
                metrics |= await _update(session, config, batch, own=own)

            async with session.stage("publish"):
                await workers.publish(session.step + 1)
                if rollouts is not None:
                    rollouts.publish(session.step + 1)
            failed = []
            if rollouts is not None and own:
                rollouts.trained(groups)
                failed = rollouts.stats.failed
            await session.commit(metrics, [s for g in groups for s in g.everyone()] + failed)
    except RolloutError:
        session.record_failed(rollouts.failed if rollouts is not None else [])
        raise
    finally:
        if rollouts is not None:
            await rollouts.close()
    await session.finish()


async def _take(
    session: Session, config: DistillConfig, parts: Parts, *, own: bool
) -> tuple[Batch, Sequence[Group], Metrics] | None:
    """The batch of a step, with the groups of the policy's own samples; None when the rows are used up."""
    workers, (rollouts, rows) = session.workers, parts
    if own:
        assert rollouts is not None
        if rollouts.exhausted():
            return None
        async with session.stage("rollout"):
            groups = await rollouts.take(config.rollout.prompts)
            metrics = describe(groups, rollouts.version) if groups else {}
            metrics |= rollouts.stats.metrics(stable=config.deterministic) | rollouts.source.metrics()
            if not config.is_scored():
                metrics = {name: value for name, value in metrics.items() if not name.startswith("reward/")}
            return (await pack(workers, groups, rollouts.oldest_trainable()), groups, metrics) if groups else None
    assert rows is not None
    async with session.stage("data"):
        given = rows.batch()
        return None if given is None else (workers.batch_builder.put(given), (), rows.metrics())


async def _update(session: Session, config: DistillConfig, batch: Batch, *, own: bool) -> Metrics:
    """The teacher's pass and the update."""
    workers, temperature = session.workers, config.rollout.temperature
    async with session.stage("infer"):
        batch = await infer(workers, batch, temperature)
    async with session.stage("train"):
        loss = DistillLoss(config.divergence, own, config.teacher, config.sft)
        work = await workers.batch_builder.keep(0, BatchBuilder.work, batch, loss, token_mean, temperature)
        metrics = await train_role(workers, workers.actor, work)
    return metrics if own else {name: value for name, value in metrics.items() if name not in ONLY_RL}


def show(config: DistillConfig, renderer: Renderer) -> Iterator[str]:
    """What is compared with the teacher: of the prompt nothing; of a given answer every token, in brackets."""
    if config.on_policy > 0:
        yield "trained: the policy's own completion, up to and including the end of the turn; no token of the prompt"
    if config.on_policy < 1:
        row = Demonstrations(demonstrations(config, config), renderer).groups()[0]
        yield from shown(renderer.tokenizer, row.samples[0].traces[0], "the first row with a given answer")


PIPELINE = Pipeline(DistillConfig, open_parts, train, show)
