"""The stages of the loop as public functions: use them in any order, replace one, or write the loop out yourself.

`examples/loop.py` does exactly that and gets the same losses as the controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from drumroll.algorithms import GREEDY, OLD, REFERENCE, TEACHER, VALUES
from drumroll.batch import Batch
from drumroll.config import AnyConfig, RLConfig
from drumroll.config.environment import NONE
from drumroll.config.rollout import RolloutConfig
from drumroll.data.render import Renderer
from drumroll.data.source import PromptSource
from drumroll.envs.episodes import Agents, Episodes
from drumroll.envs.metrics import describe_episodes
from drumroll.learners import Learner, Metrics, Update
from drumroll.learners.totals import merge
from drumroll.lifecycle import Listener, answered_once
from drumroll.rewards import Scorer
from drumroll.rollout.evaluation import Evaluator, open_sets
from drumroll.rollout.scheduler import Decode, Rollouts
from drumroll.sample import Group, Version
from drumroll.workers.batch_builder import BatchBuilder, Memory
from drumroll.workers.group import WorkerGroup
from drumroll.workers.runtime import Workers, context_length, open_workers

__all__ = ["advantages", "infer", "open_evaluator", "open_rollouts", "open_workers", "pack", "publish", "train", "update"]


def decoder(workers: Workers) -> Decode:
    """Tokens to text, for rewards and people; never for the loss."""
    return lambda tokens: workers.tokenizer.decode(tokens, skip_special_tokens=True)


def speller(workers: Workers) -> Decode:
    """Tokens to text with special tokens, in which stop strings are looked for."""
    return lambda tokens: workers.tokenizer.decode(tokens)


def open_scorer(config: AnyConfig, workers: Workers, rollout: RolloutConfig) -> Scorer:
    """The rewards, their processes, the models that they may ask and the sandbox that they may use."""
    pool = workers.open_pool(rollout.reward_workers)
    asked = (workers.judge, workers.reward_model)
    seconds = rollout.reward_timeout
    scorer = Scorer(config.rewards(), seconds, pool, *asked, config.sandbox, lambda text: workers.notify(text))
    workers.closing.append(scorer.close)
    return scorer


def open_episodes(config: AnyConfig, workers: Workers, *, seed: int) -> Episodes | None:
    """The environments, and the processes of those that compute; None when no row is played in one."""
    if not isinstance(config, RLConfig) or not config.has_episodes():
        return None
    context = context_length(config)
    renderer = Renderer(workers.tokenizer)
    agents = partial(open_agents, config, workers, seed)
    episodes = Episodes(
        config.environment,
        seed,
        renderer,
        decoder(workers),
        context,
        workers.open_pool,
        agents,
        lambda text: workers.notify(text),
    )
    workers.closing.append(episodes.close)
    return episodes


def open_agents(config: RLConfig, workers: Workers, seed: int) -> Agents:
    """The endpoint for agents; opened only where a row is played by one."""
    from drumroll.serve import agents
    from drumroll.serve.caller import Served

    renderer = Renderer(workers.tokenizer)
    served = Served(config.name, renderer, decoder(workers), context_length(config), lambda text: workers.notify(text))
    return agents.Agents(config.environment, config.rollout, seed, served, workers.router)


def open_rollouts(config: RLConfig, workers: Workers, listeners: Sequence[Listener] = ()) -> Rollouts:
    """The stream of scored groups."""
    scorer = open_scorer(config, workers, config.rollout)
    renderer = Renderer(workers.tokenizer)
    source = PromptSource(config.data, config.seed, renderer, scorer.required_columns, config.environment, tolerant=True)
    episodes = open_episodes(config, workers, seed=config.seed)
    return Rollouts(
        config.rollout,
        config.seed,
        source,
        workers.router,
        scorer,
        decoder(workers),
        spell=speller(workers),
        episodes=episodes.open if episodes else answered_once,
        greedy=GREEDY in workers.needs,
        listeners=listeners,
    )


def open_evaluator(config: AnyConfig, workers: Workers) -> Evaluator | None:
    """The held-out sets, or None when the config names none."""
    if not config.eval.sets:
        return None
    rollout = config.rollout if isinstance(config, RLConfig) else RolloutConfig(max_tokens=config.eval_max_tokens)
    scorer = open_scorer(config, workers, rollout)
    environment = config.environment if isinstance(config, RLConfig) else NONE
    longest, renderer = config.data.max_prompt_tokens, Renderer(workers.tokenizer)
    sets = open_sets(config.eval, renderer, scorer.required_columns, longest, environment)
    episodes = open_episodes(config, workers, seed=0)
    decode, spell = decoder(workers), speller(workers)
    return Evaluator(config.eval, sets, workers.router, scorer, decode, config.seed, rollout, episodes, spell)


# --- The stages of a step. A batch is a reference: on a cluster its tensors never come here. ---


async def pack(workers: Workers, groups: Sequence[Group], oldest: Version = 0) -> Batch:
    """Groups as packed tensors."""
    return await workers.batch_builder.keep(0, BatchBuilder.pack, list(groups), oldest)


async def infer(workers: Workers, batch: Batch, temperature: float) -> Batch:
    """Only the forward passes that the algorithm needs, each over all ranks of its role."""
    if OLD in workers.needs:
        batch = await _join(workers, batch, "old", await workers.actor.scatter(Learner.logprobs, batch, temperature))
    if REFERENCE in workers.needs:
        assert workers.reference is not None, "a KL term needs the reference role"
        parts = await workers.reference.scatter(Learner.reference_logprobs, batch, temperature)
        batch = await _join(workers, batch, "reference", parts)
    if TEACHER in workers.needs:
        assert workers.teacher is not None, "a KL term needs the teacher role"
        batch = await _join(workers, batch, "teacher", await workers.teacher.scatter(Learner.logprobs, batch, temperature))
    if VALUES in workers.needs:
        assert workers.critic is not None, "GAE needs the critic role"
        batch = await _join(workers, batch, "values", await workers.critic.scatter(Learner.values, batch))
    return batch


async def _join(workers: Workers, batch: Batch, column: str, parts: Sequence[Tensor]) -> Batch:
    return await workers.batch_builder.keep(0, BatchBuilder.join, batch, column, *parts)


async def advantages(workers: Workers, batch: Batch, memory: Memory) -> tuple[Batch, Metrics]:
    """Rewards become one advantage per trained token; what the algorithm's parts remember is updated."""
    batch = await workers.batch_builder.keep(0, BatchBuilder.advantages, batch, dict(memory))
    metrics, after = await workers.batch_builder.call(0, BatchBuilder.report)
    memory.update(after)
    return batch, metrics


async def update(workers: Workers, batch: Batch, temperature: float, *, idle: bool = False) -> Metrics:
    """Train the critic, if there is one, and the actor on a batch; `idle` leaves the actor as it is."""
    metrics: Metrics = {}
    if workers.critic is not None:
        metrics |= await train(workers.critic, await workers.batch_builder.keep(0, BatchBuilder.critic_work, batch))
    work = await workers.batch_builder.keep(0, BatchBuilder.actor_work, batch, temperature, idle)
    return metrics | await train(workers.actor, work)


async def train(group: WorkerGroup[Learner], work: Update) -> Metrics:
    """An update over all ranks of a role."""
    return merge(await group.broadcast(Learner.update, work))


async def publish(workers: Workers, version: int) -> None:
    """Give the engines the actor's new weights."""
    await workers.publish(version)


def describe(groups: Sequence[Group], version: int) -> dict[str, float]:
    """What the groups trained on at a version look like, as metrics."""
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
