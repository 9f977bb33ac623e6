"""Loss and perplexity on held-out rows with answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from drumroll.algorithms.aggregations import token_mean
from drumroll.algorithms.losses import SFTLoss
from drumroll.batch import Batch, pack
from drumroll.data.held_out import HeldOut
from drumroll.learners import Learner, Metrics
from drumroll.session import Session
from drumroll.workers.batch_builder import BatchBuilder
from drumroll.workers.runtime import Workers


def measure_with(session: Session, sets: Mapping[str, HeldOut], function: Callable[[], Coroutine[Any, Any, Metrics]]) -> None:
    """Measure held-out sets with every evaluation, by a function; tell what was dropped of them."""
    if sets:
        session.measure(function)
    for each in sets.values():
        if each.note:
            session.workers.notify(each.note)


async def losses(workers: Workers, sets: Mapping[str, HeldOut], batch: int) -> Metrics:
    """The mean over all trained tokens of each set, however many batches of so many rows it takes."""
    metrics: Metrics = {}
    async with workers.training():
        for name, each in sets.items():
            total = count = 0.0
            for i in range(0, len(each.groups), batch):
                packed = pack(each.groups[i : i + batch])
                tokens = int(packed.mask.sum())
                total, count = total + tokens * await _loss(workers, packed), count + tokens
            loss = total / count
            metrics |= {f"eval/{name}/loss": loss, f"eval/{name}/perplexity": math.exp(min(loss, 700.0))}
    return metrics


async def _loss(workers: Workers, batch: Batch) -> float:
    batch = await with_policy(workers, workers.batch_builder.put(batch))
    return (await workers.batch_builder.call(0, BatchBuilder.measure, batch, SFTLoss(), token_mean))["loss"]


async def with_policy(workers: Workers, batch: Batch) -> Batch:
    """A reference to the batch with the policy's present log-probs as `old`."""
    parts = await workers.actor.scatter(Learner.infer, batch, 1.0)
    return await workers.batch_builder.keep(0, BatchBuilder.join, batch, "old", *parts)
