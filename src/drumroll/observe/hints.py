"""Hints for the user of a run: settings that make training teach less than it could. Each is given once in a run.

A function per hint: it returns a sentence that names the key and a value, or None. `Hints` prints them as notices and keeps
them in `hints.json`, so that the report shows them and a resumed run does not repeat them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from drumroll.config import RunConfig
from drumroll.config.algorithm import GROUPED
from drumroll.config.environment import EnvironmentConfig
from drumroll.config.rollout import RolloutConfig
from drumroll.errors import did_you_mean
from drumroll.models.shape import find_shape
from drumroll.observe.failures import without_gradient
from drumroll.runfiles.durable import write_text
from drumroll.runfiles.format import HINTS
from drumroll.runfiles.reader import RunReader
from drumroll.sample import Fate, Sample, StopReason

MANY = 0.25
"""The share of samples that are cut, above which it is worth a hint."""
IDLE = 0.75
"""The share of groups without a gradient, above which it is worth a hint."""
FEW = 100
"""Answers of a held-out set: its score is uncertain by ±0.05 with so many."""
USUAL_RATE, USUAL_SIZE, EXPONENT = 1e-6, 7e9, 0.6
"""The usual learning rate is TRL's, verl's and OpenRLHF's default, taken for 7 billion weights; it falls with a model's size so
that our recipes at 1 and at 135 million weights (3e-4, 1e-5) are usual too."""
SOON = 5
"""Steps after which a domain that has settings should have been seen, and passes over the data can be foretold."""
EARLY = 0.9
"""The share of `steps` before which the end of the epochs is worth a hint."""
ADAPTERS, FAR = 10.0, 30.0
"""Adapters take ten times that; a rate further away than this factor is worth a hint."""


class Hints:
    """Gives each hint once, in the terminal and in the run directory."""

    def __init__(self, run: RunReader, config: RunConfig, notice: Callable[[str], None]) -> None:
        self.run, self.config, self.notice = run, config, notice
        self._given: list[dict[str, object]] | None = None
        self._steps, self._domains = 0, set[str]()

    def at_start(self, evaluations: Mapping[str, int]) -> None:
        """Look at the config, and at the numbers of prompts of held-out sets."""
        if self.config.learns_from_rewards():
            self._give("learning rate", 0, lambda: unusual_rate(self.config))
        for name, count in evaluations.items():
            answers = count * max(self.config.eval.sets[name].samples, self.config.eval.sets[name].sampled)
            self._give(f"held-out set {name}", 0, lambda name=name, n=answers: small_set(name, n))

    def after_step(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        """Look at what a step trained on."""
        config = self.config
        trained = [s for s in samples if s.state is Fate.TRAINED]
        advantage = config.algorithm_section().advantage if config.learns_from_rewards() else ""
        self._give("signal", step, lambda: without_gradient(metrics, samples) or few_signals(advantage, trained))
        self._steps, self._domains = self._steps + 1, self._domains | {s.prompt.domain for s in samples}
        if samples and self._steps == min(SOON, config.steps):
            self._give("domains", step, lambda: unseen_domain(config.named_domains(), self._steps, self._domains))
        if self._steps == min(SOON, config.steps) and not config.has_rollouts():  # these draw ahead
            self._give("schedule", step, lambda: cut_schedule(config, step, metrics.get("data/epoch", 0.0)))
        self._give("long prompts", step, lambda: long_prompts(config, metrics))
        if config.has_rollouts():
            self._give("cut", step, lambda: cut_samples(config.rollout_section(), config.environment_section(), trained))

    def _give(self, name: str, step: int, find: Callable[[], str | None]) -> None:
        if self._given is None:
            self._given = list(self.run.hints)
        if all(hint["name"] != name for hint in self._given) and (text := find()):
            self._given.append({"name": name, "step": step, "text": text})
            write_text(self.run.path / HINTS, json.dumps(self._given, indent=1, ensure_ascii=False) + "\n")
            self.notice(f"step {step}: {text}" if step else text)


def cut_samples(rollout: RolloutConfig, environment: EnvironmentConfig, samples: Sequence[Sample]) -> str | None:
    """Many samples of a domain reached a limit of tokens before they ended."""
    domains = dict.fromkeys(s.prompt.domain for s in samples)
    for domain in domains:
        own = [s for s in samples if s.prompt.domain == domain]
        cut = [s.stop for s in own if s.stop in (StopReason.LENGTH, StopReason.CONTEXT)]
        if len(cut) < MANY * len(own):
            continue
        if cut.count(StopReason.CONTEXT) * 2 > len(cut):
            limit = environment.context
            value = "environment.context" if limit is None else f"environment.context: {2 * limit}"
            key = "the context of an episode"
        else:
            limit = rollout.of(domain).length_limit
            alone = domain in rollout.domains and rollout.domains[domain].max_tokens is not None
            name = f"rollout.domains.{domain}.max_tokens" if alone else "rollout.max_tokens"
            key, value = f"{name}: {limit}", f"{name}: {2 * limit}"
        of = f" of {domain}" if len(domains) > 1 else ""
        return f"{len(cut) / len(own):.0%} of the samples{of} were cut by {key} before they ended; try {value}."
    return None


def unseen_domain(named: Mapping[str, str], steps: int, seen: Collection[str]) -> str | None:
    """A domain that the config names has had no sample. Domains of local files are checked before a run starts."""
    for domain, key in named.items():
        if domain not in seen:
            have = ", ".join(sorted(seen))
            return f"no sample of {steps} steps has the domain '{domain}', which {key} names; they have {have}.{did_you_mean(domain, seen)}"
    return None


def cut_schedule(config: RunConfig, step: int, epoch: float) -> str | None:
    """The epochs end long before the schedule of the learning rate, which is laid out over all steps."""
    epochs, schedule = config.data.epochs, config.optim.schedule
    end = 0 if epochs is None or not epoch else math.ceil(step * epochs / epoch)
    if schedule == "constant" or not 0 < end < EARLY * config.steps:
        return None
    return (
        f"data.epochs: {epochs:g} ends the run after about {end} of {config.steps} steps, long before optim.schedule: {schedule} has "
        f"lowered the learning rate; set steps: {end}."
    )


def long_prompts(config: RunConfig, metrics: Mapping[str, float]) -> str | None:
    """Prompts were longer than allowed."""
    count, longest = int(metrics.get("data/overlong", 0)), int(metrics.get("data/longest", 0))
    if not count:
        return None
    done, other = ("left out", "truncate keeps their last tokens")
    if config.data.overlong == "truncate":
        done, other = ("cut to their last tokens", "drop leaves them out")
    return (
        f"{count} prompts so far had more than data.max_prompt_tokens: {config.data.max_prompt_tokens} tokens, up to {longest}, and were "
        f"{done} (data.overlong: {config.data.overlong}; {other}); data.max_prompt_tokens: {longest} takes all of them."
    )


def small_set(name: str, answers: int) -> str | None:
    """A held-out set is so small that its score moves by chance more than by a few steps of training."""
    if answers >= FEW:
        return None
    return (
        f"eval.sets.{name} has {answers} answers, so its score is uncertain by ±{0.5 / answers**0.5:.2f} (one standard error at 0.5), more "
        f"than a few steps change it; eval.sets.{name}.limit: 400 gives ±0.03, if the data has as many rows."
    )


def unusual_rate(config: RunConfig) -> str | None:
    """The learning rate is far from what others use for a model of this size."""
    shape = find_shape(config.role_model("actor"))
    if shape is None or not config.optim.lr:
        return None
    lora = config.roles.actor.lora is not None
    usual = USUAL_RATE * (USUAL_SIZE / shape.parameters) ** EXPONENT * (ADAPTERS if lora else 1.0)
    ratio = config.optim.lr / usual
    if 1 / FAR < ratio < FAR:
        return None
    far = f"{ratio:,.0f} times" if ratio > 1 else f"1/{1 / ratio:,.0f} of"
    how = "with adapters" if lora else "with all weights trained"
    return (
        f"optim.lr: {config.optim.lr:g} is {far} what is usual for {config.algorithm_section().preset} on a model of "
        f"{shape.parameters / 1e6:,.0f} million weights {how}; try optim.lr: {usual:.0e}."
    )


def few_signals(advantage: str, samples: Sequence[Sample]) -> str | None:
    """In most groups all samples got the same reward, and the estimator compares the samples of a group."""
    groups: dict[int, set[float]] = {}
    for sample in samples:
        if sample.reward is not None:
            groups.setdefault(sample.draw, set()).add(sample.reward)
    idle = sum(len(rewards) == 1 for rewards in groups.values())
    if advantage not in GROUPED or idle < IDLE * len(groups) or idle == 0:
        return None
    return (
        f"in {idle} of {len(groups)} groups all samples got the same reward, so they teach nothing; rollout.filter: zero_variance with "
        "rollout.oversample: 2 trains on the others only, and `drumroll check` tells whether the data fits the model."
    )
