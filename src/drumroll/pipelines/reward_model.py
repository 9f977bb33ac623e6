"""Training of a reward model on pairs of a chosen and a rejected answer (Bradley-Terry).

The model's head gives one score at the last token of an answer. Nothing is generated: held-out pairs measure the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from drumroll import stages
from drumroll.algorithms.aggregations import unit_mean
from drumroll.algorithms.losses import RewardLoss, Scores
from drumroll.batch import Batch
from drumroll.components import open_renderer
from drumroll.config import RewardModelConfig
from drumroll.data.marking import marked
from drumroll.data.preferences import HeldOut, Preferences, held_out, packed
from drumroll.data.render import Renderer
from drumroll.learners import Learner, Metrics
from drumroll.pipelines import Pipeline
from drumroll.runfiles.calibration import Calibration, write_calibration
from drumroll.sample import Group, Owner, Trace
from drumroll.session import Session
from drumroll.workers.batch_builder import BatchBuilder
from drumroll.workers.runtime import Workers

Parts = tuple[Preferences, dict[str, HeldOut]]


def open_pairs(config: RewardModelConfig, workers: Workers) -> Parts:
    """The pairs, in training and held out."""
    renderer = open_renderer(config, workers)
    return Preferences(config, renderer, lambda text: workers.notify(text)), held_out(config, renderer)


def scored(groups: Sequence[Group]) -> Batch:
    """Pairs as a batch in which the last token of each answer, where its score is, is the only trained one."""
    batch = packed(groups, pairs=True)
    last = torch.zeros_like(batch.mask).index_fill_(0, batch.lengths.cumsum(0) - 1, True)
    margins = [group.samples[0].rewards.get("margin", 0.0) for group in groups for _ in group.samples]
    return batch.with_(mask=last, margins=torch.tensor(margins))


class Measurement:
    """Loss, accuracy and calibration on held-out pairs."""

    def __init__(self, session: Session, config: RewardModelConfig, sets: dict[str, HeldOut]) -> None:
        self.session, self.loss, self.sets = session, RewardLoss(config.center), sets

    async def __call__(self) -> Metrics:
        found: dict[str, Calibration] = {}
        metrics: Metrics = {}
        for name, each in self.sets.items():
            scores = await self._scores(each.groups)
            per_answer, stats = self.loss(scores)
            metrics[f"eval/{name}/loss"] = float(per_answer.mean())
            metrics |= {f"eval/{name}/{key}": float(column.mean()) for key, column in stats.items()}
            found[name] = Calibration.of(stats["margin"].tolist())
            metrics[f"eval/{name}/calibration_error"] = found[name].error
            metrics |= by_domain(f"eval/{name}", [group.prompt.domain for group in each.groups], stats["accuracy"])
        write_calibration(self.session.run.path, self.session.step, found)
        return metrics

    async def _scores(self, groups: Sequence[Group]) -> Scores:
        workers, pairs = self.session.workers, scored(groups)
        batch = workers.batch_builder.put(pairs)
        async with workers.training():
            parts = await workers.actor.scatter(Learner.infer, batch)
        numbers = torch.tensor(await workers.batch_builder.call(0, BatchBuilder.numbers, batch, *parts))
        return Scores(numbers, pairs.rewards > 0, pairs.group_of, len(groups), pairs.margins)


def by_domain(area: str, domains: Sequence[str], accuracy: torch.Tensor) -> Metrics:
    """The accuracy on the pairs of each domain, if there are several."""
    names = sorted(set(domains)) if len(set(domains)) > 1 else []
    rows = {name: [i for i, domain in enumerate(domains) if domain == name] for name in names}
    return {f"{area}/{name}/accuracy": float(accuracy[own].mean()) for name, own in rows.items()}


async def train(session: Session, config: RewardModelConfig, parts: Parts) -> None:
    """Compare batch after batch; until the steps, or the epochs, are done."""
    workers, (rows, sets), loss = session.workers, parts, RewardLoss(config.center)
    session.watch(preferences=rows)
    if sets:
        session.measure(Measurement(session, config, sets))
    for note in (each.note for each in sets.values() if each.note):
        workers.notify(note)

    await session.start()
    while session.step < config.steps:
        async with session.stage("data"):
            groups = rows.groups()
        if not groups:
            break
        async with session.stage("train"), workers.training():
            batch = workers.batch_builder.put(scored(groups))
            work = await workers.batch_builder.keep(0, BatchBuilder.work, batch, loss, unit_mean)
            metrics = await stages.train(workers, workers.actor, work)
        read = sum(len(sample.traces[0].tokens) for group in groups for sample in group.samples)
        await session.commit(metrics | rows.metrics() | {"train/tokens": float(read)})
    await session.finish()


def show(config: RewardModelConfig, renderer: Renderer) -> Iterator[str]:
    """The first pair, with the token that is scored in brackets."""
    rows = Preferences(config.model_copy(update={"batch": 1}), renderer)
    for sample in rows.groups()[0].samples:
        trace = sample.traces[0]
        kind = "chosen" if sample.reward else "rejected"
        last = Trace(trace.tokens, [Owner.PROMPT] * (len(trace.tokens) - 1) + [Owner.POLICY])
        yield f"{kind}: {len(trace.tokens)} tokens, scored at the last (in brackets)"
        yield from (f"  {line}" for line in marked(renderer.tokenizer, last).splitlines())


PIPELINE = Pipeline(RewardModelConfig, open_pairs, train, show)
