"""A resume takes the newest complete checkpoint that the ledger names; without the ledger, the newest complete one."""

import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

import drumroll
import drumroll as package
from drumroll.errors import StoreError
from drumroll.learners.checkpoint import Snapshot
from drumroll.observe.progress import Quiet
from drumroll.runfiles.ledger_queries import LedgerReader
from drumroll.runfiles.reader import RunReader
from drumroll.store.run import Run


class Hearing(Quiet):
    """Keeps the notices of a run."""

    def __init__(self):
        self.heard = []

    def notice(self, text):
        self.heard.append(text)


def trained(path):
    """Draws trained on, by step."""
    ledger = LedgerReader(path / "ledger.sqlite")
    assert ledger.problems() == []
    return ledger.db.execute("SELECT step, draw, prompt, domain FROM draws WHERE fate = 'trained' ORDER BY 1, 2").fetchall()


def samples(path):
    """Ends of samples, without those that were never recorded elsewhere."""
    query = "SELECT step, draw, sample, state, stop, reward, tokens, failure FROM samples WHERE state IN ('trained', 'failed')"
    return sorted(LedgerReader(path / "ledger.sqlite").db.execute(query).fetchall(), key=str)


def delete(path, old):
    (path / "ledger.sqlite").unlink()


def empty(path, old):
    (path / "ledger.sqlite").write_bytes(b"")


def restore(path, old):
    shutil.copyfile(old, path / "ledger.sqlite")


def forget_checkpoints(path, old):
    with sqlite3.connect(path / "ledger.sqlite") as db:
        db.execute("DELETE FROM commits")
        db.execute("DELETE FROM checkpoints")


class Copying(Hearing):
    """Copies the ledger without its write-ahead log when step 2 is committed."""

    def __init__(self, path, to):
        super().__init__()
        self.path, self.to = path, to

    def committed(self, step, metrics):
        if step == 2:
            shutil.copyfile(self.path / "ledger.sqlite", self.to)


def test_a_run_goes_on_whatever_became_of_its_ledger(small, tmp_path, untimed, mine):
    """A sample in sixteen fails, so that failures are rebuilt too."""
    name = mine(
        "def f(completion, sample):\n    if sample.draw % 4 == 1 and sample.index == 2: raise ValueError('x')\n    return len(completion) % 3"
    )
    changes = {"deterministic": True, "reward": f"{name}:f", "checkpoint": {"every": 1, "keep": 1}, "eval": {"every": 2}}
    whole = drumroll.train(small(name="whole", steps=5, **changes))
    old = tmp_path / "old.sqlite"
    first = drumroll.train(small(name="first", steps=4, **changes), progress=Copying(tmp_path / "runs/first", old))
    assert first.checkpoints.steps() in ([4], [2, 4])
    for damage in (delete, empty, restore, forget_checkpoints):
        path = tmp_path / "runs" / damage.__name__
        shutil.copytree(first.path, path)
        damage(path, old)
        progress = Hearing()
        resumed = drumroll.train(resume=path, overrides=["steps=5"], progress=progress)
        told = [text for text in progress.heard if "rebuilt" in text]
        assert len(told) == 1, (damage, progress.heard)
        assert "step-000004, the newest complete checkpoint: the run continues from it" in told[0]
        assert untimed(resumed) == untimed(whole), damage
        assert trained(path) == trained(whole.path), damage
        assert samples(path) == samples(whole.path), damage
        assert LedgerReader(path / "ledger.sqlite").committed() == {1, 2, 3, 4, 5}
        assert resumed.checkpoints.best() == whole.checkpoints.best()


def test_a_checkpoint_without_its_commit_is_taken_and_best_json_is_made_good(small, tmp_path, untimed):
    """Killed between the checkpoint and what follows it: nothing of the step is done again."""
    changes = {"deterministic": True, "checkpoint": {"every": 1}, "eval": {"every": 1}}
    whole = drumroll.train(small(name="whole", steps=3, **changes))
    run = drumroll.train(small(name="cut", steps=2, **changes))
    with sqlite3.connect(run.path / "ledger.sqlite") as db:
        db.execute("DELETE FROM commits WHERE step = 2")
    (run.path / "checkpoints" / "best.json").unlink()
    resumed = drumroll.train(resume=run.path, overrides=["steps=3"])
    assert untimed(resumed) == untimed(whole)
    assert resumed.checkpoints.best() == whole.checkpoints.best()
    assert trained(run.path) == trained(whole.path)


def lives(path, table):
    """In which life of the run each step of a table was written."""
    return dict(LedgerReader(path / "ledger.sqlite").db.execute(f"SELECT step, life FROM {table} ORDER BY step"))


def forget(path, *tables, step):
    with sqlite3.connect(path / "ledger.sqlite") as db:
        for table in tables:
            db.execute(f"DELETE FROM {table} WHERE step >= ?", (step,))


def tensors(checkpoint):
    """The bytes of a checkpoint's tensors, by folder and name."""
    files = [(file.parent.name, load_file(file)) for file in checkpoint.rglob("*.safetensors")]
    return {(folder, name): tensor.numpy().tobytes() for folder, found in files for name, tensor in found.items()}


@pytest.mark.parametrize("pipeline", ["rl", "sft"])
def test_resume_takes_the_newest_checkpoint_that_the_ledger_names(small, supervised, untimed, pipeline):
    """The step of a checkpoint that was never named is done again, and nothing of its folder is used."""

    def recipe(**more):
        changes = {"deterministic": True, "checkpoint": {"every": 1, "keep": 9}, "eval": {"every": 1}}
        return (supervised if pipeline == "sft" else small)(**changes, **more)

    whole = drumroll.train(recipe(name="whole", steps=4))
    run = drumroll.train(recipe(name="cut", steps=3))
    assert LedgerReader(run.path / "ledger.sqlite").checkpoints() == {s: f"step-00000{s}" for s in (1, 2, 3)}
    forget(run.path, "checkpoints", step=3)
    for name in ("master", "exp_avg", "exp_avg_sq"):
        shutil.copytree(run.checkpoints.path(1) / name, run.checkpoints.path(3) / name, dirs_exist_ok=True)
    resumed = drumroll.train(resume=run.path, overrides=["steps=4"])
    assert lives(run.path, "checkpoints") == lives(run.path, "commits") == {1: 1, 2: 1, 3: 2, 4: 2}
    assert untimed(resumed) == untimed(whole)
    assert resumed.checkpoints.best() == whole.checkpoints.best()
    for step in (3, 4):
        saved = [tensors(r.checkpoints.path(step)) for r in (resumed, whole)]
        assert saved[0] == saved[1], step
        assert {folder for folder, _ in saved[0]} == {"master", "exp_avg", "exp_avg_sq"}


def test_a_checkpoint_killed_before_its_row_and_commit_is_taken(small, untimed):
    changes = {"deterministic": True, "checkpoint": {"every": 1, "keep": 9}, "eval": {"every": 1}}
    whole = drumroll.train(small(name="whole", steps=4, **changes))
    run = drumroll.train(small(name="cut", steps=3, **changes))
    forget(run.path, "checkpoints", "commits", step=3)
    resumed = drumroll.train(resume=run.path, overrides=["steps=4"])
    assert lives(run.path, "checkpoints") == lives(run.path, "commits") == {1: 1, 2: 1, 3: 0, 4: 2}
    assert untimed(resumed) == untimed(whole)


def test_a_named_checkpoint_that_is_not_complete_is_passed_over(small, untimed):
    changes = {"deterministic": True, "checkpoint": {"every": 1, "keep": 9}, "eval": {"every": 1}}
    whole = drumroll.train(small(name="whole", steps=4, **changes))
    run = drumroll.train(small(name="cut", steps=3, **changes))
    (run.checkpoints.path(3) / "state.json").unlink()
    resumed = drumroll.train(resume=run.path, overrides=["steps=4"])
    assert lives(run.path, "commits") == {1: 1, 2: 1, 3: 2, 4: 2}
    assert untimed(resumed) == untimed(whole)


def test_the_rows_of_checkpoints_are_written_again_where_they_are_lost(small):
    run = drumroll.train(small(steps=2, checkpoint={"every": 1}))
    forget(run.path, "checkpoints", step=0)
    progress = Hearing()
    drumroll.train(resume=run.path, overrides=["steps=3"], progress=progress)
    assert lives(run.path, "checkpoints") == {1: 0, 2: 0, 3: 2}
    assert lives(run.path, "commits") == {1: 1, 2: 1, 3: 2}
    assert not [text for text in progress.heard if "rebuilt" in text]


def test_a_supervised_run_has_a_ledger_without_draws(supervised, drumroll):
    path = package.train(supervised(checkpoint={"every": 1})).path
    ledger = LedgerReader(path / "ledger.sqlite")
    assert (ledger.draws(), ledger.committed(), set(ledger.checkpoints())) == (0, {1, 2}, {1, 2})
    code, out, _ = drumroll("run", "ledger", str(path))
    assert (code, out.startswith("the ledger has no draws: supervised runs draw no prompts")) == (0, True)
    assert "consistent" not in out


def test_without_a_checkpoint_it_says_that_it_begins_again(small):
    run = drumroll.train(small(steps=1))
    shutil.rmtree(run.path / "checkpoints")
    progress = Hearing()
    resumed = drumroll.train(resume=run.path, progress=progress)
    assert f"{run.path} has no complete checkpoint: the run begins again at step 0." in progress.heard
    assert [m["step"] for m in resumed.metrics] == [0, 1]


def test_a_checkpoint_that_cannot_be_loaded_costs_nothing(small):
    run = drumroll.train(small(steps=2, checkpoint={"every": 1}))
    for file in run.checkpoints.path(2).rglob("*.safetensors"):
        file.unlink()
    before = {str(p): p.stat().st_size for p in run.path.rglob("*") if p.is_file()}
    with pytest.raises(StoreError, match="step-000002 is not complete: the files in master/ do not hold every element of"):
        drumroll.train(resume=run.path, overrides=["steps=3"])
    after = {str(p): p.stat().st_size for p in run.path.rglob("*") if p.is_file()}
    assert before.keys() <= after.keys()
    assert [m["step"] for m in run.metrics] == [0, 1, 2]


def test_a_second_process_on_a_run_directory_is_refused(small, tmp_path, drumroll):
    """While a real process trains, another is refused by one sentence, and `run status` is not."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(small(steps=10_000, eval={"sets": {}})))
    command = [sys.executable, "-m", "drumroll", "train", str(recipe)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    path = tmp_path / "runs" / "small"
    try:
        assert first.stdout is not None
        while not (line := first.stdout.readline()).startswith("step 1/"):
            assert line, "the first process has ended"
        for arguments in ([str(recipe)], [str(recipe), "--overwrite"], ["--resume", str(path)]):
            code, _, err = drumroll("train", *arguments)
            assert (code, err.count("\n")) == (2, 1)
            assert f"small is in use by process {first.pid} on" in err
        code, out, _ = drumroll("run", "status", str(path))
        assert (code, f"{path}: running, " in out) == (0, True)
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
    assert Run.open(path).metrics
    assert f"{path}: interrupted, " in drumroll("run", "status", str(path))[1]  # killed


PLANTED = """
import pathlib, sys, time
import drumroll
from drumroll.learners.checkpoint import Snapshot
from drumroll.observe.progress import Quiet

write, folder = Snapshot.write, pathlib.Path(sys.argv[2])

class Telling(Quiet):
    def notice(self, text):
        if text.startswith("Stopping"):
            (folder / "told").touch()

def slow(self, path):
    write(self, path)
    if "step-000003" in str(path):
        (folder / "writing").touch()
        time.sleep(3600)

Snapshot.write = slow
drumroll.train(sys.argv[1], progress=Telling())
"""
"""A run whose third checkpoint is never complete."""


def begin_slow(recipe, tmp_path):
    """Start such a run; returns its process when step 4 is done and the checkpoint of step 3 is being written."""
    file, path = tmp_path / "recipe.yaml", tmp_path / "runs" / recipe["name"]
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    command = [sys.executable, "-c", PLANTED, str(file), str(tmp_path)]
    process, deadline = subprocess.Popen(command, stderr=subprocess.PIPE, text=True), time.monotonic() + 120
    while not ((tmp_path / "writing").exists() and [m["step"] for m in RunReader(path).metrics][-1:] == [4]):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the run waits for its checkpoint"
        time.sleep(0.02)
    return process, path


def test_a_run_killed_while_a_checkpoint_is_written_continues_from_the_one_before(small, tmp_path, untimed):
    """Steps go on beside the write: step 4 is done, though the checkpoint of step 3 is not. All after step 2 is done again."""
    changes = {"deterministic": True, "checkpoint": {"every": 1, "keep": 9}, "eval": {"every": 2}, "steps": 5}
    whole = drumroll.train(small(name="whole", **changes))
    process, path = begin_slow(small(name="cut", **changes), tmp_path)
    process.kill()
    process.communicate()
    assert RunReader(path).checkpoints.steps() == [1, 2]
    assert (path / "checkpoints" / ".step-000003.tmp" / "master").exists()
    ledger = LedgerReader(path / "ledger.sqlite")
    assert (set(ledger.checkpoints()), ledger.committed()) == ({1, 2}, {1, 2, 3})
    resumed = drumroll.train(resume=path)
    assert lives(path, "checkpoints") == lives(path, "commits") == {1: 1, 2: 1, 3: 2, 4: 2, 5: 2}
    assert untimed(resumed) == untimed(whole)
    assert trained(path) == trained(whole.path)
    assert not list((path / "checkpoints").glob(".*"))
    assert resumed.checkpoints.best() == whole.checkpoints.best()
    for step in (3, 5):
        assert tensors(resumed.checkpoints.path(step)) == tensors(whole.checkpoints.path(step)), step


def test_a_second_interrupt_abandons_the_checkpoint_that_is_being_written(small, tmp_path):
    process, path = begin_slow(small(checkpoint={"every": 1, "keep": 9}, steps=9, eval={"sets": {}}), tmp_path)
    try:
        process.send_signal(signal.SIGINT)
        while not (tmp_path / "told").exists():  # or both would be one
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert f"interrupted; saved after step 2. Continue with: drumroll train --resume {path}" in said
    assert [p.name for p in sorted((path / "checkpoints").iterdir())] == ["step-000001", "step-000002"]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_at_the_next_commit(small, monkeypatch):
    """The step after it is done meanwhile; what was saved before stays."""
    write = Snapshot.write

    def broken(self, folder):
        if "step-000002" in str(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, folder)

    monkeypatch.setattr(Snapshot, "write", broken)
    recipe = small(steps=5, checkpoint={"every": 1, "keep": 9}, eval={"sets": {}})
    with pytest.raises(
        StoreError, match=r"cannot write .*step-000002: No space left on device. Free some space, then continue"
    ):
        drumroll.train(recipe)
    run = RunReader.open(Path(recipe["output"]) / recipe["name"])
    assert run.checkpoints.steps() == [1]
    assert {2} <= run.open_ledger().committed() <= {1, 2, 3}
    monkeypatch.setattr(Snapshot, "write", write)
    assert drumroll.train(resume=run.path).summary["steps"] == 5


def test_the_time_of_saving_is_told_apart(small):
    """How long the loop was blocked, and how long the write took beside it."""
    run = drumroll.train(small(steps=4, checkpoint={"every": 1}, eval={"sets": {}}))
    assert all("time/checkpoint" in m for m in run.metrics[2:])
    assert any("time/checkpoint_write" in m for m in run.metrics[2:])
