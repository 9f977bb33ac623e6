"""`drumroll init`: a project that is tested and trains as it was written."""

import subprocess
import sys

import pytest
import yaml

from drumroll.observe.hints import FEW


def test_a_new_project_passes_its_test_and_trains(drumroll, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = drumroll("init", "my sums")
    assert (code, err) == (0, "")
    assert out.splitlines()[1:] == ["cd my sums", "drumroll train recipe.yaml"]
    folder = tmp_path / "my sums"
    files = {"README.md", "data.jsonl", "held_out.jsonl", "recipe.yaml", "reward.py", "test_reward.py"}
    assert {path.name for path in folder.iterdir()} == files
    rows, held_out = ((folder / name).read_text().splitlines() for name in ("data.jsonl", "held_out.jsonl"))
    assert not set(rows) & set(held_out)
    assert len(held_out) >= FEW  # else the first run would begin with a hint
    tested = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(tested, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    monkeypatch.chdir(folder)
    code, out, err = drumroll("train", "recipe.yaml", "steps=1", "eval.sets.held_out.limit=4")
    assert code == 0, err
    assert (folder / "runs" / "my sums" / "model").is_dir()
    for line in (folder / "README.md").read_text().splitlines():
        if line.startswith("drumroll run"):
            assert drumroll(*line.partition("#")[0].strip().split(" ", 3)[1:])[0] == 0
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["name"] == "my sums"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_there_is_kept(drumroll, tmp_path, kind):
    there = tmp_path / "there"
    if kind == "folder":
        there.mkdir()
        there = there / "notes.txt"
    there.write_text("mine")
    code, _, err = drumroll("init", str(tmp_path / "there"))
    assert code == 2
    assert "exists and is not empty, so nothing was written; choose another name" in err
    assert there.read_text() == "mine"
