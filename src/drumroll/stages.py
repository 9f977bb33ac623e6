"""The stages of the loop as public functions: use them in any order, replace one, or write the loop out yourself.

`examples/loop.py` does exactly that and gets the same losses as the controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from drumroll.algorithms import OLD, REFERENCE, TEACHER, VALUES
from drumroll.batch import Batch
from drumroll.envs.metrics import describe_episodes
from drumroll.learners import Learner, Metrics, Update
from drumroll.sample import Group, Version
from drumroll.workers.batch_builder import BatchBuilder, Memory
from drumroll.workers.group import WorkerGroup
from drumroll.workers.runtime import Workers

__all__ = ["advantages", "describe", "infer", "pack", "publish", "train", "update"]


# --- The stages of a step. A batch is a reference: on a cluster its tensors never come here. ---


async def pack(workers: Workers, groups: Sequence[Group], oldest: Version = 0) -> Batch:
    """Groups as packed tensors."""
    return await workers.batch_builder.keep(0, BatchBuilder.pack, list(groups), oldest)


async def infer(workers: Workers, batch: Batch, temperature: float) -> Batch:
    """Only the forward passes that the algorithm needs, each over all ranks of its role."""
    if OLD in workers.needs:
        batch = await _join(workers, batch, "old", await workers.actor.scatter(Learner.infer, batch, temperature))
    if REFERENCE in workers.needs:
        assert workers.reference is not None, "a KL term needs the reference role"
        parts = await workers.reference.scatter(Learner.infer_reference, batch, temperature)
        batch = await _join(workers, batch, "reference", parts)
    if TEACHER in workers.needs:
        assert workers.teacher is not None, "a KL term needs the teacher role"
        batch = await _join(workers, batch, "teacher", await workers.teacher.scatter(Learner.infer, batch, temperature))
    if VALUES in workers.needs:
        assert workers.critic is not None, "GAE needs the critic role"
        batch = await _join(workers, batch, "values", await workers.critic.scatter(Learner.infer, batch))
    return batch


async def _join(workers: Workers, batch: Batch, column: str, parts: Sequence[Tensor]) -> Batch:
    return await workers.batch_builder.keep(0, BatchBuilder.join, batch, column, *parts)


async def advantages(workers: Workers, batch: Batch, memory: Memory) -> tuple[Batch, Metrics]:
    """Rewards become one advantage per trained token; what the algorithm's parts remember is updated."""
    batch = await workers.batch_builder.keep(0, BatchBuilder.advantages, batch, dict(memory))
    metrics, after = await workers.batch_builder.call(0, BatchBuilder.report)
    memory.update(after)
    return batch, metrics


async def update(
    workers: Workers, batch: Batch, temperature: float, *, idle: bool = False, demonstrations: Batch | None = None
) -> Metrics:
    """Train the critic, if there is one, and the actor on a batch; `idle` leaves the actor as it is.

    With `demonstrations` the actor imitates these too, by `algorithm.sft`.
    """
    metrics: Metrics = {}
    if workers.critic is not None:
        metrics |= await train(workers, workers.critic, await workers.batch_builder.keep(0, BatchBuilder.critic_work, batch))
    work = await workers.batch_builder.keep(0, BatchBuilder.actor_work, batch, temperature, idle, demonstrations)
    return metrics | await train(workers, workers.actor, work)


async def train(workers: Workers, group: WorkerGroup[Learner], work: Update) -> Metrics:
    """Update a role on all its ranks."""
    return await workers.batch_builder.call(0, BatchBuilder.metrics, *await group.scatter(Learner.update, work))


async def publish(workers: Workers, version: int) -> None:
    """Give the engines the actor's new weights."""
    await workers.publish(version)


def describe(groups: Sequence[Group], version: int, *, thoughts: bool = False) -> dict[str, float]:
    """What the groups trained on at a version look like, as metrics. `thoughts`: whether they have a limit."""
    samples = [s for g in groups for s in g.samples]
    lengths, ages = [s.policy_length() for s in samples], [s.oldest_version() for s in samples]
    metrics: dict[str, float] = {
        "rollout/tokens": float(sum(lengths)),
        "rollout/length": sum(lengths) / len(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/truncated": sum(s.stop in ("length", "context") for s in samples) / len(samples),
        "rollout/staleness": sum(version - oldest for oldest in ages if oldest is not None) / len(samples),
        "rollout/zero_variance": sum(len(set(g.rewards)) < 2 for g in groups) / len(groups),
    }
    if thoughts:
        metrics["rollout/thoughts_cut"] = sum(s.thought_was_cut() for s in samples) / len(samples)
    by_domain: dict[str, list[Any]] = {}
    for sample in samples:
        by_domain.setdefault(sample.prompt.domain, []).append(sample)
    for domain, own in sorted(by_domain.items()):
        metrics[f"reward/{domain}"] = sum(s.reward for s in own) / len(own)
        parts = sorted({name for s in own for name in s.rewards})
        for part in parts if len(parts) > 1 else ():
            values = [s.rewards[part] for s in own if part in s.rewards]
            metrics[f"reward/{domain}/{part}"] = sum(values) / len(values)
    return metrics | describe_episodes(samples)
