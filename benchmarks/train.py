"""Training alone: tokens per second of an update of SmolLM2-135M on the same rollouts as TRL's, and the gradient's errors.

python benchmarks/train.py [--dtype float32] [--variants float32] [--rounds 3]

8 groups of 8 completions of 20 to 64 tokens, written beforehand; every group is trained, one optimizer step. TRL's
trainer is given the completions instead of generating them, so that its step is scoring, packing, and the update. The
fraction of the limit counts the tokens that we computed; those of shared prompts that we did not are `train/saved`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from arithmetic import Shape, trained
from contest import Contestant, installed
from figures import figure, fraction, limit_gflops, natural_dtype

from drumroll.algorithms import Algorithm
from drumroll.batch import Batch, pack
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.config.optim import OptimConfig
from drumroll.learners import Update
from drumroll.learners.backends.torch import torch_learner
from drumroll.models.loading import LoadedModel, load
from drumroll.models.smollm2 import DEFAULT
from drumroll.processes.threads import CORES
from drumroll.sample import Group, Owner, Prompt, Sample, StopReason, Trace

GROUPS, SIZE, LONGEST = 8, 8, 64
MICRO = 2048


def rollouts(model: LoadedModel) -> list[dict[str, Any]]:
    """Groups of a prompt and completions; which words they are does not matter to the time."""
    rng = random.Random(0)
    words = model.module.config.vocab_size
    found: list[dict[str, Any]] = []
    for number in range(GROUPS):
        chat = [{"role": "user", "content": f"What is {37 + number} + {11 * number + 5}? Explain."}]
        text = model.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        completions = [[rng.randrange(words) for _ in range(rng.randint(20, LONGEST))] for _ in range(SIZE)]
        found.append({"prompt": text, "prompt_ids": model.tokenizer(text)["input_ids"], "completions": completions})
    return found


def batch(groups: list[dict[str, Any]]) -> Batch:
    """The rollouts as ours, every second one a success."""
    made: list[Group] = []
    for draw, group in enumerate(groups):
        prompt = Prompt(str(draw), "sums", group["prompt"], tuple(group["prompt_ids"]), {})
        samples: list[Sample] = []
        for index, tokens in enumerate(group["completions"]):
            trace = Trace()
            trace.extend(group["prompt_ids"], Owner.PROMPT)
            trace.extend(tokens, Owner.POLICY, [-1.0] * len(tokens), [0] * len(tokens))
            sample = Sample(prompt, draw, index)
            sample.traces, sample.stop, sample.reward = [trace], StopReason.EOS, float(index % 2)
            samples.append(sample)
        made.append(Group(prompt, draw, samples))
    return pack(made)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default=natural_dtype())
    parser.add_argument("--variants", default="float32" if natural_dtype() == "float32" else "autocast,bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=DEFAULT)
    given = parser.parse_args()
    limit = limit_gflops(given.dtype)
    model = load(str(given.model), dtype=given.dtype)
    groups = rollouts(model)
    packed = batch(groups)
    learner = torch_learner(model, OptimConfig(lr=1e-6, micro_tokens=MICRO), total_steps=1000)
    algorithm = Algorithm(AlgorithmConfig(preset="grpo"), single_update=True, longest=LONGEST)
    work = Update(algorithm.advantages(packed), algorithm.loss, algorithm.aggregate, 1.0)
    names = given.variants.split(",") if installed("trl") else []
    found: dict[str, list[float]] = {name: [] for name in ("ours", *names)}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rollouts.jsonl"
        data.write_text("".join(json.dumps(group | {"answer": ""}) + "\n" for group in groups))
        peers = {n: Contestant("trl_step.py", str(given.model), n, str(data), "saved", environment="trl") for n in names}
        for turn in range(given.rounds + 1):
            began = time.perf_counter()
            learner.update(work)
            times = {"ours": time.perf_counter() - began}
            times |= {name: peer.ask(step=turn)["seconds"] for name, peer in peers.items()}
            print(times, file=sys.stderr)
            for name, seconds in times.items() if turn else ():
                found[name].append(seconds)
        for peer in peers.values():
            peer.close()
    middle = {name: statistics.median(each) for name, each in found.items()}
    done = trained(Shape.of(model.module), work.batch, MICRO)
    facts: dict[str, Any] = {"dtype": given.dtype, "threads": CORES.default, "tokens": done.given, "computed": done.computed}
    figure("train/tokens_per_s", done.given / middle["ours"], "tokens/s", **facts)
    figure("train/saved", done.saved, "of tokens", **facts)
    fraction("train/fraction_of_limit", done.operations, middle["ours"], limit, **facts)
    if names:
        quickest = min(names, key=lambda name: middle[name])
        raw = {name: [round(s, 2) for s in each] for name, each in found.items()}
        figure("train/ratio_trl", middle[quickest] / middle["ours"], "x", peer=f"trl {quickest}", seconds=raw, **facts)


if __name__ == "__main__":
    main()
