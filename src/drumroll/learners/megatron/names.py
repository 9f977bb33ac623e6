"""Which blocks of Hugging Face tensors each parameter of Megatron-Core consists of.

A parameter is a sequence of blocks of named tensors, one after another: Megatron interleaves queries, keys and values by
key-value head, and joins gate and up projection. The same map reads and writes weights, gradients and moments. It is plain
arithmetic; a config or a tensor that it cannot express is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from drumroll.errors import ConfigError, ModelError
from drumroll.learners.pieces import Block
from drumroll.models.score import SCORE
from drumroll.models.value import BODY

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """How a model type differs from Llama."""

    biases: bool = False  # of queries, keys and values
    norms: bool = False  # of queries and keys
    experts: str = ""  # the module that holds router and experts
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(biases=True),
    "qwen3": Family(norms=True),
    "qwen3_moe": Family(norms=True, experts="mlp"),
    "mixtral": Family(experts="block_sparse_moe", projections=("w1", "w3", "w2")),
}
"""By `model_type` of the config."""
ROPES = ("default", "linear", "llama3")
"""Rotary embeddings whose frequencies depend on the config only, and that scale nothing else."""


@dataclass(frozen=True)
class Rule:
    """The Hugging Face tensors of a parameter, and what tensor-parallel ranks divide: nothing, rows, columns, heads, vocabulary."""

    divides: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where a rank stands: its part of layers, experts and tensors."""

    layer: int = 0  # its first
    expert: int = 0  # its first
    tensor: tuple[int, int] = (0, 1)  # rank and size
    expert_tensor: tuple[int, int] = (0, 1)


class Names:
    """The map of one model, whose head is the `vocabulary`, a `value` or a `score`."""

    def __init__(self, config: Any, *, kind: str = "vocabulary", tensor: int) -> None:
        check_config(config)
        self.config, self.kind, self.family = config, kind, FAMILIES[config.model_type]
        self.width: int = config.hidden_size
        self.head: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.heads: int = config.num_attention_heads
        self.groups: int = config.num_key_value_heads
        self.experts: int = experts_of(config) if self.family.experts else 0
        self.vocabulary: int = -(-config.vocab_size // tensor) * tensor  # rows of the embedding with those that only pad
        self.tied = bool(config.tie_word_embeddings) and kind == "vocabulary"
        self.shapes = self._shapes()
        self.rules = self._rules()

    def _layer(self) -> dict[str, Shape]:
        """The tensors of a layer."""
        queries, keys = self.heads * self.head, self.groups * self.head
        found: dict[str, Shape] = {
            "self_attn.q_proj.weight": (queries, self.width),
            "self_attn.k_proj.weight": (keys, self.width),
            "self_attn.v_proj.weight": (keys, self.width),
            "self_attn.o_proj.weight": (self.width, queries),
        }
        if self.family.biases:
            found |= {f"self_attn.{x}_proj.bias": (keys if x != "q" else queries,) for x in "qkv"}
        if self.family.norms:
            found |= {f"self_attn.{x}_norm.weight": (self.head,) for x in "qk"}
        found |= self._mlp()
        return found | {"input_layernorm.weight": (self.width,), "post_attention_layernorm.weight": (self.width,)}

    def _mlp(self) -> dict[str, Shape]:
        gate, up, down = self.family.projections
        inner = expert_width(self.config) if self.experts else self.config.intermediate_size
        within = {gate: (inner, self.width), up: (inner, self.width), down: (self.width, inner)}
        if not self.experts:
            return {f"mlp.{name}.weight": shape for name, shape in within.items()}
        module = self.family.experts
        each = {f"{module}.experts.{e}.{name}.weight": s for e in range(self.experts) for name, s in within.items()}
        return {f"{module}.gate.weight": (self.experts, self.width), **each}

    def _shapes(self) -> dict[str, Shape]:
        """All tensors, whole, in the order of the files."""
        body = f"{BODY}." if self.kind == "value" else "model."
        vocabulary = (self.config.vocab_size, self.width)
        found: dict[str, Shape] = {f"{body}embed_tokens.weight": vocabulary}
        for layer in range(self.config.num_hidden_layers):
            found |= {f"{body}layers.{layer}.{name}": shape for name, shape in self._layer().items()}
        found[f"{body}norm.weight"] = (self.width,)
        if self.kind != "vocabulary":
            return found | (
                {SCORE: (1, self.width)} if self.kind == "score" else {"head.weight": (1, self.width), "head.bias": (1,)}
            )
        return found if self.tied else found | {"lm_head.weight": vocabulary}

    def _rules(self) -> dict[str, Rule]:
        """The rule of each parameter, with `{layer}` and `{expert}` in the place of numbers."""
        body = f"{BODY}." if self.kind == "value" else "model."
        embedding = f"{body}embed_tokens.weight"
        top = {
            "embedding.word_embeddings.weight": Rule("vocabulary", (embedding,)),
            "output_layer.weight": Rule("vocabulary", (embedding if self.tied else "lm_head.weight",)),
            "decoder.final_layernorm.weight": Rule("nothing", (f"{body}norm.weight",)),
            "value_head.weight": Rule("nothing", (SCORE if self.kind == "score" else "head.weight",)),
            "value_head.bias": Rule("nothing", ("head.bias",)),
        }
        gate, up, down = self.family.projections
        inner = f"{self.family.experts}.experts.{{expert}}" if self.experts else "mlp"
        mlp = "mlp.experts.local_experts.{expert}" if self.experts else "mlp"
        layer = {
            "input_layernorm.weight": Rule("nothing", ("input_layernorm.weight",)),
            "pre_mlp_layernorm.weight": Rule("nothing", ("post_attention_layernorm.weight",)),
            **{
                f"self_attention.linear_qkv.{kind}": Rule("heads", tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv"))
                for kind in ("weight", "bias")
            },
            **{f"self_attention.{x}_layernorm.weight": Rule("nothing", (f"self_attn.{x}_norm.weight",)) for x in "qk"},
            "self_attention.linear_proj.weight": Rule("columns", ("self_attn.o_proj.weight",)),
            f"{mlp}.linear_fc1.weight": Rule("rows", (f"{inner}.{gate}.weight", f"{inner}.{up}.weight")),
            f"{mlp}.linear_fc2.weight": Rule("columns", (f"{inner}.{down}.weight",)),
            "mlp.router.weight": Rule("nothing", (f"{self.family.experts}.gate.weight",)),
        }
        prefix = f"{body}layers.{{layer}}."
        each = {
            f"decoder.layers.{{layer}}.{name}": Rule(r.divides, tuple(prefix + n for n in r.names)) for name, r in layer.items()
        }
        return top | each

    def rule(self, parameter: str) -> Rule:
        """The rule of a parameter by its name on a rank."""
        return self.rules[NUMBERED.sub(lambda found: f"{found[1]}.{{{KINDS[found[1]]}}}", parameter)]

    def blocks(self, parameter: str, place: Place) -> list[Block]:
        """The blocks that a rank's parameter consists of, in its order; rows that only pad the vocabulary have none."""
        rule, numbers = self.rule(parameter), {KINDS[kind]: int(number) for kind, number in NUMBERED.findall(parameter)}
        at = {"layer": place.layer + numbers.get("layer", 0), "expert": place.expert + numbers.get("expert", 0)}
        names = [name.format(**at) for name in rule.names]
        rank, size = place.expert_tensor if "expert" in numbers else place.tensor
        if rule.divides == "heads":
            return self._heads(names, rank, size)
        return [block for name in names for block in self._part(name, rule.divides, rank, size)]

    def _part(self, name: str, divides: str, rank: int, size: int) -> list[Block]:
        shape = self.shapes[name]
        offsets, sizes = [0] * len(shape), list(shape)
        if divides != "nothing":
            dim = 1 if divides == "columns" else 0
            each = (self.vocabulary if divides == "vocabulary" else shape[dim]) // size
            offsets[dim] = min(rank * each, shape[dim])
            sizes[dim] = min(each, shape[dim] - offsets[dim])
        return [Block(name, shape, tuple(offsets), tuple(sizes))] if all(sizes) else []

    def _heads(self, names: list[str], rank: int, size: int) -> list[Block]:
        """Of each of a rank's key-value heads: its queries, its key, its value."""
        own, found = self.groups // size, list[Block]()
        for group in range(rank * own, (rank + 1) * own):
            for name in names:
                rows, *rest = self.shapes[name]
                each = rows // self.groups
                found.append(Block(name, self.shapes[name], (group * each, *(0 for _ in rest)), (each, *rest)))
        return found

    def file_name(self, name: str) -> str:
        """The name of a tensor in the model's files."""
        return f"model.{name.removeprefix(f'{BODY}.')}" if name.startswith(f"{BODY}.") else name

    def check_files(self, found: Iterable[str], model: str) -> None:
        """Refuse files with a tensor that the map does not know, or without one that it needs."""
        known = {self.file_name(name) for name in self.shapes if not name.startswith(("head.", SCORE))}
        found = set(found)
        ignored = {SCORE, *(["lm_head.weight"] if self.tied or self.kind != "vocabulary" else [])}
        for name in sorted(found - known - ignored):
            if not name.endswith("rotary_emb.inv_freq"):
                raise ModelError(f"model: {model} has the tensor {name}, which backend: megatron does not know; use torch.")
        for name in sorted(known - found):
            raise ModelError(f"model: the files of {model} hold no tensor {name}; load it with transformers, and save it anew.")


KINDS = {"layers": "layer", "local_experts": "expert"}
NUMBERED = re.compile(rf"\b({'|'.join(KINDS)})\.(\d+)")


def experts_of(config: Any) -> int:
    """How many experts each layer has; 0 for dense models."""
    return getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0


def expert_width(config: Any) -> int:
    """The width of an expert."""
    return getattr(config, "moe_intermediate_size", None) or config.intermediate_size


def check_config(config: Any) -> None:
    """Refuse a model that the map cannot express, rather than compute it wrongly."""
    kind = config.model_type
    if kind not in FAMILIES:
        raise ModelError(
            f"model: backend: megatron knows models of type {', '.join(FAMILIES)}, not '{kind}'; use backend: torch or deepspeed."
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    windows = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    features = {
        "biases": getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False),
        f"the activation {config.hidden_act}": config.hidden_act != "silu",
        f"rotary embeddings of type '{rope}'": rope not in ROPES,
        "sliding windows": bool(windows),
        "layers without experts": bool(getattr(config, "mlp_only_layers", None))
        or getattr(config, "decoder_sparse_step", 1) != 1,
    }
    for feature, present in features.items():
        if present:
            raise ModelError(f"model: backend: megatron does not compute {feature} of this {kind} model; use backend: torch.")


def check_mesh(config: Any, mesh: Any, *, sequence: bool) -> None:
    """Refuse a mesh that does not divide the model, with the arithmetic."""
    experts = experts_of(config) if FAMILIES[config.model_type].experts else 0
    inner = expert_width(config) if experts and mesh.expert == 1 else config.intermediate_size
    divided = [
        ("tensor", "heads", config.num_attention_heads),
        ("tensor", "key-value heads", config.num_key_value_heads),
        ("tensor", "columns of the MLP", inner),
        ("pipeline", "layers", config.num_hidden_layers),
        ("expert", "experts", experts),
    ]
    for axis, what, count in divided:
        size = getattr(mesh, axis)
        if size > 1 and (count == 0 or count % size):
            fitting = max((n for n in range(1, size) if count % n == 0), default=1) if count else 1
            raise ConfigError(
                f"parallel: {axis} {size} does not divide the model's {count} {what}; nearest that does: {axis} {fitting}."
            )
    if experts and mesh.tensor > 1 and not sequence:
        raise ConfigError("parallel: experts with tensor > 1 need sequence: true in Megatron-Core.")
