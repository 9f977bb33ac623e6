"""A run that is handed to a Ray cluster as a job, with the cluster's own tool."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest


def free_port():
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def dashboard(tmp_path):
    """Start a Ray of one node with its dashboard, as a cluster's owner would; returns the address and the environment."""
    import_module("aiohttp_cors")  # Ray's dashboard: pip install 'ray[default]', which `make test-slow` does
    port = free_port()
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "made-up-for-this-test-only-000000",
    }
    command = ["ray", "start", "--head", "--block", f"--port={free_port()}", "--num-cpus=2", "--disable-usage-stats"]
    command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={port}"]
    command += [f"--dashboard-agent-listen-port={free_port()}"]  # another Ray may have the usual one
    with (tmp_path / "ray.txt").open("w") as log:
        head = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + 120
        while "Ray runtime started" not in (tmp_path / "ray.txt").read_text() and time.monotonic() < until:
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", env
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(60)


@pytest.mark.slow
def test_a_job_trains_on_the_cluster(dashboard, tmp_path):
    address, env = dashboard
    work = tmp_path / "work"
    work.mkdir()
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart" / "recipe.yaml"
    (work / "recipe.yaml").write_text(recipe.read_text())
    command = [
        "ray",
        "job",
        "submit",
        "--address",
        address,
        "--working-dir",
        str(work),
        "--",
        "drumroll",
        "train",
        "recipe.yaml",
    ]
    command += ["cluster.runtime=ray", "steps=1", f"output={tmp_path / 'runs'}"]
    for _ in range(20):
        job = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
        if "No available agent" not in job.stderr:
            break  # the node's own agent starts a little after its head
        time.sleep(3)
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
    assert json.loads((tmp_path / "runs" / "quickstart" / "summary.json").read_text())["steps"] == 1
