"""A Hugging Face model as Megatron-Core's GPTModel, with our attention, positions and heads.

Tokens are laid end to end as one row. The layout that says who attends to whom travels to the attention as its bias:
Megatron hands a bias through unseen, also where activations are recomputed. Rotary frequencies are Hugging Face's own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from typing_extensions import override

from drumroll.learners.backend import LearnerSpec, Numbers
from drumroll.learners.heads import Settings
from drumroll.learners.megatron.groups import expert_tensor
from drumroll.learners.megatron.names import Names, expert_width
from drumroll.models.distillation import Target, TeacherPass
from drumroll.models.head import LanguageModelHead
from drumroll.models.loading import DTYPES
from drumroll.models.tensor_parallel import TensorParallel

_Model: Any = GPTModel
_Config: Any = TransformerConfig


class LayoutAttention(nn.Module):
    """The core attention: the layout decides which tokens attend to which."""

    def __init__(self, config: Any, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.layer = layer_number - 1

    @override
    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, attention_bias: Any, **__: Any) -> Tensor:
        """[tokens, 1, heads, dim] each → [tokens, 1, heads × dim]."""
        q, k, v = (x[:, 0] for x in (query, key, value))
        return attention_bias.attend(self.layer, q, k, v, q.shape[-1] ** -0.5, None).flatten(1)[:, None]


class Norm(nn.Module):
    """RMSNorm as Hugging Face computes it; Megatron's own does not work with sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        weight: Any = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        weight.sequence_parallel = config.sequence_parallel  # then Megatron sums its gradient over the ranks
        self.weight = weight

    @override
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class PackedModel(_Model):
    """One stage of the model: tokens or states in, states out. On the last stage `score` turns them into a head's numbers."""

    names: Names
    frequencies: Tensor

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, **given: Any) -> tuple[Any, ...]:
        states, _, *rest = super()._preprocess(input_ids, position_ids, **given)
        angles = torch.outer(position_ids[0].float(), self.frequencies)
        return states, torch.cat((angles, angles), -1)[:, None, None], *rest

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    def score(
        self, states: Tensor, before: Tensor, chosen: Tensor, settings: Settings, asked: TeacherPass | Target | None
    ) -> Numbers:
        """The head's numbers for the chosen tokens, from the last stage's states."""
        if self.config.sequence_parallel:  # every rank computes all of the loss, so gradients are split, not summed
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
        hidden = states[:, 0].index_select(0, before)
        if self.names.kind != "vocabulary":
            return (self.value_head(hidden)[:, 0].float(),)
        how = {"entropy_gradient": settings.entropy_gradient, "asked": asked}
        return VocabularyHead(self)(hidden, chosen, settings.temperature, **how)


class VocabularyHead(LanguageModelHead):
    """The head of a model whose vocabulary is divided over tensor-parallel ranks, the last of which hold rows that only pad."""

    def __init__(self, model: Any) -> None:
        rank, size = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        )
        self.weight = model.shared_embedding_or_output_weight() if model.names.tied else model.output_layer.weight
        rows = model.names.vocabulary // size
        self.own = min(rows, max(0, model.names.config.vocab_size - rank * rows))
        group = parallel_state.get_tensor_model_parallel_group()
        self.parallel = TensorParallel(group, rank, size, vocabulary=rank * rows) if size > 1 else None

    @override
    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)[:, : self.own]


def build(spec: LearnerSpec, config: Any, names: Names, frequencies: Tensor) -> Any:
    """This rank's part of the model, with parameters that are not filled yet."""
    made = _config(spec, config, names)
    layer = get_gpt_layer_local_spec(
        num_experts=names.experts or None, moe_grouped_gemm=False, qk_layernorm=made.qk_layernorm, normalization="RMSNorm"
    )
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = LayoutAttention
    if made.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    model: Any = PackedModel(
        made,
        TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(made), layer_norm=Norm),
        vocab_size=names.vocabulary,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="none",
        share_embeddings_and_output_weights=names.tied,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    if names.kind != "vocabulary" and model.post_process:
        del model.output_layer
        model.value_head = nn.Linear(names.width, 1, bias=names.kind == "value", dtype=made.params_dtype)
    model.names = names
    model.to(torch.cuda.current_device())
    model.frequencies = frequencies.to(torch.cuda.current_device())
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


FIXED: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
    "calculate_per_token_loss": True,  # the loss of a token is its share of the whole batch: gradients are sums
    "perform_initialization": False,
    "persist_layer_norm": False,
    **dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"), False),
    **dict.fromkeys(("apply_rope_fusion", "gradient_accumulation_fusion"), False),
}
"""Megatron's config of all models: no fused kernels, which need TransformerEngine or Apex."""


def _config(spec: LearnerSpec, config: Any, names: Names) -> Any:
    """Megatron's config of a model."""
    mesh, dtype = spec.ranks.mesh, DTYPES[spec.dtype]
    more: dict[str, Any] = {}
    if spec.recompute_activations:
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if names.experts:
        more |= {
            "num_moe_experts": names.experts,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_ffn_hidden_size": expert_width(config),
            "moe_router_load_balancing_type": "none",
            "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
        }
    return _Config(
        num_layers=config.num_hidden_layers,
        hidden_size=names.width,
        num_attention_heads=names.heads,
        num_query_groups=names.groups,
        kv_channels=names.head,
        ffn_hidden_size=config.intermediate_size,
        layernorm_epsilon=config.rms_norm_eps,
        add_qkv_bias=names.family.biases,
        qk_layernorm=names.family.norms,
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        expert_model_parallel_size=mesh.expert,
        expert_tensor_parallel_size=expert_tensor(mesh),
        sequence_parallel=sequence_parallel(spec),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **FIXED,
        **more,
    )


def sequence_parallel(spec: LearnerSpec) -> bool:
    """Whether ranks along `tensor` divide the tokens between layers."""
    return spec.parallel.sequence and spec.ranks.mesh.tensor > 1
