"""Nothing writes into a run directory but `store`, the durable writing below it, learners into folders that `store` made, and trackers.

An audit hook sees every file that Python opens, renames or makes. Files that other languages write (Parquet, safetensors,
SQLite) are not seen themselves, so every file that is left must have been put there by a writer that was seen.
"""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import drumroll as package
from drumroll.errors import RolloutError

WRITERS = ("drumroll.store.", "drumroll.runfiles.")
SAVERS = ("drumroll.learners.", "drumroll.models.")
TRACKED = ("tensorboard", "wandb")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
MADE = {"os.rename": 1, "os.mkdir": 0, "os.link": 1, "os.symlink": 1, "sqlite3.connect": 0}
"""Events that make a file or folder, with the argument that names it."""

watches = []


class Watch:
    """Notes who makes files below a folder: the innermost frame of this package, and the frame that calls Python."""

    def __init__(self, folder):
        self.folder = folder.resolve()
        self.seen = {}

    def note(self, path):
        frame, found = sys._getframe(2), []
        while frame is not None:
            found.append(frame.f_globals.get("__name__", ""))
            frame = frame.f_back
        own = next((name for name in found if name.startswith("drumroll.")), "")
        direct = next((name for name in found if name not in STANDARD), "")
        self.seen.setdefault(path.relative_to(self.folder), set()).add((own, direct))

    def strangers(self):
        """Files with a writer who may not write them, and files that nobody was seen to write."""
        wrong = [(str(path), *who) for path, all_ in self.seen.items() for who in all_ if not allowed(path, *who)]
        left = {path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file()}
        known = {path for path, all_ in self.seen.items() if any(allowed(path, *who) for who in all_)}
        unseen = [path for path in left if not known & {path, *renamed(path)} and not beside_a_database(path)]
        return sorted(wrong), sorted(map(str, unseen))


STANDARD = {"pathlib", "os", "io", "codecs", "shutil", "tempfile", "contextlib", "sqlite3", "sqlite3.dbapi2"}


def allowed(path, own, direct):
    if own.startswith(WRITERS):
        return True
    if path.parts[0] in TRACKED:
        return not direct.startswith("drumroll.")  # the tracker's own code, also in its threads
    made_by_store = path.parts[0].startswith(".model.") or (path.parts[:1] == ("checkpoints",) and path.parts[1][:1] == ".")
    return own.startswith(SAVERS) and made_by_store


def renamed(path):
    """Folders that a file came with; a folder that was merely made says nothing about files in it."""
    return [folder for folder in path.parents if folder.parts and (folder.name == "model" or folder.name.startswith("step-"))]


def beside_a_database(path):
    return path.name.endswith(("-wal", "-shm"))


def hook(event, arguments):
    for watch in watches:
        if event == "open":
            path, mode, flags = arguments
            if not (flags or 0) & WRITING and not set(mode or "") & set("wax+"):
                continue
        elif event in MADE:
            path = arguments[MADE[event]]
        else:
            continue
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if isinstance(path, (str, os.PathLike)):
            path = Path(str(path).removeprefix("file://").partition("?")[0])
            path = path if path.is_absolute() else Path.cwd() / path
            if path.is_relative_to(watch.folder) and path != watch.folder:
                watch.note(path)


@contextmanager
def watching(folder):
    if hook not in HOOKED:
        HOOKED.append(hook)
        sys.addaudithook(hook)
    watch = Watch(folder)
    watches.append(watch)
    try:
        yield watch
    finally:
        watches.remove(watch)


HOOKED = []


def everything(small, **changes):
    """A recipe that writes all that a run can write."""
    return small(
        trackers=[{"kind": "tensorboard"}],
        roles={"judge": {"model": "tiny", "max_prompt_tokens": 128, "cache": "run"}, "critic": {}},
        reward=["exact", {"use": "judge", "weight": 0.1, "args": {"template": "{prompt}{completion} Is it {answer}? "}}],
        algorithm={"preset": "ppo"},
        checkpoint={"every": 1, "keep": 1},
        eval={"every": 1},
        **changes,
    )


def test_nothing_else_writes_into_a_run_directory(small, tmp_path, drumroll):
    folder = tmp_path / "runs" / "small"
    with watching(folder) as watch:
        run = package.train(everything(small))
        package.train(resume=run.path, overrides=["steps=3"])
        assert drumroll("run", "report", str(folder))[0] == 0
        assert drumroll("run", "rescore", str(folder), "reward=exact")[0] == 0
        for verb in ("status", "samples", "ledger"):
            assert drumroll("run", verb, str(folder))[0] == 0
    assert watch.strangers() == ([], [])
    written = {path.parts[0] for path in watch.seen}
    files = {"config.yaml", "format.json", "metrics.jsonl", "ledger.sqlite", "summary.json", "report.html", ".lock"}
    assert {*files, "judge.jsonl", "rollouts", "rescored", "checkpoints", "model", "tensorboard"} <= written


def test_nor_does_a_run_that_fails_or_is_supervised(small, supervised, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    hopeless = {"filter": "mean_band", "filter_args": {"low": 2, "high": 3}, "max_draws_per_step": 12}
    with watching(folder / "sft") as first, watching(folder / "failed") as second:
        package.train(supervised(name="sft"))
        with pytest.raises(RolloutError):
            package.train(small(name="failed", rollout=hopeless))
    assert (first.strangers(), second.strangers()) == (([], []), ([], []))
    assert Path("ledger.sqlite") in first.seen
    assert Path("config.yaml") in second.seen


STRANGER = """
def write(path):
    path.write_text("x")
def make(path):
    path.mkdir()
def move(path, to):
    path.rename(to)
"""


def test_the_watch_finds_a_stranger(tmp_path):
    """The same calls are allowed in `store` and nowhere else; a file that no frame was seen to write is found too."""

    def module(name):
        names = {"__name__": name}
        exec(STRANGER, names)
        return names

    outside = tmp_path / "outside"
    outside.write_text("x")
    folder = tmp_path / "run"
    folder.mkdir()
    with watching(folder) as watch:
        store, stranger, learner = map(module, ("drumroll.store.x", "drumroll.stages", "drumroll.learners.torch"))
        store["write"](folder / "good")
        store["make"](folder / "checkpoints")
        store["make"](folder / "checkpoints" / ".step-000001.tmp")
        learner["write"](folder / "checkpoints" / ".step-000001.tmp" / "shard")
        store["move"](folder / "checkpoints" / ".step-000001.tmp", folder / "checkpoints" / "step-000001")
        (folder / "tensorboard").mkdir()
        module("tensorboard.summary")["write"](folder / "tensorboard" / "events")
        assert watch.strangers() == ([], [])
        stranger["write"](folder / "tensorboard" / "own")
        stranger["write"](folder / "bad")
        stranger["make"](folder / "worse")
        stranger["move"](outside, folder / "moved")
        learner["write"](folder / "checkpoints" / "step-000001" / "late")
        pq.write_table(pa.table({"x": [1]}), folder / "unseen.parquet")
    wrong, unseen = watch.strangers()
    assert [(path, own) for path, own, _ in wrong] == [
        ("bad", "drumroll.stages"),
        ("checkpoints/step-000001/late", "drumroll.learners.torch"),
        ("moved", "drumroll.stages"),
        ("tensorboard/own", "drumroll.stages"),
        ("worse", "drumroll.stages"),
    ]
    assert unseen == ["bad", "moved", "tensorboard/own", "unseen.parquet"]
