"""PPO by a reward model, with a critic that starts from it; and the chain of recipes from imitation to a distilled student."""

import json
from pathlib import Path

import pytest
import torch
from algorithm_references import written
from test_reward_model import classifier

import drumroll
from drumroll.config import load
from drumroll.workers.roles import open_learner

CHAIN = Path(__file__).parents[2] / "recipes" / "chain"
SETS = {"sums": {"source": "drumroll.data.problems:sums", "domain": "held_out", "limit": 8}}
PARTS = {"reward_mean": "running", "reward_std": "running", "kl_reward": 0.1, "kl_target": 0.5, "kl_horizon": 50}


@pytest.fixture
def rlhf(small, tmp_path):
    """A small recipe of PPO by a reward model, which the critic starts from; the verifier only measures."""
    path = classifier(tmp_path / "classifier")

    def make(**changes):
        return small(
            roles={"reward_model": {"model": path}, "critic": {"model": path, "optim": {"lr": 1e-3}}},
            reward={"sums": "reward_model", "reversal": "reward_model", "held_out": "exact"},
            algorithm={"preset": "ppo", "critic_first": 1, **PARTS},
            eval={"sets": SETS},
            **changes,
        )

    return make


def test_ppo_by_a_reward_model_resumes_as_if_it_had_not_stopped(rlhf, untimed):
    changes = {"deterministic": True, "checkpoint": {"every": 1}}
    whole = drumroll.train(rlhf(name="whole", steps=4, **changes))
    first = drumroll.train(rlhf(name="parts", steps=2, **changes))
    resumed = drumroll.train(resume=first.path, overrides=["steps=4"])
    assert untimed(resumed) == untimed(whole)
    assert resumed.summary["after"] == whole.summary["after"]
    rewards = [s["reward"] for s in whole.samples if s["fate"] == "trained"]
    assert len(set(rewards)) > 8
    assert whole.metrics[1]["critic/value"] != 0
    state = json.loads(next((whole.path / "checkpoints").glob("*4/state.json")).read_text())["loop"]["algorithm"]["normalise"]
    assert state["count"] == len(rewards)
    assert state["mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert state["squares"] == pytest.approx(sum((r - state["mean"]) ** 2 for r in rewards))


def test_a_critic_that_starts_from_a_reward_model_values_a_text_as_that_scores_it(rlhf):
    from transformers import AutoModelForSequenceClassification

    config = load(rlhf()).config
    tokens = [[1, 5, 9, 40, 2], [1, 7, 7]]
    batch = written(*((0, 0.0, [*row, 3]) for row in tokens))
    module = AutoModelForSequenceClassification.from_pretrained(config.roles.reward_model.model).eval()
    with torch.no_grad():
        expected = [module(torch.tensor([row])).logits.item() for row in tokens]
    values = open_learner(config, "critic").infer(batch)
    print(values, expected)
