"""From hidden states to log-probs, in chunks, so that logits of all tokens never exist at once.

The logits are the model's own: its forward runs with the body taken out, so that whatever it does with its head
(tied weights, a soft cap, a scale, adapters) is done here too.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from drumroll.models.distillation import Target, TeacherPass
from drumroll.models.tensor_parallel import TensorParallel, VocabularyScore, enter_block, vocabulary_logprobs

_Function: Any = torch.autograd.Function  # its methods take what each function needs
ROWS = 1024
"""Rows of logits at a time. With more rows than this they are computed again in the backward pass."""


class _Given(nn.Module):
    """In the place of a model's body: it returns the hidden states that it is given as embeddings."""

    def __init__(self, output: type) -> None:
        super().__init__()
        self.output = output

    @override
    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return self.output(last_hidden_state=inputs_embeds)


class LanguageModelHead:
    """A language model's head alone. `output` is the type that the model's body returns."""

    def __init__(self, module: Any, output: type, parallel: TensorParallel | None = None) -> None:
        self.parallel = parallel
        self.module = copy.copy(module)  # shares the weights; only the list of children is another
        self.module._modules = {**module._modules, module.base_model_prefix: _Given(output)}

    @property
    def dtype(self) -> torch.dtype:
        """Type of its weights."""
        return next(self.module.parameters()).dtype

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] the model's logits; of tensor-parallel ranks, those of a rank's own tokens."""
        return self.module(inputs_embeds=hidden[None], use_cache=False).logits[0]

    def __call__(
        self,
        hidden: Tensor,
        chosen: Tensor,
        temperature: float,
        *,
        entropy_gradient: bool,
        rows: int = ROWS,
        asked: TeacherPass | Target | None = None,
    ) -> tuple[Tensor, ...]:
        """[rows] the log-prob of the chosen tokens, and the entropy of what they were chosen from.

        With a target the divergence from it comes third. A teacher's pass gives its rows instead.
        """
        if isinstance(asked, TeacherPass):
            return (self._taught(hidden, temperature, asked, rows),)

        def chunk(some: Tensor, tokens: Tensor, *target: Tensor) -> tuple[Tensor, ...]:
            logits, parallel = self._over(some, temperature), self.parallel
            if parallel is None and asked is None and not entropy_gradient:
                return _ChosenScore.apply(logits, tokens)
            alone = asked is not None and asked.comparison.alone
            logits = torch.log_softmax(logits, dim=-1) if parallel is None else logits
            with torch.set_grad_enabled(torch.is_grad_enabled() and not alone):
                if parallel is None:
                    numbers = _score(logits, tokens, entropy_gradient=entropy_gradient)
                else:
                    logprobs, entropy = VocabularyScore.apply(logits, tokens, parallel.vocabulary, parallel.group)
                    numbers = logprobs, entropy if entropy_gradient else entropy.detach()
            if asked is None:
                return numbers
            student = logits if parallel is None else vocabulary_logprobs(logits, parallel.group)
            rows, teacher = target
            return *numbers, asked.divergence(student, rows, teacher, temperature, parallel)

        inputs, rows = ((hidden, chosen), rows) if asked is None else ((hidden, chosen, asked.rows, asked.teacher), rows // 4)
        if self.parallel is not None and hidden.requires_grad:
            inputs = enter_block(hidden, self.parallel.group), *inputs[1:]
        if len(hidden) <= rows:
            return chunk(*inputs)
        parts: list[Any] = [
            checkpoint(chunk, *part, use_reentrant=False, preserve_rng_state=False)
            for part in zip(*(given.split(rows) for given in inputs), strict=True)
        ]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _over(self, hidden: Tensor, temperature: float) -> Tensor:
        """The logits over the temperature, in float32 at least."""
        logits = self.logits(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits if temperature == 1 else logits / temperature

    def _taught(self, hidden: Tensor, temperature: float, asked: TeacherPass, rows: int) -> Tensor:
        """[rows, width] what a student is compared with."""
        if asked.over == "all":
            return asked.hidden(hidden)
        parts = (asked.likeliest(self._over(some, temperature), self.parallel) for some in hidden.split(rows))
        return torch.cat(list(parts))


class _ChosenScore(_Function):
    """Log-probs of chosen tokens, and entropies without gradient, from logits.

    Autograd's own formulas need twice the memory: here the log-softmax and one tensor of its size exist at a time.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        distribution = torch.log_softmax(logits, dim=-1)
        ctx.save_for_backward(distribution, chosen)
        entropy = torch.cat([-(some.exp() * some).sum(-1) for some in distribution.split(ROWS // 16)])
        ctx.mark_non_differentiable(entropy)
        return distribution.gather(1, chosen[:, None])[:, 0], entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None]:
        distribution, chosen = ctx.saved_tensors
        gradient = distribution.exp().mul_(-grad[:, None])
        return gradient.scatter_add_(1, chosen[:, None], grad[:, None]), None


class LogProbModel(nn.Module):
    """A causal language model as one module that is called once per micro-batch: token tree in, log-probs and entropies out.

    Wrappers that gather parameters around a forward pass (FSDP) see every use of a parameter, because all are in it.
    """

    def __init__(self, language_model: Any, parallel: TensorParallel | None = None) -> None:
        super().__init__()
        self.language_model = language_model
        self.parallel = parallel

    @override
    def forward(
        self,
        tokens: Tensor,
        layout: Any,
        before: Tensor,
        chosen: Tensor,
        temperature: float,
        entropy_gradient: bool,
        asked: TeacherPass | Target | None = None,
    ) -> tuple[Tensor, ...]:
        inputs, how = (tokens, layout, before, chosen, temperature), {"parallel": self.parallel, "asked": asked}
        first, *others = score(self.language_model, *inputs, entropy_gradient=entropy_gradient, **how)
        return first.clone(), *others  # no view of another tensor: FSDP hangs its hooks on outputs


def score(
    module: Any,
    tokens: Tensor,
    layout: Any,
    before: Tensor,
    chosen: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool,
    parallel: TensorParallel | None = None,
    asked: TeacherPass | Target | None = None,
) -> tuple[Tensor, ...]:
    """Log-probs and entropies of chosen tokens, each after the node before it. `layout` says what the nodes attend to."""
    out = module.base_model(input_ids=tokens[None], position_ids=layout.positions(), use_cache=False, layout=layout)
    hidden = out.last_hidden_state[0].index_select(0, before)
    head = LanguageModelHead(module, type(out), parallel)
    return head(hidden, chosen, temperature, entropy_gradient=entropy_gradient, asked=asked)


def _score(distribution: Tensor, chosen: Tensor, *, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    logprobs = distribution.gather(1, chosen[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(distribution.exp() * distribution).sum(-1)
    return logprobs, entropy
