"""The config refuses what it does not know, and says what to write instead."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drumroll.config import dump, load
from drumroll.config.explain import all_keys, explain
from drumroll.config.pipelines import CONFIGS
from drumroll.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("recipe", sorted(ROOT.glob("recipes/**/*.yaml")), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_recipe_loads(recipe):
    load(recipe)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optim.lrr=1", "unknown key 'optim.lrr'. Did you mean 'lr'?"),
        ("rolout.prompts=1", "unknown key 'rolout'. Did you mean 'rollout'?"),
        ("eval.sets.sums.smaples=2", "Did you mean 'samples'?"),
        ("steps=many", "steps: input should be a valid integer"),
        ("steps=-1", "greater than or equal to 0, got -1"),
        (
            "roles.actor.devices=0",
            "roles.actor.devices: a count of devices is at least 1; device number 0 alone is written 0-0, got 0",
        ),
        (
            "optim.minibatch=7",
            "4 prompts × 4 samples = 16 samples do not divide into minibatches of 7; optim.minibatch: 4 would fit",
        ),
        ("rollout.samples=1", "must be at least 2, got 1"),
        ("reward={}", "reward is missing"),
        ("environment={mode: step, context: 99}", "data.max_prompt_tokens bounds what it shows"),
        ("data.mixture={sums: 1}", "data.train has ['reversal', 'sums']"),
        ("eval.best_by=other", "eval.sets has ['sums']"),
        ("pipeline=rl_", "'rl_' is not known; choose one of rl, sft, dpo, reward_model, distill. Did you mean 'rl'?"),
        ("optim.lr=.nan", "optim.lr"),
        ("steps", "'steps' is not an override; write key=value"),
        ("steps.x=1", "'steps' is a value, not a section"),
        ("roles.actor.backend=megatrn", "roles.actor.backend: input should be 'torch' or 'megatron' or 'deepspeed'"),
        (
            "roles.actor.parallel.pipeline=2",
            "roles.actor.parallel.pipeline needs `backend: megatron`; roles.actor.backend is torch",
        ),
        ("roles.critic.parallel.expert=2", "roles.critic.parallel.expert needs `backend: megatron`"),
        ("roles.actor.parallel.zero=2", "roles.actor.parallel.zero needs `backend: deepspeed`"),
        ("roles.rollout.backend=sglang", "roles.rollout.backend: input should be 'native' or 'vllm'"),
        ("roles.rollout.parallel={tensor: 2}", "parallel and roles.rollout.options are vLLM's"),
        ("roles.rollout.options={dtype: half}", "parallel and roles.rollout.options are vLLM's"),
        ("pipeline=nowhere:X", "pipeline: there is no module 'nowhere' (looked beside the recipe"),
        (
            "pipeline=drumroll.data.problems:sums",
            "'drumroll.data.problems:sums' is a function, not a drumroll.pipelines.Pipeline",
        ),
    ],
)
def test_mistakes_are_named(small, override, sentence):
    with pytest.raises(ConfigError) as caught:
        load(small(), [override])
    assert sentence in str(caught.value)


def test_errors_name_file_and_line(tmp_path, small):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(small()) + "optimm: {lr: 1}\n")
    line = len(path.read_text().splitlines())
    with pytest.raises(ConfigError, match=rf"recipe.yaml:{line}: unknown key 'optimm'. Did you mean 'optim'\?"):
        load(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [1,", "not valid YAML"),
        ("- 1\n- 2", "this is list"),
        ("", "this is empty"),
        ("steps: 1\nsteps: 2\n", "'steps' is set twice"),
        ("a: !!python/object/apply:os.system [ls]", "not valid YAML"),
    ],
)
def test_bad_files(tmp_path, text, sentence):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert sentence in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_missing_file():
    with pytest.raises(ConfigError, match=r"cannot read the recipe nowhere.yaml: No such file or directory"):
        load("nowhere.yaml")


def test_overrides_win_and_are_typed(small):
    config = load(small(), ["optim.lr=1e-5", "steps=7", "deterministic=true"]).config
    assert (config.optim.lr, config.steps, config.deterministic) == (1e-5, 7, True)


@pytest.mark.parametrize("order", [1, -1])
def test_an_algorithms_name_and_its_keys_can_both_be_overridden(small, order):
    overrides = ["algorithm=rloo", "algorithm.reward_clip=2"][::order]
    chosen = load(small(algorithm="dapo"), overrides).config.algorithm
    assert (chosen.preset, chosen.advantage, chosen.reward_clip) == ("rloo", "rloo", 2.0)
    assert load(small(algorithm="dapo"), ["algorithm.clip_high=0.4"]).config.algorithm.overlong_buffer == 0.25


def test_models_in_a_directory_are_known_by_their_absolute_paths(small, tmp_path, monkeypatch):
    (tmp_path / "here/model").mkdir(parents=True)
    (tmp_path / "beside/judge").mkdir(parents=True)
    recipe = small(model="./model", roles={"judge": {"model": "judge"}, "reference": {"model": "org/absent"}})
    (tmp_path / "beside/recipe.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path / "here")
    config = load(tmp_path / "beside/recipe.yaml").config
    assert config.model == str(tmp_path / "here/model")
    assert config.roles.judge.model == str(tmp_path / "beside/judge")
    assert config.roles.reference.model == "org/absent"
    assert load(small()).config.model == "tiny"


def test_a_dumped_config_loads_to_itself(small):
    config = load(small(seed=3)).config
    assert load(yaml.safe_load(dump(config))).config == config


def test_config_is_frozen(small):
    with pytest.raises(Exception, match="frozen"):
        load(small()).config.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize("pipeline", CONFIGS)
def test_every_key_explains_itself(pipeline):
    undocumented = [name for name, field in all_keys(CONFIGS[pipeline]) if not field.description]
    assert undocumented == []


def test_explain_says_where_a_value_is_set(tmp_path, small):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(small()))
    text = explain("optim.lr", load(path))
    assert "Peak learning rate" in text
    assert "default: 1e-06" in text
    assert f"set by {path}:" in text
    assert "set by override optim.lr=3" in explain("optim.lr", load(path, ["optim.lr=3"]))
    assert "set by default" in explain("optim.warmup", load(path))
    with pytest.raises(ConfigError, match=r"Did you mean 'optim.lr'"):
        explain("lr", None)


def test_config_and_reward_processes_need_no_torch():
    code = "import sys; from drumroll.config import load; import drumroll.cli, drumroll.workers.ray_rewards; load('recipes/quickstart/recipe.yaml'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
