"""Floating-point operations that training and generation do: matrix products and attention on the tokens that are computed.

What is padded or computed again to save memory is not counted, so a fraction of the machine's limit is never flattered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from drumroll.batch import Batch


@dataclass(frozen=True, slots=True)
class Shape:
    """Multiply-adds of a dense model: per computed token in its body, per row of logits, per pair of query and key."""

    body: int
    head: int
    pair: int

    @classmethod
    def of(cls, module: Any) -> Shape:
        """Of a Hugging Face language model."""
        config = module.config
        body = sum(m.weight.numel() for m in module.base_model.modules() if isinstance(m, nn.Linear))
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pair = 2 * config.num_hidden_layers * config.num_attention_heads * width  # scores, and the sum of values
        return cls(body, module.get_output_embeddings().weight.numel(), pair)

    def forward(self, tokens: int, rows: int, pairs: int) -> int:
        """Operations of a forward pass; a multiply-add is two."""
        return 2 * (self.body * tokens + self.head * rows + self.pair * pairs)


@dataclass(frozen=True, slots=True)
class Trained:
    """An update's work: tokens it was given, tokens it computed (a shared prefix once a micro-batch), operations forward and backward."""

    given: int
    computed: int
    operations: int

    @property
    def saved(self) -> float:
        """The share of the given tokens that was not computed."""
        return 1 - self.computed / self.given


def trained(shape: Shape, batch: Batch, micro_tokens: int) -> Trained:
    """The work of one pass over a batch; the backward pass does twice the forward's."""
    computed = operations = 0
    for traces in batch.micro_batches(micro_tokens):
        micro = batch.select(traces)
        tree = micro.tree()
        pairs = sum(_pairs(path.start, len(path.nodes)) for path in tree.paths)
        computed += len(tree.tokens)
        operations += 3 * shape.forward(len(tree.tokens), int(micro.mask.sum()), pairs)
    return Trained(len(batch.tokens), computed, operations)


def generated(shape: Shape, prompts: Iterable[int], lengths: Sequence[Sequence[int]]) -> int:
    """Operations to write completions: each prompt (its length) is computed once, and every token but a completion's last."""
    done = 0
    for prompt, completions in zip(prompts, lengths, strict=True):
        done += shape.forward(prompt, 1, _pairs(0, prompt))
        done += sum(shape.forward(n - 1, n - 1, _pairs(prompt, prompt + n - 1)) for n in completions)
    return done


def _pairs(start: int, end: int) -> int:
    """Keys that queries at these positions see, themselves included."""
    return (end * (end + 1) - start * (start + 1)) // 2
