"""The report is made from the files of a run: it shows what is there, and no text in it becomes markup."""

import json
import math
import re
from html import unescape

import pytest

from drumroll.config import load
from drumroll.observe.report import REPORT, STEPS_DRAWN, write_report
from drumroll.sample import Failure, Fate, Owner, Prompt, Sample, State, StopReason, Trace
from drumroll.store.run import Run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\n\t\"quoted\" 'text' & λ→雪 \x1b[31m\x00"


def sample(completion="42", *, domain="sums", index=0, content="20 + 22 =", **fields):
    trace = Trace()
    trace.extend([1, 2], Owner.PROMPT)
    trace.extend([3, 4], Owner.POLICY, [-0.5, -0.25], [0, 0])
    prompt = Prompt(id=f"p{index}", domain=domain, content=content, tokens=(1, 2), columns={"answer": "42"})
    ended = {"state": Fate.TRAINED, "stop": StopReason.EOS, "reward": 1.0, "rewards": {"exact": 1.0}}
    return Sample(prompt, draw=index, index=0, traces=[trace], completion=completion, **(ended | fields))


def new_run(tmp_path, **config):
    values = {
        "name": "demo",
        "output": str(tmp_path),
        "steps": 40,
        "data": {"train": {"sums": {"source": "sums.jsonl"}}},
        "reward": "exact",
    }
    return Run.create(load(values | config).config)


def html_of(run):
    return write_report(run).read_text()


def data_of(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def titles(data):
    return [chart["title"] for chart in data["charts"]]


@pytest.fixture
def finished(tmp_path):
    run = new_run(tmp_path)
    run.append_metrics(0, {"eval/sums": 0.25, "eval/sums/sampled": 0.125, "time/eval": 1.0})
    for step in range(1, 41):
        metrics = {"reward/sums": step / 40, "reward/words": 0.5, "reward/sums/exact": 0.25, "reward/sums/format": 0.75}
        metrics |= {
            "train/loss": -0.1,
            "train/entropy": 1.5,
            "train/kl_reference": 0.01,
            "train/grad_norm": 0.3,
            "train/mismatch": 1e-6,
        }
        metrics |= {"rollout/length": 12.0, "rollout/tokens_per_s": 900.0, "time/rollout": 1.0, "time/train": 2.0}
        run.append_metrics(step, metrics | {"time/step": 3.0, "time/tokens_per_s": 300.0, "train/lr": 1e-4})
    run.append_metrics(40, {"eval/sums": 0.875, "eval/sums/sampled": 0.75})
    for step in (1, 20, 40):
        run.write_rollouts("train", step, [sample(f"answer {step}-{i}", index=i) for i in range(100)])
    for step in (0, 40):
        run.write_rollouts("eval", step, [sample(f"held out {step}-{i}", index=i, state=State.SCORED) for i in range(100)])
    results = {
        "before": {"sums": 0.25},
        "after": {"sums": 0.875},
        "before_sampled": {"sums": 0.125},
        "after_sampled": {"sums": 0.75},
    }
    run.write_summary(results | {"name": "demo", "model": "tiny", "steps": 40, "seconds": 192.4})
    return run


def test_is_one_file_in_the_run_directory(finished):
    before = set(finished.path.iterdir())
    path = write_report(finished)
    assert path == finished.path / REPORT
    assert set(finished.path.iterdir()) - before == {path}


def test_says_what_ran_and_what_it_changed(finished):
    html = unescape(html_of(finished))
    assert "<h1>demo</h1>" in html
    assert ">finished<" in html
    for fact in ("tiny", "40 of 40", "3 min 12 s", "64 × 8"):
        assert f"<dd>{fact}</dd>" in html
    cells = re.findall(r'<td class="number[^"]*">([^<]*)</td>', html)
    assert cells[:6] == ["0.250", "0.875", "+0.625", "0.125", "0.750", "+0.625"]


def test_same_run_gives_the_same_bytes(finished):
    assert html_of(finished) == html_of(finished)


def test_every_metric_is_in_one_chart_and_a_dozen_make_the_overview(finished):
    html = html_of(finished)
    data = data_of(html)
    shown = [series["key"] for chart in data["charts"] for series in chart["series"]]
    assert sorted(shown) == sorted({key for row in finished.metrics for key in row} - {"step"})
    overview = titles(data)[: html.split("<details>")[0].count('<figure class="chart')]
    assert overview[:2] == ["Reward", "Held out"]
    assert overview[-1] == "Seconds per stage"
    assert len(overview) == 9
    assert titles(data)[9:] == ["reward/sums", "time/step", "time/tokens_per_s", "train/loss", "train/lr"]


def test_a_name_keeps_its_colour_and_a_chart_never_runs_out_of_colours(tmp_path):
    run = new_run(tmp_path)
    run.append_metrics(1, {f"reward/d{i:02}": 0.5 for i in range(20)} | {"eval/d03": 0.5, "eval/d03/sampled": 0.5})
    charts = data_of(html_of(run))["charts"]
    assert [(c["title"], len(c["series"])) for c in charts] == [("Reward", 8), ("Reward", 8), ("Reward", 4), ("Held out", 2)]
    for chart in charts[:3]:
        assert len({s["colour"] for s in chart["series"]}) == len(chart["series"])
    plain, sampled = charts[3]["series"]
    assert plain["colour"] == sampled["colour"] == charts[0]["series"][3]["colour"]
    assert (plain["dashed"], sampled["dashed"]) == (False, True)


def test_lines_of_one_step_are_one_point(finished):
    data = data_of(html_of(finished))
    assert data["steps"] == list(range(41))
    assert data["columns"]["eval/sums"] == [0.25] + [None] * 39 + [0.875]
    assert data["columns"]["reward/sums"][-1] == 1.0


def test_values_that_are_not_finite_are_gaps_and_are_counted(tmp_path):
    run = new_run(tmp_path)
    for step, loss in enumerate([0.5, math.nan, math.inf, 0.25]):
        run.append_metrics(step, {"train/loss": loss})
    html = html_of(run)
    assert data_of(html)["columns"]["train/loss"] == [0.5, None, None, 0.25]
    assert data_of(html)["broken"]["train/loss"] == 2
    assert "NaN" not in html.split('id="data">')[1].split("</script>")[0]


def test_a_long_run_is_thinned_but_keeps_its_evaluations_and_its_end(tmp_path):
    run = new_run(tmp_path, steps=10_000)
    rows = [{"step": s, "train/loss": 1.0} | ({"eval/sums": 0.5} if s == 4_001 else {}) for s in range(4 * STEPS_DRAWN + 2)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = html_of(run)
    steps = data_of(html)["steps"]
    assert len(steps) < STEPS_DRAWN + 3
    assert {0, 4_001, rows[-1]["step"]} <= set(steps)
    assert "one step in 5, and all evaluations" in html


def test_samples_are_of_the_first_and_last_step_and_the_last_evaluation(finished):
    html = html_of(finished)
    shown = re.findall(r'<div class="text">((?:answer|held out) \d+)-', html)
    assert set(shown) == {"answer 1", "answer 40", "held out 40"}
    assert 60 < len(shown) <= 100


def test_few_failures_among_many_samples_are_shown_with_their_reason(tmp_path):
    run = new_run(tmp_path)
    bad = sample(
        "?", index=999, reward=None, rewards={}, state=Fate.FAILED, failure=Failure("ValueError", "reward exact", "no <number>")
    )
    run.write_rollouts("train", 3, [*(sample(index=i) for i in range(500)), bad])
    html = html_of(run)
    assert "ValueError in reward exact: no &lt;number&gt;" in html
    assert '<span class="tag">failed</span>' in html


def test_hostile_text_stays_text(tmp_path):
    run = new_run(tmp_path, name="a<b>&c")
    bad = sample(HOSTILE, content=HOSTILE, domain=HOSTILE, failure=Failure(HOSTILE, HOSTILE, HOSTILE))
    run.write_rollouts("train", 1, [bad])
    run.append_metrics(1, {f"reward/{HOSTILE}": 1.0, f"eval/{HOSTILE}": 0.5, HOSTILE: 2.0})
    html = html_of(run)
    assert "<h1>a&lt;b&gt;&amp;c</h1>" in html
    assert "<img" not in html
    assert html.count("<script") == html.count("</script") == 2
    assert html.isascii()
    assert "\x00" not in html
    assert "\x1b" not in html
    assert "λ→雪 ␛[31m␀" in unescape(html)
    assert HOSTILE in data_of(html)["columns"]


def test_whitespace_can_be_seen(tmp_path):
    run = new_run(tmp_path)
    run.write_rollouts("train", 1, [sample("  a\n\tb "), sample("", index=1), sample("   ", index=2)])
    texts = re.findall(r'data-label="completion"><div class="text">(.*?)</div>', html_of(run), re.S)
    blank, newline, tab = '<i class="blank"> </i>', '<i class="newline"></i>\n', '<i class="tab"></i>\t'
    assert texts == [f"{blank}{blank}a{newline}{tab}b{blank}", "", blank * 3]


def test_a_long_completion_loses_its_middle(tmp_path):
    run = new_run(tmp_path)
    run.write_rollouts("train", 1, [sample("start " + "x" * 50_000 + " end")])
    html = html_of(run)
    assert "start x" in html
    assert "x end" in html
    assert "46,010 characters left out" in html
    assert "x" * 5_000 not in html


def test_chat_prompts_read_as_a_conversation(tmp_path):
    run = new_run(tmp_path)
    chat = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Wie heißt das?"},
        {"role": "user", "content": [1]},
    )
    run.write_rollouts("train", 1, [sample(content=chat), sample(index=1, content="[1, 2]"), sample(index=2, content="{}")])
    html = unescape(html_of(run))
    for text in ("<b>system</b> Be brief.", "<b>user</b> Wie heißt das?", "<b>user</b> [1]", ">[1, 2]<", ">{}<"):
        assert text in html


def test_config_is_shown_as_resolved(finished):
    assert unescape(html_of(finished)).count((finished.path / "config.yaml").read_text()) == 1


def test_a_run_that_has_only_begun_has_a_report(tmp_path):
    html = html_of(new_run(tmp_path))
    for text in (">unfinished<", "0 of 40", "No held-out set", "No step has been recorded", "No samples have been recorded"):
        assert text in html


def test_an_unfinished_run_shows_its_latest_evaluation(tmp_path):
    run = new_run(tmp_path)
    run.append_metrics(0, {"eval/sums": 0.25, "eval/words": 0.5})
    for step in (1, 2, 3):
        run.append_metrics(step, {"reward/sums": 0.5} | ({"eval/sums": step / 8} if step > 1 else {}))
    html = unescape(html_of(run))
    assert "before → latest" in html
    assert "3 of 40" in html
    cells = re.findall(r'<td class="number[^"]*">([^<]*)</td>', html)
    assert cells == ["0.250", "0.375", "+0.125", "0.500", "–", "–"]


def test_supervised_runs_have_reports_too(tmp_path):
    run = new_run(tmp_path, pipeline="sft", reward={})
    run.append_metrics(1, {"train/loss": 2.0, "time/data": 0.1, "time/train": 0.5})
    assert titles(data_of(html_of(run))) == ["Loss", "Seconds per stage"]


def test_refers_to_nothing_elsewhere(finished):
    html = html_of(finished).replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in html
    assert "https://" not in html
    assert not re.search(r"<link|<iframe|@import|url\(|\ssrc=|\shref=", html)
    assert "default-src 'none'" in html
