"""`drumroll runs` and `run status`: the state and the result of a run, and which step its model is."""

import asyncio
import json
import subprocess
import sys

import pytest

from drumroll.config import load
from drumroll.errors import Interrupted, StoreError
from drumroll.observe.runs import list_runs, model_text, state_of
from drumroll.store.lock import in_use, locked
from drumroll.store.run import Run


@pytest.fixture
def new(small):
    def make(name="one", scores=(0.25, 0.5)):
        run = Run.create(load(small(name=name)).config)
        for step, score in enumerate(scores):
            run.append_metrics(step, {"eval/sums": score, "eval/sums/sampled": 0.125} | ({"reward/sums": 0.75} if step else {}))
        return run

    return make


def finish(run, steps=2, best=None):
    run.write_summary({"steps": steps, "before": {"sums": 0.25}, "after": {"sums": 0.5}, "seconds": 3.0})
    run.model_path.mkdir()
    if best is not None:
        run.checkpoints.folder.mkdir()
        run.checkpoints.mark_best(best, 0.875)
    return run


def end(run, error):
    with pytest.raises(type(error)), run.recorded_end():
        raise error


def test_a_run_is_running_while_a_process_holds_its_lock(new):
    run = finish(new())
    with locked(run.path):
        assert in_use(run.path)
        assert state_of(run) == "running"
    assert not in_use(run.path)
    assert state_of(run) == "finished"
    (run.path / ".lock").write_text("{}")  # left by a process that was killed
    assert state_of(run) == "finished"


def test_looking_does_not_keep_a_run_from_starting(new, monkeypatch):
    """A process that begins to train while another one looks waits for a moment; one that trains is refused."""
    import fcntl

    path, real, calls = new().path, fcntl.flock, []

    def flock(handle, how):
        calls.append(how)
        if len(calls) == 1:
            raise BlockingIOError
        real(handle, how)

    with locked(path), pytest.raises(StoreError, match="is in use by process"), locked(path):
        pass
    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(path) as exclusive:
        assert exclusive
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (Interrupted("stopped"), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
        (asyncio.CancelledError(), "interrupted"),
        (StoreError("disk full\nmore"), "failed"),
        (RuntimeError(), "failed"),
    ],
)
def test_how_a_run_ended_is_recorded_until_it_goes_on(new, drumroll, error, state):
    run = new()
    assert state_of(run) == "interrupted"  # killed: nobody wrote anything
    end(run, error)
    assert state_of(run) == state
    assert run.outcome["error"] == ((str(error) or type(error).__name__).splitlines()[0])
    code, out, _ = drumroll("run", "status", str(run.path))
    assert (code, f"{run.path}: {state}, step 1 of 2" in out) == (0, True)
    assert ("disk full" in out) == (str(error) != "" and state == "failed")
    with run.recorded_end():
        pass
    assert run.outcome == {}


def test_a_run_that_failed_before_its_first_step_does_not_block_its_name(new, small):
    end(new(scores=(0.25,)), RuntimeError("no"))
    assert Run.create(load(small(name="one")).config).outcome == {}


def test_runs_are_listed_with_state_and_result(new, drumroll):
    finish(new("done"))
    new("deep/killed", scores=(0.25, 0.125))
    end(new("broken"), StoreError("disk full"))
    odd = new("odd").path
    (odd / "format.json").write_text('{"format": 99}')
    (odd.parent / "no run").mkdir()
    code, out, err = drumroll("runs", str(odd.parent), "--json")
    assert (code, err) == (0, "")
    found = {line["path"].removeprefix(f"{odd.parent}/"): line for line in map(json.loads, out.splitlines())}
    states = {name: line["state"] for name, line in found.items()}
    assert states == {"done": "finished", "deep/killed": "interrupted", "broken": "failed", "odd": "unreadable"}
    assert (found["done"]["before"], found["done"]["after"], found["done"]["step"]) == ({"sums": 0.25}, {"sums": 0.5}, 1)
    assert (found["deep/killed"]["after"], found["deep/killed"]["reward"]) == ({"sums": 0.125}, {"sums": 0.75})
    code, out, _ = drumroll("runs", str(odd.parent))
    for text in ("sums 0.250 → 0.500", "disk full", "1/2", "0 s"):
        assert text in out
    assert [line["path"] for line in list_runs(odd.parent / "done")] == [str(odd.parent / "done")]
    code, _, err = drumroll("runs", str(odd / "nowhere"))
    assert (code, "name the one that holds your runs: drumroll runs DIR" in err) == (2, True)


@pytest.mark.parametrize(
    ("best", "text"),
    [
        (None, "step 2, the last (no held-out set says which was best)"),
        (2, "step 2, the last and the best (score 0.875)"),
        (1, "step 2, the last; the best was step 1 (score 0.875): drumroll run export {path} --step best --to DIR"),
    ],
)
def test_which_step_the_model_is(new, drumroll, best, text):
    run = finish(new(), best=best)
    wanted = text.format(path=run.path)
    assert model_text(run) == wanted
    assert wanted in drumroll("run", "status", str(run.path))[1]
    assert drumroll("run", "report", str(run.path))[0] == 0
    assert f"<dt>model/</dt><dd>{wanted.partition(':')[0]}" in (run.path / "report.html").read_text()


def test_listing_runs_needs_no_torch(new):
    run = finish(new())
    program = """
import sys
from drumroll.cli import cli
for words in (["runs", sys.argv[2]], ["run", "status", sys.argv[1]], ["runs", sys.argv[2], "--json"]):
    cli(words, standalone_mode=False)
print([m for m in ("torch", "transformers", "ray") if m in sys.modules])
"""
    command = [sys.executable, "-c", program, str(run.path), str(run.path.parent)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "[]"
