"""What a terminal and a pipe show of a run: a live screen, one aligned line per step, the same closing lines for all runs."""

import io
import re

import pytest
from rich.console import Console

from drumroll.config import load
from drumroll.observe.legend import meaning
from drumroll.observe.progress import Plain, Screen, ending, for_console, sparkline
from drumroll.sample import Fate, Prompt, Sample, StopReason
from drumroll.store.run import Run

SUMMARY = {
    "name": "lake",
    "steps": 3,
    "seconds": 9.6,
    "before": {"ice": 0.1, "late": 0.2},
    "after": {"ice": 0.9},
    "before_sampled": {},
}
EPISODES = {
    "before_success": {"ice": 0.25},
    "after_success": {"ice": 0.75},
    "before_turns": {"ice": 9},
    "after_turns": {"ice": 4},
}
STEP = {
    **{"reward/sums": 0.5, "reward/words": 0.125, "reward/sums/exact": 1.0, "rollout/length": 12.25, "rollout/tokens": 900.0},
    **{
        "train/loss": 0.001,
        "train/kl_behaviour": 0.01,
        "train/mismatch": 2e-6,
        "time/tokens_per_s": 812.3,
        "time/rollout": 3.0,
    },
    **{"time/train": 1.0},
}


@pytest.fixture
def config(small):
    return load(small(steps=40)).config


@pytest.fixture
def run(small):
    run = Run.create(load(small(name="lake", steps=3)).config)
    run.model_path.mkdir()
    return run


def console(**kind):
    return Console(width=100, file=io.StringIO(), **kind)


def finished(run, summary):
    run.write_summary(summary)
    out = console()
    Plain(run.config, out).finish(run, summary)
    return out.file.getvalue()


# --- a pipe ---


def lines(config, *steps, verbose=False):
    out = console()
    shown = for_console(config, out, verbose=verbose)
    assert isinstance(shown, Plain)
    shown.begin(0, {"eval/sums": 0.25, "eval/sums/sampled": 0.5, "eval/sums/pass@4": 1.0})
    for step, metrics in enumerate(steps, 1):
        shown.committed(step, metrics)
    return out.file.getvalue().splitlines()


def test_a_step_is_a_line_with_the_handful_of_numbers(config):
    before, first, legend, second = lines(config, STEP, STEP | {"eval/sums": 0.375})
    assert before == "step 0/40   held-out sums  0.250"
    numbers = (
        r"step 1/40   reward sums  0.500  reward words  0.125  length   12.2  mismatch 2.0e-06  tokens/s    812  eta +\d+ \w+"
    )
    assert re.fullmatch(numbers, first)
    assert second.endswith("  held-out sums  0.375")
    for text in ("length: Mean tokens", "mismatch: Largest gap", "drumroll train -v shows every metric"):
        assert text in legend


def test_columns_stay_where_they_are(config):
    """Whatever a step has or lacks, a label begins at the same place in all lines after it was first seen."""
    steps = [STEP, STEP | {"eval/sums": 0.5, "rollout/length": 3.0, "reward/sums": -0.5}]
    steps += [{name: value for name, value in STEP.items() if name != "reward/sums"}, STEP | {"eval/sums": 1.0}]
    shown = [line for line in lines(config, *steps) if line.startswith("step")][1:]
    for label in ("reward sums", "reward words", "length", "mismatch", "tokens/s", "eta", "held-out sums"):
        assert len({line.index(label) for line in shown if label in line}) == 1, shown


def test_a_kl_to_a_reference_is_shown_only_where_there_is_one(config):
    with_reference = lines(config, STEP | {"train/kl_reference": 0.02})[1]
    assert "KL to reference  2.0e-02" in with_reference
    assert "mismatch" not in with_reference
    assert "KL" not in lines(config, STEP)[1]


def test_supervised_training_shows_its_loss(config):
    assert "loss   2.5000" in lines(config, {"train/loss": 2.5, "time/tokens_per_s": 10.0})[1]
    assert "loss" not in lines(config, STEP)[1]


def test_verbose_shows_every_metric_and_what_it_means_once(config):
    shown = "\n".join(lines(config, STEP, STEP, verbose=True))
    for name in STEP:
        assert shown.count(f"    {name} ") == 2
    assert shown.count("a value near 0 is normal") == 1
    assert shown.count("It is no KL to a reference") == 1


# --- a terminal ---


def screen_text(screen):
    out = console()
    out.print(screen.panel())
    return out.file.getvalue()


def sample(**fields):
    prompt = Prompt("p", "sums", "What is 1 + 1?", (1,), {"answer": "two"})
    return Sample(prompt, 3, 1, Fate.TRAINED, [], "[bold]2\x1b[31m", StopReason.EOS, 0.25, **fields)


def test_the_screen_shows_numbers_their_course_stages_and_a_sample(config):
    out = console(force_terminal=True)
    screen = for_console(config, out)
    assert isinstance(screen, Screen)
    try:
        screen.begin(0, {"eval/sums": 0.25})
        for step in range(1, 9):
            screen.stage("rollout")
            screen.sampled(step, [sample()])
            screen.committed(step, STEP | {"reward/sums": step / 8})
        screen.notice("something odd")
        text = screen_text(screen)
    finally:
        screen.close()
    assert "rollout" in text
    assert "8/40" in text
    assert re.search(r"reward sums +1\.000 +▁▂▃▄▅▆▇█", text)
    assert re.search(r"held-out sums +0\.250", text)
    assert "stages  rollout 3 s (75%)  train 1 s (25%)" in text
    for part in ("step 1, sample 3.1, sums", "What is 1 + 1?", "[bold]2␛[31m", "two", "0.25"):
        assert part in text
    assert "something odd" in out.file.getvalue()


def test_a_new_sample_is_shown_now_and_then(config, monkeypatch):
    screen = for_console(config, console(force_terminal=True))
    try:
        screen.sampled(1, [sample()])
        screen.sampled(2, [sample()])
        assert "step 1, sample" in screen_text(screen)
        monkeypatch.setattr(screen, "_sample_due", 0.0)
        screen.sampled(3, [])
        screen.sampled(4, [sample()])
        assert "step 4, sample" in screen_text(screen)
    finally:
        screen.close()


def test_sparklines():
    assert sparkline([0, 7, 3.5]) == "▁█▅"
    assert sparkline([1, 1]) == "▁▁"
    assert sparkline([1]) == sparkline([]) == ""
    assert sparkline([0.0, float("nan"), 1.0]) == "▁ █"


# --- the end ---


def test_what_was_measured_has_a_column_each_and_nothing_else(run):
    text = finished(run, SUMMARY | EPISODES)
    assert "lake: 3 steps in 10 s" in text
    assert "0.100 → 0.900" in text
    assert "0.250 → 0.750" in text
    assert "9.000 → 4.000" in text
    assert "success" in text
    assert "sampled" not in text
    assert "effective" not in text
    assert next(line for line in text.splitlines() if "late" in line).count("–") == 3


def test_runs_without_held_out_sets_end_with_the_same_lines(run):
    with_sets, without = finished(run, SUMMARY), finished(run, SUMMARY | {"before": {}, "after": {}})
    closing = [line for line in with_sets.splitlines() if not re.match("[┏┃┡│└]", line)]
    assert [line for line in without.splitlines() if not line.startswith("held out none")] == closing
    assert closing[0] == "lake: 3 steps in 10 s"
    assert closing[2] == f"model    {run.model_path}: step 3, the last (no held-out set says which was best)"
    assert ending(run, SUMMARY)[1] == closing


def test_meanings():
    assert "near 0 is normal" in meaning("train/loss")
    assert meaning("reward/sums").startswith("Mean reward")
    assert meaning("train/kl") == meaning("mine/own") == ""
