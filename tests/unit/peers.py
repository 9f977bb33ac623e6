"""Other libraries' answers: recorded in tests/recordings, or live from their environments in `.bench`.

`make test` compares with the recordings, `make test-peers` with the installed libraries, by the same tests.
`make record-peers` writes the recordings anew. A recording holds facts only (our inputs, numbers, verdicts, flags) and the
pinned versions that gave them, never text of the library.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT / "tests" / "recordings"
SOURCES = ["recorded", pytest.param("live", marks=pytest.mark.peers)]
"""Parameters of a fixture that gives a peer's answers."""


def pins(peer):
    """The exact versions that an environment in `.bench` is made of."""
    lines = (ROOT / "benchmarks" / "peers" / f"{peer}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def python(peer):
    """The interpreter of a peer's environment."""
    path = ROOT / ".bench" / peer / "bin" / "python"
    assert path.exists(), f"{peer} is not installed in .bench/{peer}: make bench-env"
    return str(path)


def run(command, **env):
    """The standard output of a program, which must succeed."""
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run([str(part) for part in command], env=offline, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def current(peer, facts, **made_of):
    """Facts of a recording, made with the present pins and of these inputs; else it must be made anew."""
    for name, value in {"pins": pins(peer), **made_of}.items():
        assert facts[name] == value, f"the recording of {peer} was made with other {name}: make record-peers"
    return facts


def read(peer, **made_of):
    """A recording in JSON."""
    return current(peer, json.loads((RECORDINGS / f"{peer}.json").read_text()), **made_of)


def write(peer, **facts):
    """Record facts in JSON, with the versions that gave them."""
    (RECORDINGS / f"{peer}.json").write_text(json.dumps({"pins": pins(peer), **facts}, indent=1) + "\n")
