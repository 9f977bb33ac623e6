"""Check and open the parts of a run: data, rewards, environments, the stream of rollouts, held-out sets."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from drumroll.algorithms import GREEDY
from drumroll.config import RunConfig
from drumroll.config.data import DatasetConfig
from drumroll.config.distill import demonstrations
from drumroll.config.rollout import RolloutConfig
from drumroll.data.render import Renderer
from drumroll.data.scan import scan
from drumroll.data.source import PromptSource, RequiredColumns
from drumroll.engines.continuation import closing_tag
from drumroll.envs.episodes import Agents, Episodes
from drumroll.errors import ConfigError, did_you_mean
from drumroll.lifecycle import Listener, answered_once
from drumroll.rewards import Scorer
from drumroll.rollout.evaluation import Evaluator, open_sets
from drumroll.rollout.sample_runner import Decode
from drumroll.rollout.scheduler import Rollouts
from drumroll.workers.runtime import Workers, context_length, open_workers

__all__ = ["decoder", "open_evaluator", "open_rollouts", "open_scorer", "open_workers", "speller"]


def decoder(workers: Workers) -> Decode:
    """Tokens to text, for rewards and people; never for the loss."""
    return lambda tokens: workers.tokenizer.decode(tokens, skip_special_tokens=True)


def speller(workers: Workers) -> Decode:
    """Tokens to text with special tokens, in which stop strings are looked for."""
    return lambda tokens: workers.tokenizer.decode(tokens)


def open_renderer(config: RunConfig, workers: Workers) -> Renderer:
    """The renderer of the policy's prompts, with the recipe's arguments of the chat template."""
    return Renderer(workers.tokenizer).given(config.data.template, "data.template")


def open_closing(config: RunConfig, workers: Workers) -> tuple[int, ...]:
    """Tokens that end a thought at its limit; none if no thought has one."""
    limited = config.rollout_section().limits_thoughts or any(s.max_thinking_tokens for s in config.eval.sets.values())
    return closing_tag(workers.tokenizer) if limited else ()


def training_columns(config: RunConfig, dataset: DatasetConfig, rewards: RequiredColumns) -> RequiredColumns:
    """The columns that training rows of a dataset must have, given those that rewards need."""
    columns = config.training_columns(dataset)
    return rewards if columns is None else lambda domain, *, played=False: columns


def scan_data(config: RunConfig, rewards: RequiredColumns) -> None:
    """Look at all rows of local files, in training and held-out data, given the columns that rewards need."""
    environment = config.environment_section()
    domains = scan("data.train", config.data.train, lambda dataset: training_columns(config, dataset, rewards), environment)
    scan("eval.sets", config.eval.sets, lambda dataset: rewards, environment)
    scan("held_out", config.held_out_sets(), lambda dataset: training_columns(config, dataset, rewards), environment)
    if (rows := config.demonstrations_section()) is not None:
        given = demonstrations(config, rows)
        more = scan("demonstrations", given.data.train, lambda dataset: training_columns(given, dataset, rewards), environment)
        domains = None if domains is None or more is None else domains | more
    if domains is not None:
        _check_domains(config, domains)


def _check_domains(config: RunConfig, domains: set[str]) -> None:
    for domain, key in config.named_domains().items():
        if domain not in domains:
            has, other = ", ".join(sorted(domains)), did_you_mean(domain, domains)
            raise ConfigError(f"{key}: no training row has the domain '{domain}'; they have {has}.{other}")


def open_scorer(config: RunConfig, workers: Workers, rollout: RolloutConfig) -> Scorer:
    """The rewards, their processes, the models that they may ask and the sandbox that they may use."""
    pool = workers.open_pool(rollout.reward_workers)
    asked = (workers.judge, workers.reward_model)
    seconds = rollout.reward_timeout
    scorer = Scorer(config.rewards(), seconds, pool, *asked, config.sandbox, lambda text: workers.notify(text), config.steps)
    workers.closing.append(scorer.close)
    return scorer


def open_episodes(config: RunConfig, workers: Workers, *, seed: int) -> Episodes | None:
    """The environments, and the processes of those that compute; None when no row is played in one."""
    if not config.has_episodes():
        return None
    context = context_length(config)
    renderer = open_renderer(config, workers)
    agents = partial(open_agents, config, workers, seed)
    episodes = Episodes(
        config.environment_section(),
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


def open_agents(config: RunConfig, workers: Workers, seed: int) -> Agents:
    """The endpoint for agents; opened only where a row is played by one."""
    from drumroll.serve import agents
    from drumroll.serve.caller import Served

    environment = config.environment_section()
    served = Served(
        config.name,
        open_renderer(config, workers),
        decoder(workers),
        context_length(config),
        lambda text: workers.notify(text),
        sampled=environment.earlier_turns == "sampled",
        closing=open_closing(config, workers),
    )
    return agents.Agents(environment, config.rollout_section(), seed, served, workers.router)


def open_rollouts(config: RunConfig, workers: Workers, listeners: Sequence[Listener] = ()) -> Rollouts:
    """The stream of scored groups."""
    rollout, renderer = config.rollout_section(), open_renderer(config, workers)
    scorer = open_scorer(config, workers, rollout)
    environment, required = config.environment_section(), scorer.required_columns
    source = PromptSource(config.data, config.seed, renderer, required, environment, tolerant=True)
    episodes = open_episodes(config, workers, seed=config.seed)
    return Rollouts(
        rollout,
        config.seed,
        source,
        workers.router,
        scorer,
        decoder(workers),
        spell=speller(workers),
        episodes=episodes.open if episodes else answered_once,
        greedy=GREEDY in workers.needs,
        closing=open_closing(config, workers),
        listeners=listeners,
    )


def open_evaluator(config: RunConfig, workers: Workers) -> Evaluator | None:
    """The held-out sets, or None when the config names none."""
    if not config.eval.sets:
        return None
    rollout, environment = config.rollout_section(), config.environment_section()
    scorer = open_scorer(config, workers, rollout)
    longest, renderer = config.data.max_prompt_tokens, open_renderer(config, workers)
    sets = open_sets(config.eval, renderer, scorer.required_columns, longest, environment)
    episodes = open_episodes(config, workers, seed=0)
    decode, spell, closing = decoder(workers), speller(workers), open_closing(config, workers)
    return Evaluator(config.eval, sets, workers.router, scorer, decode, config.seed, rollout, episodes, spell, closing)
