"""TRL's own loss of reward models and its gradient on scores from a file. Run by the Python of `.bench/trl`; knows nothing of us.

python trl_reward_model.py CASES OUT

Columns of CASES: `scores` [answers], the chosen ones first, and `margins` [pairs]. A setting is options of TRL's
RewardConfig, and `margin` if the margins are to be used. Results: `loss` and `gradient` (by score).

No formula stands here. TRL's trainer is real; only where it would run a model it is given the saved scores.
"""

from __future__ import annotations

import tempfile
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from cases import Case, answer_all
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import RewardConfig, RewardTrainer
from trl_losses import WORDS, save_tiny_model

PAIRS = {"prompt": ["word"], "chosen": ["word"], "rejected": ["<pad>"]}


def answered(scores: Tensor, **_: Any) -> SimpleNamespace:
    """What a model gives whose scores are these."""
    return SimpleNamespace(logits=scores[:, None])


def losses(trainer: Any, with_margin: bool, case: Case) -> Case:
    """TRL's loss, and its gradient by score."""
    scores = case["scores"].requires_grad_()
    ids = torch.full((len(scores), 1), WORDS["word"])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if with_margin:
        inputs["margin"] = case["margins"]
    loss = trainer.compute_loss(partial(answered, scores), inputs)
    (gradient,) = torch.autograd.grad(loss, scores)
    return {"loss": loss, "gradient": gradient}


def make_trainer(folder: str, options: dict[str, Any]) -> Any:
    """A trainer of a tiny random Llama, with these options."""
    fixed = {"output_dir": folder, "report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    args = RewardConfig(**fixed, per_device_train_batch_size=1, **options)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return RewardTrainer(model=folder, args=args, train_dataset=Dataset.from_dict(PAIRS), processing_class=tokenizer)


def prepare(folder: str, setting: dict[str, Any]) -> Any:
    """The function that answers a case under a setting."""
    options = dict(setting)
    with_margin = options.pop("margin", False)
    return partial(losses, make_trainer(folder, options), with_margin)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(folder)
        answer_all(partial(prepare, folder))
