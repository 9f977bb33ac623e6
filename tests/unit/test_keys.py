"""Every key can be found: by `explain`, in errors, in completion, and from the names that other libraries have for it."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from drumroll.cli import cli
from drumroll.completion import Key, Override
from drumroll.config import RLConfig, load
from drumroll.config.explain import explain
from drumroll.config.keys import ANY_NAME, all_keys, section_at
from drumroll.config.peers import LIBRARIES, page, table, translation
from drumroll.config.pipelines import CONFIGS
from drumroll.errors import ConfigError

ROOT = Path(__file__).parents[2]
KEYS = {name for config in CONFIGS.values() for name, _ in all_keys(config)}
DATA = {"train": {"x": {"source": "a.jsonl"}}}
ROWS = [row for rows in table().values() for row in rows]


def complete(kind, incomplete):
    return [item.value for item in kind.shell_complete(None, None, incomplete)]


@pytest.mark.parametrize(
    "key",
    ["roles.actor.lora.rank", "roles.judge.url", "trackers.0.kind", "data.train.<name>.source", "eval.sets.<name>.limit",
     "rollout.domains.<name>.samples", "reward.weight", "roles.critic.optim.lr"],
)  # fmt: skip
def test_keys_of_optional_sections_lists_and_names_are_found_everywhere(key):
    assert key in KEYS
    assert key in complete(Key(), key[:-1])
    assert f"{key}=" in complete(Override(), key[:-1])
    assert explain(key, None).startswith(f"{key}: ")
    parent, last = key.rpartition(".")[::2]
    assert last in section_at(RLConfig, parent.split(".")).model_fields


def test_every_key_that_is_listed_can_be_explained():
    for pipeline, config in CONFIGS.items():
        for key, field in all_keys(config):
            assert field.description in explain(key, None, pipeline)


def test_a_section_lists_its_keys_whatever_holds_it():
    assert "trackers.0.kind " in explain("trackers", None)
    assert "roles.actor.lora.rank " in explain("roles.actor.lora", None)
    assert f"data.train.{ANY_NAME}.source " in explain("data.train", None)
    assert "data.train.sums.source " in explain("data.train.sums", None)
    assert explain("rollout.order", None).startswith("rollout.order: 'draw' | 'arrival'\n")


def test_values_are_explained_inside_lists_and_optional_sections(small):
    loaded = load(small(trackers=[{"kind": "wandb"}], roles={"actor": {"lora": {"rank": 4}}}), ["trackers.0.project=mine"])
    assert "value:   'mine', set by override trackers.0.project=mine" in explain("trackers.0.project", loaded)
    assert "value:   4, set by default" in explain("roles.actor.lora.rank", loaded)


def test_overrides_reach_into_lists_and_sections_that_are_null(small):
    recipe = small(roles={"actor": {"lora": None}})
    assert load(recipe, ["roles.actor.lora.rank=4"]).config.roles.actor.lora.rank == 4
    assert load(small(), ["trackers.0.kind=wandb", "trackers.0.mode=offline"]).config.trackers[0].mode == "offline"
    with pytest.raises(ConfigError, match=r"'1' is no position in a list of 0; the first is 0"):
        load(small(trackers=[]), ["trackers.1.kind=wandb"])


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trackers=[{kind: wandb, projct: x}]", "unknown key 'trackers.0.projct'. Did you mean 'project'?"),
        ("roles.judge.ulr=x", "unknown key 'roles.judge.ulr'. Did you mean 'url'?"),
        ("roles.actor.lora.rnk=4", "unknown key 'roles.actor.lora.rnk'. Did you mean 'rank'?"),
        ("roles.actor.lora=16", "roles.actor.lora: it is a section with the keys rank, alpha, targets, got 16."),
        ("reward={use: exact, weigth: 2}", "unknown key 'reward.weigth'. Did you mean 'weight'?"),
        ("reward={sums: {use: exact, wieght: 2}}", "unknown key 'reward.sums.wieght'. Did you mean 'weight'?"),
        ("reward=[{use: exact, wieght: 2}]", "unknown key 'reward.0.wieght'. Did you mean 'weight'?"),
        ("lora.rank=4", "unknown key 'lora'. Did you mean 'roles.actor.lora'?"),
        ("slots=4", "unknown key 'slots'. Did you mean 'roles.rollout.slots'?"),
        ("rollout.prompt=4", "unknown key 'rollout.prompt'. Did you mean 'prompts'?"),
        ("roles.judge={}", "the key 'roles.judge.model' is missing"),
    ],
)  # fmt: skip
def test_unknown_keys_of_every_kind_of_section_are_one_sentence(small, override, sentence):
    with pytest.raises(ConfigError) as caught:
        load(small(), [override])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_key_of_ours_in_the_table_exists_and_no_peers_key_is_twice_in_a_library():
    assert [key for row in ROWS for key in row.ours.split() if key not in KEYS] == []
    for library in LIBRARIES:
        theirs = [
            (key, pipeline)
            for row in ROWS
            for key in getattr(row, library).split()
            for pipeline in row.pipelines.split() or [""]
        ]
        assert sorted(set(theirs)) == sorted(theirs)
    assert all(row.how and not row.how.endswith(".") for row in ROWS)


def test_the_page_is_up_to_date():
    assert (ROOT / "docs/coming-from.md").read_text() == page()


def test_every_key_of_a_peer_that_we_do_not_have_is_answered(small):
    for library in LIBRARIES:
        for row in ROWS:
            for key in getattr(row, library).split():
                if key in KEYS or section_at(RLConfig, key.split(".")):
                    continue  # it has the same name here
                try:
                    load(small() if not row.pipelines else {"pipeline": row.pipelines.split()[0], "data": DATA}, [f"{key}=1"])
                except ConfigError as error:
                    said = str(error)
                    assert all(ours in said for ours in row.ours.split()), (key, said)
                    assert row.how in said or row.ours, (key, said)


@pytest.mark.parametrize(
    ("pipeline", "key", "said"),
    [
        ("sft", "per_device_train_batch_size", "is batch here"),
        ("sft", "beta", "is algorithm.kl in other pipelines"),
        ("dpo", "loss_type", "is loss here: sigmoid is dpo"),
        ("dpo", "ref_model", "is roles.reference.model here"),
        ("dpo", "eval_dataset", "is held_out here"),
        ("distill", "lmbda", "is on_policy here"),
        ("distill", "beta", "is divergence here: 0 is forward"),
        ("reward_model", "num_generations", "is rollout.samples in other pipelines"),
    ],
)
def test_a_peers_key_is_answered_for_the_pipeline_at_hand(pipeline, key, said):
    with pytest.raises(ConfigError, match=f"TRL's {key} {said}"):
        load({"pipeline": pipeline, "data": DATA}, [f"{key}=1"])


def test_names_that_say_nothing_alone_are_not_taken_for_a_peers():
    assert translation("enable") == ""
    assert translation("steps", {"steps"}) == ""
    assert "rollout.samples" in translation("rollout.n")
    assert translation("gradient_accumulation_steps").startswith("TRL's gradient_accumulation_steps has no counterpart here: ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell):
    out = CliRunner().invoke(cli, ["completion", shell]).output
    assert "_DRUMROLL_COMPLETE" in out
    assert complete(Override(), "rollout.order=a") == ["rollout.order=arrival"]
    assert complete(Override(), "deterministic=") == ["deterministic=true", "deterministic=false"]


def test_help_explain_status_and_completion_import_neither_torch_nor_transformers(tmp_path):
    code = f"""
import os, sys
from drumroll import cli
def call(*words):
    sys.argv = ["drumroll", *words]
    try: cli.main()
    except SystemExit: pass
(run := __import__("pathlib").Path({str(tmp_path)!r})).joinpath("config.yaml").write_text("name: x\\nsteps: 2\\n")
(run / "format.json").write_text('{{"format": 1}}')
call("--help"); call("explain"); call("explain", "optim.lr"); call("run", "status", str(run))
if "runs" in cli.cli.commands: call("runs", str(run.parent))
os.environ |= {{"_DRUMROLL_COMPLETE": "bash_complete", "COMP_WORDS": "drumroll train x.yaml op", "COMP_CWORD": "3"}}
call()
sys.exit(", ".join(name for name in ("torch", "transformers") if name in sys.modules) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr.replace("\n", "")[-200:]) == (0, ""), done.stderr
    assert "plain,optim.lr=" in done.stdout


if __name__ == "__main__":
    (ROOT / "docs/coming-from.md").write_text(page())
