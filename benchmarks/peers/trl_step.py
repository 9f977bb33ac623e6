"""TRL's GRPOTrainer, a step per job, for benchmarks/step.py. Run by the Python of `.bench/trl`.

python trl_step.py MODEL VARIANT PROMPTS [saved]

VARIANT: `float32`, `bfloat16` (weights and all), or `autocast` (float32 weights, bfloat16 products). PROMPTS is a file of
rows {"prompt": ..., "answer": ...}, a line of JSON each; eight a step, eight samples each, up to 64 tokens, one update. With `saved` a row also has
`prompt_ids` and `completions`, and nothing is generated.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from lines import answer, jobs
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from typing_extensions import override

PROMPTS, SAMPLES, TOKENS = 8, 8, 64


class Turns(TrainerCallback):
    """A step waits for its job, and answers when it is done."""

    def __init__(self) -> None:
        self.jobs = jobs()
        self.began = 0.0

    @override
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        next(self.jobs)
        self.began = time.perf_counter()

    @override
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        mean = (logs or {}).get("completions/mean_length", 0.0)
        if mean:
            answer(seconds=time.perf_counter() - self.began, mean_length=mean)


def number(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 when the last number is the answer."""
    found = [re.findall(r"-?\d+", text) for text in completions]
    return [float(bool(f) and f[-1] == wanted) for f, wanted in zip(found, answer, strict=True)]


def saved(rows: list[dict[str, Any]]) -> Any:
    """A stand-in for generation: every prompt's completions, in their order."""
    by_prompt = {row["prompt"]: row for row in rows}

    def rollout(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        found = [by_prompt[prompt] for prompt in prompts]
        completions = [row["completions"][i % SAMPLES] for i, row in enumerate(found)]
        logprobs = [[-1.0] * len(completion) for completion in completions]
        return {"prompt_ids": [row["prompt_ids"] for row in found], "completion_ids": completions, "logprobs": logprobs}

    return rollout


def alternate(completions: list[str], **_: Any) -> list[float]:
    """Every second one a success."""
    return [float(i % 2) for i in range(len(completions))]


def main(path: str, variant: str, prompts: str, mode: str = "") -> None:
    """Train for as long as jobs come."""
    with open(prompts, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            report_to="none",
            use_cpu=True,
            bf16=variant == "autocast",
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=TOKENS,
            temperature=1.0,
            learning_rate=1e-6,
            max_steps=1000,
            logging_steps=1,
            save_strategy="no",
            gradient_checkpointing=False,
            beta=0.0,
        )
        weights = torch.bfloat16 if variant == "bfloat16" else torch.float32
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(path, dtype=weights),
            reward_funcs=alternate if mode == "saved" else number,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]),
            processing_class=AutoTokenizer.from_pretrained(path),
            callbacks=[Turns()],
            rollout_func=saved(rows) if mode == "saved" else None,
        )
        answer(ready=True)
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
