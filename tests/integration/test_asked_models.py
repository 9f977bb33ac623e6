"""Training runs whose rewards ask a model: our own engine, an endpoint, a classifier."""

import json

from test_judge import endpoint  # noqa: F401  a fixture
from test_reward_model import classifier

import drumroll


def test_training_by_a_judge_of_our_own_with_a_template(small):
    run = drumroll.train(
        small(
            roles={"judge": {"model": "tiny", "max_prompt_tokens": 128, "cache": "run"}},
            reward=["exact", {"use": "judge", "weight": 0.1, "args": {"template": "{prompt}{completion} Is it {answer}? "}}],
        )
    )
    assert run.summary["steps"] == 2
    assert "reward/sums/judge" in run.metrics[1]
    assert run.metrics[1]["judge/calls"] > 0
    assert run.metrics[1]["judge/tokens_in"] > 0
    kept = [json.loads(line) for line in (run.path / "judge.jsonl").read_text().splitlines()]
    assert len(kept) == len({key for key, _ in kept}) == sum(m.get("judge/calls", 0) for m in run.metrics)


def test_training_by_an_endpoint(small, endpoint):  # noqa: F811
    server = endpoint(429, 500, "text")
    run = drumroll.train(
        small(
            roles={"judge": {"model": "far", "url": server.url, "backoff": 0.01, "price": {"input": 1.0}}},
            reward={"use": "judge", "args": {"template": "score"}},
            rollout={"samples": 2, "prompts": 2},
            algorithm={"preset": "grpo"},
            eval={"sets": {}},
        )
    )
    assert run.metrics[1]["judge/retried"] == 3
    assert run.metrics[1]["judge/cost"] > 0
    assert all(abs(s["reward"] - 0.7) < 1e-6 for s in run.samples)
    assert len(server.heard) == sum(m.get("judge/calls", 0) for m in run.metrics)


def test_training_by_a_reward_model(small, tmp_path):
    path = classifier(tmp_path / "classifier")
    run = drumroll.train(small(roles={"reward_model": {"model": path, "batch_size": 4}}, reward="reward_model"))
    assert run.summary["steps"] == 2
    assert len({s["reward"] for s in run.samples}) > 4
