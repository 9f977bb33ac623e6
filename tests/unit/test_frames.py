"""Samples and metrics as frames, plots, and how a run shows itself."""

import pickle
import subprocess
import sys
import xml.etree.ElementTree as ET

import cloudpickle
import pytest

import drumroll
from drumroll.config import load
from drumroll.errors import MissingExtra, StoreError
from drumroll.runfiles.charts import _ticks, plot
from drumroll.runfiles.frames import Frame, SampleRow, TraceRow, TurnRow
from drumroll.runfiles.rollouts import SCHEMA, TRACE, sample_row
from drumroll.sample import Fate, Owner, Prompt, Sample, StopReason, Trace, Turn
from drumroll.store.run import Run


def sample(draw, answer):
    trace = Trace()
    trace.extend([1, 5], Owner.PROMPT)
    trace.extend([7, draw], Owner.POLICY, [-0.5, -0.25], [0, 0])
    prompt = Prompt(f"p{draw}", "sums", f"<b>{draw}</b>", (1, 5), {"answer": answer})
    turns = [Turn(0, 2, 4, "start", 1.0)]
    return Sample(prompt, draw, 0, Fate.TRAINED, [trace], "text", StopReason.EOS, draw / 2, {"exact": 1.0}, turns=turns)


@pytest.fixture
def run(small):
    made = Run.create(load(small(steps=2)).config)
    made.append_metrics(0, {"eval/sums": 0.25})
    made.append_metrics(1, {"reward/sums": 0.5, "reward/other": 0.0, "train/loss": 1.0})
    made.append_metrics(2, {"reward/sums": 0.75, "reward/other": 1.0, "train/loss": float("nan"), "eval/sums": 0.5})
    made.write_rollouts("train", 1, [sample(0, "x"), sample(1, 3)])
    return made


def test_rows_are_the_typed_dict_that_they_say(run):
    assert list(SampleRow.__annotations__) == SCHEMA.names
    assert list(TraceRow.__annotations__) == [field.name for field in TRACE]
    row = run.samples[0]
    assert set(row) == set(SCHEMA.names)
    assert set(row["turns"][0]) == set(TurnRow.__annotations__)


def test_a_callback_receives_the_row_that_is_read_later(run):
    assert [sample_row(1, "train", s) for s in (sample(0, "x"), sample(1, 3))] == run.samples


def test_frames_of_pandas_and_polars_hold_the_rows(run):
    pandas, polars = run.samples.to_pandas(), run.samples.to_polars()
    for frame in (pandas, polars):
        assert list(frame.columns) == SCHEMA.names
        assert list(frame["reward"]) == [0.0, 0.5]
    assert [columns["answer"] for columns in pandas["columns"]] == ["x", 3]
    assert list(polars["traces"][0][0]["tokens"]) == [1, 5, 7, 0]
    metrics = run.metrics.to_pandas()
    assert list(metrics["step"]) == [0, 1, 2]
    assert metrics["reward/sums"].isna().tolist() == [True, False, False]
    assert run.metrics.to_polars()["eval/sums"].to_list() == [0.25, None, 0.5]


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_missing_library_is_named(run, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtra, match=rf"drumroll\[{library}\]"):
        getattr(run.metrics, f"to_{library}")()


def test_a_frame_is_a_list_and_shows_itself(run):
    assert run.metrics[-1]["step"] == 2
    assert run.metrics == list(run.metrics)
    assert repr(Frame([{"a": 1}, {"b": 2}])) == "<Frame: 2 rows of a, b>"
    shown = run.samples._repr_html_()
    assert "&lt;b&gt;0&lt;/b&gt;" in shown  # text of a model is never markup
    assert "<th>traces</th>" not in shown
    assert "… 5 more rows" in Frame([{"a": 1}] * 15)._repr_html_()
    ET.fromstring(f"<x>{shown}</x>")


def test_a_run_shows_its_state_scores_and_curves(run):
    assert repr(run) == f"Run({str(run.path)!r}: unfinished, step 2 of 2)"
    run.write_summary({"seconds": 12.4, "before": {"sums": 0.25}, "after": {"sums": 0.5}})
    assert repr(run) == f"Run({str(run.path)!r}: finished, step 2 of 2 in 12 s, sums 0.250 → 0.500)"
    html = run._repr_html_()
    assert "sums 0.250 → 0.500" in html
    assert html.count("<svg") == 1
    ET.fromstring(html)


def lines(svg):
    """The panels of a plot: the points of each line, and all texts."""
    panels = ET.fromstring(svg).findall("{*}g")
    return [
        (
            [[tuple(map(float, p.split(","))) for p in line.get("points").split()] for line in panel.findall("{*}polyline")],
            [text.text for text in panel.findall("{*}text")],
        )
        for panel in panels
    ]


def test_a_plot_draws_rewards_and_held_out_scores(run, tmp_path):
    drawn = run.plot()
    (rewards, words), (scores, _) = lines(drawn.svg)
    assert "reward" in words
    assert "other" in words
    assert len(rewards) == 2
    assert len(scores) == 1
    for (x0, y0), (x1, y1) in (*rewards, *scores):  # steps to the right, larger values higher
        assert x0 < x1
        assert y0 > y1
    assert drawn._repr_html_() == drawn.svg
    drawn.save(tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text() == drawn.svg


def test_a_plot_of_named_metrics(run):
    (_, words), (both, _) = lines(run.plot("train/loss", "reward").svg)
    assert "train/loss" in words
    assert len(both) == 2
    assert "<circle" in run.plot("train/loss").svg  # the NaN of step 2 is left out
    with pytest.raises(StoreError, match=r"no metric 'train/los'.*Did you mean 'train/loss'"):
        run.plot("train/los")
    assert lines(plot([], ()).svg) == []


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.2, 0.2), (-3, 17), (1e-6, 3e-6), (0, 100), (5, 5)])
def test_axes_cover_the_values_with_few_round_numbers(low, high):
    ticks = _ticks(low, high)
    assert ticks[0] <= low
    assert high <= ticks[-1]
    assert 2 <= len(ticks) <= 7
    assert all(float(f"{tick:.2g}") == pytest.approx(tick) for tick in ticks)
    assert all(tick == int(tick) for tick in _ticks(low, high, whole=True))


def test_the_public_names_have_docstrings():
    assert {"train", "evaluate", "load", "rescore", "Run", "SampleRow"} <= set(dir(drumroll))
    assert dir(drumroll) == sorted(drumroll.__all__)
    for name in set(dir(drumroll)) - {"__version__"}:
        assert len(getattr(drumroll, name).__doc__) > 20, name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        drumroll.trian  # noqa: B018


def test_public_functions_are_not_hidden_by_packages_of_the_same_name():
    """A first call imports `drumroll.rollout.*`."""
    code = "import drumroll; a = drumroll.rollout; import drumroll.rollout.scheduler; assert drumroll.rollout is a is drumroll.api.rollout"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_travels_by_name():
    for pickler in (pickle, cloudpickle):
        assert pickle.loads(pickler.dumps(drumroll)) is drumroll
