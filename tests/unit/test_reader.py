"""The reader opens every run of format 1 or later, also while it is written, and reads no more of it than it needs."""

import json
import os
import shutil
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
import yaml

from drumroll.config import load
from drumroll.errors import ConfigError, StoreError
from drumroll.lifecycle import DrawEvent
from drumroll.runfiles import reader as reading
from drumroll.runfiles.format import FORMAT
from drumroll.runfiles.ledger_queries import LedgerReader
from drumroll.runfiles.reader import RunReader
from drumroll.runfiles.rollouts import ROW_GROUP
from drumroll.sample import Fate, Group, Owner, Prompt, Sample, StopReason, Trace
from drumroll.store.ledger import Ledger
from drumroll.store.run import Run


def sample(draw, domain="sums", index=0):
    trace = Trace()
    trace.extend([1, 5], Owner.PROMPT)
    trace.extend([7, draw], Owner.POLICY, [-0.5, -0.25], [0, 0])
    prompt = Prompt(f"p{draw}", domain, f"prompt {draw}", (1, 5), {"answer": draw})
    return Sample(prompt, draw, index, Fate.TRAINED, [trace], f"answer {draw}", StopReason.EOS, draw / 2, {"exact": 1.0})


@pytest.fixture
def run(small):
    return Run.create(load(small()).config)


# --- format version ---


def test_a_new_run_names_its_format_and_the_library(run):
    from drumroll import __version__

    assert json.loads((run.path / "format.json").read_text()) == {"format": 1, "drumroll": __version__}


def test_an_old_run_is_refused_by_resume_in_one_sentence(tmp_path, drumroll):
    """Before its config is read, which has keys that are gone."""
    (tmp_path / "config.yaml").write_text("algorithm: {recipe: grpo}\ncluster: {bus: auto}\n")
    code, _, err = drumroll("train", "--resume", str(tmp_path))
    assert code == 2
    assert "has no format version (format.json is missing)" in err
    assert "unknown key" not in err


@pytest.mark.parametrize("opened", [RunReader.open, Run.open])
def test_formats_that_cannot_be_read_are_one_sentence(run, opened):
    assert opened(run.path).path == run.path
    file = run.path / "format.json"
    file.write_text(json.dumps({"format": FORMAT + 1, "drumroll": "9.8.7"}))
    newer = rf"made by a newer drumroll: version 9\.8\.7 wrote run format {FORMAT + 1}, .* formats up to {FORMAT}; upgrade"
    with pytest.raises(StoreError, match=newer):
        opened(run.path)
    for text in ("", "[1]", '{"format": "1"}', '{"format": 0}', '{"drumroll": "1"}'):
        file.write_text(text)
        with pytest.raises(StoreError, match=r"format\.json names no format version: it holds"):
            opened(run.path)
    file.unlink()
    with pytest.raises(StoreError, match=r"has no format version .* open it with that version, or train it again") as told:
        opened(run.path)
    assert str(told.value).count(". ") == 0
    with pytest.raises(StoreError, match="there is no such directory"):
        opened(run.path / "nowhere")


def test_a_run_without_a_format_version_can_be_replaced(small, run):
    run.append_metrics(1, {"x": 1})
    (run.path / "format.json").unlink()
    Run.create(load(small()).config, overwrite=True)
    assert RunReader.open(run.path).metrics == []


@pytest.mark.parametrize("left", [["format.json"], [".format.json.tmp"], ["format.json", ".config.yaml.tmp"]])
def test_a_directory_whose_creation_was_cut_off_does_not_block_its_name(small, run, left):
    shutil.rmtree(run.path)
    run.path.mkdir()
    for name in left:
        (run.path / name).write_text("{}")
    Run.create(load(small()).config)
    assert sorted(p.name for p in run.path.iterdir()) == ["config.yaml", "format.json"]


# --- the config of another version ---


def test_the_config_is_a_plain_mapping_of_any_schema(run, drumroll):
    """A run of a later or earlier schema, with a reward that is not installed here, is read by every verb that only reads."""
    run.append_metrics(1, {"reward/sums": 0.5})
    run.write_rollouts("train", 1, [sample(0)])
    Ledger(run.path / "ledger.sqlite").close()
    strange = {"name": "strange", "pipeline": "dream", "steps": 7, "reward": "gone.module:f", "optim": {"lr": "warm"}}
    (run.path / "config.yaml").write_text(yaml.safe_dump(strange))
    opened = RunReader.open(run.path)
    assert opened.settings == strange
    with pytest.raises(ConfigError):
        Run.open(run.path)
    code, out, err = drumroll("run", "status", str(run.path))
    assert (code, "step 1 of 7" in out, err) == (0, True, "")
    for verb in ("samples", "ledger", "report"):
        assert drumroll("run", verb, str(run.path))[::2] == (0, "")
    assert "<h1>strange</h1>" in (run.path / "report.html").read_text()
    assert "gone" not in sys.modules
    (run.path / "config.yaml").write_text("- a list")
    code, _, err = drumroll("run", "status", str(run.path))
    assert (code, "a config is a mapping, this is list" in err) == (2, True)


def test_the_reader_is_light():
    """It imports neither torch nor the config schema, so that it can be used in any program."""
    program = "import sys, drumroll.runfiles.reader; print([m for m in ('torch', 'drumroll.config', 'drumroll.store') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


# --- a run that is being written ---


def test_a_run_that_is_being_written_is_read_as_far_as_it_is(run):
    opened = RunReader.open(run.path)
    assert (opened.metrics, opened.samples, opened.summary, opened.checkpoints.steps()) == ([], [], {}, [])
    with pytest.raises(StoreError, match="has no ledger: no step of it has begun"):
        opened.open_ledger()
    ledger = Ledger(run.path / "ledger.sqlite")
    ledger.resume(0)
    group = Group(sample(3).prompt, 3, [sample(3)])
    ledger(DrawEvent(0.0, group, None, ""))
    ledger.flush()
    run.append_metrics(1, {"x": 0.5})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "x"')
    run.write_rollouts("train", 1, [sample(3)])
    (run.path / "rollouts" / ".train-000002.parquet.tmp").write_bytes(b"PAR1 half of it")
    half = run.path / "checkpoints" / ".step-000001.tmp"
    half.mkdir(parents=True)
    (half / "state.json").write_text("{}")
    (run.path / ".summary.json.tmp").write_text("{")
    assert opened.metrics == [{"step": 1, "x": 0.5}]
    assert [row["id"] for row in opened.samples] == ["3.0"]
    assert (opened.summary, opened.checkpoints.steps()) == ({}, [])
    assert opened.open_ledger().draws() == 1
    ledger(DrawEvent(1.0, Group(sample(4).prompt, 4, [sample(4)]), None, ""))
    ledger.flush()
    assert opened.open_ledger().draws() == 2
    ledger.close()


def test_a_file_that_a_resume_removes_meanwhile_is_passed_over(run, monkeypatch):
    for step in (1, 2):
        run.write_rollouts("train", step, [sample(step)])
    listed = run.rollouts()
    listed[0].path.unlink()
    monkeypatch.setattr(reading, "rollout_files", lambda folder: listed)
    assert [row["id"] for row in run.samples] == ["2.0"]
    assert [row["id"] for row in run.outcomes([1, 2])] == ["2.0"]
    assert list(run.failures()) == []


def test_reading_leaves_nothing_behind_and_needs_no_writable_directory(run, drumroll):
    run.append_metrics(1, {"x": 1})
    run.write_rollouts("train", 1, [sample(3)])
    ledger = Ledger(run.path / "ledger.sqlite")
    ledger(DrawEvent(0.0, Group(sample(3).prompt, 3, [sample(3)]), Fate.TRAINED, ""))
    ledger.close()
    before = {p: p.stat().st_mtime_ns for p in (run.path, *run.path.rglob("*"))}
    for verb in ("status", "samples", "ledger"):
        assert drumroll("run", verb, str(run.path))[0] == 0
    assert {p: p.stat().st_mtime_ns for p in (run.path, *run.path.rglob("*"))} == before


# --- samples ---


def recorded(run):
    """Three steps of 2.5 row groups each, two domains, and an evaluation."""
    rows = range(ROW_GROUP * 5 // 2)
    for step in (1, 2, 3):
        run.write_rollouts("train", step, [sample(1000 * step + i, "sums" if i % 2 else "words") for i in rows])
    run.write_rollouts("eval", 3, [sample(9000 + i) for i in range(4)])
    return RunReader.open(run.path)


def test_a_selection_is_what_a_filter_over_all_rows_gives(run):
    opened = recorded(run)
    everything = opened.samples
    assert len(everything) == 3 * (ROW_GROUP * 5 // 2) + 4
    chosen = {"ids": {"1001.0", "2100.0", "9001.0", "nobody"}, "step": 2, "kind": "train", "domain": "words"}
    for count in range(1 << len(chosen)):
        wanted = {key: value for bit, (key, value) in enumerate(chosen.items()) if count >> bit & 1}
        right = [
            row
            for row in everything
            if all(row["id"] in value if key == "ids" else row[key] == value for key, value in wanted.items())
        ]
        assert list(opened.select(**wanted)) == right, wanted
        narrow = list(opened.select(("completion", "rewards"), **wanted))
        assert narrow == [{"completion": row["completion"], "rewards": row["rewards"]} for row in right], wanted
    assert list(opened.select(("id",), ids={"2100.0"}, step=2)) == [{"id": "2100.0"}]


def test_a_column_that_does_not_exist_is_named(run):
    with pytest.raises(StoreError, match=r"has no column 'completon'; it has step, .* Did you mean 'completion'\?"):
        list(recorded(run).select(("completon",)))


def test_a_column_that_an_older_file_does_not_have_is_empty(run):
    opened = recorded(run)
    [file, *_] = opened.rollouts(kind="eval")
    table = pq.read_table(file.path)
    pq.write_table(table.drop_columns(["success", "turns", "notes"]), file.path)
    assert [(row["success"], row["turns"]) for row in opened.select(kind="eval")] == [(None, [])] * 4
    assert list(opened.select(("id", "success"), ids=["9001.0"])) == [{"id": "9001.0", "success": None}]
    assert list(opened.failures(opened.rollouts(kind="eval"))) == []


def spoil(path, groups, keep):
    """Overwrite the bytes of a file's columns in some row groups; columns named in `keep` stay."""
    with pq.ParquetFile(path) as file:
        parts = [file.metadata.row_group(g).column(c) for g in groups for c in range(file.metadata.num_columns)]
    with path.open("r+b") as file:
        for part in parts:
            if part.path_in_schema.split(".")[0] not in keep:
                starts = [part.data_page_offset, *([part.dictionary_page_offset] if part.has_dictionary_page else [])]
                file.seek(min(starts))
                file.write(b"\xff" * part.total_compressed_size)


def test_other_columns_are_not_read(run):
    opened = recorded(run)
    path = opened.rollouts(step=2)[0].path
    right = list(opened.select(("id", "reward"), step=2))
    spoil(path, range(3), keep=("id", "reward", "domain"))
    assert list(opened.select(("id", "reward"), step=2)) == right
    with pytest.raises(OSError):
        list(opened.select(("traces",), step=2))


def test_other_row_groups_and_other_files_are_not_read(run):
    """The tokens of one sample are read though those of all other row groups, and all other files, are destroyed."""
    opened = recorded(run)
    one = {"ids": {f"{2000 + ROW_GROUP + 1}.0"}, "step": 2}
    right = list(opened.select(**one))
    assert right[0]["traces"][0]["tokens"] == [1, 5, 7, 2000 + ROW_GROUP + 1]
    spoil(opened.rollouts(step=2)[0].path, (0, 2), keep=("id", "domain"))
    for file in opened.rollouts():
        if file.step != 2:
            file.path.write_bytes(b"no parquet")
    assert list(opened.select(**one)) == right
    with pytest.raises(OSError):
        list(opened.select(ids={"2000.0"}, step=2))
    with pytest.raises(Exception, match=r"magic bytes|too small|Parquet"):
        list(opened.select(ids=one["ids"]))


def test_what_train_returns_is_a_reader(run):
    assert isinstance(run, RunReader)
    assert Run.metrics is RunReader.metrics
    assert Run.samples is RunReader.samples
    assert Run.summary is RunReader.summary
    assert Run.model_path is RunReader.model_path


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("mount") is None, reason="needs a read-only mount")
def test_a_run_on_a_read_only_disk_is_read(run, tmp_path):
    ledger = Ledger(run.path / "ledger.sqlite")
    ledger(DrawEvent(0.0, Group(sample(3).prompt, 3, [sample(3)]), Fate.TRAINED, ""))
    ledger.close()
    bound = tmp_path / "bound"
    bound.mkdir()
    if subprocess.run(["mount", "--bind", str(run.path), str(bound)], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(bound)], check=True)
        with pytest.raises(OSError):
            (bound / "x").touch()
        assert RunReader.open(bound).open_ledger().draws() == 1
    finally:
        subprocess.run(["umount", "-l", str(bound)], check=True)


def test_a_ledger_reader_that_stays_open_sees_a_run_that_is_resumed(tmp_path):
    """A reader of a finished run reads what a later process writes, and never torn pages."""
    path = tmp_path / "ledger.sqlite"
    first = Ledger(path)
    first.commit(1)
    first.close()
    reader = LedgerReader(path)
    assert reader.committed() == {1}
    second = Ledger(path)
    for step in range(2, 400):
        second.commit(step)
    assert reader.committed() == set(range(1, 400))
    second.close()
    assert reader.committed() == set(range(1, 400))
    reader.close()
