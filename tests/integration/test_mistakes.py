"""Mistakes that people make, each answered by one sentence that says what is wrong and how to mend it.

The table runs in this process; ten of its rows run again as commands (`make test-slow`).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import drumroll as package

ROOT = Path(__file__).parents[2]
FILES = {
    "no_prompt.jsonl": '{"question": "1+1=", "answer": "2"}\n',
    "no_answer.jsonl": '{"prompt": "1+1="}\n',
    "broken.jsonl": '{"prompt": "1+1="\n',
    "list.jsonl": "[1, 2]\n",
    "number.jsonl": '{"prompt": 5, "answer": "2"}\n',
    "nested.jsonl": '{"prompt": "1+1=", "gold": {"value": "2"}}\n',
    "empty.jsonl": "",
    "rows.txt": "1+1=2\n",
    "fake.parquet": "no parquet\n",
    "long.jsonl": '{"prompt": "11111+11111111111111=", "answer": "2"}\n' * 3,
    "mistakes_rewards.py": "NUMBER = 3\ndef misspelt(completion, answr): return 1.0\ndef right(completion, answer): return 1.0\n",
    "mistakes_import.py": "import not_there_at_all\n",
    "mistakes_syntax.py": "def f(completion:\n",
    "mistakes_envs.py": "class NoMethods: pass\n",
    "twice.yaml": "steps: 1\nsteps: 2\n",
    "broken.yaml": "data: [\n",
    "list.yaml": "- 1\n",
}


def source(name, **more):
    return {"data": {"train": {"sums": {"source": name, **more}}, "max_prompt_tokens": 16}}


def key(*overrides):
    """A mistake in a key or a value, made by overrides."""
    return ["train", "RECIPE", "--dry-run", *overrides], {}


def part(**changes):
    """A mistake in a recipe that a dry run finds."""
    return ["train", "RECIPE", "--dry-run"], changes


def told(*words, **changes):
    return list(words), changes


CONFIG = {
    "misspelt key": (key("optim.lrr=1"), "unknown key 'optim.lrr'. Did you mean 'lr'?"),
    "misspelt section": (key("rolout.prompts=1"), "unknown key 'rolout'. Did you mean 'rollout'?"),
    "key of another section": (key("slots=8"), "Did you mean 'roles.rollout.slots'?"),
    "key of an optional section": (key("roles.judge.ulr=x"), "Did you mean 'url'?"),
    "key of a section in a list": (key("trackers=[{kind: wandb, projct: x}]"), "'trackers.0.projct'. Did you mean 'project'?"),
    "key of a reward by domain": (key("reward={sums: {use: exact, wieght: 2}}"), "Did you mean 'weight'?"),
    "section as a number": (key("roles.actor.lora=16"), "it is a section with the keys rank, alpha, targets, got 16"),
    "list as a text": (key("rollout.stop=END"), "it is a list, for example ['END']"),
    "list as a section": (key("trackers={kind: wandb}"), "it is a list of sections, for example [{'kind': 'wandb'}]"),
    "dataset without a name": (key("data.train=rows.jsonl"), "for example {my_name: {source: ...}}"),
    "not a number": (key("steps=many"), "steps: input should be a valid integer"),
    "out of range": (key("optim.lr=-1"), "optim.lr: input should be greater than or equal to 0, got -1"),
    "greedy training": (key("rollout.temperature=0"), "rollout.temperature: input should be greater than 0"),
    "misspelt choice": (key("optim.schedule=cosin"), "input should be 'constant', 'linear' or 'cosine', got 'cosin'"),
    "misspelt preset": (key("algorithm=gropo"), "Did you mean 'grpo'?"),
    "misspelt estimator": (key("algorithm.advantage=grppo"), "or name your own as module:function. Did you mean 'grpo'?"),
    "misspelt filter": (key("rollout.filter=zero_varianc"), "Did you mean 'zero_variance'?"),
    "arguments of a filter": (key("rollout.filter=mean_band", "rollout.filter_args={lo: 1}"), "it takes low, high"),
    "minibatch": (key("optim.minibatch=7"), "do not divide into minibatches of 7; optim.minibatch: 4 would fit"),
    "groups of one": (key("rollout.samples=1"), "rollout.samples must be at least 2, got 1"),
    "off-policy without a ratio": (key("algorithm=rloo", "optim.epochs=2"), "set another loss (for example ppo), or epochs 1"),
    "partial without staleness": (key("rollout.partial=true"), "it needs rollout.max_staleness of at least 1, got 0."),
    "stale and deterministic": (key("deterministic=true", "rollout.max_staleness=1"), "needs rollout.order: draw and"),
    "no teacher": (key("algorithm.teacher=0.5"), "name one under roles.teacher.model"),
    "override without a value": (key("steps"), "'steps' is not an override; write key=value"),
    "override that is not YAML": (key("optim={lr: 1"), "is not valid YAML: close what it opens"),
    "key twice": (told("train", "twice.yaml"), "twice.yaml:2: the key 'steps' is set twice"),
    "recipe that is not YAML": (told("train", "broken.yaml"), "not valid YAML"),
    "recipe that is a list": (told("train", "list.yaml"), "a recipe is a mapping of keys to values, this is list"),
    "no recipe": (told("train"), "name a recipe, for example recipes/quickstart/recipe.yaml"),
    "recipe that is not there": (told("train", "nowhere.yaml"), "cannot read the recipe nowhere.yaml: No such file"),
    "misspelt model": (key("model=tinny"), "Did you mean 'tiny'?"),
    "model that is not there": (key("model=./nowhere"), "there is no directory ./nowhere"),
    "model directory without a model": (key("model=."), "is not a Hugging Face model directory: it has no config.json"),
    "misspelt verb": (told("trian"), "No such command 'trian'. Did you mean 'train'? See `drumroll --help`."),
    "misspelt option": (told("train", "RECIPE", "--dryrun"), "No such option '--dryrun'. Did you mean '--dry-run'?"),
    "misspelt key to explain": (told("explain", "optim.lrr"), "Did you mean 'optim.lr'?"),
    "evaluation without sets": (told("eval", "tiny", "RECIPE", eval={"sets": {}}), "add some under eval.sets"),
}  # fmt: skip
DATA = {
    "file that is not there": (part(**source("gone.jsonl")), "gone.jsonl: No such file or directory"),
    "file of another kind": (part(**source("rows.txt")), "use .jsonl, .json, .csv, .parquet"),
    "file without rows": (part(**source("empty.jsonl")), "holds no rows"),
    "broken line": (part(**source("broken.jsonl")), "broken.jsonl:1 is not valid JSON"),
    "line that is no object": (part(**source("list.jsonl")), "list.jsonl:1 must be an object with columns"),
    "file that is not parquet": (part(**source("fake.parquet")), "fake.parquet could not be parsed"),
    "no prompt": (part(**source("no_prompt.jsonl")), "lacks the column 'prompt', which the prompt needs; it has answer, question"),
    "no answer": (part(**source("no_answer.jsonl")), "lacks the column 'answer', which reward 'exact' needs"),
    "prompt that is a number": (part(**source("number.jsonl")), "the prompt must be a text or a list of messages"),
    "path into a row": (part(**source("nested.jsonl", columns={"answer": "gold.x"})), "a row has no 'gold.x'; it has gold, prompt"),
    "misspelt function": (part(**source("drumroll.data.problems:smus")), "Did you mean 'sums'?"),
    "arguments of a function": (part(**source("drumroll.data.problems:sums", args={"tops": 3})), "argument 'tops'"),
    "misspelt mixture": (key("data.mixture={sums: 1}"), "data.train has ['reversal', 'sums']; they must be the same"),
    "prompts that are all too long": (
        told("train", "RECIPE", **source("long.jsonl"), eval={"sets": {}}),
        "up to 22 tokens; raise it, or set data.overlong: truncate",
    ),
    "held-out prompt that is too long": (told("train", "RECIPE", **source("no_answer.jsonl"), reward="length",
        eval={"sets": {"long": {"source": "long.jsonl"}}}), "raise that, or leave long rows out of the set"),
}  # fmt: skip
REWARD = {
    "no reward": (part(reward=[]), "reward is missing: name a built-in (reward: exact)"),
    "misspelt reward": (part(reward="exat"), "Did you mean 'exact'?"),
    "module that is not there": (part(reward="no_such_module:f"), "there is no module 'no_such_module' (looked beside"),
    "file in place of a module": (part(reward="mistakes_rewards.py:right"), "for example mistakes_rewards:right"),
    "misspelt function of a reward": (part(reward="mistakes_rewards:rihgt"), "Did you mean 'right'?"),
    "reward that is no function": (part(reward="mistakes_rewards:NUMBER"), "is of type int, not a function"),
    "misspelt column": (part(reward="mistakes_rewards:misspelt"), "lacks the column 'answr', which reward 'misspelt' needs; it has answer"),
    "import that fails": (part(reward="mistakes_import:f"), "importing 'mistakes_import' failed: No module named 'not_there_at_all'"),
    "syntax error": (part(reward="mistakes_syntax:f"), "SyntaxError: '(' was never closed (mistakes_syntax.py, line 1)"),
    "argument that a reward does not take": (part(reward={"use": "exact", "args": {"strict": True}}), "it takes completion, answer"),
    "judge that is not there": (part(reward="judge"), "name one under roles.judge (model: ...)"),
    "judge without its key": (
        told("train", "RECIPE", "roles.judge={model: x, url: 'http://127.0.0.1:9', key_env: NO_SUCH_KEY}"),
        "the environment variable NO_SUCH_KEY is not set",
    ),
    "domain without a reward": (part(reward={"maths": "exact"}), "add one for it, or one for all others as `\"*\"`"),
}  # fmt: skip
ENVIRONMENT = {
    "misspelt environment": (part(environment={"use": "frozen_lak"}), "Did you mean 'frozen_lake'?"),
    "arguments of an environment": (part(environment={"use": "frozen_lake", "args": {"szie": 4}}, reward={}), "argument 'szie'"),
    "class that is not there": (part(environment={"use": "mistakes_envs:NoMethod"}), "Did you mean 'NoMethods'?"),
    "agent that is not there": (part(environment={"use": "agent:no_such_module:f"}), "there is no module 'no_such_module'"),
    "mode": (part(environment={"use": "frozen_lake", "mode": "steps"}), "input should be 'trajectory' or 'step'"),
    "context of single turns": (key("environment={mode: step, context: 99}"), "data.max_prompt_tokens bounds what it shows"),
    "misspelt environment to check": (told("check", "frozen_lak"), "Did you mean 'frozen_lake'?"),
    "argument without a value": (told("check", "frozen_lake", "size"), "write name=value, for example size=4"),
}  # fmt: skip
CLUSTER = {
    "misspelt runtime": (key("cluster.runtime=rey"), "input should be 'local' or 'ray', got 'rey'"),
    "vLLM in one process": (key("roles.rollout.backend=vllm"), "so it needs cluster.runtime: ray"),
    "devices of a pool in one process": (key("roles.actor.devices=0-3"), "which needs cluster.runtime: ray"),
    "device of one process in a pool": (key("cluster.runtime=ray", "roles.actor.devices=cuda"), "for example 0-3"),
    "device number 0": (key("roles.actor.devices=0"), "device number 0 alone is written 0-0"),
    "device beyond the pool": (key("cluster.runtime=ray", "cluster.devices=2", "roles.actor.devices=0-5"), "has 2 devices (0-1)"),
    "range that runs backwards": (key("cluster.runtime=ray", "cluster.devices=2", "roles.actor.devices=5-2"), "write 2-5"),
    "shards that do not divide": (
        key("cluster.runtime=ray", "cluster.devices=4", "roles.actor.parallel.shard=3"), "nearest: shard 4"),
    "role that is not there": (key("cluster.runtime=ray", "cluster.devices=2", "roles.rollout.devices=actr"), "Did you mean 'actor'?"),
    "axis of another backend": (key("roles.actor.parallel.pipeline=2"), "needs `backend: megatron`; roles.actor.backend is torch"),
    "options of another engine": (key("roles.rollout.options={a: 1}"), "they need roles.rollout.backend: vllm"),
    "accelerator that is not there": (told("train", "RECIPE", "roles.actor.devices=cuda"), "use 'auto' or 'cpu'"),
    "adapters with tensor parallelism": (key("roles.actor.lora={}", "roles.actor.parallel.tensor=2"), "parallel: {shard: 2}."),
}  # fmt: skip
RESUME = {
    "run that is there already": (told("train", "RECIPE", "output=RUNS"), "Continue it with --resume, choose another name=..."),
    "folder that is no run": (told("train", "RECIPE", "output=RUNS", "name=foreign", "--overwrite"), "nothing in it was touched"),
    "resume of nothing": (told("train", "--resume", "nowhere"), "nowhere is not a run directory: there is no such directory"),
    "resume with a recipe": (told("train", "--resume", "RUNS/small", "RECIPE"), "is not an override like steps=200"),
    "resume with a misspelt key": (told("train", "--resume", "RUNS/small", "optim.lrr=3"), "Did you mean 'lr'?"),
    "resume with another model": (
        told("train", "--resume", "RUNS/small", "model=tiny-even", "steps=2"), "Continue it without that override, or begin a new run"),
    "resume with new adapters": (
        told("train", "--resume", "RUNS/small", "roles.actor.lora={}", "steps=2"), "holds another model than the config names"),
    "run of a newer version": (told("run", "status", "RUNS/newer"), "upgrade drumroll to open it"),
    "run without a version": (told("train", "--resume", "RUNS/old"), "open it with that version, or train it again"),
    "config that was broken": (told("run", "status", "RUNS/broken"), "it is not valid YAML"),
    "prompt that is not there": (told("run", "ledger", "RUNS/small", "--prompt", "zzz"), "ids are in the prompt_id column"),
    "rescoring by nothing": (told("run", "rescore", "RUNS/small", "reward=exat"), "Did you mean 'exact'?"),
    "misspelt verb of a run": (told("run", "sample", "RUNS/small"), "Did you mean 'samples'?"),
}  # fmt: skip
PEERS = {
    "num_generations": "TRL's num_generations is rollout.samples here",
    "per_device_train_batch_size": "is rollout.prompts here",
    "gradient_accumulation_steps": "optim.micro_tokens bounds the memory of one pass",
    "beta": "TRL's beta is algorithm.kl here",
    "max_completion_length": "is rollout.max_tokens here",
    "learning_rate": "is optim.lr here",
    "rollout.top_p": "is eval.sets.<name>.top_p here: training samples from the whole distribution",
    "rollout.n": "verl's n is rollout.samples here",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "is optim.minibatch here",
    "actor_rollout_ref.actor.kl_loss_coef": "is algorithm.kl here",
    "data.train_batch_size": "is rollout.prompts here",
    "algorithm.kl_ctrl.kl_coef": "is algorithm.kl_reward here",
    "trainer.total_epochs": "is data.epochs here",
    "num_return_sequences_in_group": "ROLL's num_return_sequences_in_group is rollout.samples here",
    "kl_coef": "is algorithm.kl_reward here",
    "rollout.n_samples_per_prompt": "is rollout.samples here",
    "rollout_batch_size": "is rollout.prompts here",
}
CASES = {
    **CONFIG, **DATA, **REWARD, **ENVIRONMENT, **CLUSTER, **RESUME,
    **{f"peer's {name}": (key(f"{name}=1"), sentence) for name, sentence in PEERS.items()},
}  # fmt: skip
AS_COMMANDS = (
    "misspelt key", "misspelt verb", "recipe that is not there", "peer's num_generations", "broken line", "no answer",
    "misspelt function of a reward", "misspelt environment", "vLLM in one process", "resume with another model",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a finished run, damaged copies of it, and a folder that is no run."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = yaml.safe_load((ROOT / "recipes/quickstart/recipe.yaml").read_text())
    recipe |= {"name": "small", "output": str(folder), "steps": 1, "eval": {}}
    recipe["rollout"] |= {"prompts": 2, "samples": 2}
    package.train(recipe)
    for name in ("newer", "old", "broken"):
        shutil.copytree(folder / "small", folder / name)
    (folder / "newer/format.json").write_text('{"format": 99, "drumroll": "9.9"}')
    (folder / "old/format.json").unlink()
    (folder / "broken/config.yaml").write_text("a: [")
    (folder / "foreign").mkdir()
    (folder / "foreign/thesis.txt").write_text("chapter 1")
    return folder


@pytest.fixture
def command(small, tmp_path, monkeypatch, runs):
    """The words of a case, with its files in the current folder."""
    monkeypatch.chdir(tmp_path)

    def make(name):
        for file, text in FILES.items():
            Path(file).write_text(text)
        (words, changes), sentence = CASES[name]
        recipe = small(**{k: v for k, v in changes.items() if k != "data"})
        recipe["data"] = changes.get("data", recipe["data"])
        Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
        return [w.replace("RECIPE", "recipe.yaml").replace("RUNS", str(runs)) for w in words], sentence

    return make


def good(answer, sentence):
    assert sentence in answer
    assert answer.startswith("drumroll: ")
    assert "Traceback" not in answer
    assert len(answer.splitlines()) == 1, "one sentence"
    assert answer.endswith((".", "?", "..."))
    assert not answer.endswith(("..", "?.")) or answer.endswith("...")
    assert len(answer) < 900


def test_the_table_covers_what_people_do():
    assert len(CASES) >= 60
    assert min(map(len, (CONFIG, DATA, REWARD, ENVIRONMENT, CLUSTER, RESUME, PEERS))) >= 8


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_answered_by_one_sentence_with_its_fix(drumroll, command, name):
    words, sentence = command(name)
    code, _, err = drumroll(*words)
    assert code == 2, err
    good(err.strip(), sentence)


def test_a_refused_resume_leaves_the_run_as_it_was(drumroll, command, runs):
    """An override that the checkpoint refuses must not stay in the run's config."""
    before = (runs / "small/config.yaml").read_text()
    words, _ = command("resume with another model")
    assert drumroll(*words)[0] == 2
    assert (runs / "small/config.yaml").read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", AS_COMMANDS)
def test_the_same_as_a_command(command, name):
    words, sentence = command(name)
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-m", "drumroll", *words], capture_output=True, text=True, env=env)
    assert done.returncode == 2
    good(done.stderr.strip(), sentence)
