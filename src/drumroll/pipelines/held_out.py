"""Loss and perplexity on held-out rows with answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from drumroll.algorithms.aggregations import token_mean
from drumroll.algorithms.losses import SFTLoss
from drumroll.batch import Batch, pack
from drumroll.config.eval import HeldOutConfig
from drumroll.data.render import Renderer
from drumroll.data.rows import read
from drumroll.data.source import Reader, no_columns
from drumroll.errors import DataError
from drumroll.learners import Learner, Metrics
from drumroll.sample import Group, Prompt
from drumroll.workers.batch_builder import BatchBuilder
from drumroll.workers.runtime import Workers

HeldOut = Mapping[str, Sequence[Batch]]
"""The rows of each set, in batches."""
Imitate = Callable[[Reader, Prompt, int], Group]
"""Makes a row to imitate: its reader, its prompt and its place."""


def open_held_out(sets: Mapping[str, HeldOutConfig], renderer: Renderer, imitate: Imitate, longest: int, batch: int) -> HeldOut:
    """Read all sets, each row once. A row that cannot be used raises an error: dropping it would change what is measured."""
    found = {}
    for name, each in sets.items():
        groups = list(_rows(Reader(f"held_out.{name}", each, renderer, no_columns), imitate, longest))
        if not groups:
            raise DataError(f"held_out.{name} holds no rows.")
        found[name] = [pack(groups[i : i + batch]) for i in range(0, len(groups), batch)]
    return found


def _rows(reader: Reader, imitate: Imitate, longest: int) -> Iterator[Group]:
    for number, row in enumerate(read(reader.name, reader.config, seed=0)):
        prompt = reader.prompt(row, number)
        if len(prompt.tokens) > longest:
            raise DataError(
                f"{reader.name}: the prompt of row {number + 1} has {len(prompt.tokens)} tokens, more than data.max_prompt_tokens={longest}; "
                "raise that, or leave long rows out of the set."
            )
        yield imitate(reader, prompt, number)


async def measure(workers: Workers, sets: HeldOut) -> Metrics:
    """The mean over all trained tokens of each set, however they are cut into batches."""
    metrics: Metrics = {}
    async with workers.training():
        for name, batches in sets.items():
            counts = [int(batch.mask.sum()) for batch in batches]
            losses = [await _loss(workers, batch) for batch in batches]
            loss = math.fsum(each * count for each, count in zip(losses, counts, strict=True)) / sum(counts)
            metrics |= {f"eval/{name}/loss": loss, f"eval/{name}/perplexity": math.exp(min(loss, 700.0))}
    return metrics


async def _loss(workers: Workers, batch: Batch) -> float:
    batch = await with_policy(workers, workers.batch_builder.put(batch))
    return (await workers.batch_builder.call(0, BatchBuilder.measure, batch, SFTLoss(), token_mean))["loss"]


async def with_policy(workers: Workers, batch: Batch) -> Batch:
    """A reference to the batch with the policy's present log-probs as `old`."""
    parts = await workers.actor.scatter(Learner.infer, batch, 1.0)
    return await workers.batch_builder.keep(0, BatchBuilder.join, batch, "old", *parts)
