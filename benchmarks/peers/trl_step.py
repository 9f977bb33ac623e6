"""TRL's GRPOTrainer, a step per job, for benchmarks/step.py. Run by the Python of `.bench/trl`.

python trl_step.py MODEL VARIANT PROMPTS LENGTHS

VARIANT: `float32`, `bfloat16` (weights and all), or `autocast` (float32 weights, bfloat16 products). PROMPTS is a file of
rows {"prompt": ..., "domain": ...}, a line of JSON each; eight a step in their order, eight samples each, one update. LENGTHS
is a list of JSON, the tokens of each of the 64 samples, whatever the model writes; or `saved`: a row then also has `prompt_ids` and
`completions`, and nothing is generated.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from lines import answer, jobs
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from typing_extensions import override

PROMPTS, SAMPLES, TOKENS = 8, 8, 64


class Steps(TrainerCallback):
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


class Recorded(StoppingCriteria):
    """Ends each row one token before its length: the first of the padding is an end of sequence, which TRL counts."""

    def __init__(self, width: int, lengths: list[int]) -> None:
        self.ends = torch.tensor([width + n - (n < max(lengths)) for n in lengths])

    @override
    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return input_ids.shape[1] >= self.ends


def record(model: Any, end: int, lengths: list[int]) -> None:
    """Make the model write so many tokens in each row; `min_new_tokens` keeps ends of sequence out."""
    generate = model.generate

    def recorded(*inputs: Any, **options: Any) -> Any:
        ids = options.get("input_ids", inputs[0] if inputs else None)
        ends = StoppingCriteriaList([Recorded(ids.shape[1], lengths)])
        return generate(*inputs, stopping_criteria=ends, pad_token_id=end, **options)

    model.generate = recorded


def saved(rows: list[dict[str, Any]]) -> Any:
    """A stand-in for generation: every prompt's completions, in their order."""
    by_prompt = {row["prompt"]: row for row in rows}

    def rollout(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        found = [by_prompt[prompt] for prompt in prompts]
        completions = [row["completions"][i % SAMPLES] for i, row in enumerate(found)]
        logprobs = [[-1.0] * len(completion) for completion in completions]
        return {"prompt_ids": [row["prompt_ids"] for row in found], "completion_ids": completions, "logprobs": logprobs}

    return rollout


def alternate(completions: list[str], domain: list[str], **_: Any) -> list[float]:
    """Every second one a success, but for groups of equal rewards."""
    return [float(i % 2) if domain[i] != "equal" else 0.0 for i in range(len(completions))]


def main(path: str, variant: str, prompts: str, lengths: str) -> None:
    """Train for as long as jobs come."""
    generates = lengths != "saved"
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
            shuffle_dataset=False,
            generation_kwargs={"min_new_tokens": TOKENS},
        )
        weights = torch.bfloat16 if variant == "bfloat16" else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=weights)
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        if generates:
            record(model, tokenizer.eos_token_id, json.loads(lengths))
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=alternate,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": row["prompt"], "domain": row.get("domain", "")} for row in rows]),
            processing_class=tokenizer,
            callbacks=[Steps()],
            rollout_func=None if generates else saved(rows),
        )
        answer(ready=True)
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
