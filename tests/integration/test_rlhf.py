"""PPO by a reward model, with a critic that starts from it; and the chain of recipes from imitation to a distilled student."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

import pytest
import ray
import torch
from algorithm_references import written
from quickstarts import first_tokens
from test_reward_model import classifier

import drumroll
from drumroll.config import load
from drumroll.models.value import HEAD
from drumroll.runfiles.reader import RunReader
from drumroll.workers.roles import open_learner

CHAIN = Path(__file__).parents[2] / "recipes" / "chain"
HELD_OUT = {"sums": {"source": "drumroll.data.problems:sums", "domain": "held_out", "limit": 8}}
REMEMBERING = {"reward_mean": "running", "reward_std": "running", "kl_reward": 0.1, "kl_target": 0.5, "kl_horizon": 50}


@pytest.fixture
def rlhf(small, tmp_path):
    """A small recipe of PPO by a reward model, which the critic starts from; the verifier only measures."""
    path = classifier(tmp_path / "classifier")

    def make(**changes):
        return small(
            roles={"reward_model": {"model": path}, "critic": {"model": path, "optim": {"lr": 1e-3}}},
            reward={"sums": "reward_model", "reversal": "reward_model", "held_out": "exact"},
            algorithm={"preset": "ppo", "critic_first": 1, **REMEMBERING},
            **{"eval": {"every": 2, "sets": HELD_OUT}, **changes},
        )

    return make


def test_ppo_by_a_reward_model_resumes_as_if_it_had_not_stopped(rlhf, untimed):
    changes = {"deterministic": True, "checkpoint": {"every": 1}}
    whole = drumroll.train(rlhf(name="whole", steps=4, **changes))
    first = drumroll.train(rlhf(name="parts", steps=2, **changes))
    resumed = drumroll.train(resume=first.path, overrides=["steps=4"])
    assert untimed(resumed) == untimed(whole)
    assert resumed.summary["after"] == whole.summary["after"]
    assert whole.metrics[1]["critic/value"] != 0  # before the first update
    rewards = [s["reward"] for s in whole.samples if s["fate"] == "trained"]
    assert len(set(rewards)) > len(rewards) / 4
    state = json.loads((whole.path / "checkpoints/step-000004/state.json").read_text())["loop"]["algorithm"]["normalise"]
    mean = sum(rewards) / len(rewards)
    assert (state["count"], state["mean"]) == (len(rewards), pytest.approx(mean))
    assert state["squares"] == pytest.approx(sum((reward - mean) ** 2 for reward in rewards))


@pytest.mark.slow
def test_a_killed_run_of_ppo_by_a_reward_model_equals_its_uninterrupted_twin(rlhf, same_after_a_signal):
    same_after_a_signal(rlhf(steps=12))


def test_a_critic_that_starts_from_a_reward_model_values_texts_as_it_scores_them(rlhf):
    from transformers import AutoModelForSequenceClassification

    config = load(rlhf()).config
    texts = [[1, 5, 9, 40, 2], [1, 7, 7], [1]]
    module = AutoModelForSequenceClassification.from_pretrained(config.roles.reward_model.model).eval()
    with torch.no_grad():
        expected = [module(torch.tensor([text])).logits.item() for text in texts]
    critic, batch = open_learner(config, "critic"), written(*((0, 0.0, [*text[1:], 3]) for text in texts))
    last = batch.lengths.cumsum(0) - 1
    assert critic.infer(batch)[last].tolist() == pytest.approx(expected, abs=1e-5)
    dict(critic.backend.weights())[HEAD].zero_()
    assert critic.infer(batch)[last].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.slow
def test_ppo_by_a_reward_model_on_ray_with_a_divided_critic(rlhf, ray_cluster):
    recipe = rlhf(cluster={"runtime": "ray", "devices": 2, "kind": "cpu", "threads": 1}, name="ray", threads=1)
    recipe["roles"]["critic"]["parallel"] = {"shard": 2}
    ray.init(ray_cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        run, alone = drumroll.train(recipe), drumroll.train(rlhf(threads=1))
    finally:
        ray.shutdown()
    assert first_tokens(run) == first_tokens(alone)
    for key in ("reward/sums", "critic/value", "critic/loss"):
        assert run.metrics[1][key] == pytest.approx(alone.metrics[1][key], rel=1e-3, abs=1e-5), key


STAGES = ("sft", "reward-model", "rlhf", "student", "student-sft")
TASKS = ("sums", "reversal")


def chain(folder, seed):
    """The last metrics of every stage, each trained from what the one before it left, in a process with one thread."""
    folder.mkdir()
    for stage in STAGES:
        command = [sys.executable, "-m", "drumroll", "train", CHAIN / f"{stage}.yaml", f"seed={seed}", "threads=1", "--quiet"]
        subprocess.run(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    return {stage: RunReader.open(folder / "runs/chain" / stage).metrics[-1] for stage in STAGES}


@pytest.mark.slow
def test_rlhf_and_distillation_gain_more_than_seeds_differ(tmp_path):
    """The table of the recipe's README: three whole chains, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        seeds = list(pool.map(lambda seed: chain(tmp_path / str(seed), seed), range(3)))
    judged = [stages["reward-model"][f"eval/{task}/accuracy"] for stages in seeds for task in TASKS]
    assert min(judged) >= 0.9, judged
    for better, worse in (("rlhf", "sft"), ("student", "student-sft")):
        ends = {stage: [mean(stages[stage][f"eval/{task}"] for task in TASKS) for stages in seeds] for stage in (better, worse)}
        spread = max(max(scores) - min(scores) for scores in ends.values())
        assert mean(ends[better]) - mean(ends[worse]) > spread, ends
