"""TRL's own supervised loss and gradients on rows from a file. Run by the Python of `.bench/trl`; knows nothing of us.

python trl_sft.py CASES OUT

Columns of CASES: the parameters of a Llama. A setting is the model's config, the tokenizer (JSON), its chat template, the rows, and
options of TRL's SFTConfig. Results: `loss`, the number of trained `tokens`, and the gradient of every parameter.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from cases import Case, answer_all
from datasets import Dataset
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def prepare(setting: dict[str, Any]) -> Callable[[Case], Case]:
    """Loss and gradients of one batch of all rows, by the trainer's own preparation, collator and loss."""

    def answer(case: Case) -> Case:
        core = Tokenizer.from_str(setting["tokenizer"])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
        tokenizer.chat_template = setting["template"]
        model = LlamaForCausalLM(LlamaConfig(**setting["model"]))
        model.load_state_dict(case, strict=False)
        with tempfile.TemporaryDirectory() as folder:
            fixed = {"output_dir": folder, "report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
            rows = Dataset.from_list(setting["rows"])
            args = SFTConfig(**fixed, per_device_train_batch_size=len(rows), max_length=None, **setting["options"])
            trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
            batch = next(iter(trainer.get_train_dataloader()))
            tokens = (batch["labels"][:, 1:] != -100).sum()
            loss = trainer.compute_loss(trainer.model, dict(batch))
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        return {"loss": loss, "tokens": tokens.to(torch.float32), **gradients}

    return answer


if __name__ == "__main__":
    answer_all(prepare)
