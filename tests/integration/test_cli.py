"""The command line: quick, and every mistake is one sentence with exit code 2."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from drumroll.errors import ModelError
from drumroll.models.loading import load_tokenizer
from drumroll.observe.legend import meaning

ROOT = Path(__file__).parents[2]


@pytest.fixture
def recipe(small, tmp_path):
    def write(**changes):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(small(**changes)))
        return str(path)

    return write


def mistake(result, *sentences):
    code, _, err = result
    assert code == 2, result
    assert "Traceback" not in err
    assert err.startswith(("drumroll: ", "Usage: "))
    for sentence in sentences:
        assert sentence in err, err


def test_missing_and_bad_recipes(drumroll, tmp_path):
    mistake(drumroll("train"), "nothing to train")
    mistake(drumroll("train", "nowhere.yaml"), "cannot read the recipe nowhere.yaml: No such file")
    (tmp_path / "bad.yaml").write_text("a: [")
    mistake(drumroll("train", str(tmp_path / "bad.yaml")), "bad.yaml:1:", "not valid YAML")
    mistake(drumroll("trian"), "No such command 'trian'", "Did you mean 'train'?")
    mistake(drumroll("train", "--resume", str(tmp_path)), "is not a run directory: it has no config.yaml")
    mistake(drumroll("run", "status", "nowhere"), "there is no such directory")


def test_bad_values(drumroll, recipe):
    mistake(drumroll("train", recipe(), "optim.lrr=1"), "unknown key 'optim.lrr'")
    mistake(drumroll("train", recipe(), "steps=many"), "valid integer")
    mistake(drumroll("train", recipe(model="tinny")), "'tinny' is not known. Did you mean 'tiny'?")
    mistake(drumroll("train", recipe(model="./nowhere", name="n")), "there is no directory ./nowhere")
    mistake(
        drumroll("train", recipe(roles={"actor": {"devices": "cuda"}}, name="c")),
        "torch sees no such device here, only the CPU",
    )


@pytest.mark.slow
def test_a_model_that_cannot_be_fetched(drumroll, recipe):
    mistake(drumroll("train", recipe(model="nobody/no-such-model")), "is neither a local directory nor a built-in", "Offline")


def test_bad_data(drumroll, recipe, tmp_path):
    def rows(text, **more):
        (tmp_path / "rows.jsonl").write_text(text)
        train = {"sums": {"source": "rows.jsonl"}, "reversal": {"source": "rows.jsonl"}}
        return drumroll("train", recipe(data={"train": train}, **more), "--overwrite")

    mistake(rows(""), "holds no rows")
    mistake(rows('{"prompt": "a"}\n'), "row 1 lacks the column 'answer', which reward 'exact' needs")
    mistake(rows('{"question": "a", "answer": 1}\n'), "lacks the column 'prompt'")
    missing = {"train": {"sums": {"source": "gone.jsonl"}, "reversal": {"source": "gone.jsonl"}}}
    mistake(drumroll("train", recipe(data=missing), "--overwrite"), "cannot read", "No such file")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return float('nan')", "returned nan"),
        ("return 'yes'", "returned 'yes', a str"),
        ("raise ValueError('my bug')", "ValueError in reward 'correct': my bug"),
    ],
)
def test_a_reward_that_always_fails_stops_after_the_first_batch(drumroll, recipe, tmp_path, body, sentence):
    name = f"rewards_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(f"def correct(completion, answer):\n    {body}\n")
    path = recipe(reward=f"{name}:correct", eval={"sets": {}})
    result = drumroll("train", path, "steps=50")
    mistake(result, sentence)
    failed = re.search(r"all (\d+) samples of the step failed, so there is nothing to train on", result[2])
    assert failed, result
    assert 16 <= int(failed[1]) < 50 * 16  # a batch, and what failed beside it before the step was given up
    assert [line["state"] for line in map(json.loads, drumroll("runs", str(tmp_path), "--json")[1].splitlines())] == ["failed"]


def test_a_reward_that_does_not_exist(drumroll, recipe, tmp_path):
    mistake(drumroll("train", recipe(reward="exat")), "Did you mean 'exact'?")
    (tmp_path / "some_rewards.py").write_text("def correct(completion): return 1\n")
    mistake(drumroll("train", recipe(reward="some_rewards:corect", name="x")), "has no 'corect'. Did you mean 'correct'?")


def test_a_run_from_start_to_look(drumroll, recipe, tmp_path):
    path = recipe()
    code, out, _ = drumroll("train", path)
    assert code == 0
    folder = tmp_path / "runs" / "small"
    assert "step 2/2" in out
    assert str(folder) in out.replace("\n", "")
    assert {"config.yaml", "metrics.jsonl", "rollouts", "checkpoints", "model", "summary.json", "report.html"} <= {
        p.name for p in folder.iterdir()
    }
    mistake(drumroll("train", path), "is not empty. Continue it with --resume")
    recorded = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [name for line in recorded for name in line if not meaning(name)] == ["step"] * 3
    code, out, _ = drumroll("run", "status", str(folder))
    assert (code, "finished, step 2 of 2" in out) == (0, True)
    code, out, _ = drumroll("run", "samples", str(folder), "--kind", "train")
    assert (code, "trained" in out) == (0, True)
    assert drumroll("run", "report", str(folder))[0] == 0
    code, out, _ = drumroll("eval", str(folder))
    assert f"{json.loads((folder / 'summary.json').read_text())['after']['sums']:.4f}" in out
    code, out, _ = drumroll("train", "--resume", str(folder), "steps=3")
    assert (code, "step 3/3" in out) == (0, True)


def test_only_verbs_that_run_user_code_search_its_folder_and_never_before_the_standard_library(drumroll, recipe, tmp_path):
    """A run directory may come from anybody: looking at it imports nothing, and its files replace no module of Python."""
    for name in ("random", "json", "colorsys"):
        (tmp_path / f"{name}.py").write_text(f"print('stranger {name}')\n")
    (tmp_path / "mine.py").write_text("import colorsys, random\ndef f(completion): return random.random()\n")
    path = recipe(reward="mine:f", steps=1, eval={"sets": {}})
    script = tmp_path / "bin" / "start.py"  # like a console script: the current folder is not searched
    script.parent.mkdir()
    script.write_text("import sys\nfrom drumroll.cli import main\nmain()\nprint(*sys.path, sep='\\n')\n")
    command = [sys.executable, str(script), "train", path, "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "stranger" not in done.stdout + done.stderr
    assert str(tmp_path) in done.stdout.splitlines()
    run = tmp_path / "runs" / "small"
    for verb in ("status", "samples", "ledger", "report"):
        assert drumroll("run", verb, str(run))[0] == 0
        assert not {str(tmp_path), str(run)} & set(sys.path)


def test_dry_run_shows_config_and_arithmetic_and_writes_nothing(drumroll, recipe, tmp_path):
    code, out, _ = drumroll("train", recipe(), "--dry-run")
    assert code == 0
    assert "4 prompts × 4 samples = 16 samples a step" in out
    assert yaml.safe_load("\n".join(line for line in out.splitlines() if not line.startswith("#")))["steps"] == 2
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_finds_what_does_not_exist(drumroll, recipe, tmp_path):
    def dry(*more, **changes):
        return drumroll("train", recipe(**changes), "--dry-run", *more)

    mistake(dry(reward="exat"), "Did you mean 'exact'?")
    mistake(dry(reward="no_such_module:f"), "there is no module 'no_such_module'")
    mistake(dry(reward="judge"), "asks a judge, but there is none")
    mistake(dry(environment={"use": "frozen_lak"}), "Did you mean 'frozen_lake'?")
    mistake(dry(environment={"use": "agent:no_such_module:f"}), "there is no module 'no_such_module'")
    mistake(dry(eval={"sets": {"sums": {"source": "drumroll.data.problems:smus"}}}), "Did you mean 'sums'?")
    mistake(dry(model="./nowhere"), "there is no directory ./nowhere")
    mistake(dry(roles={"teacher": {"model": "./nowhere"}}), "there is no directory ./nowhere")
    mistake(dry(rollout={"filter": "zero_varianc"}), "Did you mean 'zero_variance'?")
    gone = {"train": {"sums": {"source": "gone.jsonl"}}}
    mistake(dry(data=gone), "cannot read", "gone.jsonl: No such file")
    (tmp_path / "gone.jsonl").write_text('{"prompt": "1+2="}\n')
    mistake(dry(data=gone), "lacks the column 'answer', which reward 'exact' needs", "gone.jsonl:1; 1 of 1 rows")
    code, out, _ = dry("--no-files", data=gone, model="./nowhere")
    assert (code, "# warning: model: there is no directory ./nowhere, " in out) == (0, True)
    mistake(drumroll("train", recipe(), "--no-files"), "--no-files is for --dry-run")
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_finds_a_wrong_argument_of_an_environment(drumroll, recipe):
    lakes = {"source": "drumroll.envs.rows:episodes", "args": {"env": "frozen_lake", "style": "compact"}}
    path = recipe(
        data={"train": {"lake": lakes}}, environment={"use": "frozen_lake", "args": {"szie": 4}}, reward={}, eval={"sets": {}}
    )
    code, _, err = drumroll("train", path, "--dry-run")
    assert code == 2
    assert "environment 'frozen_lake' cannot start an episode: TypeError" in err
    assert "szie" in err


def test_a_dry_run_shows_a_prompt_and_a_silent_hub_is_a_warning(drumroll, recipe, monkeypatch):
    lines = drumroll("train", recipe(), "--dry-run")[1].splitlines()
    at = lines.index("# the first prompt of data.train.reversal:")
    assert re.fullmatch(r"#   <bos>rev [a-z]+=", lines[at + 1]), lines[at:]
    lines = drumroll("train", recipe(environment={"use": "frozen_lake"}), "--dry-run")[1].splitlines()
    assert any(line.startswith("#   ") for line in lines), lines

    def silent(url):
        raise TimeoutError

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", silent)
    code, out, err = drumroll("train", recipe(model="nobody/none"), "--dry-run")
    assert (code, err) == (0, "")
    assert "# warning: model: 'nobody/none' is neither" in out
    assert "# the first prompt of data.train.reversal, without the model's chat template:" in out


def test_explain(drumroll):
    code, out, _ = drumroll("explain", "optim.lr", str(ROOT / "recipes/quickstart/recipe.yaml"))
    assert code == 0
    assert "recipe.yaml:" in out
    assert "rollout.prompts" in drumroll("explain")[1]
    mistake(drumroll("explain", "optim.lrr"), "Did you mean 'optim.lr'?")
    assert "dr_grpo" in drumroll("explain", "algorithm")[1]
    code, out, _ = drumroll("explain", "algorithm=dapo")
    assert (code, "clip_high    0.28" in out, "old log-probs" in out) == (0, True, True)
    mistake(drumroll("explain", "algorithm=dappo"), "Did you mean 'dapo'?")


@pytest.mark.parametrize("when", ["rollout", "train"])
def test_ctrl_c_saves_and_the_run_resumes(recipe, tmp_path, when):
    """A real process, a real signal. Slots of 1 make generation slow; a huge batch makes the update slow."""
    slow = (
        {"roles": {"rollout": {"slots": 1}}}
        if when == "rollout"
        else {"rollout": {"prompts": 32}, "optim": {"micro_tokens": 64}}
    )
    path = recipe(steps=10_000, eval={"sets": {}}, **slow)
    process = subprocess.Popen(
        [sys.executable, "-m", "drumroll", "train", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    metrics = tmp_path / "runs" / "small" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    done = len(metrics.read_text().splitlines())
    _, err = process.communicate(timeout=300)
    assert len(metrics.read_text().splitlines()) <= done + 2  # the step under way, and one that ended meanwhile
    assert process.returncode == 130
    assert "drumroll train --resume" in err
    assert "Traceback" not in err
    from drumroll import train
    from drumroll.store.run import Run

    run = Run.open(tmp_path / "runs" / "small")
    step = run.checkpoints.steps()[-1]
    assert step == run.metrics[-1]["step"]
    assert run.outcome["state"] == "interrupted"
    resumed = train(resume=run.path, overrides=[f"steps={step + 1}"])
    assert [m["step"] for m in resumed.metrics] == list(range(step + 2))


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen2.5-7b-8gpu", "qwen3-30b-a3b"])
def test_the_papers_recipes_can_be_planned_anywhere(drumroll, name):
    code, out, err = drumroll("train", f"{ROOT}/recipes/multi-domain/{name}.yaml", "--dry-run", "--no-files")
    assert (code, err) == (0, "")
    assert "64 prompts × 8 samples" in out
    assert "of 80.0 GB: training " in out


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen2.5-32b-32gpu", "32 = data 4 × pipeline 2 × tensor 4"),
        ("qwen3-30b-a3b-16gpu", "16 = data 4 × tensor 4, expert 8"),
        ("qwen2.5-7b-32k", "8 = shard 4 × context 2"),
    ],
)
def test_recipes_of_large_models_can_be_planned_anywhere(drumroll, name, layout):
    code, out, err = drumroll("train", f"{ROOT}/recipes/large/{name}.yaml", "--dry-run", "--no-files")
    assert (code, err) == (0, "")
    assert layout in out
    assert "of 80.0 GB: training " in out


def test_a_dry_run_refuses_what_does_not_fit(drumroll):
    recipe = f"{ROOT}/recipes/multi-domain/qwen2.5-7b-8gpu.yaml"
    for verb in (("plan", recipe), ("train", recipe, "--dry-run", "--no-files")):
        code, out, err = drumroll(*verb, "roles.actor.parallel.shard=1")
        assert code == 2
        assert "training 162.23 GB (peak)" in out
        assert err.strip().endswith("nearest that fits: roles.actor.parallel: {shard: 4}.")


def test_a_hub_that_does_not_answer_is_one_sentence(monkeypatch):
    def silent(url):
        raise TimeoutError

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", silent)
    with pytest.raises(ModelError, match=r"'nobody/none' is neither .* did not give it \(TimeoutError\)"):
        load_tokenizer("nobody/none")


PLANS = {"paper": "128 prompts × 8 samples = 1,024", "smollm2": "prompts × 8 samples", "warm-start-smollm2": "rows ="}


@pytest.mark.parametrize("variant", PLANS)
@pytest.mark.parametrize("name", ["frozen-lake", "sokoban", "webshop"])
def test_agentic_recipes_can_be_planned_anywhere(drumroll, name, variant):
    code, out, err = drumroll("train", f"{ROOT}/recipes/{name}/{variant}.yaml", "--dry-run", "--no-files")
    assert (code, err) == (0, "")
    assert PLANS[variant] in out
