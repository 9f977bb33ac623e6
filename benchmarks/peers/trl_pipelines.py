"""TRL's SFTTrainer or DPOTrainer, an optimizer step per job, for benchmarks/pipelines.py. Run by the Python of `.bench/trl`.

python trl_pipelines.py MODEL KIND SETTING ROWS BATCH LENGTH STEPS

KIND is `sft` or `dpo`, ROWS a file with a line of JSON per row: `prompt_ids` with `completion_ids`, or with `chosen_ids` and
`rejected_ids`. Every step trains all rows in their order, BATCH rows in a pass; with SETTING `packed` (SFT only) TRL packs
them into passes of at most LENGTH tokens. float32, no recomputation; DPO's reference log-probs are computed before the first step.
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
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from typing_extensions import override


class Steps(TrainerCallback):
    """A step waits for its job, and answers when it is done."""

    def __init__(self) -> None:
        self.jobs = jobs()
        self.began = 0.0
        self.tokens = self.widest = 0
        self.known: dict[str, Any] = {"threads": torch.get_num_threads()}

    def watch(self, trainer: Any) -> None:
        """Count the trained tokens of every pass, and all that it computes."""
        compute_loss = trainer.compute_loss

        def counted(model: Any, inputs: dict[str, Any], *more: Any, **options: Any) -> Any:
            self._count(inputs)
            return compute_loss(model, inputs, *more, **options)

        trainer.compute_loss = counted
        trainer.add_callback(self)

    def _count(self, inputs: dict[str, Any]) -> None:
        trained = inputs["labels"][:, 1:] != -100 if "labels" in inputs else inputs["completion_mask"][:, 1:] > 0
        self.tokens += int(trained.sum())
        self.widest = max(self.widest, inputs["input_ids"].numel())

    @override
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        next(self.jobs)
        self.tokens = self.widest = 0
        self.began = time.perf_counter()

    @override
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs is not None and "loss" in logs:
            seconds = time.perf_counter() - self.began
            answer(seconds=seconds, loss=float(logs["loss"]), tokens=self.tokens, widest=self.widest, **self.known)


def demonstrations(rows: list[dict[str, Any]]) -> Dataset:
    """Prompt and completion, of which the completion is trained."""
    return Dataset.from_list(
        [
            {"input_ids": r["prompt_ids"] + r["completion_ids"], "labels": [-100] * len(r["prompt_ids"]) + r["completion_ids"]}
            for r in rows
        ]
    )


def leak(trainer: Any) -> float:
    """How much the logits of a packed row's last document change if the first is another."""
    inputs = trainer.data_collator([trainer.train_dataset[0]])
    starts = (inputs["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    assert len(starts) > 1, "the first row is packed alone"
    inputs.pop("labels")
    with torch.no_grad():
        before = trainer.model(**inputs, use_cache=False).logits[0, starts[-1] :]
        inputs["input_ids"][0, : starts[1]] += 1
        after = trainer.model(**inputs, use_cache=False).logits[0, starts[-1] :]
    return float((after - before).abs().max())


def make_trainer(path: str, kind: str, folder: str, rows: list[dict[str, Any]], options: dict[str, Any]) -> Any:
    """A trainer that logs every step."""
    fixed = {
        "output_dir": folder,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "train_sampling_strategy": "sequential",
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    common: dict[str, Any] = {"model": model, "processing_class": AutoTokenizer.from_pretrained(path)}
    if kind == "sft":
        return SFTTrainer(args=SFTConfig(**fixed, **options), train_dataset=demonstrations(rows), **common)
    more = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 1, "max_length": None}
    DPOTrainer._prepare_dataset = lambda self, dataset, *_: dataset  # type: ignore[method-assign]  # rows are tokens already
    return DPOTrainer(args=DPOConfig(**fixed, **options, **more), train_dataset=Dataset.from_list(rows), **common)


def main(path: str, kind: str, setting: str, file: str, batch: str, length: str, steps: str) -> None:
    """Train for as long as jobs come."""
    with open(file, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    options: dict[str, Any] = {"per_device_train_batch_size": int(batch), "max_steps": int(steps)}
    options["gradient_accumulation_steps"] = len(rows)  # all passes of an epoch are one step
    if setting == "packed":
        options |= {"packing": True, "max_length": int(length), "per_device_train_batch_size": 1}
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(path, kind, folder, rows, options)
        watcher = Steps()
        watcher.known |= {"leak": leak(trainer)} if setting == "packed" else {}
        watcher.watch(trainer)
        answer(ready=True)
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
