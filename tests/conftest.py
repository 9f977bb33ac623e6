"""Shared by all tests: a small recipe, and the command line called in this process."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings

ROOT = Path(__file__).parent.parent

sys.path[:0] = [str(ROOT / "tests" / "simulation"), str(ROOT / "tests" / "unit")]

settings.register_profile("patient", deadline=None, max_examples=60)
settings.register_profile("quarter", deadline=None, max_examples=15)  # for passes that repeat tests on other instructions
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--worlds", type=int, default=300, help="how many simulated worlds to play")
    parser.addoption("--record", action="store_true", help="write what the peers answer to tests/recordings")


RAY = ("test_big_cluster", "test_jobs")
"""Files that start a Ray of their own; other tests with Ray use `ray_cluster`."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Clusters of Ray come one after the other, also where tests run beside each other; so do the slow tests of a file."""
    for item in items:
        if item.path.stem in RAY or "ray_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ray"))
        elif item.get_closest_marker("slow") and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("loadgroup", False):  # in a worker of xdist
        grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
        assert all("@" in item.nodeid for item in grouped), "this pytest-xdist does not group tests with this pytest"


SMALL: dict[str, Any] = {
    "name": "small",
    "model": "tiny",
    "steps": 2,
    "data": {
        "train": {
            "sums": {"source": "drumroll.data.problems:sums"},
            "reversal": {"source": "drumroll.data.problems:reversal"},
        },
        "max_prompt_tokens": 16,
    },
    "rollout": {"prompts": 4, "samples": 4, "max_tokens": 8},
    "roles": {"rollout": {"slots": 16}},
    "reward": "exact",
    "optim": {"lr": 1e-3},
    "eval": {"sets": {"sums": {"source": "drumroll.data.problems:sums", "limit": 8}}},
}


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        merged = isinstance(value, dict) and value and isinstance(base.get(key), dict)  # {} replaces
        base[key] = _merge(base[key], value) if merged else value
    return base


@pytest.fixture(scope="session")
def small_in() -> Callable[..., dict[str, Any]]:
    """A small recipe writing below a folder, with changes merged in."""

    def make(folder: Path, **changes: Any) -> dict[str, Any]:
        return _merge({**copy.deepcopy(SMALL), "output": str(folder / "runs")}, changes)

    return make


@pytest.fixture
def small(small_in: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A small recipe writing below tmp_path, with changes merged in."""
    return partial(small_in, tmp_path)


@pytest.fixture
def supervised(small: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A small recipe that imitates given answers, with changes merged in."""
    rows = {"source": "drumroll.data.problems:demonstrations", "args": {"task": "sums", "flawed": 0.5}}

    def make(**changes: Any) -> dict[str, Any]:
        made = small(pipeline="sft", batch=8, eval_max_tokens=64, data={"train": {"sums": rows, "reversal": rows}}, **changes)
        del made["rollout"]
        return made

    return make


@pytest.fixture
def untimed() -> Callable[[Any], str]:
    """A run's metrics without timings and memory, as text to be compared."""
    timed = ("time/", "memory/", "rollout/tokens_per_s")
    return lambda run: json.dumps([{k: v for k, v in m.items() if not k.startswith(timed)} for m in run.metrics])


@pytest.fixture
def same_run(untimed: Callable[[Any], str]) -> Callable[[Any, Any], None]:
    """Check that two deterministic runs are one: their metrics, their models and what else a pipeline leaves."""

    def check(one: Any, other: Any) -> None:
        assert untimed(one) == untimed(other)
        for name in ("model/model.safetensors", "calibration.json", "reference.safetensors"):
            found = [(run.path / name).read_bytes() if (run.path / name).exists() else None for run in (one, other)]
            assert found[0] == found[1], name

    return check


@pytest.fixture
def same_after_a_crash(same_run: Callable[[Any, Any], None]) -> Callable[[dict[str, Any]], tuple[Any, list[str]]]:
    """Train a recipe, and again through a crash in its third commit: both are the same. Returns the run, and what was told."""
    import drumroll
    from drumroll.observe.progress import Quiet

    class Crash(Quiet):
        def __init__(self) -> None:
            self.heard = list[str]()

        def notice(self, text: str) -> None:
            self.heard.append(text)

        def committed(self, step: int, metrics: Any) -> None:
            if step == 3:
                raise MemoryError

    def check(recipe: dict[str, Any]) -> tuple[Any, list[str]]:
        whole, crash = drumroll.train({**recipe, "name": "whole"}), Crash()
        with pytest.raises(MemoryError):
            drumroll.train({**recipe, "name": "cut"}, progress=crash)
        same_run(drumroll.train(resume=whole.path.parent / "cut"), whole)
        return whole, crash.heard

    return check


@pytest.fixture
def same_after_a_signal(same_run: Callable[[Any, Any], None], tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    """Train a recipe, and again in a real process that gets a signal at an arbitrary moment: both are the same. Returns both."""
    import drumroll

    def check(recipe: dict[str, Any], number: signal.Signals = signal.SIGKILL) -> tuple[Any, Any]:
        recipe = {"checkpoint": {"every": 2}, **recipe, "deterministic": True}
        whole = drumroll.train({**recipe, "name": "whole"})
        path, cut = tmp_path / "recipe.yaml", whole.path.parent / "cut"
        path.write_text(yaml.safe_dump({**recipe, "name": "cut"}, sort_keys=False))
        command = [sys.executable, "-m", "drumroll", "train", str(path), "--quiet"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        metrics, deadline = cut / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") > 4):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        process.communicate(timeout=30)
        assert not (cut / "summary.json").exists()
        resumed = drumroll.train(resume=cut)
        same_run(resumed, whole)
        return whole, resumed

    return check


@pytest.fixture
def kill() -> Callable[..., Coroutine[Any, Any, None]]:
    """End a worker's process as the system does when memory runs out."""
    from drumroll.workers.ray_workers import LearnerWorker

    async def strike(group: Any, rank: int = 0) -> None:
        os.kill(await group.call(rank, LearnerWorker.pid), signal.SIGKILL)

    return strike


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Coroutine[Any, Any, None]]], Any]:
    """Make a run's progress that strikes at its workers when step 1 is committed, and keeps what it hears of lost ones."""
    from drumroll.observe.progress import Quiet
    from drumroll.workers.ray import RayWorkers

    opened, start = [], RayWorkers.start

    async def remember(self: RayWorkers) -> None:
        await start(self)
        opened.append(self)

    monkeypatch.setattr(RayWorkers, "start", remember)

    class Killer(Quiet):
        def __init__(self, strike: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
            self.strike, self.heard = strike, list[str]()

        def committed(self, step: int, metrics: Any) -> None:
            if step == 1:
                self.task = asyncio.ensure_future(self.strike(opened[-1]))

        def notice(self, text: str) -> None:
            if " is gone" in text:
                self.heard.append(text)

    return Killer


@pytest.fixture
def survives_a_kill(killer: Any, kill: Any, untimed: Any) -> Callable[[dict[str, Any]], None]:
    """Check that a run whose actor loses a rank ends in one sentence, and goes on as the run that nobody killed."""
    import drumroll
    from drumroll.errors import DrumrollError

    async def strike(workers: Any) -> None:
        await asyncio.sleep(0.3)
        await kill(workers.actor, 1)

    def check(recipe: dict[str, Any]) -> None:
        whole = drumroll.train({**recipe, "name": "whole"})
        with pytest.raises(DrumrollError, match="actor rank 1 is gone"):
            drumroll.train({**recipe, "name": "killed"}, progress=killer(strike))
        resumed = drumroll.train(resume=f"{recipe['output']}/killed")
        assert untimed(resumed) == untimed(whole)

    return check


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """One Ray of two machines, each with 8 cores and 2 made-up GPUs, for all tests: starting it takes longer than most of them."""
    from ray.cluster_utils import Cluster
    from warm_ray import warm_workers

    from drumroll.workers.ray_group import NICENESS

    os.environ.setdefault(NICENESS, "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # eight processes that no worker of ours would use
    with warm_workers() as warm:
        machine = {"num_cpus": 8, "num_gpus": 2, "object_store_memory": 2**28} | warm
        made = Cluster(True, head_node_args=machine | {"include_dashboard": False})
        try:
            made.add_node(**machine)
            yield made
        finally:
            made.shutdown()


@pytest.fixture
def same_on_two_ranks(ray_cluster: Any) -> Callable[[dict[str, Any]], tuple[Any, Any]]:
    """Train a recipe in one process, and on Ray with its actor divided over two: their numbers are equal. Returns both runs."""
    import ray

    import drumroll

    def check(recipe: dict[str, Any]) -> tuple[Any, Any]:
        recipe = _merge(copy.deepcopy(recipe), {"model": "tiny-even", "threads": 1, "optim": {"lr": 1e-4}})
        cluster = {"runtime": "ray", "devices": 2, "kind": "cpu", "threads": 1}
        divided = {"name": "divided", "cluster": cluster, "roles": {"actor": {"parallel": {"shard": 2}}}}
        alone = drumroll.train({**recipe, "name": "alone"})
        ray.init(ray_cluster.address, log_to_driver=False, logging_level="ERROR")
        try:
            run = drumroll.train(_merge(recipe, divided))
        finally:
            ray.shutdown()
        for mine, theirs in zip(run.metrics, alone.metrics, strict=True):
            for key in (key for key in theirs if key.startswith(("train/", "eval/"))):
                assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-4), key
        return run, alone

    return check


@pytest.fixture
def drumroll(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Call the command line; returns exit code, stdout, stderr."""
    from drumroll.cli import main

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["drumroll", *arguments])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a user's module; returns its name, importable here and in worker processes."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        name = f"mine_{len(list(tmp_path.glob('mine_*.py')))}_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write
