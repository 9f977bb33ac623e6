"""Which metric decides the best checkpoint, and in which direction."""

import math

import pytest

from drumroll.config import load
from drumroll.config.best import BestBy, lower_is_better
from drumroll.errors import ConfigError

ROWS = {"source": "drumroll.data.problems:sums"}


def decided(pipeline="sft", *, sets=(), held_out=(), **evaluation):
    evaluation |= {"sets": dict.fromkeys(sets, ROWS)}
    answered = {"held_out": dict.fromkeys(held_out, ROWS)} if held_out else {}
    given = {"pipeline": pipeline, "reward": "exact", "data": {"train": {"x": ROWS}}, "eval": evaluation, **answered}
    config = load(given).config
    return config.eval.decided_by(config.held_out_sets())


@pytest.mark.parametrize("pipeline", ["sft", "dpo"])
def test_what_decides_by_default(pipeline):
    assert decided(pipeline, sets=["a", "b"], held_out=["p"]) == BestBy(("eval/a", "eval/b"))
    assert decided(pipeline, held_out=["p", "q"]) == BestBy(("eval/p/loss", "eval/q/loss"), lower=True)
    assert decided(pipeline) == BestBy((), lower=True)


@pytest.mark.parametrize(
    ("wanted", "metric", "lower"),
    [
        ("a", "eval/a", False),
        ("p", "eval/p/loss", True),
        ("eval/p/perplexity", "eval/p/perplexity", True),
        ("eval/p/accuracy", "eval/p/accuracy", False),
        ("eval/a/pass@4", "eval/a/pass@4", False),
        ("eval/a/turns", "eval/a/turns", True),
        ("eval/loss/accuracy", "eval/loss/accuracy", False),
        ("-eval/own/thing", "eval/own/thing", True),
        ("-a", "eval/a", True),
    ],
)
def test_a_set_or_a_metric_decides(wanted, metric, lower):
    assert decided(sets=["a"], held_out=["p"], best_by=wanted) == BestBy((metric,), lower)


def test_the_words_that_make_lower_better():
    lower = ["eval/x/loss", "eval/x/kl_reference", "eval/x/calibration_error", "eval/x/thoughts_cut", "train/loss"]
    assert all(map(lower_is_better, lower))
    assert not any(map(lower_is_better, ["eval/loss", "eval/x/margin", "eval/x/success", "eval/kl/sampled"]))


def test_a_name_that_is_no_set_is_refused():
    with pytest.raises(ConfigError, match=r"eval.best_by is 'q', but eval.sets has \['a'\], and held_out has \['p'\]"):
        decided(sets=["a"], held_out=["p"], best_by="q")
    with pytest.raises(ConfigError, match="both have a set 'a'"):
        decided(sets=["a"], held_out=["a"])
    with pytest.raises(ConfigError, match="asks for eval/p/lss, but an evaluation of this run measures eval/p/loss"):
        decided(held_out=["p"], best_by="eval/p/lss").score({"eval/p/loss": 1.0})


@pytest.mark.parametrize("lower", [False, True])
def test_only_a_better_score_by_the_same_metric_improves(lower):
    by = BestBy(("eval/p/x",), lower)
    best = {"step": 1, "score": 0.5, "by": "eval/p/x"}
    assert by.improves(0.4 if lower else 0.6, best)
    assert not by.improves(0.6 if lower else 0.4, best)
    assert not by.improves(0.5, best)
    assert not by.improves(math.nan, best)
    assert not by.improves(math.nan, None)
    assert not by.improves(None, None)
    assert by.improves(0.5, None)
    assert by.improves(0.5, {"step": 1, "score": 0.5})  # by another metric
    assert BestBy(("eval/a",)).improves(0.6, {"step": 1, "score": 0.5})
    assert not BestBy(("eval/a", "eval/b")).improves(0.4, {"step": 1, "score": 0.5})


def test_the_score_is_the_mean():
    assert BestBy(("a", "b")).score({"a": 1.0, "b": 4.0}) == 2.5
    assert BestBy(()).score({"a": 1.0}) is None
