"""Whole runs that train a reward model: what they learn, crash and resume, exports, its use as a reward, the dry run."""

import asyncio
import json
import subprocess
import sys

import pytest
import torch
import transformers as hf
import yaml
from test_preferences import CHAT, chatty

import drumroll as package
from drumroll.config import load
from drumroll.config.roles import RewardModelRole
from drumroll.data.preferences import held_out
from drumroll.data.render import Renderer
from drumroll.errors import ConfigError, ModelError
from drumroll.models import tiny
from drumroll.rewards.model import Classifier, RewardModel
from drumroll.workers.group import LocalGroup, Role


def rows(task="sums", **more):
    return {"source": "drumroll.data.problems:preferences", "args": {"task": task}, **more}


@pytest.fixture
def recipe(small):
    """A small recipe, with changes merged in."""

    def make(**changes):
        made = small(pipeline="reward_model", batch=6, max_tokens=24, held_out={"pairs": rows(limit=12)})
        made["eval"] = {}
        made["data"]["train"] = {"sums": rows(), "reversal": rows("reversal")}
        del made["rollout"]
        made.pop("reward", None)
        for key, value in changes.items():
            made[key] = {**made[key], **value} if key in ("data", "eval") else value
        return made

    return make


def test_a_crashed_run_goes_on_as_if_nothing_had_happened(recipe, same_after_a_crash):
    changes = {"deterministic": True, "steps": 4, "checkpoint": {"every": 1}, "eval": {"every": 1}, "center": 0.01}
    whole, _ = same_after_a_crash(recipe(**changes))
    assert (whole.path / "calibration.json").exists()


@pytest.mark.slow
def test_a_killed_run_equals_its_uninterrupted_twin(recipe, same_after_a_signal):
    same_after_a_signal(recipe(steps=40))


def test_it_learns_and_is_used_at_once(recipe, drumroll, small, tmp_path):
    """Its scores are those of the export, of a checkpoint's export, and of the reward that asks it."""
    both = {"a": rows(limit=24), "b": rows("reversal", limit=24)}
    run = package.train(
        recipe(steps=20, batch=16, optim={"lr": 1e-3}, held_out=both, checkpoint={"every": 10}, eval={"every": 10})
    )
    first, last = run.metrics[0], run.metrics[-1]
    names = ["loss", "accuracy", "margin", "score_chosen", "score_rejected"]
    assert all({f"train/{name}", f"eval/a/{name}"} <= last.keys() for name in names)
    assert last["eval/a/accuracy"] > max(0.8, first["eval/a/accuracy"])
    assert 0 <= last["eval/a/calibration_error"] <= 1
    config = json.loads((run.model_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert len(config["id2label"]) == 1
    assert config["pad_token_id"] == 0
    exported = tmp_path / "exported"
    assert drumroll("run", "export", str(run.path), "--step", "last", "--to", str(exported))[0] == 0
    assert (exported / "model.safetensors").read_bytes() == (run.model_path / "model.safetensors").read_bytes()
    assert (exported / "config.json").read_text() == (run.model_path / "config.json").read_text()
    card = (run.model_path / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert "| a/accuracy | " in card
    report = (run.path / "report.html").read_text()
    assert "Calibration on a" in report
    assert asyncio.run(margin_of(str(run.path / "model"), recipe(held_out=both))) == pytest.approx(
        last["eval/a/margin"], abs=1e-5
    )
    named = {"roles": {"reward_model": {"model": str(run.path)}}, "reward": "reward_model"}
    assert package.train({**small(name="rl", steps=1), **named, "eval": {}}).metrics[-1]["reward/sums"] != 0


def test_adapters_of_a_reward_model_are_trained_exported_and_resumed(recipe, drumroll, same_after_a_crash, tmp_path):
    changes = {"deterministic": True, "steps": 4, "checkpoint": {"every": 1}, "eval": {"every": 1}}
    run, _ = same_after_a_crash(recipe(roles={"actor": {"lora": {"rank": 4}}}, optim={"lr": 1e-2}, **changes))
    alone, merged = tmp_path / "alone", tmp_path / "merged"
    assert drumroll("run", "export", str(run.path), "--to", str(alone), "--step", "last")[0] == 0
    assert drumroll("run", "export", str(run.path), "--to", str(merged), "--step", "last", "--merge-lora")[0] == 0
    for made, live, file in ((alone, run.model_path / "adapter", "adapter_model"), (merged, run.model_path, "model")):
        assert (made / f"{file}.safetensors").read_bytes() == (live / f"{file}.safetensors").read_bytes()
    assert "AutoPeftModelForSequenceClassification" in (alone / "README.md").read_text()


def test_a_reward_model_is_refused_where_a_model_must_write(recipe, small, drumroll):
    """And a language model where a score is wanted."""
    run = package.train(recipe(name="scorer", steps=1))
    scorer, said = str(run.path), "cannot generate text; name a language model"
    judge = {"roles": {"judge": {"model": scorer}}, "reward": "judge"}
    supervised = recipe(pipeline="sft", model=scorer, held_out={}) | {"eval": {}}
    for made, key in ((small(model=scorer), "model"), (supervised, "model"), (small(**judge), "roles.judge.model")):
        with pytest.raises(ModelError, match=f"^{key}: .*{said}"):
            package.train(made)
    with pytest.raises(ModelError, match=said):
        package.evaluate(run.model_path, small())
    with pytest.raises(ConfigError, match="is a reward model and generates no answers"):
        package.evaluate(run)
    assert "trained a reward model, which cannot generate text" in drumroll("serve", scorer)[2]
    named = {"roles": {"reward_model": {"model": "tiny"}}, "reward": "reward_model"}
    with pytest.raises(ModelError, match=r"roles.reward_model.model: tiny is a language model, which has no score head"):
        package.train(small(**named))


def test_a_prompt_is_shown_as_its_role_says():
    """With a system message, arguments of the template, or no turns of a chat: as the rows that it was trained on."""
    tokenizer, workers = chatty(), LocalGroup(Role.REWARD_MODEL, [])

    def shown(**role):
        model = RewardModel(RewardModelRole(model="x", **role), workers, tokenizer)
        return tokenizer.decode(model._tokens("hi", "yes")).replace(" ", "")

    assert shown() == "u:hi<eos>a:yes<eos>"
    assert shown(system="be kind") == "s:bekind<eos>u:hi<eos>a:yes<eos>"
    assert shown(chat=False) == "hiyes<eos>"
    tokenizer.chat_template = "{{ mood }}" + CHAT
    assert shown(template={"mood": "glad "}) == "gladu:hi<eos>a:yes<eos>"
    with pytest.raises(ConfigError, match=r"roles.reward_model.template: the chat template of .* has no variable 'mod'"):
        shown(template={"mod": "glad"})
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"roles.reward_model.system needs a chat template, and the tokenizer of x has none"):
        shown(system="be kind")


async def margin_of(path, made):
    """The mean margin on a held-out set, by the reward `reward_model`."""
    role = RewardModelRole(model=path)
    model = RewardModel(role, LocalGroup(Role.REWARD_MODEL, [Classifier(role)]), hf.AutoTokenizer.from_pretrained(path))
    gaps = []
    for group in held_out(load(made).config, Renderer(tiny.tokenizer()))["a"].groups:
        chosen, rejected = [await model(group.prompt.content, group.prompt.columns[side]) for side in ("chosen", "rejected")]
        gaps.append(chosen - rejected)
    await model.close()
    return sum(gaps) / len(gaps)


def test_margins_move_the_loss_and_domains_have_an_accuracy_each(recipe, tmp_path):
    path = tmp_path / "pairs.jsonl"
    made = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "x", "margin": 2.0, "score_chosen": 3, "score_rejected": 1.0,
             "domain": "ab"[i % 2]} for i in range(12)]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, made)))
    files = {"data": {"train": {"x": {"source": str(path)}}, "epochs": 2}, "held_out": {"x": {"source": str(path)}}}
    plain, column, scores = (
        package.train(recipe(name=str(margin), steps=100, margin=margin, **files)) for margin in (None, "column", "scores")
    )
    assert [line["step"] for line in plain.metrics] == [0, 1, 2, 3, 4, 4]  # 12 rows, twice, 6 a step; and the last evaluation
    assert column.metrics[0]["eval/x/loss"] > plain.metrics[0]["eval/x/loss"] + 0.5
    assert column.metrics[0]["eval/x/loss"] == scores.metrics[0]["eval/x/loss"]
    assert {"eval/x/a/accuracy", "eval/x/b/accuracy"} <= plain.metrics[0].keys()


def test_mistakes_are_one_sentence(recipe):
    with pytest.raises(ConfigError, match="a reward model generates no answers; name held-out pairs under held_out"):
        load(recipe(eval={"sets": {"sums": {"source": "drumroll.data.problems:sums"}}}))


def test_the_dry_run_shows_a_pair_with_its_scored_token(recipe, drumroll, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe()))
    code, out, _ = drumroll("train", str(path), "--dry-run")
    assert code == 0
    lines = out[out.index("# chosen:") :].splitlines()
    assert lines[0].endswith("scored at the last (in brackets)")
    assert lines[1].endswith("[<eos>]")
    assert lines[1].count("[") == 1
    assert "# 2 steps × 6 pairs = 12 pairs" in out
    assert drumroll("check", str(path))[0] == 0
    code, out, _ = drumroll("plan", str(path))
    assert (code, "actor" in out, "logits" in out, "rollout" in out) == (0, True, False, False)
    assert "default: 0.0" in drumroll("explain", "center", "--pipeline", "reward_model")[1]


@pytest.mark.slow
def test_a_divided_run_on_ray_trains_as_one_process(recipe, same_on_two_ranks):
    runs = same_on_two_ranks(recipe())
    tensors = [hf.AutoModelForSequenceClassification.from_pretrained(run.model_path).score.weight for run in runs]
    assert torch.allclose(*tensors, atol=1e-5)


SERVED = """
import json, sys
from drumroll.engines.vllm import _prepare_environment
_prepare_environment()
from vllm import LLM, TokensPrompt
if __name__ == "__main__":
    path, rows = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(path, runner="pooling", dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4, block_size=32,
              kv_cache_memory_bytes=2**26, disable_log_stats=True)
    print(json.dumps([out.outputs.probs for out in llm.classify([TokensPrompt(prompt_token_ids=r) for r in rows], use_tqdm=False)]))
"""


@pytest.mark.slow
def test_vllm_serves_the_export_with_the_same_scores(recipe, tmp_path):
    """`vllm serve --runner pooling` gives raw scores, because the export says that it is a regression."""
    pytest.importorskip("vllm")
    run, tokenizer = package.train(recipe(optim={"lr": 1e-3})), tiny.tokenizer()
    texts = ["1+2+3=6", "1+2+3=3", "rev abc=cba"]
    rows = [[tokenizer.bos_token_id, *tokenizer.encode(t, add_special_tokens=False), tokenizer.eos_token_id] for t in texts]
    script = tmp_path / "served.py"
    script.write_text(SERVED)
    done = subprocess.run(
        [sys.executable, str(script), str(run.model_path), json.dumps(rows)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    expected = Classifier(RewardModelRole(model=str(run.model_path))).score(rows)
    assert [score for (score,) in found] == pytest.approx(expected, abs=1e-4)
