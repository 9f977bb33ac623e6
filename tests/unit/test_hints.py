"""Hints: each names the key and a value, is given once in a run, and is kept for the report and for a resume."""

import html
import json
from pathlib import Path

import pytest

from drumroll import train
from drumroll.config import load
from drumroll.config.environment import EnvironmentConfig
from drumroll.config.rollout import RolloutConfig
from drumroll.observe.hints import (
    FAR,
    cut_samples,
    cut_schedule,
    few_signals,
    long_prompts,
    small_set,
    unseen_domain,
    unusual_rate,
)
from drumroll.observe.progress import Quiet
from drumroll.sample import Fate, Prompt, Sample, StopReason

ROOT = Path(__file__).parents[2]


def samples(*stops, domain="d", rewards=None, size=4):
    made = []
    for i, stop in enumerate(stops):
        sample = Sample(Prompt(str(i // size), domain, "", (1,)), i // size, i % size, stop=stop)
        sample.reward, sample.state = (rewards[i] if rewards else 0.0), Fate.TRAINED
        made.append(sample)
    return made


def test_samples_that_are_cut():
    rollout, environment = RolloutConfig(max_tokens=32), EnvironmentConfig()
    eos, cut, context = StopReason.EOS, StopReason.LENGTH, StopReason.CONTEXT
    assert cut_samples(rollout, environment, []) is None
    assert cut_samples(rollout, environment, samples(eos, eos, eos, eos, cut)) is None
    said = cut_samples(rollout, environment, samples(eos, cut))
    assert said == "50% of the samples were cut by rollout.max_tokens: 32 before they ended; try rollout.max_tokens: 64."
    own = RolloutConfig(max_tokens=32, domains={"code": {"max_tokens": 8}})
    mixed = [*samples(eos, eos), *samples(cut, cut, domain="code")]
    assert "100% of the samples of code were cut by rollout.domains.code.max_tokens: 8" in cut_samples(own, environment, mixed)
    said = cut_samples(rollout, EnvironmentConfig(context=300), samples(context, eos))
    assert said == "50% of the samples were cut by the context of an episode before they ended; try environment.context: 600."


def test_long_prompts(small):
    config = load(small()).config
    assert long_prompts(config, {"data/overlong": 0.0}) is None
    said = long_prompts(config, {"data/overlong": 3.0, "data/longest": 70.0})
    assert "3 prompts so far had more than data.max_prompt_tokens: 16 tokens, up to 70, and were left out" in said
    assert "data.max_prompt_tokens: 70 takes all of them" in said
    cut = load(small(data={"overlong": "truncate"})).config
    assert "were cut to their last tokens" in long_prompts(cut, {"data/overlong": 3.0, "data/longest": 70.0})


def test_a_schedule_that_the_epochs_cut_off(small):
    def said(**optim):
        return cut_schedule(load(small(steps=500, data={"epochs": 2}, optim=optim)).config, 5, 0.05)

    assert said(schedule="linear") == (
        "data.epochs: 2 ends the run after about 200 of 500 steps, long before optim.schedule: linear has lowered the learning rate; "
        "set steps: 200."
    )
    assert said(schedule="constant") is None
    config = load(small(steps=210, data={"epochs": 2}, optim={"schedule": "cosine"})).config
    assert cut_schedule(config, 5, 0.05) is None
    assert cut_schedule(config, 5, 0.0) is None


def test_small_held_out_sets():
    assert small_set("sums", 100) is None
    assert "eval.sets.sums has 25 answers, so its score is uncertain by ±0.10" in small_set("sums", 25)
    assert "eval.sets.sums.limit: 400" in small_set("sums", 25)


@pytest.mark.parametrize("recipe", ["quickstart/recipe", "frozen-lake/recipe", "sokoban/recipe", "multi-domain/recipe"])
def test_the_learning_rates_of_our_recipes_are_usual(recipe):
    config = load(ROOT / f"recipes/{recipe}.yaml", ["model=tiny"]).config
    assert unusual_rate(config) is None
    assert "times what is usual for" in unusual_rate(load(ROOT / f"recipes/{recipe}.yaml", ["model=tiny", "optim.lr=1"]).config)


def test_rates_far_from_the_usual_are_named_with_a_usual_one(small):
    said = unusual_rate(load(small(), ["optim.lr=1e-7"]).config)
    assert "optim.lr: 1e-07 is 1/" in said
    usual = float(said.rpartition("optim.lr: ")[2].rstrip("."))
    assert 1e-4 < usual < 3e-4  # as our quickstart's
    assert unusual_rate(load(small(), [f"optim.lr={usual * (FAR - 5)}"]).config) is None
    lora = ["roles.actor.lora={}", f"optim.lr={usual * (FAR + 5)}"]
    assert unusual_rate(load(small(), lora).config) is None  # adapters take ten times the rate
    assert unusual_rate(load(small(), lora[1:]).config) is not None
    assert unusual_rate(load(small(model="org/unknown"), ["optim.lr=1"]).config) is None


def test_groups_without_signal():
    rewards = [1.0] * 12 + [0.0, 1.0, 0.0, 1.0]
    eos = [StopReason.EOS] * 16
    said = few_signals("grpo", samples(*eos, rewards=rewards))
    assert said.startswith("in 3 of 4 groups all samples got the same reward")
    assert few_signals("reinforce", samples(*eos, rewards=rewards)) is None
    assert few_signals("grpo", samples(*eos, rewards=[0.0, 1.0] * 8)) is None


def test_a_domain_that_is_named_and_never_seen():
    assert unseen_domain({"sums": "rollout.domains.sums"}, 5, {"sums"}) is None
    said = unseen_domain({"sums": "rollout.domains.sums", "sum": "algorithm.domain_weights.sum"}, 5, {"sums", "code"})
    assert said.startswith(
        "no sample of 5 steps has the domain 'sum', which algorithm.domain_weights.sum names; they have code, sums."
    )
    assert said.endswith("Did you mean 'sums'?")


class Heard(Quiet):
    def __init__(self):
        self.lines = []

    def notice(self, text):
        self.lines.append(text)


def test_each_hint_is_given_once_in_the_terminal_and_the_report_and_not_again_on_resume(small):
    recipe = small(
        rollout={"max_tokens": 1, "domains": {"sum": {"samples": 2}}}, data={"max_prompt_tokens": 9}, eval={"sets": {}}, steps=2
    )
    recipe["data"]["train"].pop("reversal")
    recipe["data"]["train"]["sums"]["args"] = {"top": 99}
    heard = Heard()
    run = train(recipe, progress=heard)
    names = [hint["name"] for hint in run.hints]
    assert {"cut", "long prompts", "domains"} <= set(names)
    assert sorted(set(names)) == sorted(names)
    page = html.unescape((run.path / "report.html").read_text())
    for hint in run.hints:
        assert sum(hint["text"] in line for line in heard.lines) == 1
        assert page.count(hint["text"]) == 1
    again = Heard()
    resumed = train(resume=run.path, overrides=["steps=3"], progress=again)
    assert [hint["name"] for hint in resumed.hints][: len(names)] == names
    assert resumed.settings["steps"] == 3  # the override holds from now on
    assert not any(hint["text"] in line for hint in json.loads(json.dumps(run.hints))[: len(names)] for line in again.lines)
