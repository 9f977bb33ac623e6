"""From a model's name to a module under our attention, and its tokenizer.

A name is a built-in (`tiny`), a local Hugging Face directory, or a hub id. What goes wrong here is the user's
to fix, so every failure says what was looked for and what to do offline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from drumroll.errors import ConfigError, ModelError, did_you_mean
from drumroll.models import attention, tiny

T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class LoadedModel:
    """A causal language model, its tokenizer, and the tokens that end a completion."""

    module: Any
    tokenizer: Any
    eos: frozenset[int]


def pick_device(device: str) -> torch.device:
    """`auto` is CUDA when there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device: {device} was asked for, but torch sees no CUDA device here; use 'auto' or 'cpu'.")
    return torch.device(device)


def load(
    name: str, *, dtype: str = "float32", device: str = "cpu", seed: int = 0, recompute_activations: bool = False
) -> LoadedModel:
    """Load a model and put it under drumroll's attention."""
    _quiet_transformers()
    attention.register()
    if name == "tiny-random":
        module, tokenizer = tiny.random_model(seed), tiny.tokenizer()
    else:
        module, tokenizer = _from_pretrained(str(tiny.SHIPPED) if name == "tiny" else name)
    module = module.to(device=pick_device(device), dtype=DTYPES[dtype])
    module.set_attn_implementation(attention.NAME)
    module.eval()
    if recompute_activations:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    return LoadedModel(module, tokenizer, _eos(module, tokenizer))


def load_tokenizer(name: str) -> Any:
    """A model's tokenizer alone."""
    if name in tiny.NAMES:
        return tiny.tokenizer()
    from transformers import AutoTokenizer

    _quiet_transformers()
    return _pretrained(name, AutoTokenizer.from_pretrained)


def load_classifier(name: str) -> tuple[Any, int]:
    """A sequence classifier, and the token to pad with, which it must know to find the end of a row."""
    from transformers import AutoModelForSequenceClassification

    _quiet_transformers()

    def read(source: str) -> tuple[Any, dict[str, Any]]:
        return AutoModelForSequenceClassification.from_pretrained(source, dtype=torch.float32, output_loading_info=True)

    module, info = _pretrained(name, read)
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"model: {name} is no sequence classifier: it has no {missing[0]}. Train one, or name another.")
    config, tokenizer = module.config, load_tokenizer(name)
    known = (config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    config.pad_token_id = next(token for token in known if token is not None)
    return module, int(config.pad_token_id)


def _from_pretrained(name: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def both(source: str) -> tuple[Any, Any]:
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), AutoTokenizer.from_pretrained(source)

    return _pretrained(name, both)


def _pretrained(name: str, read: Callable[[str], T]) -> T:
    """Read a directory or hub id; what goes wrong is told in the user's terms."""
    path = Path(name).expanduser()
    local = path.exists()
    if local and not (path / "config.json").exists():
        raise ModelError(f"model: {name} is not a Hugging Face model directory: it has no config.json.")
    if not local and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ModelError(f"model: there is no directory {name}.")
    if not local and "/" not in name and did_you_mean(name, tiny.NAMES):
        raise ModelError(f"model: '{name}' is not known.{did_you_mean(name, tiny.NAMES)}")
    source = str(path) if local else name
    try:
        return read(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        if local:
            raise ModelError(f"model: {name} could not be loaded: {reason}") from error
        raise ModelError(
            f"model: '{name}' is neither a local directory nor a built-in ({', '.join(tiny.NAMES)}), and it could not be "
            f"fetched from the Hugging Face hub. Offline, give the path of a directory "
            f"with config.json, weights and tokenizer, or run `make smollm2` and use its path."
        ) from error


def _eos(module: Any, tokenizer: Any) -> frozenset[int]:
    """All tokens that end a completion: the tokenizer's and the generation config's."""
    listed = getattr(module.generation_config, "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])}
    return frozenset(i for i in ids if i is not None)


def kv_shapes(module: Any) -> list[tuple[int, int]]:
    """(kv heads, head dim) of every attention layer, read from the key projections' configuration."""
    config = module.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return [(heads, dim)] * config.num_hidden_layers


def _quiet_transformers() -> None:
    """Its progress bars and advice would tear the live terminal."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
