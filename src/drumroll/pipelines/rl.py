"""The training loop: one program that states the dataflow of reinforcement learning.

Everything around it (evaluation, files, terminal, interruption) is the session's; everything inside a stage is the
stage's. No helper may hide the order of the stages.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumroll.components import open_rollouts
from drumroll.config import RLConfig
from drumroll.config.distill import demonstrations
from drumroll.data.marking import shown
from drumroll.data.render import Renderer
from drumroll.errors import RolloutError
from drumroll.pipelines import Pipeline
from drumroll.pipelines.sft import Demonstrations, open_demonstrations
from drumroll.rollout.scheduler import Rollouts
from drumroll.session import Remembered, Session
from drumroll.stages import advantages, describe, infer, pack, publish, update
from drumroll.workers.batch_builder import BatchBuilder
from drumroll.workers.runtime import Workers

Parts = tuple[Rollouts, Demonstrations | None]


def open_parts(config: RLConfig, workers: Workers) -> Parts:
    """The stream of scored groups, and the rows to imitate beside it."""
    rows = config.demonstrations
    given = None if rows is None else open_demonstrations(demonstrations(config, rows), workers)
    return open_rollouts(config, workers), given


async def train(session: Session, config: RLConfig, parts: Parts) -> None:
    """Generate, score, train, publish, commit; until the steps are done."""
    workers, (rollouts, rows) = session.workers, parts
    memory = Remembered(await workers.batch_builder.call(0, BatchBuilder.start))
    rollouts.listeners.append(session.open_ledger())
    session.watch(rollouts=rollouts, algorithm=memory, **({} if rows is None else {"demonstrations": rows}))
    temperature = config.rollout.temperature

    await session.start()
    try:
        while session.step < config.steps and not rollouts.exhausted():
            async with session.stage("rollout"):
                groups = await rollouts.take(config.rollout.prompts)
            if not groups:
                break
            metrics = describe(groups, rollouts.version, thoughts=config.rollout.limits_thoughts)
            metrics |= rollouts.stats.metrics(stable=config.deterministic) | rollouts.source.metrics()

            async with workers.training():  # devices shared with generation are given over
                async with session.stage("infer"):
                    batch = await pack(workers, groups, oldest=rollouts.oldest_trainable())
                    batch = await infer(workers, batch, temperature)
                    batch, found = await advantages(workers, batch, memory)
                    metrics |= found

                async with session.stage("train"):
                    idle = session.step < config.algorithm.critic_first
                    drawn = None if rows is None or idle else rows.batch()
                    given = None if drawn is None else workers.batch_builder.put(drawn)
                    metrics |= await update(workers, batch, temperature, idle=idle, demonstrations=given)

            async with session.stage("publish"):
                await publish(workers, session.step + 1)
                rollouts.publish(session.step + 1)
            rollouts.trained(groups)

            await session.commit(metrics, [s for g in groups for s in g.everyone()] + rollouts.stats.failed)
    except RolloutError:
        session.record_failed(rollouts.failed)
        raise
    finally:
        await rollouts.close()
    await session.finish()


def show(config: RLConfig, renderer: Renderer) -> Iterator[str]:
    """What is trained: of the prompt nothing; of a row to imitate its answer, in brackets."""
    own = "the turns that the policy writes, not the observations between them" if config.has_episodes() else "the completion"
    yield f"trained: {own}, up to and including the end of the turn; no token of the prompt"
    if config.demonstrations is not None:
        row = Demonstrations(demonstrations(config, config.demonstrations), renderer).groups()[0]
        yield from shown(renderer.tokenizer, row.samples[0].traces[0], "the first row to imitate")


PIPELINE = Pipeline(RLConfig, open_parts, train, show)
