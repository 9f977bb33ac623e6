"""Mixtures of experts train, generate, save and export like any other model, under the names of their files."""

import contextlib

import pytest
import torch
import transformers as hf
from test_parallel import FAMILIES, LIMITS, Matrix

from drumroll.models.shape import shape_of

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURES = {
    "Qwen3-MoE": hf.Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=40, norm_topk_prob=True),
    "Mixtral": hf.MixtralConfig(**SIZES, num_local_experts=8),
}


# --- the shape ---


@pytest.mark.parametrize(("family", "width"), [("Qwen3-MoE", 40), ("Mixtral", 48)])
def test_a_shape_counts_experts(family, width):
    config = MIXTURES[family]
    with torch.device("meta"):
        module = hf.AutoModelForCausalLM.from_config(config)
    shape = shape_of(config.to_dict())
    assert shape.parameters == sum(p.numel() for p in module.parameters())
    assert shape.layer == sum(p.numel() for p in module.model.layers[0].parameters())
    assert (shape.experts, shape.visits, shape.expert_width, shape.mlp) == (8, 2, width, 2 * width)
    assert shape.routed_layer == 8 * 3 * width * 64
    assert shape.routed == 2 * shape.routed_layer
    dense = shape_of(hf.Qwen3Config(**SIZES).to_dict())
    assert (dense.experts, dense.visits, dense.expert_width, dense.routed, dense.routed_layer) == (0, 0, 0, 0, 0)


# --- training ---

FAMILIES.update(MIXTURES)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    with contextlib.closing(Matrix(tmp_path_factory.mktemp("models"))) as made:
        yield made


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("layout", "family", "role"), [("shard 2", "Qwen3-MoE", "actor"), ("data 2 × shard 2", "Mixtral", "critic")]
)
def test_mixtures_train_as_one_process(matrix, layout, family, role, dtype):
    found = matrix.compare(layout, family, role, dtype)
    assert found.within(LIMITS[dtype]), found


@pytest.mark.slow
@pytest.mark.parametrize("role", ["actor", "critic", "LoRA"])
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("layout", ["data 2", "shard 2", "shard 4", "data 2 × shard 2"])
def test_every_layout_trains_mixtures_as_one_process(matrix, layout, family, role):
    for dtype, limits in LIMITS.items():
        if role != "LoRA" or layout != "data 2":
            found = matrix.compare(layout, family, role, dtype)
            assert found.within(limits), (dtype, found)
