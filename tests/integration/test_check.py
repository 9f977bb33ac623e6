"""`drumroll check`: what is found on a real machine, with a real Ray."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from drumroll.checks.machine import Ray, ask_ray
from drumroll.runfiles.rollouts import read_samples

HEAVY = {"torch", "ray", "vllm", "transformers"}


def test_machine_for_people(drumroll, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    code, out, err = drumroll("check", "machine")
    assert (code, err) == (0, "")
    for words in ("cores usable", "shared memory", "transformers", "RAY_ADDRESS is not set", "actor: torch on CPU", "yes"):
        assert words in out, out
    assert "warning: " in out
    assert "OMP_NUM_THREADS=4096" in out


def test_machine_for_programs(drumroll, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    code, out, _ = drumroll("check", "machine", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["cpu"]["cores"] > 0
    assert found["disk"]["free"] > 0
    assert found["versions"]["torch"]
    assert found["ray"]["problem"].startswith("nothing answers there")
    [local] = [part for part in found["parts"] if part["name"] == "runtime: local"]
    assert local["runs"]


def test_machine_is_asked_without_heavy_imports_where_there_is_no_gpu(tmp_path):
    """Where there is one, torch is the only one that can tell about it."""
    program = (
        "import sys; from pathlib import Path; from drumroll.checks.machine import look; "
        "machine = look(Path.cwd(), env={}); "
        f"print(sorted(({HEAVY} - ({{'torch'}} if machine.gpu_driver else set())) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done


def test_an_unknown_check_is_one_sentence(drumroll):
    code, _, err = drumroll("check", "machin")
    assert code == 2
    assert "'machin' is neither a recipe, nor an environment" in err


@pytest.fixture
def recipe(small, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(small()))
    return path


@pytest.fixture
def cluster():
    """Start a Ray of one node in a process of its own, for the test; returns its address."""
    program = (
        "import ray; ray.init('local', num_cpus=1, num_gpus=2, include_dashboard=False, _node_ip_address='127.0.0.1', "
        "log_to_driver=False); print(ray.get_runtime_context().gcs_address, flush=True); input()"
    )
    with ExitStack() as stack:

        def start(**env):
            command, pipe = [sys.executable, "-c", program], subprocess.PIPE
            process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | env))
            stack.callback(process.communicate, "\n", timeout=60)
            return process.stdout.readline().strip()

        yield start


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_real_cluster_tells_its_nodes_and_resources(cluster):
    address = cluster(RAY_AUTH_MODE="disabled")
    assert ask_ray(address, seconds=60) == Ray(address, 1, {"CPU": 1.0, "GPU": 2.0})


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_real_cluster_that_asks_for_a_token(cluster, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    address = cluster(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="made-up-for-this-test-only-000000")
    assert "it asks for a token" in ask_ray(address, seconds=60).problem


def test_a_recipe_whose_rewards_tell_right_from_wrong(drumroll, recipe):
    code, out, err = drumroll("check", str(recipe))
    assert (code, err) == (0, ""), out
    for words in ("sums", "reversal", "exact", "good", "groups with a gradient", "of them trained (in brackets)", "ready:"):
        assert words in out, out


def test_a_recipe_whose_reward_cannot_tell(drumroll, recipe):
    code, out, _ = drumroll("check", str(recipe), "reward=length")
    assert code == 1
    assert "no reward scores right answers higher than wrong ones" in " ".join(out.split())


def test_a_run_scored_again_with_another_reward(drumroll, recipe, tmp_path):
    assert drumroll("train", str(recipe), f"output={tmp_path}", "--quiet")[0] == 0
    code, out, err = drumroll("run", "rescore", str(tmp_path / "small"), "reward=contains")
    assert (code, err) == (0, ""), out
    assert "reward now" in out
    [first, *_] = sorted((tmp_path / "small" / "rescored").glob("train-*.parquet"))
    assert all("contains" in row["rewards"] for row in read_samples(first))
