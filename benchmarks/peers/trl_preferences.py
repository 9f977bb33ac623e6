"""TRL's own preference losses and gradients on log-probs from a file. Run by the Python of `.bench/trl`; knows nothing of us.

python trl_preferences.py CASES OUT

Columns of CASES, of answers padded to [answers, tokens], the chosen ones first: `logprobs` and `reference`; `mask` (1 where
trained); and for KTO `kl_logprobs`, `kl_reference` of mismatched answers with the same mask. A setting is a trainer and options
of its config. Results: `loss` and `gradient` (by log-prob).

No formula stands here. TRL's trainers are real; only where they would run a model they are given the saved log-probs.
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
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl_losses import WORDS, save_tiny_model

OWN, MISMATCHED = WORDS["word"], WORDS["<eos>"]
"""The token of answers, and the token of mismatched answers."""
PAIRS = {"prompt": ["word"], "chosen": ["word"], "rejected": ["<pad>"]}
RATED = {"prompt": ["word"] * 2, "completion": ["word"] * 2, "label": [True, False]}
TRAINERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dpo": (DPOTrainer, DPOConfig, PAIRS),
    "kto": (KTOTrainer, KTOConfig, RATED),
    "cpo": (CPOTrainer, CPOConfig, PAIRS),
}


class Saved:
    """A model that answers with saved log-probs: of its own answers, or of mismatched ones."""

    def __init__(self, case: Case, logprobs: str, mismatched: str) -> None:
        self.case, self.columns = case, {OWN: logprobs, MISMATCHED: mismatched}

    def __call__(self, input_ids: Tensor, **options: Any) -> SimpleNamespace:
        logprobs, nothing = self.case[self.columns[int(input_ids[0, 1])]], torch.zeros_like(self.case["mask"])
        masked = logprobs * self.case["mask"]
        more = {"entropy": nothing, "mean_logits": nothing, "is_top1": nothing.bool(), "aux_loss": None}
        return SimpleNamespace(log_probs=masked, logits=self._logits(logprobs), **more)

    def _logits(self, logprobs: Tensor) -> Tensor:
        """Logits whose log-softmax is the saved log-prob for the answers' token; the last position predicts nothing."""
        rest = torch.log1p(-logprobs.exp()) - torch.log(torch.tensor(len(WORDS) - 1.0, dtype=logprobs.dtype))
        pieces = [logprobs if word == OWN else rest for word in range(len(WORDS))]
        logits = torch.stack(pieces, -1)
        return torch.cat([logits, torch.zeros_like(logits[:, :1])], 1)


def padded(case: Case, token: int) -> dict[str, Tensor]:
    """Answers after a prompt of one token."""
    mask = torch.cat([torch.zeros_like(case["mask"][:, :1]), case["mask"]], 1)
    return {"input_ids": torch.full_like(mask, token), "attention_mask": torch.ones_like(mask), "completion_mask": mask}


def inputs(kind: str, case: Case) -> dict[str, Any]:
    """A batch as a trainer's collator makes it."""
    own, half = padded(case, OWN), len(case["mask"]) // 2
    if kind == "dpo":
        return dict(own)
    if kind == "kto":
        mismatched = {f"KL_{name}": column for name, column in padded(case, MISMATCHED).items()}
        return {**own, **mismatched, "label": torch.arange(len(case["mask"])) < half}
    labels = own["input_ids"].masked_fill(own["completion_mask"] == 0, -100)
    columns = {"input_ids": own["input_ids"], "attention_mask": own["attention_mask"], "labels": labels}
    sides = {"chosen": slice(None, half), "rejected": slice(half, None)}
    return {f"{side}_{name}": column[rows] for side, rows in sides.items() for name, column in columns.items()}


def losses(trainer: Any, kind: str, case: Case) -> Case:
    """TRL's loss, and its gradient by log-prob."""
    logprobs = case["logprobs"].requires_grad_()
    trainer.ref_model = Saved(case, "reference", "kl_reference")
    loss = trainer.compute_loss(Saved(case, "logprobs", "kl_logprobs"), inputs(kind, case))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return {"loss": loss, "gradient": gradient}


def make_trainer(folder: str, kind: str, options: dict[str, Any]) -> Any:
    """A trainer of a tiny random Llama, with these options."""
    trainer, config, rows = TRAINERS[kind]
    fixed = {"output_dir": folder, "report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    args = config(**fixed, per_device_train_batch_size=2, **options)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return trainer(model=folder, args=args, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(folder)
        answer_all(lambda setting: partial(losses, make_trainer(folder, *setting), setting[0]))
