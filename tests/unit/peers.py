"""Other libraries' answers: recorded in tests/recordings, or live from their environments in `.bench`.

`make test` compares with the recordings, `make test-peers` with the installed libraries, by the same tests.
`make record-peers` writes the recordings anew. A recording holds facts only (our inputs, numbers, verdicts, flags) and the
pinned versions that gave them, never text of the library.
"""

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

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


class Compared(NamedTuple):
    """Cases of tensors, and a peer's answers to them: `SETTING/CASE/result`."""

    cases: dict[str, dict[str, Tensor]]
    answers: dict[str, Tensor]


@dataclass(frozen=True)
class Recording:
    """Tensors in tests/recordings, in float32: cases and what a program of benchmarks/peers makes of them (`cases.py` there)."""

    name: str
    """Of the file, and of the program."""
    settings: Mapping[str, Any]
    """Options for the program, by name."""
    make: Mapping[str, Callable[[], dict[str, Tensor]]]
    """Makes each case; asked only when recording."""
    exact: tuple[str, ...] = ()
    """Columns that are float64 for the peer and for us, so that only formulas can differ; their values are those of float32."""
    peer: str = "trl"

    @property
    def path(self):
        return RECORDINGS / f"{self.name}.safetensors"

    @property
    def facts(self):
        return {"settings": json.loads(json.dumps(self.settings)), "cases": list(self.make)}

    def read(self):
        """What was recorded."""
        with safe_open(self.path, "pt") as file:
            current(self.peer, json.loads(file.metadata()["facts"]), **self.facts)
        found = Compared(defaultdict(dict), {})
        for name, value in load_file(self.path).items():
            kind, rest = name.split("/", 1)
            if kind == "answer":
                found.answers[rest] = value.double()
                continue
            case, column = rest.split("/")
            number = value.double() if column in self.exact else value
            found.cases[case][column] = number if value.is_floating_point() else value.long()
        return found

    def write(self, told):
        """Record cases and answers."""
        rows = {f"case/{name}": value for name, value in flat(told.cases).items()}
        rows |= {f"answer/{name}": value for name, value in told.answers.items()}
        small = {name: value.float() if value.is_floating_point() else value.char() for name, value in rows.items()}
        save_file(small, self.path, metadata={"facts": json.dumps({"pins": pins(self.peer), **self.facts})})

    def ask(self, cases, folder):
        """What the peer makes of the cases, live."""
        save_file(flat(cases), folder / "cases", metadata={"settings": json.dumps(self.settings)})
        run([python(self.peer), f"benchmarks/peers/{self.name}.py", folder / "cases", folder / "out"])
        return Compared(cases, load_file(folder / "out"))

    def fixtures(self):
        """Two fixtures: the peer's live answers (recorded with `--record`), and those that a test compares with, from either source."""

        @pytest.fixture(scope="module")
        def live(request, tmp_path_factory):
            recording = request.config.getoption("record")
            cases = {name: make() for name, make in self.make.items()} if recording else self.read().cases
            told = self.ask(cases, tmp_path_factory.mktemp(self.peer))
            if recording:
                self.write(told)
            return told

        @pytest.fixture(scope="module", params=SOURCES)
        def either(request):
            return self.read() if request.param == "recorded" else request.getfixturevalue("live")

        return live, either

    def agrees_with(self, live):
        """Whether the recorded answers are the live ones."""
        recorded = self.read().answers
        return recorded.keys() == live.answers.keys() and all(distance(recorded[k], v) < 1e-6 for k, v in live.answers.items())


def flat(cases):
    """Columns of all cases, as `CASE/column`."""
    return {f"{case}/{column}": value for case, columns in cases.items() for column, value in columns.items()}


def distance(got, want):
    """The largest difference, relative to the largest value."""
    return ((got - want).abs().max() / want.abs().max()).item()
