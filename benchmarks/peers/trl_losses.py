"""TRL's own advantages, losses and gradients on tensors from a file. Run by the Python of `.bench/trl`; knows nothing of us.

python trl_losses.py CASES OUT

Columns of CASES: `logprobs`, `old`, `behaviour`, `reference` and `mask` (1 where trained) padded to [samples, tokens];
`lengths`, `advantages` and `rewards` [samples]. A setting is options of TRL's GRPOConfig, and `use_vllm` if the gap to
`behaviour` is to be corrected. Results: `loss`, `gradient` (by log-prob) and `advantages` (TRL's, from `rewards`).

No formula stands here. TRL's trainer is real; only where it would run a model it is given the saved log-probs.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from cases import Case, answer_all
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

WORDS = {"<pad>": 0, "<eos>": 1, "word": 2}


class SavedTrainer(GRPOTrainer):
    """TRL's trainer, whose rollouts, rewards and log-probs are those of `case`."""

    case: Case

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **options: Any) -> tuple[Tensor, Tensor, None]:
        column = "logprobs" if torch.is_grad_enabled() else "reference" if model is self.ref_model else "old"
        return self.case[column], torch.zeros_like(self.case[column]), None

    def losses(self, case: Case) -> Case:
        """Score the case's rollouts, then take the loss of its given advantages."""
        self.case = case
        scored = self._generate_and_score_completions([{"prompt": "word"} for _ in case["rewards"]])
        logprobs = case["logprobs"].requires_grad_()
        loss = self.compute_loss(self.model, {**scored, "advantages": case["advantages"]})
        (gradient,) = torch.autograd.grad(loss, logprobs)
        return {"loss": loss, "gradient": gradient, "advantages": scored["advantages"]}


def rollout(prompts: list[str], trainer: SavedTrainer) -> dict[str, list[Any]]:
    """The saved completions: which of their tokens the policy wrote, and with which log-prob."""
    lengths = trainer.case["lengths"].tolist()

    def rows(column: str) -> list[list[Any]]:
        return [row[:n].tolist() for row, n in zip(trainer.case[column], lengths, strict=True)]

    word = WORDS["word"]
    return {
        "prompt_ids": [[word] for _ in lengths],
        "completion_ids": [[word] * n for n in lengths],
        "logprobs": rows("behaviour"),
        "env_mask": rows("mask"),
    }


def make_trainer(folder: str, options: dict[str, Any]) -> SavedTrainer:
    """A trainer of a tiny random Llama, with these options. Two iterations per batch, so that old log-probs are asked for."""
    options = dict(options)
    corrected = options.pop("use_vllm", False)
    fixed = {"output_dir": folder, "report_to": "none", "use_cpu": True, "bf16": False, "num_iterations": 2}
    config = GRPOConfig(**fixed, per_device_train_batch_size=options["num_generations"], **options)
    trainer = SavedTrainer(
        model=folder,
        reward_funcs=lambda **_: trainer.case["rewards"].tolist(),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["word"]}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
        rollout_func=rollout,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # set by the training loop, which is not run
    trainer.use_vllm, trainer._last_loaded_step = corrected, 0  # its correction, without its engine
    return trainer


def save_tiny_model(folder: str) -> None:
    """The smallest model and tokenizer that TRL accepts; neither is run."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **shape)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(folder)
        answer_all(lambda options: make_trainer(folder, options).losses)
