"""Tokens per second of the native engine beside transformers' `generate` and vLLM, and their share of the machine's limit.

python benchmarks/rollout.py [--quick] [--dtype float32] [--peers transformers,vllm] [--rounds 3]

8 prompts × 8 samples on SmolLM2-135M at temperature 1: once with all completions of 128 tokens (`forced`), once with the lengths
that the model's own stops gave on other prompts of the kind (`real`). All write the same length in every row and return the log-prob of
every token. They take turns in the same run, each peer in a process and an environment of its own (`make bench-env`), so that
a machine that slows down slows all. Every round has other prompts: nothing is reused from round to round.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from arithmetic import Shape, generated
from contest import Contestant, installed
from figures import figure, fraction, limit_gflops, natural_dtype

from drumroll.engines import Request, Sampling
from drumroll.engines.native import NativeEngine
from drumroll.models.loading import LoadedModel, load
from drumroll.models.smollm2 import DEFAULT
from drumroll.processes.threads import CORES

PROMPTS, SAMPLES = 8, 8
ENVIRONMENTS = {"transformers": "trl", "vllm": "vllm"}
GOALS = {("transformers", "forced"): 2.5, ("transformers", "real"): 3.0, ("vllm", "forced"): 1.5}


def prompts(model: LoadedModel, number: int) -> list[list[int]]:
    """Short sums in the model's own chat form."""
    chats = [[{"role": "user", "content": f"What is {37 + number} + {11 * i + 5}? Explain."}] for i in range(PROMPTS)]
    return [model.tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]


def ours(engine: NativeEngine, rows: list[list[int]], lengths: list[int], number: int) -> tuple[list[int], float]:
    """Tokens written in each row, at most its length, and seconds."""

    async def go() -> list[int]:
        requests = [
            Request(f"{number}.{n}", tuple(row), Sampling(1.0, most), 1000 * number + n)
            for n, (row, most) in enumerate(zip(rows, lengths, strict=True))
        ]
        return [len(c.logprobs) for c in await asyncio.gather(*(engine.generate(r) for r in requests))]

    began = time.perf_counter()
    return asyncio.run(go()), time.perf_counter() - began


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """Prompts, and the length of each of their rows."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def rows(self) -> list[list[int]]:
        """Every prompt, once for each sample."""
        return [prompt for prompt in self.prompts for _ in range(SAMPLES)]

    def operations(self, shape: Shape) -> int:
        """What we compute: a prompt's rows share it."""
        each = [self.lengths[i : i + SAMPLES] for i in range(0, len(self.lengths), SAMPLES)]
        return generated(shape, map(len, self.prompts), each)


def recorded(model: LoadedModel, engine: NativeEngine, tokens: int, number: int, forced: bool) -> Round:
    """A round's work. Its lengths come from other prompts, so that nobody has seen its own."""
    wanted = Round(prompts(model, number), [tokens] * (PROMPTS * SAMPLES))
    if forced:
        return wanted
    engine.model = model
    stops, _ = ours(engine, Round(prompts(model, number + 25), []).rows, wanted.lengths, number + 25)
    return dataclasses.replace(wanted, lengths=stops)


def compare(
    model: LoadedModel, engine: NativeEngine, peers: dict[str, Contestant], tokens: int, rounds: int, forced: bool
) -> tuple[dict[str, list[float]], list[float]]:
    """Tokens per second of all, by turns, after a round that does not count; and our operations per second."""
    found: dict[str, list[float]] = {name: [] for name in ("ours", *peers)}
    shape, operations = Shape.of(model.module), list[float]()
    for turn in range(rounds + 1):
        number = turn + (50 if forced else 0)
        work = recorded(model, engine, tokens if turn else 8, number, forced)
        engine.model = dataclasses.replace(model, eos=frozenset())
        lengths, seconds = ours(engine, work.rows, work.lengths, number)
        done = {"ours": {"lengths": lengths, "seconds": seconds}}
        done |= {name: peer.ask(prompts=work.rows, lengths=work.lengths) for name, peer in peers.items()}
        for name, result in done.items():
            assert result["lengths"] == work.lengths, f"{name} wrote other lengths than it was asked for"
        for name, result in done.items() if turn else ():
            found[name].append(sum(work.lengths) / result["seconds"])
        operations += [work.operations(shape) / seconds] if turn else []
    return found, operations


def start(path: Path, dtype: str) -> tuple[LoadedModel, NativeEngine, float]:
    """Model and engine, and the seconds from the beginning of `load` to the first token, kernels compiled anew."""
    with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, {"XDG_CACHE_HOME": cache}):
        began = time.perf_counter()
        model = load(str(path), dtype=dtype)
        engine = NativeEngine(model, slots=PROMPTS * SAMPLES, context=512)
        ours(engine, prompts(model, 99)[:1], [1], 99)
        return model, engine, time.perf_counter() - began


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 tokens, one round, no peers")
    parser.add_argument("--dtype", default=natural_dtype(), choices=["float32", "bfloat16"])
    parser.add_argument("--peers", default=",".join(p for p, e in ENVIRONMENTS.items() if installed(e)))
    parser.add_argument("--model", type=Path, default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    limit = limit_gflops(given.dtype)
    tokens, rounds = (16, 1) if given.quick else (given.tokens, given.rounds)
    CORES.configure()
    names = [] if given.quick else [name for name in given.peers.split(",") if name]
    model, engine, seconds = start(given.model, given.dtype)
    facts: dict[str, Any] = {"model": given.model.name, "dtype": given.dtype, "threads": CORES.total}
    figure("engine/start_seconds", seconds, "s", goal=3, at_most=True, **facts)
    facts |= {"tokens": tokens, "rounds": rounds}
    peers = {n: Contestant(f"{n}_rollout.py", str(given.model), given.dtype, environment=ENVIRONMENTS[n]) for n in names}
    done: dict[str, list[float]] = {}
    for kind in ("forced", "real"):
        found, operations = compare(model, engine, peers, tokens, rounds, kind == "forced")
        rates = {name: [round(rate, 1) for rate in each] for name, each in found.items()}
        print(kind, rates, file=sys.stderr)
        middle = {name: statistics.median(each) for name, each in found.items()}
        for name in peers:
            ratio = middle["ours"] / middle[name]
            figure(f"rollout/ratio_{name}_{kind}", ratio, "x", goal=GOALS.get((name, kind)), tokens_per_s=rates, **facts)
        done[kind] = operations
    for peer in peers.values():
        peer.close()
    engine.close()
    rows, wanted = PROMPTS * SAMPLES, sum(map(len, prompts(model, 99)))
    figure("rollout/saved", wanted * (SAMPLES - 1) / (wanted * SAMPLES + rows * tokens), "of tokens", **facts)
    fraction("rollout/fraction_of_limit", statistics.median(done["forced"]), 1.0, limit, goal=0.45, **facts)


if __name__ == "__main__":
    main()
