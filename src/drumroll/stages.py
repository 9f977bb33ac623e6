"""The stages of the loop as public functions: use them in any order, replace one, or write the loop out yourself.

`examples/loop.py` does exactly that and gets the same losses as the controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drumroll.algorithms import Algorithm
from drumroll.batch import Batch, pack
from drumroll.cluster.workers import Workers, open_workers
from drumroll.config import AnyConfig, RLConfig
from drumroll.config.rollout import RolloutConfig
from drumroll.data.render import Renderer
from drumroll.data.source import PromptSource
from drumroll.learners import Learner, Metrics, Update
from drumroll.rewards import Scorer
from drumroll.rollout.evaluation import Evaluator, open_sets
from drumroll.rollout.lifecycle import Listener
from drumroll.rollout.scheduler import Decode, Rollouts
from drumroll.sample import Group

__all__ = ["advantages", "infer", "open_evaluator", "open_rollouts", "open_workers", "pack", "publish", "update"]


def decoder(workers: Workers) -> Decode:
    """Tokens to text, for rewards and people; never for the loss."""
    return lambda tokens: workers.tokenizer.decode(tokens, skip_special_tokens=True)


def open_rollouts(config: RLConfig, workers: Workers, listeners: Sequence[Listener] = ()) -> Rollouts:
    """The stream of scored groups."""
    scorer = Scorer(config.rewards(), config.rollout.reward_timeout, config.rollout.reward_workers)
    workers.closing.append(scorer.close)
    source = PromptSource(config.data, config.seed, Renderer(workers.tokenizer), scorer.required_columns)
    return Rollouts(config.rollout, config.seed, source, workers.router, scorer, decoder(workers), listeners=listeners)


def open_evaluator(config: AnyConfig, workers: Workers) -> Evaluator | None:
    """The held-out sets, or None when the config names none."""
    if not config.eval.sets:
        return None
    rollout = config.rollout if isinstance(config, RLConfig) else RolloutConfig(max_tokens=config.eval_max_tokens)
    scorer = Scorer(config.rewards(), rollout.reward_timeout, rollout.reward_workers)
    workers.closing.append(scorer.close)
    sets = open_sets(config.eval, Renderer(workers.tokenizer), scorer.required_columns, config.data.max_prompt_tokens)

    return Evaluator(config.eval, sets, workers.router, scorer, decoder(workers), config.seed, rollout)


def open_algorithm(config: RLConfig) -> Algorithm:
    """The algorithm's parts. One update per batch needs no log-probs of the policy before it."""
    samples = config.rollout.prompts * config.rollout.samples
    single = config.optim.epochs == 1 and (config.optim.minibatch or samples) >= samples
    stale = config.rollout.max_staleness > 0
    return Algorithm(config.algorithm, single_update=single, longest=config.rollout.max_tokens, stale=stale)


async def infer(workers: Workers, algorithm: Algorithm, batch: Batch, temperature: float) -> Batch:
    """Only the forward passes that the algorithm needs."""
    if algorithm.needs.old_logprobs:
        batch = batch.with_(old=await workers.actor.call(0, Learner.logprobs, batch, temperature))
    if algorithm.needs.reference:
        assert workers.reference is not None, "a KL term needs the reference role"
        batch = batch.with_(reference=await workers.reference.call(0, Learner.logprobs, batch, temperature))
    return batch


def advantages(algorithm: Algorithm, batch: Batch) -> Batch:
    """Rewards become one advantage per trained token."""
    return algorithm.advantages(batch)


async def update(workers: Workers, algorithm: Algorithm, batch: Batch, temperature: float) -> Metrics:
    """Train the actor on a batch."""
    work = Update(batch, algorithm.loss, algorithm.aggregate, temperature)
    return await workers.actor.call(0, Learner.update, work)


async def publish(workers: Workers, version: int) -> None:
    """Give the engines the actor's new weights."""
    await workers.publish(version)


def describe(groups: Sequence[Group], version: int) -> dict[str, float]:
    """What the groups trained on at a version look like, as metrics."""
    samples = [s for g in groups for s in g.samples]
    lengths = [s.policy_length() for s in samples]
    metrics: dict[str, float] = {
        "rollout/tokens": float(sum(lengths)),
        "rollout/length": sum(lengths) / len(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/truncated": sum(s.stop in ("length", "context") for s in samples) / len(samples),
        "rollout/staleness": sum(version - (s.oldest_version() or 0) for s in samples) / len(samples),
        "rollout/zero_variance": sum(len(set(g.rewards)) < 2 for g in groups) / len(groups),
    }
    by_domain: dict[str, list[Any]] = {}
    for sample in samples:
        by_domain.setdefault(sample.prompt.domain, []).append(sample)
    for domain, own in sorted(by_domain.items()):
        metrics[f"reward/{domain}"] = sum(s.reward for s in own) / len(own)
        parts = sorted({name for s in own for name in s.rewards})
        for part in parts if len(parts) > 1 else ():
            values = [s.rewards[part] for s in own if part in s.rewards]
            metrics[f"reward/{domain}/{part}"] = sum(values) / len(values)
    return metrics
