"""Training, evaluating and playing in environments: the whole way from a recipe to a better policy."""

import asyncio
import html
import json
import re

import pytest
import yaml

import drumroll as package
from drumroll.config import load
from drumroll.errors import ConfigError
from drumroll.runfiles.ledger_queries import LedgerReader
from drumroll.runfiles.rollouts import read_samples
from drumroll.sample import Owner
from drumroll.store.run import Run
from drumroll.workers.runtime import context_length

SEEDS = "drumroll.data.seeds:seeds"


@pytest.fixture
def played(small):
    """A recipe with episodes."""

    def make(use="toy_environments:Quiz", **changes):
        environment = {"use": use, "max_turns": 3, **changes.pop("environment", {})}
        base = {
            "data": {"train": {"quiz": {"source": SEEDS}}, "max_prompt_tokens": 24},
            "eval": {"sets": {"quiz": {"source": SEEDS, "limit": 16}}},
            "rollout": {"prompts": 4, "samples": 4, "max_tokens": 4},
            "environment": environment,
        }
        recipe = {**small(), **base, "reward": {}}
        for key, value in changes.items():
            recipe[key] = {**recipe[key], **value} if isinstance(recipe.get(key), dict) and isinstance(value, dict) else value
        return recipe

    return make


@pytest.mark.parametrize(
    ("mode", "algorithm"),
    [("trajectory", "starpo"), ("step", "gigpo"), ("trajectory", "gigpo"), ("step", {"advantage": "turns"})],
)
def test_every_mode_and_algorithm_trains(played, mode, algorithm):
    run = package.train(played(environment={"mode": mode, "history": 1}, algorithm=algorithm))
    last = run.metrics[-1]
    assert last["environment/quiz/turns"] == 2
    assert 0 <= last["environment/quiz/success"] <= 1
    assert 0 <= last["environment/quiz/effective"] <= 1
    assert {"eval/quiz/success", "eval/quiz/effective", "eval/quiz/turns"} <= last.keys()
    assert run.summary["after_turns"] == {"quiz": 2.0}
    assert last["train/mismatch"] < 1e-3
    trained = [s for s in run.samples if s["fate"] == "trained"]
    assert len(trained) == 2 * 16
    for sample in trained:
        assert len(sample["traces"]) == (1 if mode == "trajectory" else 2)
        assert sample["stop"] == "terminated"
        assert sample["reward"] == pytest.approx(sum(t["reward"] for t in sample["turns"]))
        assert any(Owner.ENVIRONMENT in t["owners"] for t in sample["traces"]) == (mode == "trajectory")
    assert LedgerReader(run.path / "ledger.sqlite").problems() == []


def test_ppo_over_episodes(played):
    run = package.train(played(algorithm={"preset": "starpo", "advantage": "gae"}, steps=1))
    assert "critic/explained" in run.metrics[-1]


def test_episodes_are_deterministic_and_resume(played):
    recipe = played(deterministic=True, checkpoint={"every": 1}, steps=3)
    first = package.train({**recipe, "name": "first"})
    package.train({**recipe, "name": "second", "steps": 1})
    second = package.train(resume=f"{recipe['output']}/second", overrides=["steps=3"])
    tokens = [[(s["id"], s["traces"]) for s in run.samples if s["kind"] == "train"] for run in (first, second)]
    assert tokens[0] == tokens[1]


def test_asynchronous_episodes_keep_the_bound(played):
    run = package.train(played(steps=4, rollout={"max_staleness": 1, "partial": True}))
    for sample in run.samples:
        if sample["fate"] == "trained":
            versions = [v for t in sample["traces"] for v in t["versions"] if v >= 0]
            assert sample["step"] - 1 - min(versions) <= 1


def test_a_policy_learns_in_an_environment(played):
    """To answer with an even number, in both turns: the first question looks like those that the tiny model knows."""
    recipe = played(
        steps=20,
        environment={"args": {"questions": 2, "even": True}},
        rollout={"prompts": 16, "samples": 8},
        optim={"lr": 1e-3},
        eval={"sets": {"quiz": {"source": SEEDS, "limit": 64}}},
        algorithm="starpo",
        roles={"rollout": {"slots": 128}},
    )
    run = package.train(recipe)
    before, after = run.summary["before"]["quiz"], run.summary["after"]["quiz"]
    assert after > before + 0.2, (before, after)


def test_mixtures_and_transfer(played):
    """Two environments and plain prompts in one run; a third environment only in evaluation."""
    train = {
        "quiz": {"source": SEEDS},
        "walk": {"source": SEEDS, "environment": "toy_environments:Corridor", "environment_args": {"length": 1}},
        "sums": {"source": "drumroll.data.problems:sums", "environment": "none"},
    }
    sets = {"far": {"source": SEEDS, "environment": "toy_environments:Corridor", "limit": 4}}
    recipe = played(data={"train": train}, reward={"sums": "exact"}, eval={"sets": sets}, rollout={"prompts": 6}, steps=1)
    run = package.train(recipe)
    last = run.metrics[-1]
    assert {"reward/quiz", "reward/walk", "reward/sums", "environment/walk/turns", "environment/quiz/turns"} <= last.keys()
    assert "environment/sums/turns" not in last
    assert "eval/far/success" in last
    plain = [s for s in run.samples if s["domain"] == "sums"]
    assert plain
    assert not any(s["turns"] for s in plain)


@pytest.mark.parametrize(
    ("how", "setting"),
    [
        ({"mode": "trajectory", "context": 40}, "environment.context"),
        ({"mode": "step", "history": 6, "keep_first": True}, "data.max_prompt_tokens"),
    ],
)
def test_check_names_the_limit_that_cuts_episodes_off(played, drumroll, tmp_path, how, setting):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(played("toy_environments:Corridor", environment={"max_turns": 9, **how})))
    code, out, _ = drumroll("check", str(path))
    assert code == 1, out  # cut off, no episode earns anything: no group would give a gradient
    assert f"tokens cut the episode off; raise {setting}, or" in " ".join(out.split())
    code, out, err = drumroll("train", str(path), "steps=2")
    assert code == 0, err
    assert " ".join(out.split()).count(f"tokens cut the episode off; raise {setting}, or") == 1  # once in a run


def test_other_rewards_may_be_added(played, mine, drumroll):
    name = mine("async def short(completion): return -float(len(completion))")
    run = package.train(played(reward={"quiz": [{"use": f"{name}:short", "weight": 0.5}]}, steps=1))
    sample = next(s for s in run.samples if s["fate"] == "trained")
    assert sample["reward"] == pytest.approx(sample["rewards"]["environment"] + 0.5 * sample["rewards"]["short"])
    code, _, err = drumroll("run", "rescore", str(run.path), f"reward={name}:short")
    assert code == 0, err
    again = next(r for f in (run.path / "rescored").glob("train-*") for r in read_samples(f) if r["id"] == sample["id"])
    assert again["reward"] == pytest.approx(sample["rewards"]["environment"] + sample["rewards"]["short"])
    assert again["turns"] == sample["turns"]


WAYS = {
    "reset": "ValueError in {}, reset: no such level",
    "raise": "ValueError in {}, step: the floor gave way",
    "crash": "WorkerDied in {}, step: the worker process exited with code 3",
    "hang": "TimeoutError in {}, step: took longer than 1 s",
    "type": "BadAnswer in {}, step: ",
    "reward": "BadAnswer in {}, step: ",
    "leak": "TooMuchMemory in {}, step: its process has grown to",
    "endless": "Endless in {}: no end within max_turns=2",
    "print": "Printed in {}, step: ",
}


@pytest.mark.parametrize("how", WAYS)
def test_bad_environments_are_named_and_the_run_goes_on(played, drumroll, tmp_path, how):
    """Every second seed goes wrong, in each way; without end, all do."""
    args = {"how": how, "every": 1 if how == "endless" else 2, "length": 1}
    recipe = played(
        "toy_environments:Bad",
        data={"train": {"walk": {"source": SEEDS}}},
        eval={"sets": {}},
        rollout={"prompts": 3, "samples": 2},
        environment={"args": args, "step_timeout": 1.0, "max_turns": 2, "memory_gb": 0.3},
        steps=2,
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    code, out, err = drumroll("train", str(path))
    assert code == 0, err

    run = Run.open(f"{recipe['output']}/small")
    what = WAYS[how].format("environment 'toy_environments:Bad'")
    told = [text for s in run.samples for text in (s["failure"], *s["notes"]) if text]
    assert any(what in text for text in told), told
    assert what in " ".join(out.split())
    assert what.partition(": ")[0] in html.unescape((run.path / "report.html").read_text())
    assert len({s["step"] for s in run.samples if s["fate"] == "trained"}) == 2
    assert LedgerReader(run.path / "ledger.sqlite").problems() == []


def test_config_of_environments(played, small):
    config = load(played(environment={"max_turns": 4})).config
    assert context_length(config) == 24 + 4 + 3 * 2 * 4
    assert context_length(load(played(environment={"mode": "step"})).config) == 28
    assert context_length(load(played(environment={"context": 99})).config) == 99
    with pytest.raises(ConfigError, match=r"unknown key 'environment.turns'"):
        load(played(environment={"turns": 4}))
    with pytest.raises(ConfigError, match="or an environment"):
        load(small(reward={}))
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        package.train(played(use="nowhere:Env"))


# --- verbs ---


def test_check_of_a_recipe_with_episodes(played, drumroll, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(played()))
    code, out, err = drumroll("check", str(path))
    assert code == 0, err
    assert "quiz" in out
    assert "cut the episode off" not in out
    path.write_text(yaml.safe_dump(played("toy_environments:Bad", environment={"args": {"how": "raise"}})))
    code, out, _ = drumroll("check", str(path))
    assert code == 1
    assert "the floor gave way" in " ".join(out.split())


def test_check_of_a_built_in_environment(drumroll):
    code, out, err = drumroll("check", "sokoban", "style=compact")
    assert code == 0, err
    assert "success 1.00" in out


def test_check_environment(drumroll):
    code, out, err = drumroll("check", "toy_environments:Corridor", "length=2")
    assert code == 0, err
    for text in ("same seed, same episode", "success 1.00", "speed", "inline"):
        assert text in out
    code, out, err = drumroll("check", "toy_environments:Unseeded")
    assert code == 2
    assert "fails: same seed, same episode" in err
    assert "random or numpy.random was used" in out
    code, out, err = drumroll("check", "toy_environments:Moody")
    assert "fails: same seed, same episode" in err
    assert re.search(r"turn 1 differs: .+, after the actions '[lr]'", " ".join(re.split(r"[\s│]+", out)))
    for how, name in (("raise", "answers"), ("type", "answers"), ("crash", "stays alive")):
        code, _, err = drumroll("check", "toy_environments:Bad", f"how={how}")
        assert code == 2
        assert name in err
    code, _, err = drumroll("check", "toy_environments:Bad", "how=hang", "--seconds", "3")
    assert "ends in time" in err
    assert drumroll("check", "machin")[0] == 2


def test_rollout_without_training(played, drumroll, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(played()))
    code, out, err = drumroll("rollout", str(path), "--batches", "2")
    assert code == 0, err
    assert "environment/quiz/success" in out

    run = Run.open(tmp_path / "runs" / "small-rollout")
    assert len(run.samples) == 2 * 16
    assert not (run.path / "model").exists()
    assert drumroll("rollout", str(path))[0] == 2
    assert drumroll("rollout", str(path), "--overwrite")[0] == 0


def test_a_person_plays(drumroll, monkeypatch):
    said = iter(["r", "x", *"rrrrrrrr"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    code, out, _ = drumroll("rollout", "toy_environments:Corridor", "--human", "--seed", "3", "length=1")
    assert code == 0
    assert "malformed True" in out
    assert "success True" in out
    assert "the episode is over" in out


def test_the_human_ends_with_the_input(monkeypatch):
    from drumroll.envs.human import play

    def nothing(prompt):
        raise EOFError

    monkeypatch.setattr("builtins.input", nothing)
    assert asyncio.run(play("toy_environments:Corridor", {}, 0)) == 0.0
