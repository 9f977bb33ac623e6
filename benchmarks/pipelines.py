"""SFT and DPO of SmolLM2-135M against TRL's SFTTrainer and DPOTrainer: trained tokens per second, and the most memory held.

python benchmarks/pipelines.py [--kinds sft,dpo] [--settings grouped,packed,plain] [--rounds 3]

Every step trains the same rows once and takes one optimizer step, in float32, without recomputation. Lengths of rows are
log-normal; prompts are 40 to 60% of the tokens. We and the first setting of TRL take turns, a step each, in processes of their own
with as many threads; a first step does not count. Then the other settings take one step each. All must train the same number of
tokens and report the same loss.

Settings of TRL: `plain` (batches in the order of the rows), `grouped` (batches of similar length), `packed` (SFT only: rows end to
end, which a block-diagonal mask keeps apart; `leak` in the figures is by how much another row changes a row's logits). Our micro-batches
have as many tokens as TRL's batches have on average, padding not counted. DPO's reference log-probs are computed before the first step.
The figures with goals are against the fastest setting, for memory too.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contest import Contestant, installed
from figures import figure

from drumroll.data.render import Renderer
from drumroll.models.loading import load_tokenizer
from drumroll.models.smollm2 import DEFAULT

Row = dict[str, Any]
Result = dict[str, Any]
POOL, BATCHES, BATCH = 512, 4, 8
"""Rows that are sorted by length and cut into so many parts; of each the last batch of so many sequences is trained."""
MEDIAN, SPREAD, SHORTEST, LONGEST = 85, 0.8, 48, 480
"""Tokens of prompt and answer, log-normal."""
SHARES = {"sft": (0.3, 0.7), "dpo": (0.42, 0.72)}
"""The prompt's part of a row; of a pair, of prompt and chosen answer."""
WORDS = """
    the a one every some old new small large quiet river bridge garden window letter teacher farmer engine valley market
    paper stone winter summer morning evening opens closes carries finds keeps builds reads writes counts moves before after
    under over near behind because although while often never always slowly quickly again there and or but with without for
"""
SETTINGS = {"sft": ("grouped", "packed", "plain"), "dpo": ("grouped", "plain")}
OURS = "ours"
GOALS = {"sft": 1.3, "dpo": 2.0}
SAME_LOSS = 3e-3
"""The largest difference of two losses of the same step."""


def text(rng: random.Random, words: int) -> str:
    """Sentences of so many words; which they are does not matter to the time."""
    known = WORDS.split()
    return " ".join(rng.choice(known) + ("." if i % 12 == 11 else "") for i in range(max(1, words)))


def rows(kind: str, renderer: Renderer) -> list[Row]:
    """The rows, always the same ones: texts for us, and their tokens for TRL."""
    rng, found = random.Random(21), list[Row]()
    template = len(renderer.prompt("one"))
    for _ in range(POOL):
        length = min(LONGEST, max(SHORTEST, round(rng.lognormvariate(math.log(MEDIAN), SPREAD))))
        own = round(length * rng.uniform(*SHARES[kind]))  # the prompt's
        row: Row = {"prompt": text(rng, own - template)}
        lengths = {"completion": length - own}
        if kind == "dpo":
            lengths = {"chosen": length - own, "rejected": round((length - own) * rng.lognormvariate(0, 0.4))}
            lengths["rejected"] = min(lengths["rejected"], LONGEST - own)
        row |= {name: text(rng, words) for name, words in lengths.items()}
        row["prompt_ids"] = list(renderer.prompt(row["prompt"]))
        row |= {f"{name}_ids": renderer.answer(row["prompt"], row[name]) for name in lengths}
        found.append(row)
    part, size = POOL // BATCHES, BATCH // len(lengths)
    found.sort(key=longest)
    return [row for end in range(part, POOL + 1, part) for row in found[end - size : end]]


def answers(row: Row) -> list[list[int]]:
    """The tokens of each answer of a row."""
    return [row[f"{name}_ids"] for name in ("completion", "chosen", "rejected") if name in row]


def longest(row: Row) -> int:
    """Tokens of the longest sequence of a row."""
    return len(row["prompt_ids"]) + max(map(len, answers(row)))


def tokens(row: Row) -> int:
    """Tokens of all sequences of a row."""
    return sum(len(row["prompt_ids"]) + len(answer) for answer in answers(row))


def recipe(kind: str, model: Path, data: Path, some: Sequence[Row], steps: int, micro_tokens: int) -> dict[str, Any]:
    """The same training as a recipe of ours."""
    more = {"reference": "precomputed"} if kind == "dpo" else {}
    return {
        "pipeline": kind,
        "name": kind,
        "model": str(model),
        "steps": steps,
        "batch": len(some),
        "data": {"train": {"rows": {"source": str(data)}}, "shuffle": False},
        "roles": {"actor": {"dtype": "float32"}},
        "optim": {"lr": 1e-5, "micro_tokens": micro_tokens},
        "checkpoint": {"every": 0},
        **more,
    }


def contest(kind: str, settings: Sequence[str], rounds: int, model: Path) -> None:
    """We and the first setting of TRL take turns; then the other settings take a step each."""
    some = rows(kind, Renderer(load_tokenizer(str(model))))
    size = BATCH // len(answers(some[0]))
    budget = math.ceil(sum(map(tokens, some)) / BATCHES)
    steps, found = rounds + 1, dict[str, list[Result]]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        orders = {"grouped": some, "plain": random.Random(0).sample(some, len(some)), "packed": some}
        for name, ordered in orders.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ordered))
        own = folder / "recipe.yaml"
        own.write_text(json.dumps(recipe(kind, model, folder / "plain.jsonl", some, steps, budget)))
        players = {OURS: Contestant("ours_pipelines.py", str(own))}
        for setting in settings:
            given = (str(model), kind, setting, str(folder / f"{setting}.jsonl"), str(size), str(budget), str(steps))
            players[setting] = Contestant("trl_pipelines.py", *given, environment="trl")
            turns(players, steps, found)
            players, steps = {}, 1
    check(found)
    report(kind, facts(some) | {"tokens_per_pass": budget}, found)


def turns(players: dict[str, Contestant], steps: int, found: dict[str, list[Result]]) -> None:
    """So many steps of each, by turns."""
    for step in range(steps):
        for name, player in players.items():
            result = player.ask(step=step)
            print(name, result, file=sys.stderr, flush=True)
            found.setdefault(name, []).append(result)
    for player in players.values():
        player.close()


def check(found: dict[str, list[Result]]) -> None:
    """All did the same work."""
    for name, results in found.items():
        for own, other in zip(found[OURS], results, strict=False):
            assert abs(own["loss"] - other["loss"]) < SAME_LOSS, f"the loss of {name} is {other['loss']}, ours {own['loss']}"
            for fact in ("tokens", "threads"):
                assert own[fact] == other[fact], f"{fact} of {name} are {other[fact]}, ours {own[fact]}"


def facts(some: Sequence[Row]) -> dict[str, Any]:
    """What explains the figures."""
    prompts, given = sum(len(row["prompt_ids"]) for row in some), [len(answer) for row in some for answer in answers(row)]
    share = prompts / (prompts + sum(given))
    lengths = sorted(map(longest, some))
    return {"dtype": "float32", "rows": len(some), "prompt_share": round(share, 3), "longest": lengths[-1], "lengths": lengths}


def report(kind: str, known: dict[str, Any], found: dict[str, list[Result]]) -> None:
    """Ratios to each setting of TRL; the figures with goals are against the fastest."""

    def speed(name: str) -> float:
        return statistics.median(r["tokens"] / r["seconds"] for r in found[name][1:] or found[name])

    def memory(name: str) -> float:
        return max(r["peak_gb"] for r in found[name])

    settings = [name for name in found if name != OURS]
    for name in settings:
        facts = {key: found[name][-1][key] for key in ("widest", "leak") if key in found[name][-1]}
        figure(f"pipelines/{kind}/ratio_trl_{name}", speed(OURS) / speed(name), "x", steps=len(found[name]), **facts)
        figure(f"pipelines/{kind}/memory_ratio_trl_{name}", memory(OURS) / memory(name), "x")
    known["trained_tokens_per_s"] = {name: round(speed(name), 1) for name in found}
    known["seconds"] = {name: [round(r["seconds"], 2) for r in results] for name, results in found.items()}
    known["loss"] = {name: [round(r["loss"], 5) for r in results] for name, results in found.items()}
    known |= {key: found[OURS][0][key] for key in ("tokens", "threads")}
    gigabytes = {name: round(memory(name), 2) for name in found}
    best = max(settings, key=speed)
    peer: dict[str, Any] = {"peer": f"trl {best}"}
    figure(f"pipelines/{kind}_ratio_trl", speed(OURS) / speed(best), "x", goal=GOALS[kind], **peer, **known)
    figure(f"pipelines/{kind}_memory_ratio_trl", memory(OURS) / memory(best), "x", goal=0.6, at_most=True, **peer, gb=gigabytes)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(SETTINGS))
    parser.add_argument("--settings", default="grouped,packed,plain")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=DEFAULT)
    given = parser.parse_args()
    if not installed("trl"):
        sys.exit("TRL is not installed: make bench-env")
    for kind in given.kinds.split(","):
        contest(kind, [s for s in given.settings.split(",") if s in SETTINGS[kind]], given.rounds, given.model)


if __name__ == "__main__":
    main()
