"""recipes/long-context: its texts, its plan, and that two ranks which divide every text train as one does."""

import itertools
import re
import sys
from pathlib import Path

import pytest
import ray

import drumroll

FOLDER = Path(__file__).parents[2] / "recipes" / "long-context"
RECIPE = FOLDER / "recipe.yaml"


@pytest.fixture
def lookups(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import lookups

    yield lookups
    del sys.modules["lookups"]


@pytest.fixture
def model(lookups, tmp_path):
    lookups.write_model(tmp_path / "random")
    return str(tmp_path / "random")


def test_a_text_hides_one_digit(lookups):
    rows = list(itertools.islice(lookups.texts("train", 0, length=800, shortest=50, flawed=0.7), 200))
    sizes = [len(row["prompt"]) for row in rows]
    assert 50 <= min(sizes) < 80
    assert 500 < max(sizes) <= 800
    assert 150 < sorted(sizes)[100] < 270  # the middle of a log-uniform distribution is the geometric mean
    assert all(re.findall(r"\d", row["prompt"]) == [row["answer"]] for row in rows)
    right = [row["completion"] == row["answer"] for row in rows]
    assert 0.2 < sum(right) / len(right) < 0.4
    held_out = itertools.islice(lookups.texts("held_out", 0, length=800), 5)
    assert [(len(row["prompt"]), row["completion"] == row["answer"]) for row in held_out] == [(800, True)] * 5


def test_the_recipe_can_be_planned(drumroll, model):
    code, out, err = drumroll("train", str(RECIPE), f"model={model}", "--dry-run")
    assert (code, err) == (0, "")
    assert "2 = context 2" in out


@pytest.mark.slow
def test_two_ranks_train_on_long_texts_as_one_does(ray_cluster, model, tmp_path):
    """Step 1 samples the same tokens and has the same loss and gradient. The reward is one that a random model meets half the time."""
    ray.init(ray_cluster.address, log_to_driver=False, logging_level="ERROR")
    reward = "reward={use: regex, args: {pattern: '^[a-zA-M]'}}"
    given = [f"model={model}", f"output={tmp_path}", "steps=2", "rollout.prompts=2", "eval.sets={}", reward]
    try:
        runs = [
            drumroll.train(RECIPE, [*given, f"name=on-{n}", f"cluster.devices={n}", f"roles.actor.parallel.context={n}"])
            for n in (1, 2)
        ]
    finally:
        ray.shutdown()
    alone, divided = (run.metrics[1] for run in runs)
    tokens = [{s["id"]: s["traces"][0]["tokens"] for s in run.samples if s["step"] == 1} for run in runs]
    assert tokens[0] == tokens[1]
    assert all(len(each) > 8000 for each in tokens[0].values())
    assert alone["train/grad_norm"] > 1e-3
    for key in ("train/loss", "train/grad_norm", "train/tokens", "train/entropy"):
        assert divided[key] == pytest.approx(alone[key], rel=1e-4, abs=1e-6), key
    assert all(metrics["train/mismatch"] < 1e-4 for run in runs for metrics in run.metrics[1:])
