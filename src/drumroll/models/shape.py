"""The shape of a model: its parameters by kind and its widths, as plain numbers, without its weights.

It comes from a local `config.json`, one in the hub's cache, or the table of the recipes' models below, so a memory plan
needs neither the hub nor the weights. transformers builds the module on the meta device, which counts exactly for
every family and allocates nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

_QWEN_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_QWEN_32B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
_QWEN_05B = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_QWEN_30B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
_SMOLLM2_135M = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-7B": _QWEN_7B,
    "Qwen/Qwen2.5-7B-Instruct": _QWEN_7B,
    "Qwen/Qwen2.5-0.5B": _QWEN_05B,
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN_05B,
    "Qwen/Qwen2.5-32B": _QWEN_32B,
    "Qwen/Qwen3-30B-A3B": _QWEN_30B,
    "Qwen/Qwen3-30B-A3B-Base": _QWEN_30B,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2_135M,
    "~/.cache/drumroll/smollm2-135m-instruct": _SMOLLM2_135M,
}
"""Public configs of the models that recipes name."""
EXPERTS = ".experts."
"""In the names of parameters that are the experts of a layer, one row each."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Parameters by kind and widths of a causal language model or a sequence classifier."""

    family: str
    """The model type, as transformers names it."""
    parameters: int
    """All parameters; tied weights count once."""
    embedding: int
    """Parameters of the token embedding."""
    head: int
    """Parameters of the output head; 0 if it is tied to the embedding."""
    replicated: int
    """Parameters of one dimension, norms and biases: tensor parallelism leaves them whole."""
    layers: int
    layer: int
    """Parameters of the largest layer."""
    matrix: int
    """The largest tensor of a layer."""
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    """Width of the MLP for one token; of a mixture of experts, of all experts that a token visits."""
    gated: bool
    """The MLP multiplies two projections (SwiGLU, GeGLU)."""
    norms: tuple[int, int]
    """Widths of a layer's norms, added up: over hidden states, and over queries and keys."""
    experts: int
    """Experts of a layer; 0 for a dense model."""
    visits: int
    """Experts that a token visits; 0 for a dense model."""
    expert_width: int
    """Width of one expert; 0 for a dense model."""
    routed: int
    """Parameters of all experts of all layers, without routers and experts that every token visits."""
    routed_layer: int
    """The same for the largest layer."""
    vocabulary: int

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head == 0

    @property
    def root(self) -> int:
        """Parameters outside the layers: embedding, head, final norm."""
        return max(self.parameters - self.layers * self.layer, self.embedding + self.head)

    @property
    def largest(self) -> int:
        """The largest tensor of the model."""
        return max(self.embedding, self.matrix)


@lru_cache
def find_shape(name: str, *, classifier: bool = False) -> ModelShape | None:
    """The shape of a named model; None if neither its config nor the table below is at hand."""
    config = _config(name)
    return None if config is None else shape_of(config, classifier=classifier)


def find_context(name: str) -> int | None:
    """The most tokens that a named model attends to; None if its config is not at hand or does not say."""
    config = _config(name) or {}
    text = config.get("text_config") or config
    found = (text.get(key) for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"))
    return next((value for value in found if isinstance(value, int)), None)


def architectures(name: str) -> list[str]:
    """The classes that a named model's config names; none if the config is not at hand."""
    return (_config(name) or {}).get("architectures") or []


def is_classifier(architectures: Iterable[str] | None) -> bool:
    """Whether models of these classes score sequences and write none."""
    return any(name.endswith("ForSequenceClassification") for name in architectures or ())


def shape_of(config: Mapping[str, Any], *, classifier: bool = False) -> ModelShape | None:
    """The shape that a `config.json` describes; None if transformers does not know such a model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    facts = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config", "dtype")}
    try:
        made = AutoConfig.for_model(config["model_type"], **facts)
        text = made.get_text_config()
        with torch.device("meta"):
            module = (AutoModelForSequenceClassification if classifier else AutoModelForCausalLM).from_config(text)
    except (KeyError, ValueError, AttributeError):
        return None
    return measure(module)


def measure(module: Any) -> ModelShape:
    """Count a module's parameters by kind, and read its widths."""
    import torch

    config = module.config.get_text_config()
    parameters = list(module.parameters())
    lists = [m for m in module.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == config.num_hidden_layers]
    layers = [dict(layer.named_parameters()) for layer in lists[0]]
    largest = max(layers, key=lambda layer: sum(p.numel() for p in layer.values()))
    embedding, output = module.get_input_embeddings().weight, module.get_output_embeddings()
    head = 0 if output is None or output.weight is embedding else output.weight.numel()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    mlp = {name: p for name, p in largest.items() if p.dim() >= 2 and "attn" not in name and "attention" not in name}
    visits = (getattr(config, "num_experts_per_tok", None) or 0) if any("expert" in name for name in mlp) else 0
    width = _mlp_width(config, visits)
    routed = [sum(p.numel() for name, p in layer.items() if EXPERTS in name) for layer in layers]
    return ModelShape(
        family=config.model_type,
        parameters=sum(p.numel() for p in parameters),
        embedding=embedding.numel(),
        head=head,
        replicated=sum(p.numel() for p in parameters if p.dim() < 2),
        layers=len(layers),
        layer=sum(p.numel() for p in largest.values()),
        matrix=max(p.numel() for p in largest.values()),
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp=width,
        gated=bool(visits) or sum(p.numel() for p in mlp.values()) > 2.5 * width * config.hidden_size,
        norms=_norms(largest, config.hidden_size, heads * head_dim, kv_heads * head_dim),
        experts=next((p.shape[0] for name, p in largest.items() if EXPERTS in name), 0),
        visits=visits,
        expert_width=width // visits if visits else 0,
        routed=sum(routed),
        routed_layer=max(routed),
        vocabulary=embedding.shape[0],
    )


def _mlp_width(config: Any, visits: int) -> int:
    if visits:
        return visits * (getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    return int(getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size)


def _norms(layer: Mapping[str, Any], hidden: int, queries: int, keys: int) -> tuple[int, int]:
    """The widths of a layer's norms; those of queries and keys are one for each head, or one for all."""
    names = [name.removesuffix(".weight") for name in layer if name.endswith(".weight") and layer[name].dim() == 1]
    inner = sum(queries if "q_" in name else keys for name in names if name.endswith(("q_norm", "k_norm")))
    return hidden * sum(not name.endswith(("q_norm", "k_norm")) for name in names), inner


def _config(name: str) -> Mapping[str, Any] | None:
    """The config of a model: a local one, one in the hub's cache, or the table's; None if none is at hand."""
    from drumroll.models import tiny

    if name in tiny.RANDOM:
        return tiny.config(**tiny.RANDOM[name]).to_dict()
    path = tiny.SHIPPED.get(name, Path(name).expanduser()) / "config.json"
    if not path.exists() and name not in KNOWN and name.count("/") == 1:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(name, "config.json")
        except HFValidationError:
            cached = None
        path = Path(cached) if isinstance(cached, str) else path
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return KNOWN.get(name)
