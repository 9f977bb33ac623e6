"""Whole runs with the tiny model: they learn, repeat to the byte, resume, and leave what they promise."""

import asyncio
import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import drumroll
from drumroll.config import RLConfig, load
from drumroll.errors import ConfigError, DataError, ModelError
from drumroll.observe.progress import Quiet

ROOT = Path(__file__).parents[2]
LEARNING = {
    "steps": 30,
    "rollout": {"prompts": 32, "samples": 8},
    "roles": {"rollout": {"slots": 256}},
    "optim": {"lr": 4e-4, "warmup": 3},
    "eval": {"sets": {"sums": {"limit": 100}, "reversal": {"source": "drumroll.data.problems:reversal", "limit": 100}}},
}


def test_it_really_learns(small):
    run = drumroll.train(small(**LEARNING))
    before, after = run.summary["before"], run.summary["after"]
    assert all(value < 0.4 for value in before.values())
    assert all(after[name] > before[name] + 0.25 for name in before), (before, after)
    assert all(m["train/mismatch"] < 1e-4 for m in run.metrics[1:])


def test_deterministic_runs_are_byte_equal(small, untimed):
    runs = [drumroll.train(small(name=name, deterministic=True, steps=3, eval={"every": 1})) for name in ("a", "b")]
    assert untimed(runs[0]) == untimed(runs[1])
    assert [s["traces"] for s in runs[0].samples] == [s["traces"] for s in runs[1].samples]
    other = drumroll.train(small(name="c", deterministic=True, steps=3, eval={"every": 1}, seed=1))
    assert untimed(other) != untimed(runs[0])


@pytest.mark.parametrize("pipeline", ["rl", "sft"])
def test_a_resumed_run_equals_an_uninterrupted_one(small, pipeline, untimed):
    changes = {"deterministic": True, "eval": {"every": 2}, "checkpoint": {"every": 1}}
    if pipeline == "sft":
        rows = {"source": "drumroll.data.problems:demonstrations", "args": {"task": "sums", "flawed": 0.5}}
        changes |= {"pipeline": "sft", "batch": 8, "eval_max_tokens": 64, "data": {"train": {"sums": rows, "reversal": rows}}}

    def recipe(**more):
        made = small(**changes, **more)
        if pipeline == "sft":
            del made["rollout"]
        return made

    whole = drumroll.train(recipe(name="whole", steps=4))
    first = drumroll.train(recipe(name="parts", steps=2))
    resumed = drumroll.train(resume=first.path, overrides=["steps=4"])
    assert untimed(resumed) == untimed(whole)
    assert resumed.summary["after"] == whole.summary["after"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda n: n.name)
def test_an_interrupted_or_killed_run_equals_its_uninterrupted_twin(small, number, same_after_a_signal):
    """Resumed, it is the same run to the last byte."""
    runs = same_after_a_signal(small(steps=12, rollout={"filter": "zero_variance", "oversample": 2}), number)
    trained = [[(s["id"].partition("~")[0], s["traces"]) for s in run.samples if s["fate"] == "trained"] for run in runs]
    assert trained[0] == trained[1]


def test_a_second_ctrl_c_ends_at_once(small, mine, tmp_path):
    """The first waits for the step, which here would take an hour."""
    name = mine("import time\ndef slow(completion):\n    time.sleep(3600)\n")
    path = tmp_path / "recipe.yaml"
    recipe = small(reward=f"{name}:slow", rollout={"reward_timeout": 3600}, eval={"sets": {}}, import_from=[str(tmp_path)])
    path.write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "drumroll", "train", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("step 0/2")
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().startswith("Stopping after this step; Ctrl-C again ends the run at once")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "interrupted; saved before the first step. Continue with: drumroll train --resume" in rest
    assert process.returncode == 130


def test_the_written_out_loop_has_the_same_losses(small):
    spec = importlib.util.spec_from_file_location("loop", ROOT / "examples" / "loop.py")
    assert spec is not None
    assert spec.loader is not None
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    recipe = small(deterministic=True, steps=3, optim={"lr": 1e-3, "minibatch": 8}, algorithm={"kl": 0.01})
    config = load(recipe).config
    assert isinstance(config, RLConfig)
    seen = []
    asyncio.run(loop.train(config, lambda step, metrics: seen.append(metrics)))
    run = drumroll.train(recipe)
    names = ("train/loss", "train/grad_norm", "train/entropy", "train/kl_reference", "train/mismatch")
    assert [[m[n] for n in names] for m in seen] == [[m[n] for n in names] for m in run.metrics[1:]]
    assert seen[0]["train/loss"] != seen[1]["train/loss"]


def test_the_final_model_is_a_plain_hugging_face_directory(small):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = drumroll.train(small(steps=1))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run.model_path), AutoTokenizer.from_pretrained(run.model_path)
    out = model.generate(**tokenizer("1+2+3=", return_tensors="pt"), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out.shape[1] > 6
    scores = drumroll.evaluate(run.path, run.path / "config.yaml")
    assert scores["eval/sums"] == run.summary["after"]["sums"]


def test_kl_starts_at_zero_and_ratios_at_one(small):
    first, second = drumroll.train(small(algorithm={"kl": 0.1})).metrics[1:]
    assert abs(first["train/kl_reference"]) < 1e-6 < second["train/kl_reference"]
    assert first["train/ratio_max"] == 1.0


def test_a_critic_comes_first(small):
    run = drumroll.train(
        small(steps=3, algorithm={"preset": "ppo", "critic_first": 2}, roles={"critic": {"optim": {"lr": 1e-3}}})
    )
    assert ["train/loss" in m for m in run.metrics[1:]] == [False, False, True]
    assert [m["critic/lr"] for m in run.metrics[1:]] == [1e-3] * 3
    assert all("critic/explained" in m for m in run.metrics[1:])


def test_remax_scores_a_greedy_sample_and_does_not_train_on_it(small):
    run = drumroll.train(small(algorithm="remax"))
    rows = [s for s in run.samples if s["kind"] == "train"]
    assert {s["fate"] for s in rows} == {"trained", "baseline"}
    baseline = [s for s in rows if s["fate"] == "baseline"]
    assert len(baseline) == 2 * 4
    assert all(s["id"].endswith(".greedy") and s["reward"] is not None for s in baseline)
    tokens = sum(sum(t["owners"].count(1) for t in s["traces"]) for s in rows if s["fate"] == "trained" and s["step"] == 1)
    assert run.metrics[1]["rollout/tokens"] == tokens


@pytest.mark.parametrize("staleness", [0, 1])
def test_adapters_learn_against_themselves_switched_off(small, staleness):
    recipe = small(
        algorithm={"kl": 0.05, "correction": "truncate"},
        roles={"actor": {"lora": {"rank": 4}}},
        rollout={"max_staleness": staleness},
        optim={"lr": 1e-2},
        steps=3,
    )
    run = drumroll.train(recipe)
    kl = [m["train/kl_reference"] for m in run.metrics[1:]]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[-1] > 1e-5
    assert all(m["train/mismatch"] < 1e-4 for m in run.metrics[1:]) or staleness
    assert drumroll.evaluate(run.model_path, recipe)["eval/sums"] == run.metrics[-1]["eval/sums"]


def test_a_second_minibatch_is_off_policy(small):
    run = drumroll.train(small(optim={"lr": 1e-3, "minibatch": 8}))
    assert run.metrics[1]["train/ratio_max"] > 1.0
    assert run.metrics[1]["train/mismatch"] < 1e-4


def test_bfloat16_weights_with_float32_masters(small):
    run = drumroll.train(small(roles={"actor": {"dtype": "bfloat16"}}))
    assert 0 < run.metrics[1]["train/mismatch"] < 0.5
    from safetensors.torch import load_file

    for folder in ("master", "exp_avg", "exp_avg_sq"):
        [file] = (run.checkpoints.path(2) / folder).iterdir()
        assert all(t.dtype == torch.float32 for t in load_file(file).values())


def test_failing_rewards_are_recorded_and_the_run_goes_on(small, mine):
    name = mine("def f(sample):\n    if sample.index == 0: raise RuntimeError('index zero is unlucky')\n    return 1.0")
    run = drumroll.train(small(reward=f"{name}:f", eval={"sets": {}}))
    failed = [s for s in run.samples if s["fate"] == "failed"]
    assert run.metrics[1]["rollout/failed"] == 4
    assert len(failed) == 8
    assert failed[0]["failure"] == f"RuntimeError in reward 'f': index zero is unlucky ({name}.py, line 2)"
    assert sum(s["fate"] == "trained" for s in run.samples) == 24


MISBEHAVING = """
import time
def f(completion, sample):
    kind = (sample.draw * 7 + sample.index) % 25
    if kind == 0: raise RuntimeError("no")
    if kind == 1: return float("nan")
    if kind == 2: return "1"
    if kind == 3: time.sleep(10)
    if kind == 4: return None
    return float(len(completion))
"""


def test_a_run_goes_on_when_a_fifth_of_its_rewards_misbehave(small, mine):
    """Raises, NaN, a string, ten times the deadline, None: each is its sample's failure, of its own kind."""
    rollout = {"reward_timeout": 1, "prompts": 4, "samples": 4, "filter": None}
    run = drumroll.train(small(reward=f"{mine(MISBEHAVING)}:f", rollout=rollout, steps=2, eval={"sets": {}}))
    assert len(run.metrics) >= 2
    kinds = {s["failure"].split(" ")[0] for s in run.samples if s["fate"] == "failed"}
    assert kinds >= {"RuntimeError", "BadReward", "TimeoutError", "NotApplicable"}
    assert all(s["failure"] is None for s in run.samples if s["fate"] == "trained")


def test_several_domains_and_rewards_have_their_own_curves(small):
    run = drumroll.train(small(reward={"sums": ["exact", {"use": "length", "weight": 0.1}], "reversal": "exact"}))
    assert {"reward/sums", "reward/sums/exact", "reward/sums/length", "reward/reversal"} <= set(run.metrics[1])


@pytest.mark.parametrize(
    ("rollout", "sentence"),
    [
        ({"filter": "zero_variance", "filter_args": {"low": 0.1}}, "do not fit the filter 'zero_variance'"),
        ({"filter": "drumroll.rewards.text:exact"}, "do not fit the filter"),
    ],
)
def test_a_filter_that_does_not_fit_is_refused(small, rollout, sentence):
    with pytest.raises(ConfigError, match=sentence):
        drumroll.train(small(rollout=rollout))


def test_a_bad_row_of_a_file_is_found_before_the_model_is_loaded(small, tmp_path):
    """One row of 300 lacks its answer: told with its line, before anything else, and nothing is left behind."""
    rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(300)]
    del rows[8]["answer"]
    (tmp_path / "rows.jsonl").write_text("\n" + "\n".join(map(json.dumps, rows)))
    recipe = small(model="./no-such-model")
    recipe["data"] = {"train": {"rows": {"source": str(tmp_path / "rows.jsonl")}}, "max_prompt_tokens": 16}
    found = r"row 9 lacks the column 'answer', which reward 'exact' needs; it has prompt. It is .*rows.jsonl:10; 1 of 300 rows"
    with pytest.raises(DataError, match=found):
        drumroll.train(recipe)
    assert not (tmp_path / "runs" / "small").exists()


LATER = """
def rows(split, seed):
    number = 0
    while True:
        number += 1
        good = {"prompt": f"{number % 9}+1=", "answer": number % 9 + 1, "completion": str(number % 9 + 1)}
        yield {1: {"prompt": "9+1="}, 2: {"prompt": 5, "answer": 6}, 3: "no row"}.get(number % 7, good) if number > 2 else good
"""


def test_a_bad_row_met_later_is_its_own_samples_failure(small, mine):
    """A generator's rows cannot be looked at before: three of seven are bad, and the run goes on."""
    recipe = small(steps=3, eval={"sets": {}})
    recipe["data"] = {"train": {"rows": {"source": f"{mine(LATER)}:rows"}}, "max_prompt_tokens": 16}
    run = drumroll.train(recipe)
    assert run.summary["steps"] == 3
    texts = {s["failure"] for s in run.samples if s["fate"] == "failed"}
    name = "BadRow in data: data.train.rows:"
    assert f"{name} row 8 lacks the column 'answer', which reward 'exact' needs; it has prompt." in texts
    assert f"{name} row 10 must be a mapping of columns to values, it is a str." in texts
    assert sum(s["fate"] == "trained" for s in run.samples) == 3 * 16


FIRST = """
def rows(split, seed, bad):
    return [{"prompt": "9+1="}] * bad + [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(9)]
"""


def test_a_bad_first_row_of_a_list_is_one_of_its_rows_unless_all_are_bad(small, mine):
    recipe = small(steps=1, eval={"sets": {}})
    recipe["data"] = {"train": {"rows": {"source": f"{mine(FIRST)}:rows", "args": {"bad": 1}}}, "shuffle": False}
    run = drumroll.train(recipe)
    assert [s["fate"] for s in run.samples].count("trained") == 16
    assert {s["failure"] for s in run.samples if s["fate"] == "failed"} == {
        "BadRow in data: data.train.rows: row 1 lacks the column 'answer', which reward 'exact' needs; it has prompt."
    }
    recipe["data"]["train"]["rows"]["args"]["bad"] = 100
    with pytest.raises(DataError, match="row 1 lacks the column 'answer'"):
        drumroll.train({**recipe, "name": "bad"})


def test_supervised_training_skips_a_bad_row_met_later(small, mine):
    recipe = small(pipeline="sft", batch=4, eval_max_tokens=64, steps=2)
    del recipe["rollout"], recipe["reward"], recipe["eval"]
    recipe["data"] = {"train": {"rows": {"source": f"{mine(LATER)}:rows"}}, "max_prompt_tokens": 16}
    progress = Hearing()
    run = drumroll.train(recipe, progress=progress)
    assert run.metrics[-1]["data/dropped/bad"] == 4  # rows 3, 8, 9 and 10 of the first 12
    assert len([text for text in progress.heard if text.startswith("data.train.rows: row 3 is dropped, because")]) == 1


def test_a_recipe_that_does_not_work_leaves_the_old_run_alone(small):
    run = drumroll.train(small(steps=1))
    with pytest.raises(ModelError):
        drumroll.train(small(model="tinny"), overwrite=True)
    assert run.summary["steps"] == 1
    with pytest.raises(ModelError):
        drumroll.train(small(name="other", model="tinny"))
    assert not (run.path.parent / "other").exists()


def test_evaluation_stops_where_training_stops(small):
    run = drumroll.train(small(steps=1, rollout={"stop": ["1"]}, eval={"sets": {"sums": {"sampled": 1}}}))
    assert all("1" not in s["completion"][:-1] for s in run.samples)


def test_evaluation_reports_avg_and_pass_at_k(small):
    sets = {
        "sums": {"samples": 4, "temperature": 1.0, "top_p": 0.9},
        "greedy": {"source": "drumroll.data.problems:sums", "limit": 8},
    }
    run = drumroll.train(small(steps=4, eval={"every": 2, "sets": sets, "best_by": "sums"}))
    assert [m["step"] for m in run.metrics if "eval/sums" in m] == [0, 2, 4]
    assert all(m["eval/sums"] <= m["eval/sums/pass@4"] for m in run.metrics if "eval/sums" in m)
    assert run.checkpoints.best_step() in (2, 4)
    assert run.checkpoints.best_step() in run.checkpoints.steps()


def test_supervised_training_on_chat_and_completion_rows(small, tmp_path):
    from drumroll.models import tiny

    folder = tmp_path / "chatty"
    tiny.random_model(0).save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "c", "completion": "d"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = small(pipeline="sft", model=str(folder), batch=8, eval_max_tokens=64, steps=80, optim={"lr": 3e-3})
    del recipe["rollout"], recipe["reward"], recipe["eval"]
    recipe["data"] = {"train": {"rows": {"source": str(tmp_path / "rows.jsonl")}}}
    run = drumroll.train(recipe)
    losses = [m["train/loss"] for m in run.metrics[1:]]
    assert losses[-1] < 0.1 < losses[0]
    assert "train/mismatch" not in run.metrics[1]


class Hearing(Quiet):
    """Keeps the notices of a run."""

    def __init__(self):
        self.heard = []

    def notice(self, text):
        self.heard.append(text)


def test_a_missing_extra_is_named_with_its_install_command(small, monkeypatch):
    from drumroll.errors import MissingExtra

    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match=r"pip install 'drumroll\[wandb\]'"):
        drumroll.train(small(trackers=[{"kind": "wandb"}]))


def test_training_inside_a_running_event_loop(small):
    async def notebook():
        return drumroll.train(small(steps=1))

    assert asyncio.run(notebook()).summary["steps"] == 1


def test_epochs_end_a_run_early(small, tmp_path):
    """Ten rows, four a step: two whole batches and a remainder. Then it goes on for another epoch from where it was."""
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}+1=", "answer": i + 1}) for i in range(10)))
    recipe = small(steps=50)
    recipe["data"] = {"train": {"rows": {"source": str(tmp_path / "rows.jsonl")}}, "epochs": 1, "max_prompt_tokens": 16}
    run = drumroll.train(recipe)
    assert run.summary["steps"] == 3
    assert sum(s["fate"] == "trained" for s in run.samples) == 40
    resumed = drumroll.train(resume=run.path, overrides=["data.epochs=2"])
    assert resumed.summary["steps"] == 6
    assert drumroll.Run.open(run.path).config.data.epochs == 2


@pytest.mark.slow
@pytest.mark.parametrize(("model", "seed"), [("tiny", 0), ("tiny", 1), ("tiny", 2), ("tiny-even", 0)])
def test_quickstart_keeps_its_promise(model, seed, tmp_path):
    run = drumroll.train(ROOT / "recipes/quickstart/recipe.yaml", [f"model={model}", f"seed={seed}", f"output={tmp_path}"])
    summary = run.summary
    assert all(value < 0.40 for value in [*summary["before"].values(), *summary["before_sampled"].values()])
    assert all(value > 0.85 for value in summary["after"].values())


def test_a_teacher_is_approached_on_the_policys_own_samples(small):
    """With no reward to gain, all that moves the policy is the KL term against the teacher."""
    run = drumroll.train(
        small(
            model="tiny-random",
            steps=12,
            roles={"teacher": {"model": "tiny"}},
            algorithm={"preset": "grpo", "teacher": 1.0},
            optim={"lr": 1e-2},
            eval={"sets": {}},
        )
    )
    gaps = [m["train/kl_teacher"] for m in run.metrics if "train/kl_teacher" in m]
    assert len(gaps) == 12
    assert sum(gaps[-3:]) < 0.9 * sum(gaps[:3])


def test_a_teacher_must_be_named_and_speak_the_same_tokens(small, tmp_path):
    with pytest.raises(
        ConfigError, match=r"algorithm.teacher: 0.5 needs a model to learn from: name one under roles.teacher.model"
    ):
        drumroll.train(small(algorithm={"teacher": 0.5}))


def test_deadlines_that_passed_are_a_metric_and_no_verdict(small, mine, tmp_path):
    """The first call hangs, in the evaluation before training: it is made again, and counted with the first step."""
    name = mine(
        f"import pathlib, time\nhung = pathlib.Path({str(tmp_path / 'hung')!r})\ndef f(completion):\n"
        "    if not hung.exists():\n        hung.touch()\n        time.sleep(1000)\n    return 1 + len(completion) % 2\n"
    )
    first, *rest = drumroll.train(small(reward=f"{name}:f", steps=2, rollout={"reward_timeout": 0.5})).metrics
    again, _ = drumroll.train(small(name="again", reward=f"{name}:f", steps=2)).metrics[:2]
    assert [first[key] for key in first if key.startswith("eval/")] == [again[key] for key in again if key.startswith("eval/")]
    assert [m.get("rollout/deadlines/wall") for m in rest] == [1.0, None]
