"""Runs every part of `make test`, prints how long each took, and fails at the end if any part failed.

The numeric unit tests run three times: on the instructions of this processor (in `tests`), on those of AVX2, and on
torch's plain code without our kernels, so that a test that passes here passes on other machines.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
PYTEST = (sys.executable, "-m", "pytest")
PARALLEL = ("--numprocesses", "2", "--dist", "loadgroup", "--durations", "20", "--durations-min", "4")
NUMERIC = tuple(
    f"tests/unit/test_{name}.py"
    for name in ("engine", "engine_models", "learner", "prefix", "algorithms", "advantages", "losses", "shaping", "batch")
)
QUARTER = ("--hypothesis-profile", "quarter", "-m", "not slow")
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "DRUMROLL_KERNELS": "x86-64-v3",
}
PLAIN = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "DRUMROLL_KERNELS": "off",
}


@dataclass(frozen=True)
class Part:
    """One command of the suite, with what it changes in the environment."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


PARTS = (
    Part("lint", (str(BIN / "ruff"), "check", ".")),
    Part("format", (str(BIN / "ruff"), "format", "--check", ".")),
    Part("types", (str(BIN / "pyrefly"), "check")),
    Part("layers", (str(BIN / "lint-imports"), "--no-cache")),
    Part("tests", (*PYTEST, "-m", "not slow and not peers", *PARALLEL), {"OMP_NUM_THREADS": "1"}),
    Part(
        "numerics on AVX2",
        (*PYTEST, *NUMERIC, "tests/unit/test_kernels.py", *QUARTER, *PARALLEL),
        AVX2 | {"OMP_NUM_THREADS": "1"},
    ),
    Part("numerics on any CPU", (*PYTEST, *NUMERIC, *QUARTER, *PARALLEL), PLAIN | {"OMP_NUM_THREADS": "1"}),
)


def run(part: Part) -> bool:
    """Run a part; whether it passed."""
    return subprocess.run(part.command, cwd=ROOT, env=os.environ | part.environment, check=False).returncode == 0


@contextmanager
def beside(loops: int) -> Generator[None]:
    """Keep this many processes busy meanwhile."""
    loop = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with this process
    busy = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> int:
    """Run the parts; 1 if any failed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--busy", type=int, default=0, metavar="N", help="run beside N busy loops")
    busy = options.parse_args().busy
    lines, failed = list[str](), 0
    with beside(busy):
        for part in PARTS:
            print(f"=== {part.name}", flush=True)
            began = time.monotonic()
            passed = run(part)
            failed += not passed
            lines.append(f"{part.name:22} {'passed' if passed else 'FAILED':8} {time.monotonic() - began:7.1f} s")
    print("\n".join(["=== parts", *lines]), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
