"""Whole runs on preferences: every loss and reference, crash and resume, pairs from a run, the dry run."""

import json
import math
from statistics import mean

import pytest
import torch
import transformers as hf
import yaml

import drumroll as package
from drumroll.config import load
from drumroll.data.preferences import Preferences, held_out, mismatched
from drumroll.data.render import Renderer
from drumroll.errors import ConfigError, DrumrollError, StoreError
from drumroll.models import tiny
from drumroll.sample import Owner

SUMS = "drumroll.data.problems:sums"


def rows(task="sums", **more):
    return {"source": "drumroll.data.problems:preferences", "args": {"task": task}, **more}


@pytest.fixture
def recipe(small):
    """A small recipe on pairs, with changes merged in."""

    def make(**changes):
        made = small(pipeline="dpo", batch=6, max_tokens=24, eval_max_tokens=8)
        made |= {"held_out": {"pairs": rows(limit=12)}, "eval": {"sets": {"sums": {"source": SUMS, "limit": 4}}}}
        made["data"]["train"] = {"sums": rows(), "reversal": rows("reversal")}
        del made["rollout"]
        for key, value in changes.items():
            made[key] = {**made[key], **value} if key in ("data", "eval") else value
        return made

    return make


@pytest.mark.parametrize(
    "changes",
    [{"sft": 0.1}, {"loss": "kto", "reference": "precomputed"}],
    ids=["role", "kto, precomputed"],
)
def test_a_crashed_run_goes_on_as_if_nothing_had_happened(recipe, same_after_a_crash, changes):
    common = {"deterministic": True, "steps": 4, "checkpoint": {"every": 1}, "eval": {"every": 1}}
    whole, _ = same_after_a_crash(recipe(**common, **changes))
    if "reference" in changes:
        with pytest.raises(StoreError, match="set reference: role"):
            package.train(resume=whole.path, overrides=["steps=6"])
        (whole.path / "reference.safetensors").unlink()
        with pytest.raises(StoreError, match="is missing"):
            package.train(resume=whole.path, overrides=["steps=6"])


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_killed_run_equals_its_uninterrupted_twin(recipe, same_after_a_signal, loss):
    same_after_a_signal(recipe(steps=40, loss=loss))


def test_the_reference_is_the_same_wherever_it_comes_from(recipe):
    """And the first step starts from it: no answer is preferred yet."""
    runs = [package.train(recipe(name=str(i), threads=1, **more)) for i, more in enumerate(({}, {"reference": "precomputed"}))]
    for first, second in zip(*(run.metrics for run in runs), strict=True):
        compared = {key for key in first if key.startswith(("train/", "eval/"))}
        assert all(first[key] == pytest.approx(second[key], rel=1e-4, abs=1e-5) for key in compared)
    adapters = package.train(recipe(name="lora", roles={"actor": {"lora": {"rank": 4}}}, optim={"lr": 1e-2}))
    expected = ["accuracy", "margin", "loss", "reward_chosen", "reward_rejected", "logprob_chosen", "logprob_rejected"]
    for run in (*runs, adapters):
        assert all({f"train/{key}", f"eval/pairs/{key}"} <= run.metrics[-1].keys() for key in expected)
        assert run.metrics[0]["eval/pairs/loss"] == pytest.approx(math.log(2), abs=1e-4)
        assert run.metrics[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-4)
        assert run.metrics[1]["train/margin"] == pytest.approx(0, abs=1e-4)
        assert run.metrics[2]["eval/pairs/margin"] > 0


def test_a_named_reference_is_another_model(recipe):
    run = package.train(recipe(steps=1, roles={"reference": {"model": "tiny-random"}}, reference="precomputed"))
    assert abs(run.metrics[1]["train/margin"]) > 1e-3


def test_simpo_learns_without_a_reference(recipe):
    run = package.train(recipe(loss="simpo", beta=2.0, steps=12, batch=16))
    assert run.metrics[-1]["eval/pairs/accuracy"] > run.metrics[0]["eval/pairs/accuracy"] + 0.2
    assert run.metrics[-1]["eval/pairs/loss"] < run.metrics[0]["eval/pairs/loss"]
    assert run.summary["after_accuracy"] == {"pairs": run.metrics[-1]["eval/pairs/accuracy"]}


def test_a_loss_of_the_users_own(recipe, mine, tmp_path):
    name = mine(
        "import torch\n"
        "from drumroll.algorithms.preferences import PREFERENCE_LOSSES\n"
        "@PREFERENCE_LOSSES.register('hinge', reference=False)\n"
        "def hinge(pairs, config):\n"
        "    return torch.relu(1 - config.beta * (pairs.chosen.logprobs - pairs.rejected.logprobs))\n"
    )
    run = package.train(recipe(loss=f"{name}:hinge", import_from=[str(tmp_path)]))
    assert run.metrics[-1]["train/loss"] > 0
    with pytest.raises(ConfigError, match=r"loss: 'dop' is not known.*Did you mean 'dpo'"):
        package.train(recipe(name="typo", loss="dop"))


def test_pairs_of_a_run_are_the_best_against_the_worst_of_each_group(small, recipe):
    """By the tokens that were sampled, not by their texts."""
    run = package.train(small(name="rl", rollout={"prompts": 8}))
    groups = {}
    for sample in run.select(kind="train"):
        groups.setdefault((sample["step"], sample["id"].partition(".")[0]), []).append(sample)
    apart = [
        group for group in groups.values() if len({s["reward"] for s in group}) == 2 and all(s["completion"] for s in group)
    ]
    changes = {"data": {"train": {"x": {"source": str(run.path)}}, "epochs": 1}, "batch": 64}
    config = load({**recipe(), **changes}).config
    drawn = Preferences(config, Renderer(tiny.tokenizer())).groups()
    assert len(drawn) >= len(apart) > 0
    tokens = {tuple(trace["tokens"]): s["reward"] for group in groups.values() for s in group for trace in s["traces"]}
    for group in drawn:
        chosen, rejected = (tokens[tuple(sample.traces[0].tokens)] for sample in group.samples)
        assert chosen > rejected
    trained = package.train(recipe(name="on-run", steps=1, data=changes["data"], batch=4))
    assert trained.metrics[-1]["train/loss"] == pytest.approx(math.log(2), abs=1e-4)
    empty = package.train(recipe(name="no-groups"))
    with pytest.raises(DrumrollError, match="no group of answers with different rewards"):
        package.train(recipe(name="x", data={"train": {"x": {"source": str(empty.path)}}}))


def test_the_held_out_loss_of_kto_is_that_of_a_slow_loop(recipe, tmp_path):
    """Row after row by transformers, with the KL on the answers of the rows before, which the policy has learned to give anywhere."""
    path, answers = tmp_path / "rated.jsonl", ("xx", "xxx", "y")
    lines = [{"prompt": f"{i}+1=", "completion": answers[i % 3], "label": i % 3 < 2} for i in range(11)]
    lines.append({"prompt": "9+9=", "chosen": "xx", "rejected": "yy"})
    path.write_text("\n".join(map(json.dumps, lines)))
    files = {"data": {"train": {"x": {"source": str(path)}}}, "held_out": {"pairs": {"source": str(path)}}}
    made = recipe(loss="kto", steps=3, optim={"lr": 3e-3}, **files)
    run = package.train(made)
    policy, reference = (
        hf.AutoModelForCausalLM.from_pretrained(p, dtype="float32") for p in (run.model_path, tiny.SHIPPED["tiny"])
    )

    @torch.no_grad()
    def ratio(sample):
        trace = sample.traces[0]
        tokens, own = torch.tensor(trace.tokens), torch.tensor([owner is Owner.POLICY for owner in trace.owners[1:]])
        now, before = (
            model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[own].sum()
            for model in (policy, reference)
        )
        return float(now - before)

    config = load(made).config
    groups = held_out(config, Renderer(tiny.tokenizer()))["pairs"].groups
    kl = mean(ratio(sample) for group in mismatched(groups, config.max_tokens) for sample in group.samples)
    gaps = [(ratio(sample) - kl) * (1 if sample.reward else -1) for group in groups for sample in group.samples]
    loss = mean(1 - 1 / (1 + math.exp(-config.beta * gap)) for gap in gaps)
    assert kl > 0.1
    assert run.metrics[-1]["eval/pairs/loss"] == pytest.approx(loss, abs=1e-4)
    assert run.metrics[-1]["eval/pairs/accuracy"] == pytest.approx(mean(gap > 0 for gap in gaps))
    assert max(line.get("train/kl_reference", 0.0) for line in run.metrics) > 0


def test_the_dry_run_shows_a_pair_with_its_trained_tokens(recipe, drumroll, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe()))
    code, out, _ = drumroll("train", str(path), "--dry-run")
    assert code == 0
    lines = out[out.index("# chosen:") :].splitlines()
    assert lines[0].endswith("of them trained (in brackets)")
    assert lines[1].startswith("#   <bos>")
    assert lines[1].endswith("=" + "".join(f"[{c}]" for c in lines[1].split("=")[1].strip("[]").split("][")))
    assert lines[2].startswith("# rejected:")
    assert "# 2 steps × 6 pairs = 12 pairs" in out
    code, out, _ = drumroll("check", str(path))
    assert (code, "chosen:" in out) == (0, True)
    code, out, _ = drumroll("explain", "beta", "--pipeline", "dpo")
    assert (code, "default: 0.1" in out) == (0, True)


@pytest.mark.slow
def test_a_divided_run_on_ray_trains_as_one_process(recipe, same_on_two_ranks):
    run, _ = same_on_two_ranks(recipe(loss="kto"))
    assert math.isfinite(run.metrics[-1]["train/loss"])
