"""Tokens per second of the native engine beside transformers' `generate`, and their share of the machine's limit.

python benchmarks/rollout.py [--quick] [--dtype float32] [--model PATH] [--repeats 3]

8 prompts × 8 samples on SmolLM2-135M, at temperature 1: once with all completions forced to full length, once with real
stops. The two take turns in the same run, so that a machine that slows down slows both. Every round has other prompts:
nothing is reused from round to round.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from figures import figure, gemm_gflops

from drumroll.engines import Request, Sampling
from drumroll.engines.native import NativeEngine
from drumroll.models.attention import NAME
from drumroll.models.loading import LoadedModel, load

MODEL = Path("~/.cache/drumroll/smollm2-135m-instruct")
PROMPTS, SAMPLES = 8, 8
GFLOP_PER_TOKEN = 0.27  # two operations per parameter


def prompts(model: LoadedModel, repeat: int) -> list[tuple[int, ...]]:
    """Short sums in the model's own chat form."""
    chats = [[{"role": "user", "content": f"What is {37 + repeat} + {11 * i + 5}? Explain."}] for i in range(PROMPTS)]
    return [tuple(model.tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False)) for c in chats]


def ours(engine: NativeEngine, wanted: list[tuple[int, ...]], tokens: int, repeat: int) -> tuple[int, float]:
    """Tokens written, and seconds."""

    async def go() -> int:
        requests = [Request(f"{repeat}.{i}", wanted[i // SAMPLES], Sampling(1.0, tokens), i) for i in range(PROMPTS * SAMPLES)]
        return sum(len(c.tokens) for c in await asyncio.gather(*(engine.generate(r) for r in requests)))

    began = time.perf_counter()
    return asyncio.run(go()), time.perf_counter() - began


def theirs(model: LoadedModel, wanted: list[tuple[int, ...]], tokens: int, forced: bool) -> tuple[int, float]:
    """The same by `generate`: padded on the left; tokens after a row's end do not count."""
    ends = sorted(model.eos)
    width = max(map(len, wanted))
    rows = [[ends[0]] * (width - len(p)) + list(p) for p in wanted for _ in range(SAMPLES)]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in wanted for _ in range(SAMPLES)]
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": ends[0]}
    least = {"min_new_tokens": tokens} if forced else {}
    model.module.set_attn_implementation("sdpa")
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.module.generate(
            torch.tensor(rows), attention_mask=torch.tensor(mask), max_new_tokens=tokens, eos_token_id=ends, **least, **options
        )
    seconds = time.perf_counter() - began
    model.module.set_attn_implementation(NAME)
    ended = torch.isin(out[:, width:], torch.tensor(ends))
    lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, ended.shape[1])
    return int(lengths.sum()), seconds


def compare(
    model: LoadedModel, engine: NativeEngine, tokens: int, repeats: int, forced: bool
) -> tuple[list[float], list[float]]:
    """Tokens per second of both, by turns."""
    engine.model = dataclasses.replace(model, eos=frozenset()) if forced else model
    own, peer = [], []
    for repeat in range(repeats):
        wanted = prompts(model, repeat + (50 if forced else 0))
        count, seconds = ours(engine, wanted, tokens, repeat)
        own.append(count / seconds)
        count, seconds = theirs(model, wanted, tokens, forced)
        peer.append(count / seconds)
    return own, peer


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="16 tokens, one round")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    tokens, repeats = (16, 1) if given.quick else (128, given.repeats)
    began = time.perf_counter()
    model = load(given.model, dtype=given.dtype)
    loaded = time.perf_counter()
    engine = NativeEngine(model, slots=PROMPTS * SAMPLES, context=512)
    ours(engine, prompts(model, 99)[:1] * PROMPTS, 1, 99)
    started = time.perf_counter()
    facts: dict[str, Any] = {"model": Path(given.model).name, "dtype": given.dtype, "threads": torch.get_num_threads()}
    figure("engine/start_seconds", started - began, "s", goal=3, at_most=True, load=round(loaded - began, 2), **facts)
    facts |= {"peer": f"transformers {transformers.__version__} generate", "tokens": tokens, "repeats": repeats}
    for kind, goal in (("forced", 2.5), ("real", 3.0)):
        own, peer = compare(model, engine, tokens, repeats, kind == "forced")
        a, b = statistics.median(own), statistics.median(peer)
        raw = {"ours": [round(x, 1) for x in own], "theirs": [round(x, 1) for x in peer]}
        figure(f"rollout/ratio_transformers_{kind}", a / b, "x", goal=goal, **raw, **facts)
        if kind == "forced":
            limit = gemm_gflops(getattr(torch, given.dtype))
            share = a * GFLOP_PER_TOKEN / limit
            figure(
                "rollout/fraction_of_limit",
                share,
                "of limit",
                goal=0.45,
                tokens_per_s=round(a, 1),
                gemm_gflops=round(limit, 1),
                **facts,
            )
    engine.close()


if __name__ == "__main__":
    main()
