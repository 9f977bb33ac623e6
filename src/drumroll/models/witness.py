"""The witness: proof, when a model is loaded, that drumroll computes what transformers computes.

Learner and native engine run a model under drumroll's attention, which would silently drop what it does not know: a soft
cap, sinks, a layer that mixes tokens in its own way. The witness is a small float32 model of the same config class, with
one layer of every kind that the model has. Its log-probs through the learner's own path must equal those of
transformers' eager attention, under weights for which switching any feature off would show. One place decides, for
every role and engine: models that fail are refused.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from drumroll.batch import Path
from drumroll.errors import ModelError
from drumroll.models import attention, experts
from drumroll.models.head import score
from drumroll.models.prefix_tree import PrefixTree

TOLERANCE = 1e-4
"""Largest difference between log-probs of the two ways; float32 rounding is about 1e-6."""
VISIBLE = 100 * TOLERANCE
"""How far switching a feature off must move log-probs before agreement with it proves anything."""
SCALES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Of the random weights, tried in this order until every feature is visible."""
WINDOW = 8
HEADS, HEAD_DIM, WIDTH, EXPERTS, VOCAB = 4, 16, 32, 4, 64
LARGEST = 2**25
"""Parameters of the small model: a proof takes less than a second."""
SEQUENCES = [[*range(26)], [*range(12), *range(26, 35)], [*range(35, 45)]]
"""Nodes of a tree of tokens: two sequences with a prompt in common, both longer than the window, and a third."""
EAGER = "drumroll-witness"
"""Name of transformers' own eager attention with a feature switched off."""

OUTSIDE = "mixing of tokens outside attention"

_VERDICTS: dict[tuple[type, str], str | None] = {}


def prove(module: Any) -> None:
    """Refuse a model whose log-probs drumroll would not compute as transformers does. Its weights are not looked at."""
    small = [_shrunk(module), _shrunk(module, whole_heads=True)]
    key = (type(module), small[0].to_json_string())
    if key not in _VERDICTS:
        _VERDICTS[key] = _verdict(module, small)
    if _VERDICTS[key] is not None:
        name = module.config.get_text_config().model_type
        raise ModelError(f"model: type '{name}' cannot be used: {_VERDICTS[key]}; docs/models.md says which types can.")


def kinds(module: Any) -> list[str]:
    """The kind of every layer: its entry in the config's `layer_types`, or its class."""
    text, layers = module.config.get_text_config(), decoder_layers(module)
    named = getattr(text, "layer_types", None) or ()
    return [str(named[i]) if i < len(named) else type(layer).__name__ for i, layer in enumerate(layers)]


# --- the small model ---


def decoder_layers(module: Any) -> nn.ModuleList:
    """The decoder layers."""
    count = module.config.get_text_config().num_hidden_layers
    for part in module.base_model.modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return part
    raise ModelError(f"model: {type(module).__name__} has no list of its {count} layers, so it cannot be checked.")


def _depth(module: Any) -> int:
    """How many of the first layers include one of every kind."""
    signatures = [(kind, _signature(layer)) for kind, layer in zip(kinds(module), decoder_layers(module), strict=True)]
    return 1 + max(signatures.index(one) for one in signatures)


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    """What distinguishes a layer from others: its parts and their settings."""
    plain = (bool, int, float, str, type(None))
    return tuple(
        (name, type(part).__name__, tuple((k, v) for k, v in vars(part).items() if isinstance(v, plain) and "layer_i" not in k))
        for name, part in layer.named_modules()
    )


def _shrunk(module: Any, *, whole_heads: bool = False) -> Any:
    """A config of the same class with few and narrow layers, few tokens and a short window."""
    config = copy.deepcopy(module.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    text, depth = config.get_text_config(), _depth(module)
    for other in (getattr(config, name, None) for name in config.sub_configs):
        if other is not None and other is not text and hasattr(other, "num_hidden_layers"):
            other.num_hidden_layers = 1
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:depth])
        elif name in ("sliding_window", "attention_chunk_size", "window_size") and value:
            setattr(text, name, WINDOW)
        elif isinstance(value, int):
            setattr(text, name, _narrow(name, value))
    if hasattr(text, "num_attention_heads"):
        _narrow_heads(text, whole=whole_heads)
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = depth, VOCAB, None
    return config


def _narrow(name: str, value: int) -> int:
    """A small size in place of a large one."""
    if name in ("num_experts", "num_local_experts", "n_routed_experts"):
        return min(value, EXPERTS)
    if name in ("num_experts_per_tok", "n_group", "topk_group"):
        return min(value, 2 if name == "num_experts_per_tok" else 1)
    if name.endswith(("intermediate_size", "lora_rank", "ffn_dim", "n_inner")):
        return min(value, WIDTH)
    return value


def _narrow_heads(text: Any, *, whole: bool) -> None:
    """Few heads, shared among queries as before, and narrow unless a list in the config is as long as they are wide."""
    heads, shared = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    ropes = getattr(text, "rope_parameters", None) or {}
    listed = any(isinstance(v, list) for rope in (ropes, *ropes.values()) if isinstance(rope, dict) for v in rope.values())
    fits = (d for d in range(dim // HEAD_DIM, 1, -1) if dim % d == 0 and dim // d % 2 == 0)  # rotary halves
    divisor = 1 if whole or listed else next(fits, 1)
    for name, value in list(vars(text).items()):
        if name.endswith("head_dim") and isinstance(value, int):
            setattr(text, name, value // divisor)
    text.num_attention_heads, text.hidden_size = HEADS, HEADS * (dim // divisor)
    if shared is not None:
        text.num_key_value_heads = HEADS if shared == heads else 1 if shared == 1 else 2


def _made(kind: Any, config: Any) -> Any:
    """The model of a config, if it is small."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind._from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"it has {size:,} parameters")
    return kind._from_config(config, attn_implementation="eager", dtype=torch.float32)


def _fill(model: nn.Module, start: list[Tensor], scale: float) -> None:
    """Weights of the wanted scale, the same in every process, without the global random numbers."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter, first in zip(model.parameters(), start, strict=True):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * scale / max(parameter.shape[-2:]) ** 0.5)
            else:
                parameter.copy_(first + 0.1 * scale * noise)


# --- transformers' eager attention, with something switched off ---


class _Switch:
    """Runs eager attention without one feature, and notes what each layer brings."""

    def __init__(self, off: str = "") -> None:
        self.off = off
        self.features: dict[int, set[str]] = {}

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, more: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        length = q.shape[2]
        causal = torch.full((length, length), torch.finfo(q.dtype).min).triu(1)[None, None]
        found = {name for name, value in more.items() if value is not None and name not in ("dropout", "scaling")}
        if mask is not None and not torch.equal(mask == 0, (causal == 0).expand_as(mask)):
            found.add("mask")
        own = {name for name, parameter in module._parameters.items() if parameter is not None}
        self.features[module.layer_idx] = found | own
        if self.off == "attention":
            return torch.zeros_like(v[:, :1].expand(-1, q.shape[1], -1, -1)).transpose(1, 2), None
        if self.off == "mask":
            mask = causal
        if self.off == "scaling":
            more["scaling"] = q.shape[-1] ** -0.5
        elif self.off in more:
            more[self.off] = None
        kept = getattr(module, self.off).detach().clone() if self.off in own else None
        if kept is not None:  # a sink so low that nothing flows into it
            module._parameters[self.off].data.fill_(-1e4)
        try:
            return _eager_of(module)(module, q, k, v, mask, **more)
        finally:
            if kept is not None:
                module._parameters[self.off].data.copy_(kept)


def _eager_of(module: Any) -> Callable[..., tuple[Tensor, Any]]:
    """The eager attention in the file that defines a module's class."""
    return next(f for c in type(module).__mro__ if (f := getattr(sys.modules[c.__module__], "eager_attention_forward", None)))


def _switched(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, witness: Any = None, **more: Any
) -> Any:
    if witness is None:
        raise TypeError("keywords given to the model do not reach its attention")
    return witness(module, query, key, value, attention_mask, more)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    attention.register()
    AttentionInterface.register(EAGER, _switched)
    AttentionMaskInterface.register(EAGER, eager_mask)


# --- the proof ---


class _Trial:
    """The witness model, and the ways to run it."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.start = [parameter.detach().clone() for parameter in model.parameters()]
        self.tokens = torch.randint(VOCAB, (45,), generator=torch.Generator().manual_seed(1))
        self.outputs: list[Tensor] = []  # of the layers, in the last run
        for layer in decoder_layers(model):
            layer.register_forward_hook(self._note)

    def _note(self, layer: nn.Module, given: Any, out: Any) -> None:
        self.outputs.append(out if isinstance(out, Tensor) else out[0])

    def eager(self, nodes: list[int], *, off: str | None = None, tokens: Tensor | None = None, **more: Any) -> Tensor:
        """The log-probs of a sequence's tokens after the first by transformers, with a feature switched off if asked."""
        self.model.set_attn_implementation("eager" if off is None else EAGER)
        experts.use(self.model, "eager")
        if off is not None:
            self.switch = more["witness"] = _Switch(off)
        row = (self.tokens if tokens is None else tokens)[nodes]
        self.outputs.clear()
        logits = self.model(input_ids=row[None], use_cache=False, **more).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]

    def ours(self) -> Tensor:
        """The log-probs of all sequences as the learner computes them."""
        self.model.set_attn_implementation(attention.NAME)
        experts.use(self.model)
        paths = [Path(torch.tensor(nodes), start=12 if i == 1 else 0) for i, nodes in enumerate(SEQUENCES)]
        before = torch.cat([path.nodes[:-1] for path in paths])
        chosen = self.tokens[torch.cat([path.nodes[1:] for path in paths])]
        self.outputs.clear()
        layout = PrefixTree(paths, torch.device("cpu"))
        return score(self.model, self.tokens, layout, before, chosen, 1.0, entropy_gradient=False)[0]

    def effects(self) -> dict[str, float]:
        """How far switching each feature off moves the log-probs of the first sequence."""
        nodes, text = SEQUENCES[0], self.model.config.get_text_config()
        plain = self.eager(nodes, off="")
        names = sorted(set().union(*self.switch.features.values()))
        moved = {name: plain - self.eager(nodes, off=name) for name in (*names, "scaling", "attention")}
        moved["positions"] = plain - self.eager(nodes, position_ids=torch.zeros(1, len(nodes), dtype=torch.int64))
        if cap := getattr(text, "final_logit_softcapping", None):
            text.final_logit_softcapping = None
            moved["final_logit_softcapping"] = plain - self.eager(nodes)
            text.final_logit_softcapping = cap
        other = self.tokens.clone()
        other[nodes[0]] = (other[nodes[0]] + 1) % VOCAB
        alone = [self.eager(nodes, off="attention", tokens=tokens)[1:] for tokens in (self.tokens, other)]
        moved[OUTSIDE] = (alone[0] - alone[1]).where((alone[0] - alone[1]).abs() > TOLERANCE / 100, 0.0)
        return {name: float(difference.abs().max()) for name, difference in moved.items()}


def _verdict(module: Any, small: list[Any]) -> str | None:
    """What is wrong with models of this class and config, or None."""
    _register()
    reason = ""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for config in small:
            try:
                trial = _Trial(_made(type(module), config))
                trial.eager(SEQUENCES[0])
            except Exception as error:  # whatever a foreign class raises when its sizes do not fit
                reason = _first_line(error)
                continue
            return _judge(trial)
    return f"no small model of class {type(module).__name__} could be made to check it ({reason})"


def _judge(trial: _Trial) -> str | None:
    """Compare both ways under weights that show every feature."""
    effects, hidden = dict[str, float](), list[str]()
    for scale in SCALES:
        _fill(trial.model, trial.start, scale)
        try:
            effects = trial.effects()
        except Exception as error:
            return f"it does not run under another attention ({_first_line(error)})"
        hidden = [name for name, effect in effects.items() if 0 < effect < VISIBLE]
        if not hidden:
            break
    if hidden:
        return f"its log-probs hardly show whether {hidden[0]} is computed"
    features, expected, outputs = trial.switch.features, list[Tensor](), list[list[Tensor]]()
    for nodes in SEQUENCES:
        expected.append(trial.eager(nodes))
        outputs.append([out[0] for out in trial.outputs])
    try:
        gap = float((trial.ours() - torch.cat(expected)).abs().max())
        problem = (
            f"its log-probs differ from those under transformers' eager attention by {gap:.2g}" if gap > TOLERANCE else None
        )
    except Exception as error:  # foreign code, under an attention that it may not expect
        problem = f"it does not run under drumroll's attention ({_first_line(error)})"
    if problem is None:
        return None
    for i, (kind, layer, own) in enumerate(zip(kinds(trial.model), decoder_layers(trial.model), trial.outputs, strict=False)):
        pairs = zip(SEQUENCES, outputs, strict=True)
        if any(_relative(own[0, nodes], theirs[i]) > TOLERANCE / 10 for nodes, theirs in pairs):
            return f"its layers of type {kind} ({type(layer).__name__}) {_why(features.get(i), effects)}"
    return problem


def _why(features: set[str] | None, effects: dict[str, float]) -> str:
    """Why a layer differs, given the features that it brings to attention, if it calls it at all."""
    unknown = sorted(f for f in features or () if effects.get(f) and not (f == "mask" and "sliding_window" in (features or ())))
    if features is not None and unknown:
        named = " and ".join("a mask that is not causal" if f == "mask" else f for f in unknown)
        return f"use {named}, which drumroll's attention does not compute"
    if features is None or effects[OUTSIDE]:
        return "mix tokens outside transformers' attention interface"
    return "differ from transformers' eager attention"


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-6))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
