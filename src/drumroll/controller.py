"""The training loop: one program that states the dataflow of reinforcement learning.

Everything around it (evaluation, files, terminal, interruption) is the session's; everything inside a stage is the
stage's. No helper may hide the order of the stages.
"""

from __future__ import annotations

from drumroll.batch import pack
from drumroll.config import RLConfig
from drumroll.rollout.scheduler import Rollouts
from drumroll.session import Session
from drumroll.stages import advantages, describe, infer, open_algorithm, publish, update


async def train(session: Session, config: RLConfig, rollouts: Rollouts) -> None:
    """Generate, score, train, publish, commit; until the steps are done."""
    workers = session.workers
    algorithm = open_algorithm(config)
    rollouts.listeners.append(session.open_ledger())
    session.watch(rollouts)
    temperature = config.rollout.temperature

    await session.start()
    try:
        while session.step < config.steps and not rollouts.exhausted():
            with session.stage("rollout"):
                groups = await rollouts.take(config.rollout.prompts)
            if not groups:
                break
            metrics = describe(groups, rollouts.version)
            metrics |= rollouts.stats.metrics(stable=config.deterministic) | rollouts.source.metrics()

            with session.stage("infer"):
                batch = pack(groups, oldest=rollouts.oldest_trainable())
                batch = await infer(workers, algorithm, batch, temperature)
                batch = advantages(algorithm, batch)

            with session.stage("train"):
                metrics |= await update(workers, algorithm, batch, temperature)

            with session.stage("publish"):
                await publish(workers, session.step + 1)
                rollouts.publish(session.step + 1)
            rollouts.trained(groups)

            await session.commit(metrics, [s for g in groups for s in g.samples] + rollouts.stats.failed)
    finally:
        await rollouts.close()
    await session.finish()
