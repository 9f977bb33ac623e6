"""What is written is whole or absent, and a full or read-only disk is one sentence."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from drumroll.config import load
from drumroll.errors import StoreError
from drumroll.runfiles.durable import new_folder, write_text
from drumroll.sample import Failure, Fate, Owner, Prompt, Sample, StopReason, Trace
from drumroll.store.checkpoints import Checkpoints
from drumroll.store.ledger import Ledger
from drumroll.store.lock import locked
from drumroll.store.run import Run


@pytest.fixture
def run(small):
    return Run.create(load(small()).config)


@pytest.fixture
def full_disk(tmp_path):
    """A real file system of 1 MB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def save(checkpoints, step, write):
    async def body(folder):
        write(folder)

    asyncio.run(checkpoints.save(step, {"": body}, {"note": "x"}))
    checkpoints.prune(checkpoints.steps())


def test_checkpoints_keep_the_newest_and_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 6):
        save(checkpoints, step, lambda folder: (folder / "weights").write_text("w"))
        if step == 2:
            checkpoints.mark_best(2, 0.5)
    assert checkpoints.steps() == [2, 4, 5]
    assert checkpoints.state(5) == {"step": 5, "note": "x"}
    assert (checkpoints.best_step(), checkpoints.best_score()) == (2, 0.5)


def test_a_checkpoint_that_failed_does_not_exist(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1, lambda folder: (folder / "weights").write_text("w"))

    def broken(folder):
        (folder / "weights").write_text("half")
        raise RuntimeError("crash")

    with pytest.raises(RuntimeError):
        save(checkpoints, 2, broken)
    assert checkpoints.steps() == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_a_folder_left_by_a_killed_process_is_not_taken_for_a_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    (tmp_path / ".step-000007.tmp").mkdir()
    (tmp_path / ".step-000007.tmp" / "state.json").write_text("{}")
    (tmp_path / "step-000008").mkdir()
    assert checkpoints.steps() == []


def test_pruning_waits_until_the_ledger_names_the_newer_checkpoint(tmp_path):
    """Until then the older one is the way back, also with keep: 1 and after the step's commit."""
    checkpoints, ledger = Checkpoints(tmp_path / "checkpoints", keep=1), Ledger(tmp_path / "ledger.sqlite")

    def saved(step, *, named):
        asyncio.run(checkpoints.save(step, {}, {}))
        ledger.commit(step)
        if named:
            ledger.add_checkpoint(step, checkpoints.path(step).name)
        checkpoints.prune(ledger.checkpoints())
        return checkpoints.steps()

    assert saved(1, named=True) == [1]
    assert saved(2, named=False) == [1, 2]
    assert saved(3, named=False) == [1, 2, 3]
    ledger.add_checkpoint(3, "step-000003")
    checkpoints.prune(ledger.checkpoints())
    assert checkpoints.steps() == [2, 3]  # nobody named 2, so nobody may delete it
    ledger.close()


@pytest.mark.parametrize(
    ("complete", "named", "committed", "step"),
    [
        ([], [], [], None),
        ([], [1, 2], [1, 2], None),  # all folders are gone
        ([2, 4], [2, 4], [1, 2, 3, 4], 4),
        ([2, 4], [2, 4, 6], [1, 2, 3, 4, 5, 6], 4),  # the folder of 6 is not complete
        ([2, 4], [2], [1, 2, 3, 4, 5], 2),  # committed, but not known to be complete
        ([2, 4], [2], [1, 2, 3], 4),  # killed between the checkpoint and its row, or an old copy of the ledger
        ([2, 4], [], [1, 2, 3, 4], 4),  # the ledger names none
        ([2, 4], [6], [1, 2, 3, 4, 5, 6], 4),  # the ledger names none that is there
        ([2, 4], [], [], 4),  # the ledger is lost
    ],
)
def test_resume_takes_the_newest_complete_checkpoint_that_the_ledger_names(tmp_path, complete, named, committed, step):
    checkpoints = Checkpoints(tmp_path, keep=9)
    for saved in complete:
        asyncio.run(checkpoints.save(saved, {}, {}))
    assert checkpoints.newest(named, committed) == step


def test_a_ledger_keeps_the_rows_of_checkpoints_through_lives(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.resume(0)
    ledger.commit(1)
    ledger.commit(2)
    ledger.add_checkpoint(1, "step-000001")  # complete after the commit of 2
    ledger.add_checkpoint(2, "step-000002")
    ledger.close()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.checkpoints() == {1: "step-000001", 2: "step-000002"}
    ledger.resume(1)
    assert (ledger.life, ledger.checkpoints(), ledger.committed()) == (2, {1: "step-000001"}, {1})
    ledger.add_checkpoint(2, "step-000002")
    assert ledger.db.execute("SELECT step, life FROM checkpoints ORDER BY 1").fetchall() == [(1, 1), (2, 2)]
    ledger.close()


def test_full_disk_leaves_no_half_checkpoint(full_disk):
    checkpoints = Checkpoints(full_disk / "checkpoints", keep=3)
    save(checkpoints, 1, lambda folder: (folder / "weights").write_bytes(b"x" * 300_000))
    with pytest.raises(StoreError, match=r"No space left on device. Free some space, then continue with --resume"):
        save(checkpoints, 2, lambda folder: (folder / "weights").write_bytes(b"x" * 2_000_000))
    assert checkpoints.steps() == [1]
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["step-000001"]


def test_full_disk_under_the_real_learner(full_disk, small):
    from drumroll.api import train

    with pytest.raises(StoreError, match="Free some space"):
        train(small(output=str(full_disk), checkpoint={"every": 1}))
    assert not list((full_disk / "small" / "checkpoints").glob("*"))


def test_write_text_replaces_or_keeps(tmp_path):
    path = tmp_path / "file"
    write_text(path, "one")
    path.chmod(0o400)
    write_text(path, "two")
    assert path.read_text() == "two"
    with pytest.raises(StoreError, match="cannot write"):
        write_text(tmp_path / "missing" / "file", "x")


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/sys").exists(), reason="root ignores permissions")
def test_read_only_output_is_one_sentence(small):
    with pytest.raises(StoreError, match="cannot write /proc/sys"):
        Run.create(load(small(output="/proc/sys")).config)


def test_a_run_directory_is_not_overwritten_by_accident(small, run):
    config = load(small()).config
    run.append_metrics(1, {"x": 1})
    with pytest.raises(StoreError, match=r"is not empty. Continue it with --resume, choose another name=..., or replace"):
        Run.create(config)
    Run.create(config, overwrite=True)
    foreign = Path(config.output) / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match="nothing in it was touched"):
        Run.create(load(small(name="foreign")).config, overwrite=True)
    assert (foreign / "thesis.tex").exists()


def test_a_run_that_ended_before_its_first_step_does_not_block_its_name(small, run):
    config = load(small()).config
    run.append_metrics(0, {"eval/sums": 0.5})
    run.write_rollouts("eval", 0, [])
    run.write_rollouts("train", 1, [])  # the samples that failed, with their report
    (run.path / "report.html").write_text("")
    Ledger(run.path / "ledger.sqlite").close()
    Run.create(config)
    assert sorted(p.name for p in run.path.iterdir()) == ["config.yaml", "format.json"]
    for name in ("notes.txt", "model"):  # somebody's own, and what a finished run has
        (run.path / name).write_text("x")
        with pytest.raises(StoreError, match="is not empty"):
            Run.create(config)
        (run.path / name).unlink()
    run.write_rollouts("train", 1, [])  # by `drumroll rollout`, which has no metrics
    with pytest.raises(StoreError, match="is not empty"):
        Run.create(config)


def test_a_checkpoint_under_another_name_is_left_alone(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1, lambda folder: (folder / "weights").write_text("w"))
    shutil.copytree(checkpoints.path(1), tmp_path / "step-000001-copy")
    save(checkpoints, 2, lambda folder: (folder / "weights").write_text("w"))
    assert checkpoints.steps() == [2]
    assert (tmp_path / "step-000001-copy" / "weights").exists()


def test_a_ledger_that_cannot_be_read_is_one_sentence(run):
    (run.path / "ledger.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(StoreError, match=r"cannot open the ledger .*Move it away to continue with --resume, which rebuilds it"):
        Ledger(run.path / "ledger.sqlite")


HOLD = """
import sys
from pathlib import Path
from drumroll.store.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_directory_has_one_holder_and_its_lock_dies_with_it(tmp_path):
    path = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        named = (
            rf"run is in use by process {process.pid} on {socket.gethostname()} since \d{{4}}-.*; wait until it ends, or stop"
        )
        with pytest.raises(StoreError, match=named), locked(path):
            pass
    finally:
        process.kill()
        process.wait()
    with locked(path) as exclusive:
        assert exclusive
        with pytest.raises(StoreError, match=f"process {os.getpid()}"), locked(path):
            pass
    assert not (path / ".lock").exists()


def test_a_lock_leaves_no_directory_behind(tmp_path):
    with locked(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
    with locked(tmp_path / "used"):
        (tmp_path / "used" / "file").touch()
    assert [p.name for p in (tmp_path / "used").iterdir()] == ["file"]


def test_each_part_of_a_checkpoint_has_its_folder(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)

    async def write(folder):
        (folder / "weights").write_text(folder.name)

    asyncio.run(checkpoints.save(7, {"": write, "critic": write}, {}))
    assert (checkpoints.path(7) / "weights").read_text() == ".step-000007.tmp"
    assert (checkpoints.path(7) / "critic" / "weights").read_text() == "critic"


def test_open_says_what_is_missing(tmp_path):
    with pytest.raises(StoreError, match="there is no such directory"):
        Run.open(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"it has no config.yaml"):
        Run.open(tmp_path)


def test_samples_come_back_as_written(run):
    trace = Trace()
    trace.extend([1, 5], Owner.PROMPT)
    trace.extend([7, 2], Owner.POLICY, [-0.5, -0.25], [3, 4])
    prompt = Prompt("p", "d", ({"role": "user", "content": "¿?"},), (1, 5), {"answer": 7})
    good = Sample(prompt, 3, 1, Fate.TRAINED, [trace], "7", StopReason.EOS, 1.0, {"exact": 1.0})
    bad = Sample(prompt, 3, 2, Fate.FAILED, [trace], failure=Failure("ValueError", "reward 'x'", "no"))
    run.write_rollouts("train", 1, [good, bad])
    first, second = run.samples
    assert (first["id"], first["reward"], first["fate"], first["stop"]) == ("3.1", 1.0, "trained", "eos")
    assert first["traces"] == [
        {"tokens": [1, 5, 7, 2], "owners": [0, 0, 1, 1], "logprobs": [0, 0, -0.5, -0.25], "versions": [-1, -1, 3, 4]}
    ]
    assert first["columns"] == {"answer": 7}
    assert (second["reward"], second["failure"]) == (None, "ValueError in reward 'x': no")


def test_rewind_forgets_what_came_after_and_survives_a_torn_line(run):
    for step in range(4):
        run.append_metrics(step, {"x": step})
        run.write_rollouts("train", step, [])
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "x"')
    assert [m["step"] for m in run.metrics] == [0, 1, 2, 3]
    run.rewind(2)
    assert [m["step"] for m in run.metrics] == [0, 1, 2]
    assert len(list((run.path / "rollouts").glob("*.parquet"))) == 3


def test_new_folder_replaces_a_complete_one_only_when_complete(tmp_path):
    target = tmp_path / "model"
    with new_folder(target) as folder:
        (folder / "a").write_text("old")
    with pytest.raises(KeyError), new_folder(target) as folder:
        raise KeyError
    assert (target / "a").read_text() == "old"


def test_rows_of_a_life_that_was_superseded_are_no_record_of_the_next(tmp_path):
    """Steps done again after a crash have the draws of the first time; a ledger that lost the second time is rebuilt whole."""
    outcome = {"id": "7.0", "prompt_id": "p", "domain": "d", "fate": "trained", "stop": "eos", "reward": 1.0, "tokens": 3}
    row = outcome | {"failure": None, "history": "[]", "step": 6}
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.rebuild([6], {}, [row])
    ledger.resume(5)
    assert ledger.fates() == [("superseded", 1)]
    ledger.rebuild([6], {6: "step-000006"}, [row])
    assert ("trained", 1) in ledger.fates()
    ledger.close()


HOLDER = """
import os, sys, time
from pathlib import Path
from drumroll.store.lock import locked
with locked(Path(sys.argv[1])):
    started, say = os.pipe()
    if os.fork() == 0:
        os.write(say, b"!")  # it has let go of the lock before it runs
        time.sleep(300)
        os._exit(0)
    os.read(started, 1)
    print("held", flush=True)
    time.sleep(300)
"""


def test_a_lock_dies_with_its_holder_though_a_child_of_it_lives(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match=f"in use by process {process.pid}"), locked(tmp_path / "run"):
            pass
        process.kill()
        process.wait()
        with locked(tmp_path / "run") as exclusive:
            assert exclusive
    finally:
        os.killpg(process.pid, signal.SIGKILL)
