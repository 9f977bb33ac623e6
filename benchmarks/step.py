"""A whole training step: of the quickstart against the machine's limit, and of SmolLM2-135M against TRL's GRPOTrainer.

python benchmarks/step.py [recipe.yaml] [key=value ...]    seconds and tokens per second of a recipe's step
python benchmarks/step.py --peer trl [--dtype float32] [--variants float32,autocast,bfloat16] [--rounds 3] [--ours all]

Against TRL: 8 prompts × 8 samples of up to 64 tokens, one update, the same model and prompts. We and a variant of TRL take
turns, a step each, in processes of their own. All do the same work: the rows of a step have fixed lengths, whatever the model
writes. We run twice: with rewards that differ within every group, so that all are trained (`all`), and with rewards that are
equal in 4 of the 8 groups, as TRL has them, where those groups are skipped (`skipping`; it changes no gradient).
A first step of each does not count, except with `--rounds 0`, where it is the only one: a CPU that only emulates bfloat16
needs a quarter of an hour for a step of TRL.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from contest import ROOT, Contestant, installed
from figures import figure, limit_gflops, natural_dtype

import drumroll
from drumroll.data.problems import questions
from drumroll.models.loading import load, load_tokenizer
from drumroll.models.smollm2 import DEFAULT
from drumroll.processes.threads import CORES

QUICKSTART = ROOT / "recipes" / "quickstart" / "recipe.yaml"
DIFFER = {"use": "length", "args": {"target": 1000}}  # rows of a group have different lengths
OURS = {"all": [f"reward={json.dumps(DIFFER)}"], "skipping": []}
LENGTHS = random.Random(0).choices(range(20, 65), k=64)
"""Tokens of each row of a step."""
OPERATIONS = 8  # per parameter and token: two to decode it, six to train on it


def alone(recipe: str, overrides: list[str]) -> None:
    """Train a few steps; report the median step after the first two."""
    limit = limit_gflops()
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"output={folder}", "eval={sets: {}}", "checkpoint.every=0"]
        run = drumroll.train(recipe, ["steps=14", *overrides, *fixed])
        steps = run.metrics[3:]
        parameters = sum(p.numel() for p in load(run.config.model).module.parameters())
    seconds = statistics.median(m["time/step"] for m in steps)
    tokens = statistics.median(m["rollout/tokens"] for m in steps)
    facts = {"recipe": Path(recipe).parent.name, "repeats": len(steps), "gemm_gflops": round(limit, 1)}
    stages = {n: round(statistics.median(m[f"time/{n}"] for m in steps), 4) for n in ("rollout", "infer", "train", "publish")}
    figure("step/seconds", seconds, "s", **facts, stages=stages)
    figure("step/tokens_per_s", tokens / seconds, "tokens/s", **facts, limit=round(limit * 1e9 / (OPERATIONS * parameters)))


def prompts(folder: Path, model: Path) -> Path:
    """A file of questions in the model's own chat form, for everyone."""
    tokenizer = load_tokenizer(str(model))
    path, rows = folder / "prompts.jsonl", questions("train", 0, terms=2, top=12)
    with path.open("w") as file:
        for number in range(2048):
            row = next(rows)
            chat = [{"role": "user", "content": row["prompt"]}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            domain = ("equal", "differ")[number % 2]
            row = {"prompt": text, "asked": row["prompt"], "answer": "never written", "domain": domain}
            file.write(json.dumps(row) + "\n")  # ours renders the chat itself: a control token in a text is content
    return path


def recipe(folder: Path, model: Path, data: Path, dtype: str) -> Path:
    """The same step as a recipe of ours."""
    path = folder / "recipe.yaml"
    path.write_text(
        json.dumps(
            {
                "name": "step",
                "model": str(model),
                "steps": 1000,
                "data": {"train": {"sums": {"source": str(data), "prompt": "asked"}}, "shuffle": False},
                "rollout": {"prompts": 8, "samples": 8, "max_tokens": 64},
                "roles": {"actor": {"dtype": dtype}, "rollout": {"slots": 64}},
                "reward": {"equal": "exact", "differ": DIFFER},
                "optim": {"lr": 1e-6, "micro_tokens": 512},
                "checkpoint": {"every": 0},
            }
        )
    )
    return path


def contest(dtype: str, ours: list[str], variants: list[str], rounds: int, model: Path) -> None:
    """Steps by turns. Two processes at a time: TRL needs most of a small machine's memory."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = prompts(folder, model)
        own, lengths = str(recipe(folder, model, data, dtype)), json.dumps(LENGTHS)
        found: dict[str, list[dict[str, Any]]] = {}
        for name, variant in product(ours, variants):
            players = {
                name: Contestant("ours_step.py", own, lengths, *OURS[name]),
                f"trl {variant}": Contestant("trl_step.py", str(model), variant, str(data), lengths, environment="trl"),
            }
            for turn in range(rounds + 1):
                for player, contestant in players.items():
                    result = contestant.ask(step=turn)
                    print(player, result, file=sys.stderr)
                    if turn or not rounds:
                        found.setdefault(player, []).append(result)
            for contestant in players.values():
                contestant.close()
    report(found, ours, variants, dtype)


def report(found: dict[str, list[dict[str, Any]]], ours: list[str], variants: list[str], dtype: str) -> None:
    """Ratios to each variant of TRL; the figures with goals are against the quickest and, for memory, the fair one."""

    def seconds(player: str) -> float:
        return statistics.median(r["seconds"] for r in found[player])

    def memory(player: str) -> float:
        return max(r["peak_gb"] for r in found[player])

    raw = {p: [round(r["seconds"], 2) for r in rs] for p, rs in found.items()}
    lengths = {p: round(statistics.mean(r["mean_length"] for r in rs), 1) for p, rs in found.items()}
    assert len(set(lengths.values())) == 1, f"players did not do the same work: {lengths}"
    stages = {p: found[p][-1]["stages"] for p in ours}
    gigabytes = {p: round(memory(p), 2) for p in found}
    facts = {
        "dtype": dtype,
        "seconds": raw,
        "mean_length": lengths,
        "stages": stages,
        "gb": gigabytes,
        "threads": CORES.default,
    }
    for name in ours:
        skipped = statistics.mean(r["skipped"] for r in found[name])
        figure(f"step/{name}/skipped", skipped, "of groups", lengths=lengths[name])
    for name, variant in product(ours, variants):
        figure(f"step/{name}/ratio_trl_{variant}", seconds(f"trl {variant}") / seconds(name), "x", **facts)
        figure(f"step/{name}/memory_ratio_trl_{variant}", memory(name) / memory(f"trl {variant}"), "x")
    if set(ours) != set(OURS):
        return
    quickest = min((f"trl {v}" for v in variants), key=seconds)
    fair = "trl autocast" if "autocast" in variants else quickest
    figure("step/ratio_trl_all_groups", seconds(quickest) / seconds("all"), "x", goal=2.5, peer=quickest)
    figure("step/ratio_trl", seconds(quickest) / seconds("skipping"), "x", goal=4.0, peer=quickest)
    figure("step/memory_ratio_trl", memory("all") / memory(fair), "x", goal=0.8, at_most=True, peer=fair)


def main() -> None:
    """One or the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs="*", help="recipe and overrides")
    parser.add_argument("--peer", choices=["trl"])
    parser.add_argument("--dtype", default=natural_dtype())
    parser.add_argument("--variants", default="float32" if natural_dtype() == "float32" else "autocast,bfloat16")
    parser.add_argument("--ours", default=",".join(OURS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=DEFAULT)
    given = parser.parse_args()
    if given.peer is None:
        name, *overrides = given.arguments or [str(QUICKSTART)]
        alone(name, overrides)
    elif unknown := set(given.ours.split(",")) - set(OURS):
        sys.exit(f"--ours {min(unknown)} does not exist; choose among {', '.join(OURS)}")
    elif not installed("trl"):
        sys.exit("TRL is not installed: make bench-env")
    else:
        contest(given.dtype, given.ours.split(","), given.variants.split(","), given.rounds, given.model)


if __name__ == "__main__":
    main()
