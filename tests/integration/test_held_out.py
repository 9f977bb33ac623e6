"""Loss on held-out rows: what it is, and that lower is better wherever a run is told of."""

import json
import math

import pytest
import torch
import transformers as hf

import drumroll as package
from drumroll.config import load
from drumroll.data.demonstrations import Demonstrations
from drumroll.data.render import Renderer
from drumroll.errors import ConfigError, DataError
from drumroll.models import tiny
from drumroll.observe.report import write_report
from drumroll.observe.runs import describe_run, result_text
from drumroll.runfiles.reader import RunReader

ANSWERS = {"source": "drumroll.data.problems:demonstrations", "args": {"task": "sums", "flawed": 0.0}, "limit": 11}


def slow_loss(folder, rows):
    """Row after row by transformers, and the mean over all trained tokens; also the mean of the rows' means."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    nats, means = [], []
    for group in rows:
        trace = group.samples[0].traces[0]
        tokens = torch.tensor(trace.tokens)
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        own = -logprobs[torch.tensor([owner.name == "POLICY" for owner in trace.owners[1:]])]
        nats.append(own)
        means.append(own.mean())
    return torch.cat(nats).mean().item(), torch.stack(means).mean().item()


def test_held_out_loss_of_supervised_training(supervised, drumroll, tmp_path):
    """Exact over batches of three rows; the lowest is the best; told at the end of the run, in the report and by `runs`."""
    recipe = supervised(steps=3, optim={"lr": 0.03}, held_out={"sums": ANSWERS})
    recipe |= {"batch": 3, "max_tokens": 40, "eval": {"every": 1}}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    code, out, err = drumroll("train", str(path))
    assert code == 0, err
    run = RunReader.open(tmp_path / "runs/small")
    losses = [line["eval/sums/loss"] for line in run.metrics]
    assert all(line["eval/sums/perplexity"] == math.exp(line["eval/sums/loss"]) for line in run.metrics)

    rows = Demonstrations(load(recipe).config, Renderer(tiny.tokenizer()))
    assert len(rows.held_out["sums"].groups) == 11
    exact, mean_of_means = slow_loss(run.model_path, rows.held_out["sums"].groups)
    assert losses[-1] == pytest.approx(exact, rel=1e-5)
    assert abs(mean_of_means - exact) > 1e-3

    best = min(range(1, 4), key=losses.__getitem__)
    assert run.checkpoints.best() == {"step": best, "score": losses[best], "by": "eval/sums/loss"}
    change = f"{losses[0]:.3f} → {losses[3]:.3f}"
    assert "loss ↓" in out
    assert change in out
    assert f"the best (eval/sums/loss {losses[3]:.3f})" in out or f"step {best} (eval/sums/loss {losses[best]:.3f})" in out
    assert run.summary["before_loss"] == {"sums": losses[0]}
    assert result_text(describe_run(run)) == f"sums loss {change}"
    assert f"| sums/loss | {losses[0]:.3f} | {losses[3]:.3f} |" in (run.model_path / "README.md").read_text()
    report = write_report(run).read_text()
    assert "loss, lower is better" in report
    assert ("number up" if losses[3] < losses[0] else "number down") in report


def test_a_metric_that_is_not_measured_is_refused_before_training(supervised):
    with pytest.raises(ConfigError, match=r"asks for eval/sums/los, but an evaluation of this run measures eval/sums/loss, "):
        package.train(supervised(held_out={"sums": ANSWERS}) | {"eval": {"best_by": "eval/sums/los"}})
    with pytest.raises(DataError, match=r"held_out.sums has no row that can be used"):
        package.train(supervised(name="long", held_out={"sums": ANSWERS}, max_tokens=3) | {"eval": {}})


@pytest.mark.slow
def test_two_ranks_measure_as_one_process(supervised, same_on_two_ranks):
    """Eleven rows in batches of three: the last has one row more than ranks, and none is counted twice."""
    run, _ = same_on_two_ranks(supervised(held_out={"sums": ANSWERS}) | {"batch": 3, "max_tokens": 40, "eval": {"every": 1}})
    assert [line["step"] for line in run.metrics if "eval/sums/loss" in line] == [0, 1, 2]
