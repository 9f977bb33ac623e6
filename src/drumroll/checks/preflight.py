"""Checks a recipe before training: the rewards separate right answers from wrong ones, and the start model gets a gradient.

Gold answers come from the rows, in each of the forms that verifiers look for. Wrong, empty and garbage answers must
score less. Then the start model answers a few prompts of each domain.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from drumroll.algorithms.advantages import ESTIMATORS
from drumroll.components import decoder, open_closing, open_episodes, open_renderer, open_scorer, scan_data, speller
from drumroll.config import RunConfig
from drumroll.data.marking import shown
from drumroll.data.source import PromptSource
from drumroll.engines import Sampling
from drumroll.envs.episodes import CUT_OFF
from drumroll.registry import search
from drumroll.rewards import Rewards, Scorer
from drumroll.rewards.group_calls import GroupCalls
from drumroll.rollout.evaluation import Evaluator
from drumroll.sample import Failure, Prompt, Sample, StopReason, Trace
from drumroll.workers.runtime import open_workers, with_lengths

ROWS, GROUPS = 12, 6
"""Rows per domain to score, and how many of them the start model answers."""
GOLD = ("completion", "gold", "solution", "answer")
FORMS = (
    "{}",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "<think>\nIt follows.\n</think>\n<answer>{}</answer>",
    "<think>\nIt follows.\n</think>\n<answer>\\boxed{{{}}}</answer>",
    "```python\n{}\n```",
)
GARBAGE = "zq#~ 0/0 ]]} \\boxed{ </answer> ```"
RIGHT, LOW = 0.99, 0.2


@dataclass
class RewardCheck:
    """The mean scores of one reward in one domain, per kind of answer."""

    domain: str
    reward: str
    weight: float
    gold: float | None
    wrong: float | None
    empty: float
    garbage: float
    milliseconds: float
    problems: list[str] = field(default_factory=list)

    def tells(self) -> bool:
        """Return whether right answers score higher than all others."""
        return self.gold is not None and self.gold > max(self.wrong or 0.0, self.empty, self.garbage) + 0.01


@dataclass(frozen=True)
class Start:
    """The start model's results on a domain."""

    domain: str
    passed: float
    reward: float
    useful: float
    truncated: float
    limit: str
    """The setting that cuts off most of the truncated completions."""
    tokens: float
    failure: Failure | None
    cut_off: str = ""
    """How many episodes the context limit ended, and what to do about it."""
    trace: Trace | None = None
    """A sample."""


@dataclass(frozen=True)
class Preflight:
    """All findings."""

    rewards: list[RewardCheck]
    starts: list[Start]
    problems: list[str]
    notices: list[str]
    sample: list[str]
    """A sample of the start model in lines, with the tokens that would be trained in brackets."""


async def preflight(config: RunConfig, notify: Callable[[str], None] = lambda text: None) -> Preflight:
    """Open all parts as training does, and run the checks. `notify` receives messages for the user as they arise."""
    config = with_lengths(config, fetch=True)
    search(config.import_from)
    scan_data(config, Rewards(config.rewards()).required_columns)
    rollout, environment = config.rollout_section(), config.environment_section()
    workers = await open_workers(config)
    workers.notify = notify
    try:
        scorer = open_scorer(config, workers, rollout)
        renderer = open_renderer(config, workers)
        by_domain = _rows(PromptSource(config.data, config.seed, renderer, scorer.required_columns, environment))
        episodes = open_episodes(config, workers, seed=config.seed)
        decode, spell, closing = decoder(workers), speller(workers), open_closing(config, workers)
        player = Evaluator(config.eval, [], workers.router, scorer, decode, config.seed, rollout, episodes, spell, closing)
        rewards, problems, notices = [], [], []
        for domain, prompts in by_domain.items():
            if prompts[0].scene is not None:  # the environment gives the reward; `drumroll check ENV` checks it
                continue
            found = await _check_rewards(scorer, domain, prompts, rollout.reward_timeout)
            rewards += found
            problems += [f"{domain}: {problem}" for check in found for problem in check.problems]
            if all(check.gold is None for check in found):
                notices.append(
                    f"{domain}: no gold answer was found in the columns ({', '.join(GOLD)}), so its rewards could not be checked."
                )
            elif not any(check.tells() for check in found if check.weight):
                if any(reward.group for reward in scorer.rewards(domain)):
                    notices.append(f"{domain}: a reward compares the samples of a group, which single answers cannot check.")
                else:
                    problems.append(f"{domain}: no reward scores right answers higher than wrong ones.")
        starts = [await _start(config, player, domain, prompts[:GROUPS]) for domain, prompts in by_domain.items()]
        problems += [f"{s.domain}: a sample failed: {s.failure.told()}" for s in starts if s.failure is not None]
        notices += [notice for start in starts for notice in _advice(start)]
        if starts and not any(start.useful for start in starts):
            problems.append("no group of the start model would give a gradient, so training would change nothing.")
        trace, title = next(((s.trace, f"a sample of {s.domain}") for s in starts if s.trace is not None), (None, ""))
        sample = [] if trace is None else list(shown(workers.tokenizer, trace, title))
        return Preflight(rewards, starts, problems, notices, sample)
    finally:
        await workers.close()


def _rows(source: PromptSource) -> dict[str, list[Prompt]]:
    """Draw a few rows of every domain, in training's order."""
    found: dict[str, list[Prompt]] = {}
    for _ in range(ROWS * 4 * max(1, len(source.config.train))):
        prompt = source.draw()
        if prompt is None:
            break
        rows = found.setdefault(prompt.domain, [])
        if len(rows) < ROWS:
            rows.append(prompt)
        if len(found) >= len(source.config.train) and all(len(r) >= ROWS for r in found.values()):
            break
    return found


async def _check_rewards(scorer: Scorer, domain: str, prompts: Sequence[Prompt], timeout: float) -> list[RewardCheck]:
    """Score right, wrong, empty and garbage answers with every reward of a domain."""
    answers = [_answer(prompt) for prompt in prompts]
    gold = [await _best(scorer, p, a) for p, a in zip(prompts, answers, strict=True) if a is not None]
    others = [_other(answers, i) for i in range(len(prompts))]
    wrong = [await _score(scorer, p, o) for p, o in zip(prompts, others, strict=True) if o is not None]
    empty = [await _score(scorer, prompt, "") for prompt in prompts]
    began = time.perf_counter()
    garbage = [await _score(scorer, prompt, GARBAGE) for prompt in prompts]
    seconds = (time.perf_counter() - began) / len(prompts)
    again = [await _score(scorer, prompt, GARBAGE) for prompt in prompts]
    checks: list[RewardCheck] = []
    for reward in scorer.rewards(domain):

        def mean(samples: Sequence[Sample], name: str = reward.name) -> float | None:
            values = [s.rewards[name] for s in samples if name in s.rewards]
            return statistics.mean(values) if values else None

        check = RewardCheck(
            domain,
            reward.name,
            reward.weight,
            mean(gold),
            mean(wrong),
            mean(empty) or 0.0,
            mean(garbage) or 0.0,
            1000 * seconds,
        )
        changed = sum(a.rewards.get(reward.name) != b.rewards.get(reward.name) for a, b in zip(garbage, again, strict=True))
        if changed:
            check.problems.append(
                f"reward '{reward.name}' gave {changed} of {len(prompts)} answers another score the second time."
            )
        checks.append(check)
    failures = [s.failure for s in [*gold, *wrong, *empty, *garbage] if s.failure is not None]
    if failures and checks:
        checks[0].problems.append(f"{len(failures)} of the answers could not be scored; the first: {failures[0].told()}")
    if seconds > timeout / 10 and checks:
        checks[0].problems.append(
            f"scoring takes {seconds:.2g} s an answer, which is close to rollout.reward_timeout={timeout:g}."
        )
    return checks


def _answer(prompt: Prompt) -> str | None:
    found = next((prompt.columns[c] for c in GOLD if prompt.columns.get(c) not in (None, "")), None)
    return None if found is None else str(found)


def _other(answers: Sequence[str | None], index: int) -> str | None:
    """Return another row's answer that differs from the right one."""
    return next((a for a in (*answers[index + 1 :], *answers[:index]) if a is not None and a != answers[index]), None)


async def _best(scorer: Scorer, prompt: Prompt, answer: str) -> Sample:
    """Score the right answer in every form; return the sample with the highest reward."""
    tried = [await _score(scorer, prompt, form.format(answer)) for form in FORMS]
    return max(tried, key=lambda sample: sample.reward if sample.reward is not None else float("-inf"))


async def _score(scorer: Scorer, prompt: Prompt, completion: str) -> Sample:
    sample = Sample(prompt, 0, 0, completion=completion, stop=StopReason.EOS)
    await scorer.score(sample)
    return sample


async def _start(config: RunConfig, player: Evaluator, domain: str, prompts: Sequence[Prompt]) -> Start:
    """Let the start model answer a few prompts, or play episodes, with training's sampling; return the results."""
    own = config.rollout_section().of(domain)
    sampling = Sampling(own.temperature, own.length_limit, tuple(own.stop), max_thinking=own.max_thinking_tokens)

    calls = [GroupCalls(range(own.samples)) for _ in prompts]

    async def one(draw: int, prompt: Prompt, index: int) -> Sample:
        sample = Sample(prompt, draw, index)
        await player.attempt(sample, sampling, own.samples, domain, f"preflight/{domain}")
        if sample.failure is None:
            await player.scorer.score(sample, calls[draw])
        calls[draw].leave(sample)
        return sample

    samples = await asyncio.gather(*(one(d, p, i) for d, p in enumerate(prompts) for i in range(own.samples)))
    rewards = [s.reward or 0.0 for s in samples]
    groups = [rewards[i : i + own.samples] for i in range(0, len(rewards), own.samples)]
    compares = ESTIMATORS.traits(config.algorithm_section().advantage).get(
        "grouped"
    )  # other estimators learn from equal rewards too
    count, threshold = len(samples), config.eval.pass_threshold
    cut = [s.stop for s in samples if s.stop in (StopReason.LENGTH, StopReason.CONTEXT)]
    episode = "environment.context" if config.environment_section().mode == "trajectory" else "data.max_prompt_tokens"
    ended = [note.text for s in samples for note in s.notes if note.kind == CUT_OFF]
    return Start(
        domain,
        sum(s.success is True or (s.success is None and (s.reward or 0.0) > threshold) for s in samples) / count,
        statistics.mean(rewards),
        sum(not compares or max(g) - min(g) > 1e-9 for g in groups) / len(groups),
        len(cut) / count,
        "rollout.max_tokens" if cut.count(StopReason.LENGTH) * 2 >= len(cut) else episode,
        statistics.mean(s.policy_length() for s in samples),
        next((s.failure for s in samples if s.failure is not None), None),
        f"{len(ended)} of {count} episodes do not end by themselves: {ended[0]}" if ended else "",
        next((s.traces[0] for s in samples if s.failure is None and s.traces), None),
    )


def _advice(start: Start) -> Iterator[str]:
    if start.useful == 0:
        what = "always right" if start.passed == 1 else "never right" if start.passed == 0 else "always scored alike"
        yield f"{start.domain}: the start model is {what} here, so no group would give a gradient: choose other data or a warm start."
    elif start.useful < LOW:
        yield (
            f"{start.domain}: only {start.useful:.0%} of groups would give a gradient; "
            "rollout.filter: zero_variance with rollout.oversample trains on these alone."
        )
    if start.cut_off:
        yield f"{start.domain}: {start.cut_off}."
    elif start.truncated > 0.5:
        yield f"{start.domain}: {start.truncated:.0%} of completions are cut off: raise {start.limit}."


def preflight_tables(found: Preflight) -> list[RenderableType]:
    """Return the findings as tables for the terminal."""
    rewards = Table(title="rewards on right and wrong answers", title_justify="left")
    for column in ("domain", "reward", "weight", "gold", "wrong", "empty", "garbage", "ms", ""):
        rewards.add_column(
            column, justify="right" if column in ("weight", "gold", "wrong", "empty", "garbage", "ms") else "left"
        )
    for c in found.rewards:
        good = c.gold is not None and c.gold >= RIGHT and max(c.wrong or 0.0, c.empty, c.garbage) <= LOW
        verdict = Text("good", "green") if good else Text("tells", "green") if c.tells() else Text("–", "dim")
        cells = [f"{c.weight:g}", *("–" if v is None else f"{v:.2f}" for v in (c.gold, c.wrong, c.empty, c.garbage))]
        rewards.add_row(c.domain, c.reward, *cells, f"{c.milliseconds:.1f}", verdict)
    starts = Table(title="the start model", title_justify="left")
    for column in ("domain", "passes", "mean reward", "groups with a gradient", "cut off", "tokens"):
        starts.add_column(column, justify="left" if column == "domain" else "right")
    for s in found.starts:
        starts.add_row(
            s.domain, f"{s.passed:.0%}", f"{s.reward:.3f}", f"{s.useful:.0%}", f"{s.truncated:.0%}", f"{s.tokens:.0f}"
        )
    lines = Table.grid(padding=(0, 1))
    for problem in found.problems:
        lines.add_row(Text("problem:", "bold red"), Text(problem))
    for notice in found.notices:
        lines.add_row(Text("notice:", "bold yellow"), Text(notice))
    idle = [start.domain for start in found.starts if not start.useful]
    if not found.problems and idle:
        note = f"the rewards can be trained on, but {', '.join(idle)} would give no gradient."
        lines.add_row(Text("in part:", "bold yellow"), Text(note))
    elif not found.problems:
        lines.add_row(Text("ready:", "bold green"), Text("the rewards can be trained on."))
    return [rewards, starts, *map(Text, found.sample), lines]
