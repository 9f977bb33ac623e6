"""What docs/environments.md shows works as it stands there."""

import re
import shlex
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
CHECKS = [line.partition("  #")[0] for line in TEXT.splitlines() if line.startswith("drumroll check ")]
ELSEWHERE = ("gem:", "openenv:")  # they need an environment of their own, or a server


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """The directory with the programs of the page."""
    for program in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", program)
        (tmp_path / (name[1] if name else "my_envs.py")).write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("command", [c for c in CHECKS if not any(name in c for name in ELSEWHERE)])
def test_the_commands_find_no_fault(command, shown, drumroll):
    _, *arguments = shlex.split(command)
    code, out, err = drumroll(*arguments)
    assert (code, err) == (0, ""), out
    assert "same seed, same episode" in out


def test_there_are_such_commands():
    assert len(CHECKS) >= 8
