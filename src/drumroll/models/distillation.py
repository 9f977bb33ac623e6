"""What a teacher's pass gives for each trained token, and how the student's head compares its distribution with it.

Distributions over the whole vocabulary exist for a chunk of tokens at a time only. Between the two passes a token's row holds the
teacher's likeliest tokens with their log-probs, or the teacher's last hidden state, from which the student's ranks compute the
teacher's distribution again with a copy of its head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from drumroll.algorithms.divergences import DIVERGENCES
from drumroll.config.divergence import DivergenceConfig
from drumroll.models.tensor_parallel import TensorParallel, add_over_ranks, gathered, vocabulary_logprobs


@dataclass(frozen=True, slots=True)
class TeacherPass:
    """The rows of a teacher's pass: `top_k` ids, their log-probs and that of all other tokens together; or its hidden states."""

    over: Literal["all", "top_k"]
    width: int
    """Columns of a row; of several teachers, those of the widest."""
    vocabulary: int
    """Tokens that count: those of the student. A teacher may have further logits that no token uses."""

    @property
    def top_k(self) -> int:
        """How many tokens a row names."""
        return (self.width - 1) // 2

    def hidden(self, states: Tensor) -> Tensor:
        """Hidden states as rows."""
        return torch.nn.functional.pad(states, (0, self.width - states.shape[-1]))

    def likeliest(self, logits: Tensor, parallel: TensorParallel | None) -> Tensor:
        """[tokens, width] the likeliest tokens, from the logits of this rank's columns."""
        start = 0 if parallel is None else parallel.vocabulary
        logits = logits[:, : max(0, self.vocabulary - start)]
        logprobs = torch.log_softmax(logits, dim=-1) if parallel is None else vocabulary_logprobs(logits, parallel.group)
        values, ids = logprobs.topk(min(self.top_k, logprobs.shape[-1]))
        ids = ids + start
        if parallel is not None:
            more = (0, self.top_k - ids.shape[-1])
            values = gathered(torch.nn.functional.pad(values, more, value=-torch.inf), parallel.group)
            ids = gathered(torch.nn.functional.pad(ids, more), parallel.group).gather(1, values.topk(self.top_k).indices)
        return torch.cat([ids.to(logprobs.dtype), with_rest(logprobs, ids, parallel)], dim=1)


class TeacherHeads:
    """The heads of all teachers, on a rank of the student, whose `vocabulary` tokens count."""

    def __init__(self, heads: Sequence[Any], widths: Sequence[int], vocabulary: int) -> None:
        self.heads, self.widths, self.vocabulary = heads, widths, vocabulary

    def logprobs(self, rows: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """[tokens, vocabulary] of each token's teacher, from rows of hidden states; uniform where it has none."""
        found = rows.new_full((len(rows), self.vocabulary), -math.log(self.vocabulary))
        for number, (head, width) in enumerate(zip(self.heads, self.widths, strict=True)):
            at = (teacher == number).nonzero()[:, 0]
            logits = head.logits(rows[at, :width].to(head.dtype))[:, : self.vocabulary]
            found[at] = torch.log_softmax(logits.to(rows.dtype) / temperature, dim=-1)
        return found


@dataclass(frozen=True)
class Comparison:
    """How a student is compared with its teachers; with `over: all` it needs their heads."""

    config: DivergenceConfig
    heads: TeacherHeads | None = None
    alone: bool = False
    """The loss has no gradient by other numbers. What they would keep for it is then never freed chunk by chunk."""


@dataclass(frozen=True)
class Target:
    """What the student is compared with at each trained token: the teacher's row, and the number of the teacher."""

    rows: Tensor  # [tokens, width]
    teacher: Tensor  # [tokens] int64
    comparison: Comparison

    def of(self, tokens: Tensor) -> Target:
        """The same for some of the tokens."""
        index = tokens.to(self.rows.device)
        return Target(self.rows[index], self.teacher[index], self.comparison)

    def divergence(self, student: Tensor, rows: Tensor, teacher: Tensor, temperature: float, parallel: Any) -> Tensor:
        """[tokens] the divergence of the student's log-probs of this rank's columns, for some of the rows."""
        config = self.comparison.config
        terms = DIVERGENCES.get(config.use)
        if config.over == "top_k":
            count = (rows.shape[-1] - 1) // 2
            chosen = with_rest(student, rows[:, :count].long(), parallel)
            return terms(chosen, rows[:, count:].to(chosen.dtype), config).sum(-1)
        assert self.comparison.heads is not None
        with torch.no_grad():
            start = 0 if parallel is None else parallel.vocabulary
            other = self.comparison.heads.logprobs(rows.to(student.dtype), teacher, temperature)
            other = other[:, start : start + student.shape[-1]]
        found = terms(student, other, config).sum(-1)
        return found if parallel is None else add_over_ranks(found, parallel.group)


def with_rest(logprobs: Tensor, ids: Tensor, parallel: TensorParallel | None) -> Tensor:
    """[tokens, k + 1] the log-probs of k tokens each, and of all other tokens together."""
    size, start = logprobs.shape[-1], 0 if parallel is None else parallel.vocabulary
    own = (ids - start).masked_fill((ids < start) | (ids >= start + size), size)
    padded = torch.nn.functional.pad(logprobs, (0, 1))
    picked = padded.gather(1, own)
    others = torch.ones_like(padded, dtype=torch.bool).scatter_(1, own, False)[:, :-1]
    rest = torch.where(others, logprobs.exp(), 0.0).sum(-1, keepdim=True)
    both = torch.cat([picked, rest], dim=1)
    both = both if parallel is None else add_over_ranks(both, parallel.group)
    return torch.cat([both[:, :-1], both[:, -1:].clamp_min(torch.finfo(both.dtype).tiny).log()], dim=1)
