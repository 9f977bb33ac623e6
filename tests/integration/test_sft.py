"""Whole supervised runs: on the samples of a run, on conversations, through a crash, and shown before they start."""

import json

import pytest
import yaml

import drumroll as package
from drumroll.config import load
from drumroll.data.demonstrations import Demonstrations
from drumroll.data.render import Renderer
from drumroll.errors import DrumrollError
from drumroll.models import tiny


@pytest.fixture
def recipe(small):
    def make(rows, **changes):
        made = small(**{"pipeline": "sft", "batch": 4, "eval_max_tokens": 8, "deterministic": True, "steps": 20, **changes})
        del made["rollout"], made["eval"], made["reward"]
        made["data"] = {"train": {"x": rows}, "epochs": 2}
        return made

    return make


def test_a_crashed_run_on_given_rows_goes_on_as_if_nothing_had_happened(recipe, same_after_a_crash, tmp_path):
    """Each row is trained as often as epochs say: 9 of 11 rows twice are 18, in batches of 4."""
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(11)]
    rows[3]["completion"], rows[7]["completion"] = ["nothing"], "9" * 60
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole, heard = same_after_a_crash(recipe({"source": str(path)}, checkpoint={"every": 1}, max_tokens=32, overlong="drop"))
    assert whole.summary["steps"] == 5
    facts = {"data/epoch": 2.0, "data/dropped/bad": 2.0, "data/dropped/long": 2.0}
    last = [row for row in whole.metrics if "data/epoch" in row][-1]
    assert {k: v for k, v in last.items() if k.startswith("data/")} == facts
    places = [text.partition(" is dropped, because ")[0] for text in heard if "is dropped" in text]
    assert sorted(places) == [f"data.train.x: {path}:{line}" for line in (4, 8)]


def test_a_dry_run_shows_calls_of_tools_as_they_are_trained(recipe, drumroll, tmp_path):
    """The row of docs/sft.md, for a template that reads the content of every message."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    run = package.train(
        recipe(
            {"source": "drumroll.data.problems:demonstrations", "args": {"task": "sums", "flawed": 0.5}, "limit": 4}, steps=1
        )
    )
    tokenizer.save_pretrained(run.model_path)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": 1}}}]}
    talk = [
        {"role": "user", "content": "1+1?"},
        call,
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"tools": tools, "messages": talk}))
    made = recipe({"source": str(tmp_path / "talks.jsonl")}, model=str(run.path), max_tokens=900)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(made))
    code, out, err = drumroll("train", str(tmp_path / "recipe.yaml"), "--dry-run")
    assert code == 0, err
    assert "[<][t][o][o][l]" in out
    assert "the first prompt" not in out


@pytest.mark.slow
def test_a_killed_run_equals_its_uninterrupted_twin(recipe, same_after_a_signal):
    """Eighty rows, four times each, in batches of 8."""
    rows = {"source": "drumroll.data.problems:demonstrations", "args": {"task": "sums", "flawed": 0.5}, "limit": 80}
    whole, _ = same_after_a_signal({**recipe(rows, batch=8, steps=99), "data": {"train": {"x": rows}, "epochs": 4}})
    epochs = [row["data/epoch"] for row in whole.metrics if "data/epoch" in row]
    assert (whole.summary["steps"], epochs[-1]) == (40, 4.0)


def test_the_best_samples_of_a_run_are_imitated_by_their_tokens(small, recipe, drumroll, tmp_path):
    run = package.train(small(name="rl", rollout={"prompts": 8}))
    scored = [s for s in run.select(kind="train") if s["reward"] is not None and s["completion"].strip()]

    def drawn(**chosen):
        config = load(recipe({"source": str(run.path), **chosen}, batch=500)).config
        return [g.samples[0] for g in Demonstrations(config, Renderer(tiny.tokenizer())).groups()]

    def tokens(samples):
        return sorted((s.traces[0].tokens, s.traces[0].owners) for s in samples)

    def recorded(samples):
        return sorted((s["traces"][0]["tokens"], s["traces"][0]["owners"]) for s in samples for _ in range(2))

    right = [s for s in scored if s["reward"] >= 1]
    assert 0 < len(right) < len(scored)
    assert tokens(drawn()) == recorded(scored)
    assert tokens(drawn(where="reward >= 1")) == recorded(right)
    groups = {}
    for sample in right:
        groups.setdefault((sample["step"], sample["id"].partition(".")[0]), []).append(sample)
    assert tokens(drawn(where="reward >= 1", best=1)) == recorded([samples[0] for samples in groups.values()])
    short = "tokens < 4 and rewards ->> 'exact' = 1 and domain = 'sums'"
    assert {s.prompt.domain for s in drawn(where=short)} == {"sums"}

    source = {"source": str(run.path), "where": "reward >= 1", "best": 1}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(source, name="imitating", steps=2)))
    code, out, _ = drumroll("train", str(path), "--dry-run")
    assert code == 0
    shown = out[out.index("# row:") :].splitlines()
    assert shown[0].endswith("of them trained (in brackets)")
    assert shown[1].startswith("#   <bos>")
    assert shown[1].endswith("[<eos>]")
    assert drumroll("train", str(path), "--quiet")[0] == 0
    for wrong, said in (
        ({"where": "rewrd > 1"}, "Did you mean 'reward'"),
        ({"where": "reward > 9"}, "for which 'reward > 9' holds"),
    ):
        with pytest.raises(DrumrollError, match=said):
            package.train(recipe({"source": str(run.path), **wrong}, name="wrong"))
