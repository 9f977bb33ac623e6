"""Trackers, each with the real library: names and groups, tables of samples, and resumed runs that continue."""

import io
import json
import struct
import sys

import peers
import pytest

import drumroll
from drumroll.config import load
from drumroll.errors import ConfigError, TrackerError
from drumroll.observe import trackers
from drumroll.observe.progress import Quiet


def records(path):
    """The records of an offline run of wandb: parts with a header of 7 bytes, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def test_a_resumed_run_continues_in_its_trackers(small):
    settings = {"project": "p", "entity": "e", "group": "g", "tags": ["t", "u"], "name": "n", "mode": "offline", "samples": 3}
    kinds = [{"kind": "tensorboard", "samples": 3}, {"kind": "wandb", **settings}]
    run = drumroll.train(small(steps=2, trackers=kinds, checkpoint={"every": 1}))
    (run.path / "checkpoints" / "step-000002" / "state.json").unlink()  # step 2 is done again
    run = drumroll.train(resume=run.path, overrides=["steps=3"])
    _events(run)
    [own] = json.loads((run.path / "trackers.json").read_text()).values()
    files = sorted((run.path / "wandb").glob(f"offline-run-*-{own}/run-{own}.wandb"))
    assert len(files) == len(list((run.path / "wandb").glob("offline-run-*"))) == 2
    first, again = ([*records(file)] for file in files)
    for session in (first, again):
        [opened] = [r.run for r in session if r.WhichOneof("record_type") == "run"][:1]
        assert (opened.run_id, opened.project, opened.entity, opened.run_group) == (own, "p", "e", "g")
        assert (list(opened.tags), opened.display_name) == (["t", "u"], "n")
        assert "rollout" in {item.key for item in opened.config.update}
    assert [_steps(session) for session in (first, again)] == [[0, 1, 2], [3]]
    tables = sorted((run.path / "wandb").rglob("*.table.json"))
    assert len(tables) == 5  # held-out samples at steps 0, 2, 3, training samples at 2 and 3
    table = json.loads(tables[0].read_text())
    assert (tuple(table["columns"]), len(table["data"])) == (trackers.COLUMNS, 3)


def _steps(session):
    return [r.history.step.num for r in session if r.WhichOneof("record_type") == "history"]


def _events(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/sums")] == [1, 2, 3]  # the first step 2 is hidden
    values = [line["reward/sums"] for line in run.metrics[1:]]
    assert [event.value for event in events.Scalars("reward/sums")] == pytest.approx(values)
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples/eval/text_summary")]
    assert all(text.startswith("| id | domain | prompt |") and text.count("\n") == 4 for text in texts)
    assert "name: small" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


TRACKIO = """
import json, sys
import drumroll
from trackio.sqlite_storage import SQLiteStorage

recipe = json.loads(sys.argv[1])
run = drumroll.train(recipe)
(run.path / "checkpoints" / "step-000002" / "state.json").unlink()
run = drumroll.train(resume=run.path, overrides=["steps=3"])
[name] = SQLiteStorage.get_runs("p")
logs = SQLiteStorage.get_logs("p", name)
config = SQLiteStorage.get_run_config("p", name)
print(json.dumps([name, logs, config], default=str))
"""


@pytest.mark.peers
def test_trackio_itself(small, tmp_path):
    """In its own environment: the run and its resumption are one run there."""
    tracker = {"kind": "trackio", "project": "p", "group": "g", "tags": ["t"], "name": "n", "samples": 3}
    recipe = small(steps=2, trackers=[tracker], checkpoint={"every": 1})
    home = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HOME": str(tmp_path / "hub"), "PYTHONPATH": str(peers.ROOT / "src")}
    out = peers.run([peers.python("trackio"), "-c", TRACKIO, json.dumps(recipe)], **home)
    name, logs, config = json.loads(out.splitlines()[-1])
    own = json.loads((tmp_path / "runs" / "small" / "trackers.json").read_text())
    assert own == {"trackio:p": name.removeprefix("n-")}
    assert sorted({line["step"] for line in logs if "reward/sums" in line}) == [1, 2, 3]
    assert sorted({line["step"] for line in logs if "samples/eval" in line}) == [0, 2, 3]
    assert (config["_Group"], config["tags"], config["steps"]) == ("g", ["t"], 3)


def test_keys_that_a_tracker_lacks_are_refused(small):
    with pytest.raises(ConfigError, match="tensorboard has no `group`; leave it out, or use `kind: wandb`"):
        load(small(trackers=[{"kind": "tensorboard", "group": "g"}]))
    with pytest.raises(ConfigError, match="trackio has no `entity`"):
        load(small(trackers=[{"kind": "trackio", "entity": "e"}]))


class Hearing(Quiet):
    """Keeps the notices of a run."""

    def __init__(self):
        self.heard = []

    def notice(self, text):
        self.heard.append(text)


@pytest.mark.parametrize("required", [False, True])
def test_a_tracker_without_a_login_is_one_sentence(small, monkeypatch, tmp_path, required):
    """The real wandb, with no key anywhere: by config the run goes on, or ends before its first step."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    recipe, progress = small(steps=1, trackers=[{"kind": "wandb", "required": required}]), Hearing()
    if required:
        with pytest.raises(
            TrackerError, match=r"^the tracker wandb could not be opened: No API key configured.*required: false"
        ):
            drumroll.train(recipe, progress=progress)
        recipe["trackers"] = []
        assert drumroll.train(recipe).summary["steps"] == 1  # the run that failed does not block its name
        return
    assert drumroll.train(recipe, progress=progress).summary["steps"] == 1
    (told,) = [text for text in progress.heard if "tracker" in text]
    assert told.startswith("the tracker wandb could not be opened: No API key configured")
    assert told.endswith("The run goes on without it.")


def test_a_tracker_that_fails_later_is_given_up(small, monkeypatch):
    class Failing:
        def __init__(self, run, config):
            pass

        def log(self, step, metrics):
            if step:
                raise ConnectionError("the line is cut\nand more")

        def table(self, step, name, rows):
            pass

        def close(self):
            raise AssertionError("it was given up")

    monkeypatch.setitem(trackers.OPEN, "wandb", Failing)
    progress = Hearing()
    run = drumroll.train(small(steps=2, trackers=[{"kind": "wandb"}]), progress=progress)
    assert run.summary["steps"] == 2
    assert [t for t in progress.heard if "tracker" in t] == [
        "the tracker wandb failed at step 1: the line is cut. The run goes on without it."
    ]
