"""Tokens per second of the native engine beside transformers' `generate` and vLLM, and their share of the machine's limit.

python benchmarks/rollout.py [--quick] [--dtype float32] [--peers transformers,vllm] [--rounds 3]

8 prompts × 8 samples on SmolLM2-135M at temperature 1: once with all completions forced to 128 tokens, once with real
stops. All take turns in the same run, each peer in a process and an environment of its own (`make bench-env`), so that a
machine that slows down slows all. Every round has other prompts: nothing is reused from round to round.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from contest import Contestant, installed
from figures import figure, gemm_gflops, natural_dtype

from drumroll.engines import Request, Sampling
from drumroll.engines.native import NativeEngine
from drumroll.models.cores import CORES
from drumroll.models.loading import LoadedModel, load
from drumroll.models.smollm2 import DEFAULT

PROMPTS, SAMPLES = 8, 8
ENVIRONMENTS = {"transformers": "trl", "vllm": "vllm"}
GOALS = {("transformers", "forced"): 2.5, ("transformers", "real"): 3.0, ("vllm", "forced"): 1.5}


def prompts(model: LoadedModel, number: int) -> list[list[int]]:
    """Short sums in the model's own chat form."""
    chats = [[{"role": "user", "content": f"What is {37 + number} + {11 * i + 5}? Explain."}] for i in range(PROMPTS)]
    return [model.tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]


def ours(engine: NativeEngine, wanted: list[list[int]], tokens: int, number: int) -> tuple[int, float]:
    """Tokens written, and seconds."""

    async def go() -> int:
        each = [(prompt, i) for prompt in wanted for i in range(SAMPLES)]
        requests = [
            Request(f"{number}.{n}", tuple(p), Sampling(1.0, tokens), 1000 * number + n) for n, (p, _) in enumerate(each)
        ]
        return sum(len(c.tokens) for c in await asyncio.gather(*(engine.generate(r) for r in requests)))

    began = time.perf_counter()
    return asyncio.run(go()), time.perf_counter() - began


def compare(
    model: LoadedModel, engine: NativeEngine, peers: dict[str, Contestant], tokens: int, rounds: int, forced: bool
) -> dict[str, list[float]]:
    """Tokens per second of all, by turns, after a round that does not count."""
    engine.model = dataclasses.replace(model, eos=frozenset()) if forced else model
    found: dict[str, list[float]] = {name: [] for name in ("ours", *peers)}
    for turn in range(rounds + 1):
        number = turn + (50 if forced else 0)
        wanted = prompts(model, number)
        count, seconds = ours(engine, wanted, tokens if turn else 8, number)
        rates = {"ours": count / seconds}
        for name, peer in peers.items():
            done = peer.ask(prompts=wanted, samples=SAMPLES, tokens=tokens if turn else 8, forced=forced)
            rates[name] = done["tokens"] / done["seconds"]
        for name, rate in rates.items() if turn else ():
            found[name].append(rate)
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 tokens, one round, no peers")
    parser.add_argument("--dtype", default=natural_dtype(), choices=["float32", "bfloat16"])
    parser.add_argument("--peers", default=",".join(p for p, e in ENVIRONMENTS.items() if installed(e)))
    parser.add_argument("--model", type=Path, default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    tokens, rounds = (16, 1) if given.quick else (128, given.rounds)
    CORES.configure()
    names = [] if given.quick else [name for name in given.peers.split(",") if name]
    model = load(str(given.model), dtype=given.dtype)
    began = time.perf_counter()
    engine = NativeEngine(model, slots=PROMPTS * SAMPLES, context=512)
    ours(engine, prompts(model, 99)[:1], 1, 99)
    facts: dict[str, Any] = {"model": given.model.name, "dtype": given.dtype, "threads": CORES.total}
    figure("engine/start_seconds", time.perf_counter() - began, "s", goal=3, at_most=True, **facts)
    facts |= {"tokens": tokens, "rounds": rounds}
    peers = {n: Contestant(f"{n}_rollout.py", str(given.model), given.dtype, environment=ENVIRONMENTS[n]) for n in names}
    for kind in ("forced", "real"):
        found = compare(model, engine, peers, tokens, rounds, kind == "forced")
        rates = {name: [round(rate, 1) for rate in each] for name, each in found.items()}
        print(kind, rates, file=sys.stderr)
        middle = {name: statistics.median(each) for name, each in found.items()}
        for name in peers:
            ratio = middle["ours"] / middle[name]
            figure(f"rollout/ratio_{name}_{kind}", ratio, "x", goal=GOALS.get((name, kind)), tokens_per_s=rates, **facts)
        if kind == "forced":
            with CORES.work():
                limit = gemm_gflops(getattr(torch, given.dtype))
            parameters = sum(p.numel() for p in model.module.parameters())
            share = middle["ours"] * 2e-9 * parameters / limit
            rate = round(middle["ours"], 1)
            figure(
                "rollout/fraction_of_limit",
                share,
                "of limit",
                goal=0.45,
                tokens_per_s=rate,
                gemm_gflops=round(limit, 1),
                **facts,
            )
    for peer in peers.values():
        peer.close()
    engine.close()


if __name__ == "__main__":
    main()
