"""What goes wrong in user code, and steps that teach nothing, are told where a person looks."""

import html
import json

import pytest

from drumroll.store.run import Run

SOMETIMES = """
def inner(row):
    return row["x"]

def f(completion, sample):
    if sample.index % 2:
        return inner({})
    return float(sample.index)
"""
ALWAYS = "def f(completion):\n    return {}['x']\n"


@pytest.fixture
def trained(small, mine, drumroll, tmp_path):
    """Train with a reward of the user through the command line; returns the module's name, the exit code and the output."""

    def train(text, **changes):
        name = mine(text)
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps(small(reward=f"{name}:f", import_from=[str(tmp_path)], **changes)))
        return (name, *drumroll("train", str(path)))

    return train


def test_an_exception_of_a_reward_is_told_with_file_and_line(trained, drumroll, tmp_path):
    name, code, out, err = trained(SOMETIMES)
    assert code == 0, err
    assert f"KeyError in reward 'f': 'x' ({name}.py, line 3)" in out
    assert out.count('return row["x"]') == 1  # once per kind, though it failed in both steps and all evaluations
    run = Run.open(tmp_path / "runs/small")
    assert all(s["traceback"].endswith("~~~^^^^^") for s in run.samples if s["failure"])
    page = html.unescape((run.path / "report.html").read_text())
    assert page.count(f'{name}.py", line 3, in inner') == 1
    code, out, err = drumroll("run", "samples", str(run.path), "--limit", "1", "--where", "failure is not null")
    assert out.count('return row["x"]') == 1, err
    _, out, _ = drumroll("run", "ledger", str(run.path), "--prompt", next(s["prompt_id"] for s in run.samples if s["failure"]))
    assert "line 3" in " ".join(out.split())


def test_an_exception_is_told_also_when_every_sample_failed(trained, drumroll, tmp_path):
    name, code, _, err = trained(ALWAYS, eval={"sets": {}})
    assert code == 2
    assert f"KeyError in reward 'f': 'x' ({name}.py, line 2)" in err
    assert f'{name}.py", line 2, in f' in err
    assert "Traceback" not in err
    path = tmp_path / "runs/small"
    assert f'{name}.py", line 2, in f' in html.unescape((path / "report.html").read_text())
    _, out, _ = drumroll("run", "samples", str(path))
    assert f"{name}.py" in "".join(out.split())
    assert "return {}['x']" in out


def test_a_step_without_a_gradient_is_told_with_the_reason(trained, drumroll, tmp_path):
    _, code, out, err = trained("def f(completion): return 0.5", eval={"sets": {}})
    assert code == 0, err
    assert out.count("no gradient") == 1
    assert "step 1: no gradient: in all 4 groups every sample got the same reward (0.5)" in out
    code, out, _ = drumroll("check", str(tmp_path / "recipe.yaml"))
    assert code == 1
    assert "no group would give a gradient" in " ".join(out.split())
    assert "ready" not in out
    _, out, _ = drumroll("check", str(tmp_path / "recipe.yaml"), "algorithm.advantage=reinforce")
    assert "gradient" not in " ".join(out.split()).partition("problem:")[2]  # it does not compare the samples of a group


FULL = """
class Env:
    def reset(self, seed): return "1" * 300
    def step(self, text): raise AssertionError("the policy had a turn")
    def close(self): pass
"""


def test_first_observations_that_fill_the_context_are_told_and_the_run_goes_on(small, mine, drumroll, tmp_path):
    path = tmp_path / "recipe.yaml"
    data = {"train": {"walk": {"source": "drumroll.data.seeds:seeds"}}, "max_prompt_tokens": 16}
    environment = {"use": f"{mine(FULL)}:Env", "context": 40}
    changes = {"data": data, "environment": environment, "reward": {}, "eval": {"sets": {}}, "steps": 3}
    path.write_text(json.dumps({**small(**changes), "data": data, "import_from": [str(tmp_path)]}))
    code, out, err = drumroll("train", str(path))
    assert code == 0, err
    assert "step 1: no gradient: the policy wrote no token in any sample" in out
    run = Run.open(tmp_path / "runs/small")
    assert [line["rollout/staleness"] for line in run.metrics[1:]] == [0.0, 0.0, 0.0]
