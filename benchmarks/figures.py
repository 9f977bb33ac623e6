"""How a benchmark prints: one JSON object per figure, with what explains it."""

from __future__ import annotations

import json
import time
from typing import Any

import torch


def figure(name: str, value: float, unit: str, *, goal: float | None = None, at_most: bool = False, **facts: Any) -> None:
    """Print a figure; `holds` says whether it meets its goal."""
    line: dict[str, Any] = {"figure": name, "value": round(value, 6), "unit": unit}
    if goal is not None:
        line |= {"goal": goal, "holds": value <= goal if at_most else value >= goal}
    print(json.dumps(line | facts), flush=True)


def gemm_gflops(dtype: torch.dtype = torch.float32, size: int = 1024, seconds: float = 1.0) -> float:
    """The machine's own limit: billions of floating-point operations per second in a square matrix product."""
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    a @ b
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        a @ b
        count += 1
    return count * 2 * size**3 / (time.perf_counter() - began) / 1e9


def natural_dtype() -> str:
    """The type this machine multiplies fastest: bfloat16 where it has instructions for it, else float32."""
    supported = torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if supported else "float32"
