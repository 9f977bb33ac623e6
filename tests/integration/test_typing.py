"""A user's project is checked by type checkers that see the package as an installed one, by its `py.typed`."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TYPED = ROOT / "tests" / "typed"
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project far from the repository, and an interpreter that has the package and its dependencies installed."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder / "env", symlinks=True)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    (packages / "installed.pth").write_text(f"{ROOT / 'src'}\n{sysconfig.get_path('purelib')}\n")
    (folder / "pyrefly.toml").write_text('preset = "strict"\n')
    for file in TYPED.glob("*.py"):
        (folder / file.name).write_text(file.read_text())
    return folder


def errors(project, *command):
    """The lines of each file with an error, and all that the checker said."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "MYPYPATH")}
    done = subprocess.run(
        [str(BIN / command[0]), *map(str, command[1:])], cwd=project, capture_output=True, text=True, env=clean, check=False
    )
    said = done.stdout + done.stderr
    told = [re.search(r"(\w+\.py):(\d+)", line) for line in said.splitlines() if "error" in line.lower()]
    return {(place[1], int(place[2])) for place in told if place}, said


MISTAKES = {
    ("mistakes.py", n) for n, line in enumerate((TYPED / "mistakes.py").read_text().split("\n"), 1) if line.endswith("# wrong")
}
PYTHON = "env/bin/python"
CHECKERS = {
    "pyrefly": ("check", "--output-format", "min-text", "--python-interpreter-path", PYTHON),
    "mypy": ("--strict", "--cache-dir", os.devnull, "--python-executable", PYTHON),
    "pyright": ("--pythonpath", PYTHON),
}


@pytest.mark.parametrize("checker", ["pyrefly", "pyright", pytest.param("mypy", marks=pytest.mark.slow)])
def test_a_users_project_has_no_type_error_and_mistakes_have_one_each(project, checker):
    found, said = errors(project, checker, *CHECKERS[checker], "project.py", "mistakes.py")
    assert found == MISTAKES, said
