"""What a run has committed outlives a power cut: it was synced, file and folder. A disk that forgets the rest shows it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from power import Disk

import drumroll
from drumroll.runfiles.ledger_queries import LedgerReader
from drumroll.store.ledger import Ledger
from drumroll.store.run import Run

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")

WRITER = """
import asyncio, os, sys
from pathlib import Path
from drumroll.config import load
from drumroll.lifecycle import DrawEvent
from drumroll.sample import Fate, Group, Prompt, Sample
from drumroll.store.ledger import Ledger
from drumroll.store.run import Run

run = Run.create(load(sys.argv[1]).config)
ledger = Ledger(run.path / "ledger.sqlite")
ledger.resume(0)

async def write(folder):
    (folder / "weights").write_text("w")

for step in (1, 2):
    prompt = Prompt("p", "d", "text", (1,))
    sample = Sample(prompt, step, 0, Fate.TRAINED, reward=1.0)
    run.write_rollouts("train", step, [sample])
    run.append_metrics(step, {"x": step})
    asyncio.run(run.checkpoints.save(step, {"critic": write}, {"note": step}))
    run.checkpoints.mark_best(step, step / 10)
    ledger(DrawEvent(0.0, Group(prompt, step, [sample]), Fate.TRAINED, ""))
    ledger.next_step()
    ledger.commit(step)
    ledger.add_checkpoint(step, run.checkpoints.path(step).name)  # after the commit, so that nothing later syncs it
os._exit(9)  # nothing is closed, nothing is written back
"""


def test_everything_of_a_commit_is_on_disk(small, tmp_path):
    disk = Disk(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(small()))
    done = subprocess.run([sys.executable, "-c", WRITER, str(recipe)], env=disk.environment, capture_output=True, text=True)
    assert done.returncode == 9, done.stderr
    left = disk.cut(tmp_path / "runs", tmp_path / "left")
    run = Run.open(left / "small")
    assert [m["step"] for m in run.metrics] == [1, 2]
    assert run.checkpoints.steps() == [1, 2]
    assert run.checkpoints.best() == {"step": 2, "score": 0.2}
    assert (run.checkpoints.path(2) / "critic" / "weights").read_text() == "w"
    assert [s["step"] for s in run.samples] == [1, 2]
    ledger = Ledger(run.path / "ledger.sqlite")
    assert ledger.committed() == {1, 2}
    assert ledger.checkpoints() == {1: "step-000001", 2: "step-000002"}
    assert ledger.db.execute("SELECT draw, fate FROM draws ORDER BY 1").fetchall() == [(1, "trained"), (2, "trained")]


def test_a_run_goes_on_after_a_power_cut(small, tmp_path, untimed):
    """With keep: 1 a power cut must not find the older checkpoint gone and the newer one not yet there."""
    disk = Disk(tmp_path)
    changes = {"deterministic": True, "steps": 6, "checkpoint": {"every": 1, "keep": 1}, "eval": {"every": 2}}
    whole = drumroll.train(small(name="whole", **changes))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(small(name="twin", **changes), sort_keys=False))
    command = [sys.executable, "-m", "drumroll", "train", str(recipe), "--quiet"]
    process = subprocess.Popen(command, env=disk.environment, stderr=subprocess.PIPE, text=True)
    metrics, deadline = tmp_path / "runs/twin/metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    left = disk.cut(tmp_path / "runs" / "twin", tmp_path / "runs" / "left")
    step = Run.open(left).checkpoints.steps()[-1]
    assert step >= 1  # step 3 has begun to end, so a save after that of step 1 had to wait for it
    committed = LedgerReader(left / "ledger.sqlite").committed()
    assert committed >= set(range(1, step))  # the last may have been cut between its checkpoint and its row
    twin = drumroll.train(resume=left)
    assert untimed(twin) == untimed(whole)
    assert LedgerReader(Path(twin.path) / "ledger.sqlite").problems() == []
    assert json.loads((left / "checkpoints" / "best.json").read_text()) == whole.checkpoints.best()
