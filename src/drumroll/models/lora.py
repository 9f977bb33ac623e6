"""LoRA adapters (peft): put on a model, switched off for a moment, merged for export."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from drumroll.config.roles import LoraConfig
from drumroll.errors import ConfigError, ModelError
from drumroll.models.loading import LoadedModel


def add_adapters(model: LoadedModel, config: LoraConfig) -> None:
    """Freeze the weights and put trainable adapters beside them; they change nothing until trained."""
    try:
        model.module.add_adapter(_peft(config))
    except ValueError as error:
        raise ModelError(f"roles.actor.lora: {str(error).strip().splitlines()[0]}") from error


def _peft(config: LoraConfig) -> Any:
    try:
        import peft
    except ModuleNotFoundError:
        raise ConfigError("roles.actor.lora needs the package peft: pip install 'drumroll[lora]'.") from None
    return peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=config.targets, lora_dropout=0.0)


def peft_config(config: LoraConfig) -> dict[str, Any]:
    """The adapters' configuration as peft writes it."""
    return _peft(config).to_dict()


def has_adapters(module: Any) -> bool:
    """Whether adapters were put on it."""
    return bool(getattr(module, "_hf_peft_config_loaded", False))


def adapter_parameters(module: Any) -> dict[str, Tensor]:
    """The weights of its adapters by name; none where there are no adapters."""
    return {name: value for name, value in module.named_parameters() if ".lora_" in name}


@contextmanager
def without_adapters(module: Any) -> Generator[None]:
    """The model as it was before training; the same model where there are no adapters."""
    if not has_adapters(module):
        yield
        return
    module.disable_adapters()
    try:
        yield
    finally:
        module.enable_adapters()


def save_model(model: LoadedModel, folder: Path) -> None:
    """A plain Hugging Face directory; adapters are merged into it, and kept alone in `adapter/` beside."""
    module = model.module
    if has_adapters(module):
        module.save_pretrained(folder / "adapter")
        module = merged(module)
    module.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)


def merged(module: Any) -> Any:
    """A copy whose weights are those of the model with its adapters."""
    from peft.tuners.lora import LoraLayer

    plain = copy.deepcopy(module)
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge(safe_merge=True)
            parent, _, last = name.rpartition(".")
            setattr(plain.get_submodule(parent), last, layer.get_base_layer())
    plain._hf_peft_config_loaded = False
    return plain
