"""Tensor parallelism: ranks compute every layer together, each with its part of the heads, columns and vocabulary.

Transformers states for each family which linear layers are divided by columns (their outputs) and which by rows (their
inputs), the *plan*. Between a block's column layers and its row layer each rank computes its own heads or columns; the
row layer sums the parts. Embedding and head are divided by vocabulary, so no rank holds all logits. Parameters
are plain tensors, so that a rank's part can be sharded further, saved and sent like any other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from drumroll.errors import ConfigError, ModelError
from drumroll.models.blocks import replace_parameters

FAMILIES = frozenset(
    (
        *("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi", "phi3"),
        *("smollm3", "olmo2", "granite", "cohere2", "glm4"),
    )
)
"""Model types that tests/unit/test_tensor_parallel.py compares with one process."""
KINDS = frozenset(
    (
        "colwise",
        "rowwise",
        "colwise_gather_output",
        "rowwise_split_input",
        "replicated_with_grad_allreduce",
        "embedding_rowwise",
    )
)
"""What a plan may ask for."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a parameter on this rank: along `dim`, from `start` on, of `whole`."""

    dim: int
    start: int
    whole: int


@dataclass
class TensorParallel:
    """How a model is divided over a group of ranks."""

    group: Any
    rank: int
    size: int
    parts: dict[str, Part] = field(default_factory=dict)  # by the parameter's name
    partial: set[str] = field(default_factory=set)  # whole parameters whose gradients are to be summed over the group
    vocabulary: int = 0  # the first token of this rank

    def span(self, whole: int) -> tuple[int, int]:
        """Start and size of this rank's part of a dimension; the last ranks may have less."""
        each = -(-whole // self.size)
        start = min(self.rank * each, whole)
        return start, min(each, whole - start)


def check(config: Any, size: int) -> None:
    """Refuse a model that cannot be divided by so many ranks, with the arithmetic."""
    text, key = config.get_text_config(), f"parallel: tensor {size}"
    plan = getattr(text, "base_model_tp_plan", None)
    if text.model_type not in FAMILIES or not plan or not set(plan.values()) <= KINDS:
        raise ConfigError(
            f"{key}: models of type '{text.model_type}' are not divided by tensor; use shard. It works for {', '.join(sorted(FAMILIES))}."
        )
    check_heads(config, "tensor", size)


def check_heads(config: Any, axis: str, size: int, tensor: int = 1) -> None:
    """Refuse a number of ranks along an axis that does not divide a model's heads, of which each `tensor` rank has a part."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    for name, count in (("heads", heads), ("key-value heads", getattr(text, "num_key_value_heads", None) or heads)):
        if count % (size * tensor):
            fitting = [n for n in range(1, count + 1) if count % (n * tensor) == 0 and heads % (n * tensor) == 0]
            nearest = min(fitting, key=lambda n: (abs(n - size), n))
            asked = f"{axis} {size}" if tensor == 1 else f"tensor {tensor} × {axis} {size}"
            raise ConfigError(
                f"parallel: {asked} does not divide the model's {count} {name}; nearest that does: {axis} {nearest}."
            )


def divide(module: Any, group: Any) -> TensorParallel:
    """Leave each parameter of a causal language model (on the meta device) the part of this rank, and let its layers work on parts."""
    made = TensorParallel(group, dist.get_rank(group), dist.get_world_size(group))
    check(module.config, made.size)
    prefix, new = f"{module.base_model_prefix}.", dict[nn.Parameter, nn.Parameter]()
    text = module.config.get_text_config()
    plan = {
        re.compile(pattern.replace(".", r"\.").replace("*", r"\d+")): kind for pattern, kind in text.base_model_tp_plan.items()
    }
    kind_of = {
        name: kind
        for name, _ in module.base_model.named_modules()
        for pattern, kind in plan.items()
        if pattern.fullmatch(name) and kind != "embedding_rowwise"
    }
    for name, kind in kind_of.items():
        layer = module.base_model.get_submodule(name)
        if kind.startswith("colwise"):
            _cut(made, new, layer, prefix + name, {"weight": 0, "bias": 0})
            if kind.endswith("gather_output"):
                _specialise(layer, _Gathering, made)
        elif kind.startswith("rowwise"):
            _cut(made, new, layer, prefix + name, {"weight": 1})
            _specialise(layer, _SplittingRows if kind.endswith("split_input") else _Rows, made)
    _enter_blocks(made, module, kind_of, prefix)
    _divide_vocabulary(made, new, module, prefix)
    replace_parameters(module, new)
    return made


def _cut(
    made: TensorParallel, new: dict[nn.Parameter, nn.Parameter], layer: nn.Module, name: str, dims: dict[str, int]
) -> None:
    """Leave this rank's part of a layer's parameters, along the given dimensions."""
    for own, dim in dims.items():
        parameter = layer._parameters.get(own)
        if parameter is None:
            continue
        whole = parameter.shape[dim]
        start, size = made.span(whole)
        if size == 0 or (whole % made.size and "embed" not in name and "lm_head" not in name):
            raise ConfigError(
                f"parallel: tensor {made.size} does not divide the {whole} {'columns' if dim else 'rows'} of {name}."
            )
        made.parts[f"{name}.{own}"] = Part(dim, start, whole)
        if parameter not in new:
            part = torch.empty_like(parameter.narrow(dim, 0, size), memory_format=torch.contiguous_format)
            new[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)


def _enter_blocks(made: TensorParallel, module: Any, kind_of: dict[str, str], prefix: str) -> None:
    """Sum the gradients that flow out of a block through its input, once for all its column layers."""
    blocks: dict[str, set[str]] = {}
    for name, kind in kind_of.items():
        blocks.setdefault(name.rpartition(".")[0], set()).add(kind)
    for name, kinds in blocks.items():
        if not any(kind.startswith("colwise") for kind in kinds):
            continue
        block = module.base_model.get_submodule(name)
        block.register_forward_pre_hook(_Entering(made.group), with_kwargs=True)
        if "colwise_gather_output" in kinds and "colwise" not in kinds:
            continue  # what lies between is computed whole by every rank
        for own, _ in block.named_parameters():
            if f"{prefix}{name}.{own}" not in made.parts and kind_of.get(f"{name}.{own.rpartition('.')[0]}") != "rowwise":
                made.partial.add(f"{prefix}{name}.{own}")


def _divide_vocabulary(made: TensorParallel, new: dict[nn.Parameter, nn.Parameter], module: Any, prefix: str) -> None:
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    names = {part: name for name, part in module.named_modules()}
    made.vocabulary, _ = made.span(embedding.weight.shape[0])
    if embedding.weight.shape[0] < made.size:
        raise ModelError(f"parallel: tensor {made.size} is more than the {embedding.weight.shape[0]} tokens of the vocabulary.")
    _cut(made, new, embedding, names[embedding], {"weight": 0})
    _specialise(embedding, _Tokens, made)
    if embedding.padding_idx is not None:
        own = embedding.padding_idx - made.vocabulary
        embedding.padding_idx = own if 0 <= own < made.span(embedding.num_embeddings)[1] else None
    if head is not None:
        _cut(made, new, head, names[head], {"weight": 0, "bias": 0})


def _specialise(layer: nn.Module, behaviour: type[nn.Module], made: TensorParallel) -> None:
    """Let a layer of any class work on parts."""
    kind = type(layer)
    layer.__class__ = type(kind.__name__, (behaviour, kind), {})
    layer.__dict__["parallel"] = made


class _Gathering(nn.Module):
    """A column layer whose output every rank gets whole."""

    parallel: TensorParallel

    @override
    def forward(self, input: Tensor) -> Tensor:
        return _Gather.apply(super().forward(input), self.parallel.group)


class _Rows(nn.Module):
    """A row layer: the ranks' products are summed, and the bias is added once."""

    parallel: TensorParallel
    weight: Tensor
    bias: Tensor | None

    @override
    def forward(self, input: Tensor) -> Tensor:
        out = _Sum.apply(torch.nn.functional.linear(input, self.weight), self.parallel.group)
        return out if self.bias is None else out + self.bias


class _SplittingRows(_Rows):
    """A row layer whose input every rank has whole."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(_Split.apply(input, self.parallel.group))


class _Tokens(nn.Module):
    """An embedding of this rank's tokens; those of others come from them."""

    parallel: TensorParallel
    weight: Tensor

    @override
    def forward(self, input: Tensor) -> Tensor:
        own = input - self.parallel.vocabulary
        others = (own < 0) | (own >= self.weight.shape[0])
        found = super().forward(own.masked_fill(others, 0))
        return _Sum.apply(found.masked_fill(others[..., None], 0), self.parallel.group)


class _Entering:
    """A hook at the entrance of a block."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def enter(value: Any) -> Any:
            return enter_block(value, self.group) if isinstance(value, Tensor) and value.requires_grad else value

        return tuple(map(enter, args)), {name: enter(value) for name, value in kwargs.items()}


def enter_block(x: Tensor, group: Any) -> Tensor:
    """The same tensor; its gradient is summed over the ranks, each of which computes with a part of a block's weights."""
    return _Enter.apply(x, group)


def add_over_ranks(x: Tensor, group: Any) -> Tensor:
    """The sum over the ranks, each of which computes all that follows: the gradient goes to each as it is."""
    return _Sum.apply(x, group)


def vocabulary_logprobs(logits: Tensor, group: Any) -> Tensor:
    """Log-probs of the tokens of a rank, from logits of which each rank has the columns of its tokens."""
    return _VocabularyLogProbs.apply(logits, group)


_Function: Any = torch.autograd.Function  # its methods take what each function needs


# --- collectives with gradients; contiguous, because gloo ignores strides ---


def _summed(x: Tensor, group: Any) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def gathered(x: Tensor, group: Any) -> Tensor:
    """All ranks' parts, side by side along the last dimension."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _own(x: Tensor, group: Any) -> Tensor:
    """This rank's part of the last dimension."""
    return x.chunk(dist.get_world_size(group), dim=-1)[dist.get_rank(group)].contiguous()


class _Enter(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _Sum(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own(grad, ctx.group), None


class _Split(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _own(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.group), None


class _VocabularyLogProbs(_Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Any) -> Tensor:
        ctx.group = group
        highest = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:1], -torch.inf)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        shifted = logits - highest[:, None]
        logprobs = shifted - _summed(shifted.exp().sum(-1), group).log()[:, None]
        ctx.save_for_backward(logprobs)
        return logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (logprobs,) = ctx.saved_tensors
        return grad - logprobs.exp() * _summed(grad.sum(-1), ctx.group)[:, None], None


class VocabularyScore(_Function):
    """Log-probs of chosen tokens, and entropies, from logits of which each rank has the columns of its tokens."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, chosen: Tensor, start: int, group: Any) -> tuple[Tensor, Tensor]:
        highest = logits.amax(-1) if logits.shape[-1] else logits.new_full(logits.shape[:1], -torch.inf)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        weights = (logits - highest[:, None]).exp()
        own = chosen - start
        elsewhere = (own < 0) | (own >= logits.shape[-1])
        own = own.masked_fill(elsewhere, 0)
        picked = logits.gather(1, own[:, None])[:, 0].masked_fill(elsewhere, 0)
        sums = torch.stack([weights.sum(-1), (weights * (logits - highest[:, None])).sum(-1), picked])
        dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        entropy = log_sum - sums[1] / sums[0]
        shares = weights.div_(sums[0][:, None])
        ctx.save_for_backward(shares, own, elsewhere, logits - (highest + log_sum)[:, None], entropy)
        return sums[2] - highest - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None]:
        shares, own, elsewhere, logprobs, entropy = ctx.saved_tensors
        out = -shares * (grad[:, None] + grad_entropy[:, None] * (logprobs + entropy[:, None]))
        out.scatter_add_(1, own[:, None], grad.masked_fill(elsewhere, 0)[:, None])
        return out, None, None, None
