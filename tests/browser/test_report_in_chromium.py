"""The report in a real browser: its script runs, and the texts of models do not."""

import math
import re
import shutil
import subprocess
from html import unescape

import pytest

from drumroll.config import load
from drumroll.observe.report import write_report
from drumroll.runfiles.calibration import Calibration, write_calibration
from drumroll.sample import Failure, Fate, Prompt, Sample, StopReason
from drumroll.store.run import Run

FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"
MARK = "document.documentElement.dataset.hacked=1"
HOSTILE = f"</td></script><script>{MARK}</script><img src=x onerror={MARK}><svg onload={MARK}>\n<b>λ</b> 'a' \"b\" &amp; {{{{ 7*7 }}}}"


@pytest.fixture
def dump(tmp_path):
    """The page's DOM after its scripts ran; `extra` is a script appended to the page, as a user's hand."""

    def run(report, extra=""):
        chromium = shutil.which("chromium")
        if chromium is None:
            pytest.fail("chromium is missing: run make system")
        page = report.with_name("opened.html")
        page.write_text(report.read_text() + f"<script>{extra}</script>")
        command = [chromium, *FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    return run


def new_run(tmp_path):
    values = {"name": "demo", "output": str(tmp_path), "steps": 40, "reward": "exact"}
    return Run.create(load(values | {"data": {"train": {"sums": {"source": "sums.jsonl"}}}}).config)


@pytest.fixture
def report(tmp_path):
    """40 steps, two domains, evaluations at every tenth step, one hostile sample and one that failed."""
    run = new_run(tmp_path)
    for step in range(41):
        learnt = 1 - math.exp(-step / 15)
        metrics = (
            {"reward/sums": learnt, "reward/words": learnt / 2, "train/loss": -0.1 * learnt, "time/rollout": 2.0}
            if step
            else {}
        )
        metrics |= {"eval/sums": learnt, "eval/words": learnt / 2, "eval/words/sampled": learnt / 3} if step % 10 == 0 else {}
        run.append_metrics(step, metrics | {f"reward/{HOSTILE}": 0.5})
    rewards = [0.5, 10.0, 2.0]
    samples = [_sample(i, f"answer {i}", reward) for i, reward in enumerate(rewards)]
    failed = _sample(3, HOSTILE, None, state=Fate.FAILED, failure=Failure("ValueError", "reward", HOSTILE))
    run.write_rollouts("train", 40, [*samples, failed])
    return write_report(run)


def _sample(index, completion, reward, **fields):
    prompt = Prompt(id=str(index), domain=HOSTILE if reward is None else "sums", content=completion, tokens=(1,))
    return Sample(
        prompt, index, 0, completion=completion, reward=reward, stop=StopReason.EOS, **({"state": Fate.TRAINED} | fields)
    )


def rewards_in(dom):
    rows = re.findall(r"<tr(?: hidden=\"\")?>(.*?)</tr>", dom.split('id="samples"')[1], re.S)[1:]
    return [re.search(r'data-label="reward">([^<]*)<', row)[1] for row in rows]


def test_script_runs_and_draws(dump, report):
    dom = dump(report)
    assert 'data-ready="1"' in dom
    figures = re.findall(r"<figure.*?</figure>", dom, re.S)
    assert len(figures) == 5
    for figure in figures:
        assert re.search(r'<polyline class="plot" points="[\d.]+,[\d.]+ ', figure)
        assert figure.count('<text x="') >= 5
    reward, held_out, *_ = figures
    assert "step 40" in reward
    assert ">0.931</b>" in reward
    # The set measured at every tenth step has a dot for each of its five evaluations.
    assert held_out.count('r="2.2"') == 3 * 5


def test_calibration_and_the_accuracy_of_domains_stand_beside_the_charts(dump, tmp_path):
    run = new_run(tmp_path)
    for step in range(3):
        found = {"eval/x/accuracy": 0.5 + step / 10, "eval/x/a/accuracy": 0.4, "eval/x/b/accuracy": 0.9}
        run.append_metrics(step, found | ({"train/loss": 1.0 / step} if step else {}))
    write_calibration(run.path, 2, {"x": Calibration.of([0.3, -0.1, 2.0])})
    dom = dump(write_report(run))
    assert 'data-ready="1"' in dom
    charts = re.findall(r"<figure class=\"chart[^>]*data-chart.*?</figure>", dom, re.S)
    accuracy = next(chart for chart in charts if "<h3>Held-out accuracy" in chart or "Held-out accuracy</" in chart)
    assert [name in accuracy for name in (">x<", ">x/a<", ">x/b<")] == [True] * 3
    assert all('<polyline class="plot" points="' in chart for chart in charts)
    assert "Calibration on x" in dom
    assert re.search(r"x/b <[^>]*>accuracy", dom)


def test_hostile_text_is_shown_and_not_run(dump, report):
    dom = dump(report)
    assert 'data-ready="1"' in dom
    assert "data-hacked" not in dom
    assert "<img" not in dom
    shown = re.search(r'data-label="completion"><div class="text">(&lt;/td.*?)</div>', dom, re.S)[1]
    assert unescape(shown.replace('<i class="newline"></i>', "")) == HOSTILE


def test_an_unfinished_run_opens(dump, tmp_path):
    dom = dump(write_report(new_run(tmp_path)))
    assert 'data-ready="1"' in dom
    assert "No step has been recorded" in dom


def test_hovering_shows_the_values_of_that_step_in_every_chart(dump, report):
    hover = """
      const svg = document.querySelector(".chart > svg"), box = svg.getBoundingClientRect();
      svg.dispatchEvent(new PointerEvent("pointermove", {clientX: charts[0].x(9) + box.left}));"""
    dom = dump(report, hover)
    reward, held_out, _, _, loss = re.findall(r"<figure.*?</figure>", dom, re.S)
    assert "step 9<" in reward
    assert ">0.451</b>" in reward
    assert "step 9 " in loss
    assert "step 10<" in held_out
    assert ">0.487</b>" in held_out
    assert re.search(r'class="cross"[^>]*visibility="visible"', reward)


def test_columns_sort_by_number_with_missing_values_last(dump, report):
    click = 'const button = document.querySelectorAll("#samples button")[6]; button.click();'
    assert rewards_in(dump(report)) == ["0.5", "10", "2", "–"]
    assert rewards_in(dump(report, click)) == ["0.5", "2", "10", "–"]
    assert rewards_in(dump(report, click + "button.click();")) == ["10", "2", "0.5", "–"]


def test_the_filter_hides_rows_without_the_text(dump, report):
    dom = dump(
        report, 'const box = document.getElementById("filter"); box.value = "ANSWER 1"; box.dispatchEvent(new Event("input"));'
    )
    assert dom.count('<tr hidden="">') == 3
    assert "1 of 4 samples" in dom
