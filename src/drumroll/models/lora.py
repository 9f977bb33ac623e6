"""LoRA adapters (peft): put on a model, switched off for a moment, merged for export."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
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


def base_weights(module: Any) -> Iterator[tuple[str, Tensor, Any]]:
    """The parameters under the adapters, by their names without adapters, each with the layer whose adapters change it or None."""
    from peft.tuners.lora import LoraLayer

    layers = {path: layer for path, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    for name, parameter in module.named_parameters():
        path, _, last = name.rpartition(".base_layer.")
        if path in layers:
            yield f"{path}.{last}", parameter.detach(), layers[path] if last == "weight" else None
        elif not any(name.startswith(f"{path}.") for path in layers):
            yield name, parameter.detach(), None


def merge(layer: Any, weight: Tensor) -> Tensor:
    """A copy of a layer's weight with its adapters added."""
    merged = weight.clone()
    with torch.no_grad():
        for adapter in layer.active_adapters:
            merged += layer.get_delta_weight(adapter).to(merged.dtype)
    return merged
