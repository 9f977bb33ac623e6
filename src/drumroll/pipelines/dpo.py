"""Training on preferences: pairs of a chosen and a rejected answer, or single answers that were called good or bad.

The two answers of a pair are samples of one group, so the learner computes their prompt once, and of one unit, so nothing
separates them. The reference's log-probs come from a role, from the actor without its adapters, or from a file that is
computed before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from drumroll import stages
from drumroll.algorithms import PreferenceLoss
from drumroll.algorithms.aggregations import unit_mean
from drumroll.batch import Batch, pack
from drumroll.components import open_renderer
from drumroll.config import PreferenceConfig
from drumroll.data.held_out import HeldOut
from drumroll.data.marking import shown
from drumroll.data.preferences import Preferences, held_out, mismatched, packed
from drumroll.data.render import Renderer
from drumroll.errors import StoreError
from drumroll.learners import Learner, Metrics
from drumroll.pipelines import Pipeline
from drumroll.pipelines.held_out import measure_with, with_policy
from drumroll.runfiles.reference import REFERENCE_FILE, ReferenceLogprobs
from drumroll.sample import Group
from drumroll.session import Session
from drumroll.workers.batch_builder import BatchBuilder
from drumroll.workers.runtime import Workers

ONLY_RL = ("mismatch", "kl", "behaviour_ratio")
"""Diagnostics that compare with the policy that sampled, which is not known here."""


@dataclass
class Parts:
    """What a run is made of: rows to train on, held-out rows by name, and the renderer that read them."""

    rows: Preferences
    held_out: dict[str, HeldOut]
    renderer: Renderer


def open_preferences(config: PreferenceConfig, workers: Workers) -> Parts:
    """The rows, in training and held out."""
    renderer = open_renderer(config, workers)
    rows = Preferences(config, renderer, lambda text: workers.notify(text))
    return Parts(rows, held_out(config, renderer), renderer)


class Comparison:
    """Batches with the reference's log-probs, and the loss on them."""

    def __init__(self, session: Session, config: PreferenceConfig, parts: Parts) -> None:
        self.session, self.workers, self.config, self.parts = session, session.workers, config, parts
        self.pairs, self.precomputed = config.takes_pairs(), config.reference == "precomputed" and config.takes_reference()
        self._known: ReferenceLogprobs | None = None

    async def prepare(self) -> None:
        """Read the precomputed log-probs, or compute them before the first step."""
        path = self.session.run.path / REFERENCE_FILE
        if not self.precomputed or self._known is not None:
            return
        if path.exists():
            self._known = ReferenceLogprobs.load(path)
            return
        if self.session.step:
            raise StoreError(
                f"{path} is missing, and the weights that it was computed with are gone; restore it from a copy of the run."
            )
        self._known = known = ReferenceLogprobs()
        rows = Preferences(self.config, self.parts.renderer)
        drawn = (rows.groups() for _ in range(self.config.steps))
        for groups in chain((each.groups for each in self.parts.held_out.values()), drawn):
            for batch in self._batches(groups) if groups else ():
                if new := known.missing(batch):
                    known.add(await self._infer_reference(batch.select(new)))
        known.save(path)

    def _batches(self, groups: Sequence[Group]) -> Iterator[Batch]:
        """All that the reference is asked about."""
        yield packed(groups, pairs=self.pairs)
        if others := self._mismatched(groups):
            yield pack(others)

    def _mismatched(self, groups: Sequence[Group]) -> list[Group]:
        """What the KL is estimated on, if the loss takes one."""
        return [] if self.pairs or not self.config.takes_reference() else mismatched(groups, self.config.max_tokens)

    async def _infer_reference(self, batch: Batch) -> Batch:
        group = self.workers.reference or self.workers.actor  # before the first step their weights are the same
        async with self.workers.training():
            parts = await group.scatter(Learner.infer_reference, group.put(batch), 1.0)
        return await self.workers.batch_builder.call(0, BatchBuilder.join, batch, "reference", *parts)

    async def compared(self, batch: Batch) -> Batch:
        """A reference to the batch, with the column `reference` if the loss takes one."""
        if self._known is not None:
            batch = self._known.fill(batch)
        batch = self.workers.batch_builder.put(batch)
        return batch if self.precomputed else await stages.infer(self.workers, batch, 1.0)

    async def loss(self, groups: Sequence[Group]) -> PreferenceLoss:
        """The loss; on rated answers with the batch's KL, which is estimated with the policy before the update."""
        terms = self.config.terms()
        if not (others := self._mismatched(groups)):
            return PreferenceLoss(terms)
        batch = await with_policy(self.workers, await self.compared(pack(others)))
        return PreferenceLoss(terms, max(0.0, await self.workers.batch_builder.call(0, BatchBuilder.divergence, batch)))

    async def measure(self) -> Metrics:
        """Loss, accuracy and margin on the held-out sets."""
        await self.prepare()
        metrics: Metrics = {}
        async with self.workers.training():
            for name, each in self.parts.held_out.items():
                loss = await self.loss(each.groups)
                batch = await with_policy(self.workers, await self.compared(packed(each.groups, pairs=self.pairs)))
                found = await self.workers.batch_builder.call(0, BatchBuilder.measure, batch, loss, unit_mean)
                metrics |= {f"eval/{name}/{k}": v for k, v in found.items() if k != "entropy" and not k.startswith(ONLY_RL)}
                metrics |= margin(metrics, f"eval/{name}/")
        return metrics


def margin(metrics: Metrics, area: str) -> Metrics:
    """For rated answers: the difference of the mean rewards of good and bad ones, if both are there."""
    good, bad = metrics.get(f"{area}reward_chosen"), metrics.get(f"{area}reward_rejected")
    return {} if good is None or bad is None or f"{area}margin" in metrics else {f"{area}margin": good - bad}


async def train(session: Session, config: PreferenceConfig, parts: Parts) -> None:
    """Compare batch after batch; until the steps, or the epochs, are done."""
    workers, rows, comparison = session.workers, parts.rows, Comparison(session, config, parts)
    session.watch(preferences=rows)
    measure_with(session, parts.held_out, comparison.measure)

    await session.start()
    async with session.stage("infer"):
        await comparison.prepare()
    while session.step < config.steps:
        async with session.stage("data"):
            groups = rows.groups()
        if not groups:
            break
        async with workers.training():
            async with session.stage("infer"):
                batch = await comparison.compared(packed(groups, pairs=comparison.pairs))
                loss = await comparison.loss(groups)
            async with session.stage("train"):
                work = await workers.batch_builder.keep(0, BatchBuilder.work, batch, loss, unit_mean)
                metrics = await stages.train(workers, workers.actor, work)
        async with session.stage("publish"):
            await workers.publish(session.step + 1)
        metrics = {k: v for k, v in metrics.items() if not k.startswith(tuple(f"train/{name}" for name in ONLY_RL))}
        estimate = {} if comparison.pairs else {"train/kl_reference": loss.kl}
        await session.commit(metrics | estimate | margin(metrics, "train/") | rows.metrics())
    await session.finish()


def show(config: PreferenceConfig, renderer: Renderer) -> Iterator[str]:
    """The first row, with the tokens that are trained in brackets."""
    rows = Preferences(config.model_copy(update={"batch": 1}), renderer)
    for sample in rows.groups()[0].samples:
        yield from shown(renderer.tokenizer, sample.traces[0], "chosen" if sample.reward else "rejected")


PIPELINE = Pipeline(PreferenceConfig, open_preferences, train, show)
