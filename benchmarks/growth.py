"""How generation grows: tokens per second and cache memory against live sequences, context and model size.

python benchmarks/growth.py [--quick] [--dtype float32]

Random Llama models of several sizes, all completions forced. Writes docs/growth.svg. A cliff is a step in live
sequences that makes generation slower as a whole.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from dataclasses import dataclass
from typing import Any

import torch
from contest import ROOT
from figures import figure, natural_dtype

from drumroll.engines import Request, Sampling
from drumroll.engines.native import NativeEngine
from drumroll.models import attention, tiny
from drumroll.models.loading import LoadedModel
from drumroll.processes.threads import CORES

SIZES = {"6 M": (256, 8, 4), "25 M": (448, 12, 7), "135 M": (576, 30, 9)}  # hidden, layers, heads
WORDS = 8192
PICTURE = ROOT / "docs" / "growth.svg"


@dataclass(frozen=True)
class Point:
    """One measurement."""

    at: float
    tokens_per_s: float
    cache_mb: float


def model(size: str, dtype: str) -> LoadedModel:
    """A random Llama of a size, with SmolLM2's proportions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, layers, heads = SIZES[size]
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if heads % 3 else heads // 3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    attention.register()
    module = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval().requires_grad_(False)
    module.set_attn_implementation(attention.NAME)
    return LoadedModel(module, tiny.tokenizer(), frozenset())


def measure(loaded: LoadedModel, live: int, prompt: int, tokens: int) -> tuple[float, float]:
    """Decoded tokens per second of `live` sequences after prompts of their own, and the megabytes of their cache."""
    engine = NativeEngine(loaded, slots=live, context=prompt + tokens + 1)

    async def go(count: int, seed: int) -> float:
        words = [[(7 * i + 13 * seed + j * j) % WORDS for j in range(prompt)] for i in range(live)]
        requests = [Request(f"{seed}.{i}", tuple(words[i]), Sampling(1.0, count), i) for i in range(live)]
        began = time.perf_counter()
        await asyncio.gather(*(engine.generate(r) for r in requests))
        return time.perf_counter() - began

    try:
        asyncio.run(go(2, 0))
        first, whole = asyncio.run(go(1, 1)), asyncio.run(go(tokens, 2))
        return live * (tokens - 1) / (whole - first), engine._cache.nbytes() / 2**20
    finally:
        engine.close()


def draw(panels: dict[str, dict[str, list[Point]]]) -> None:
    """One picture: speed above, memory below."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "drumroll", "font.size": 9})
    figure_, axes = plt.subplots(2, len(panels), figsize=(4 * len(panels), 5.5), squeeze=False)
    for column, (title, lines) in enumerate(panels.items()):
        for name, points in lines.items():
            at = [p.at for p in points]
            axes[0][column].plot(at, [p.tokens_per_s for p in points], marker="o", label=name)
            axes[1][column].plot(at, [p.cache_mb for p in points], marker="o", label=name)
        for row, label in enumerate(("tokens per second", "cache, MB")):
            axis = axes[row][column]
            axis.set(xscale="log", yscale="log", xlabel=title, ylabel=label)
            measured = sorted({p.at for points in lines.values() for p in points})
            axis.set_xticks(measured, [str(at) for at in measured])
            axis.set_xticks([], minor=True)
            axis.grid(alpha=0.3)
            if len(lines) > 1:
                axis.legend()
    figure_.tight_layout()
    figure_.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Measure, draw, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest model, few points, no picture")
    parser.add_argument("--dtype", default=natural_dtype())
    given = parser.parse_args()
    CORES.configure()
    sizes = ["6 M"] if given.quick else list(SIZES)
    lives = [1, 8, 32] if given.quick else [1, 4, 16, 64, 256]
    contexts = [128, 512] if given.quick else [128, 512, 1024, 2048, 4096]
    models = {size: model(size, given.dtype) for size in sizes}
    by_live: dict[str, list[Point]] = {}
    for size, loaded in models.items():
        by_live[size] = [Point(n, *measure(loaded, n, 32, 24)) for n in lives]
    middle = sizes[len(sizes) // 2]
    by_context = {middle: [Point(n, *measure(models[middle], 8, n, 24)) for n in contexts]}
    weights = [sum(p.numel() for p in models[size].module.parameters()) / 1e6 for size in sizes]
    by_size = {
        "64 live": [Point(w, by_live[s][-2].tokens_per_s, by_live[s][-2].cache_mb) for s, w in zip(sizes, weights, strict=True)]
    }
    facts: dict[str, Any] = {"dtype": given.dtype, "threads": CORES.default}
    for size, points in by_live.items():
        growth = min(b.tokens_per_s / a.tokens_per_s for a, b in itertools.pairwise(points))
        rates = {int(p.at): round(p.tokens_per_s) for p in points}
        figure(f"growth/least_gain/{size.replace(' ', '')}", growth, "x", goal=0.95, tokens_per_s=rates, **facts)
    rates = {int(p.at): round(p.tokens_per_s) for p in by_context[middle]}
    figure("growth/context", by_context[middle][-1].tokens_per_s, "tokens/s", tokens_per_s=rates, live=8, model=middle, **facts)
    if not given.quick:
        draw({"live sequences": by_live, "prompt tokens (8 live)": by_context, "parameters, millions": by_size})


if __name__ == "__main__":
    main()
