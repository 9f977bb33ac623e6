"""How a benchmark prints: one JSON object per figure, with what explains it. And the machine's limit, measured in one place.

python benchmarks/figures.py [float32]    the limit in GFLOP/s
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

LIMITS = "BENCHMARK_LIMITS"
"""Environment variable with the limits measured so far, GFLOP/s by dtype as JSON; `collect.py` sets it for all benchmarks."""
TRIES, SIZES = 5, (1024, 2048)


def figure(name: str, value: float, unit: str, *, goal: float | None = None, at_most: bool = False, **facts: Any) -> None:
    """Print a figure; `holds` says whether it meets its goal."""
    shown = round(value, 6) if abs(value) >= 0.001 else float(f"{value:.3g}")
    line: dict[str, Any] = {"figure": name, "value": shown, "unit": unit}
    if goal is not None:
        line |= {"goal": goal, "holds": value <= goal if at_most else value >= goal}
    print(json.dumps(line | facts), flush=True)


def fraction(name: str, operations: float, seconds: float, limit: float, *, goal: float | None = None, **facts: Any) -> None:
    """Print the arithmetic that was done as a fraction of the limit (GFLOP/s). A fraction above 1 ends the benchmark with exit code 1."""
    value = operations / seconds / limit / 1e9
    figure(name, value, "of limit", goal=goal, gflop=round(operations / 1e9, 3), gemm_gflops=round(limit, 1), **facts)
    if value > 1:
        sys.exit(f"{name} is {value:.3g}, above 1: the arithmetic or the limit of {limit:.4g} GFLOP/s is counted wrong.")


def limit_gflops(dtype: str = "float32") -> float:
    """The machine's limit for matrix products on all threads, the best of five, in GFLOP/s.

    Call it before any peer or model starts. It is measured once, in a process of its own: `make bench` measures it
    before the first benchmark and passes it to all; a benchmark that runs alone measures for itself.
    """
    known: dict[str, float] = json.loads(os.environ.get(LIMITS, "{}"))
    if dtype not in known:
        env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        out = subprocess.run([sys.executable, __file__, dtype], stdout=subprocess.PIPE, text=True, check=True, env=env)
        known[dtype] = float(out.stdout)
        os.environ[LIMITS] = json.dumps(known)
    return known[dtype]


def _measure(dtype: str, seconds: float = 0.5) -> float:
    return max(_gflops(dtype, size, seconds) for _ in range(TRIES) for size in SIZES)


def _gflops(dtype: str, size: int, seconds: float) -> float:
    import torch

    a, b = (torch.randn(size, size, dtype=getattr(torch, dtype)) for _ in range(2))
    a @ b
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        a @ b
        count += 1
    return count * 2 * size**3 / (time.perf_counter() - began) / 1e9


def natural_dtype() -> str:
    """The type this machine multiplies fastest: bfloat16 where it has instructions for it, else float32."""
    import torch

    supported = torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if supported else "float32"


if __name__ == "__main__":
    print(_measure(sys.argv[1] if len(sys.argv) > 1 else "float32"))
