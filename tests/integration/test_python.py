"""Training from Python: functions, classes and rows in the config itself, callbacks, interrupts in a running event loop."""

import asyncio
import json
import os
import signal
import threading
from pathlib import Path

import pandas as pd
import pytest

import drumroll as package
from drumroll.errors import ConfigError, DataError, Interrupted
from drumroll.observe.notebook import Notebook, in_notebook
from drumroll.observe.progress import Quiet

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]


@pytest.fixture
def given(small):
    """A small recipe with rows, and a reward that only this function knows; changes merged in."""

    def make(**changes):
        bonus = 0.25

        def correct(completion, answer):
            return float(completion.strip() == answer) + bonus

        recipe = small(reward=correct, **changes)
        recipe["eval"]["sets"] = {"sums": {"source": ROWS[:6]}}
        recipe["data"] = {"train": {"sums": {"source": ROWS}}, "max_prompt_tokens": 16}
        return recipe

    return make


class Told(Quiet):
    def __init__(self):
        self.heard = []

    def notice(self, text):
        self.heard.append(text)


def test_a_run_with_objects_equals_one_with_names(small, tmp_path, mine, untimed):
    """The reward in worker processes and the rows give what the same module and file give, byte by byte."""
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS))
    name = mine("def correct(completion, answer):\n    return float(completion.strip() == answer) + 0.25\n")
    common = {"deterministic": True, "steps": 1, "eval": {"sets": {}}}
    named = small(name="named", reward=f"{name}:correct", **common)
    named["data"]["train"] = {"sums": {"source": str(file)}}
    objects = small(name="objects", reward=lambda completion, answer: float(completion.strip() == answer) + 0.25, **common)
    objects["data"]["train"] = {"sums": {"source": ROWS}}
    runs = [package.train(named), package.train(objects)]
    texts = [untimed(run).replace("/correct", "/lambda") for run in runs]
    assert texts[0] == texts[1]
    other = {**objects, "name": "other", "reward": lambda completion, answer: float(completion.strip() == answer)}
    assert untimed(package.train(other)) != texts[0]  # the comparison notices another reward


def test_a_run_made_with_objects_is_continued_measured_and_scored_again(given, drumroll):
    """With the objects at hand; without them one sentence says which to pass. A resumed run equals a whole one."""
    whole = package.train(given(name="whole", steps=3, deterministic=True))
    run = package.train(given(steps=2, deterministic=True))
    assert run.settings["reward"] == "python:correct"
    assert run.objects["correct"]["source"].startswith("def correct(completion, answer):")
    assert run.objects["sums"] == {"kind": "list", "rows": 25}
    assert min(s["reward"] for s in run.samples) == 0.25

    loaded = package.load(run.path)
    for attempt in (
        lambda: package.train(resume=loaded, overrides=["steps=3"]),
        lambda: package.evaluate(loaded),
        lambda: package.rescore(loaded),
    ):
        with pytest.raises(ConfigError, match=r"python:correct.*only Python can give .*pass objects=\{"):
            attempt()
    code, _, err = drumroll("train", "--resume", str(run.path), "steps=3")
    assert code == 2
    assert "pass objects={'sums': ..., 'correct': ..., 'sums_2': ...} to drumroll.train" in err

    assert package.evaluate(run)["eval/sums"] == run.metrics[-1]["eval/sums"]
    assert package.evaluate(loaded, objects=run.given) == package.evaluate(run)
    table = package.rescore(loaded, objects={"correct": lambda completion: 2.0})
    assert list(table.columns[3].cells) == ["2.0000"]
    told = Told()
    resumed = package.train(resume=loaded, overrides=["steps=3"], objects={**run.given, "sums_2": ROWS[:7]}, progress=told)
    assert told.heard == [f"'sums_2' is not the object that {run.path}/objects.json describes; the run goes on with it."]
    for name in ("train/loss", "reward/sums"):
        assert resumed.metrics[3][name] == whole.metrics[3][name]


def test_environments_estimators_losses_and_filters_may_be_objects(small, drumroll):
    seen = []

    class Echo:
        def reset(self, seed, prompt=""):
            return "say 1:"

        def step(self, text):
            return package.Step("", float("1" in text), True)

        def close(self): ...

    def halves(scores):
        seen.append("estimator")
        return scores.rewards / 2

    def plain(tokens, config):
        seen.append("loss")
        return -tokens.advantages * tokens.logprobs

    recipe = small(
        environment={"use": Echo},
        algorithm={"advantage": halves, "loss": plain},
        rollout={"filter": lambda rewards: seen.append("filter")},
        eval={"sets": {}},
        reward={},
        steps=1,
    )
    run = package.train(recipe)
    assert run.settings["environment"]["use"] == "python:Echo"
    assert {s["stop"] for s in run.samples} == {"terminated"}
    assert set(seen) == {"estimator", "loss", "filter"}
    assert set(run.objects) == {"Echo", "halves", "plain", "lambda"}


def test_bad_rows_and_rewards_are_told_before_a_model_is_loaded(given):
    recipe = given(model="/nowhere")
    recipe["data"]["train"]["sums"]["source"] = pd.DataFrame([*ROWS, {"prompt": "1+1="}])
    with pytest.raises(DataError, match=r"lacks the column 'answer'.*row 26 of python:sums; 1 of 26 rows cannot be used"):
        package.train(recipe)
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="reward: 'python:correct' cannot be sent to another process: TypeError"):
        package.train(given(model="/nowhere") | {"reward": "python:correct"}, objects={"correct": lambda answer: lock.locked()})


# --- callbacks ---


def test_callbacks_receive_steps_evaluations_and_samples(given):
    steps, evals, rows = [], [], []
    run = package.train(
        given(eval={"every": 1}),
        on_step=lambda step, metrics: steps.append((step, metrics["reward/sums"])),
        on_eval=lambda step, metrics: evals.append((step, metrics["eval/sums"])),
        on_sample=rows.append,
    )
    assert steps == [(m["step"], m["reward/sums"]) for m in run.metrics[1:]]
    assert evals == [(m["step"], m["eval/sums"]) for m in run.metrics]
    recorded = [
        sorted((row["kind"], row["step"], row["id"], row["completion"]) for row in found) for found in (rows, run.samples)
    ]
    assert recorded[0] == recorded[1]


@pytest.mark.parametrize(("name", "steps"), [("on_step", [0, 1, 2]), ("on_eval", [0])])
def test_an_exception_in_a_callback_ends_the_run_after_the_commit(given, name, steps):
    def broken(step, metrics):
        if step == steps[-1]:
            raise ZeroDivisionError("mine")

    recipe = given(steps=4, checkpoint={"every": 0})
    with pytest.raises(ZeroDivisionError, match="mine") as raised:
        package.train(recipe, **{name: broken})
    assert raised.traceback[-1].name == "broken"
    assert f"{name} raised this" in raised.value.__notes__[0]
    run = package.load(Path(recipe["output"]) / "small")
    assert [m["step"] for m in run.metrics] == steps
    if steps[-1]:
        assert run.checkpoints.steps() == [2]
        assert sorted(run.open_ledger().committed()) == [1, 2]
        objects = {"correct": recipe["reward"], "sums": ROWS, "sums_2": ROWS[:6]}
        assert [m["step"] for m in package.train(resume=run, objects=objects).metrics] == [0, 1, 2, 3, 4]


def test_a_coroutine_is_no_callback(given):
    async def on_step(step, metrics): ...

    with pytest.raises(ConfigError, match="on_step is a coroutine function"):
        package.train(given(), on_step=on_step)


# --- notebooks ---


def test_an_interrupt_in_a_running_loop_ends_the_run_after_its_step(given, monkeypatch):
    """A notebook's kernel raises KeyboardInterrupt in the main thread, which waits while another one trains."""
    threads = set()

    def interrupt(step, metrics):
        threads.add(threading.current_thread().name)
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    async def cell():
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            package.train(given(steps=50), on_step=interrupt)
        finally:
            signal.signal(signal.SIGINT, before)

    with pytest.raises(Interrupted, match="saved after step"):
        asyncio.run(cell())
    assert threads == {"drumroll"}


def test_progress_of_a_notebook_is_one_output_that_changes(monkeypatch, tmp_path):
    shown = []

    class Output:
        def update(self, html):
            shown[0] = html.data

    def display(html, display_id):
        shown.append(html.data)
        return Output()

    monkeypatch.setattr("IPython.display.display", display)
    assert not in_notebook()
    progress = Notebook(4)
    progress.begin(0, {"eval/sums": 0.5})
    progress.notice("a <b>")
    progress.committed(2, {"reward/sums": 0.25, "eval/sums": 0.75})
    assert len(shown) == 1
    assert 'value="2" max="4"' in shown[0]
    assert "a &lt;b&gt;" in shown[0]
    assert "step 2 of 4" in shown[0]
    assert "<svg" in shown[0]
