"""LoRA adapters (peft): put on a model, switched off for a moment, merged for export."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from drumroll.config.roles import LoraConfig
from drumroll.errors import ConfigError, ModelError
from drumroll.models.blocks import parameters_on_meta
from drumroll.models.experts import has_experts
from drumroll.models.loading import LoadedModel

BASE = ".base_layer."
"""What peft adds to the name of a layer that has an adapter."""


def add_adapters(model: LoadedModel, config: LoraConfig, *, empty: bool = False) -> None:
    """Freeze the weights and put trainable adapters beside them; they change nothing until trained.

    With `empty` their parameters are on the meta device, like those of the model. Experts and routers have none.
    """
    mixture = has_experts(model.module)
    if mixture and config.targets == "all-linear":  # peft would count them in
        linear = {name.rpartition(".")[2] for name, m in model.module.base_model.named_modules() if isinstance(m, nn.Linear)}
        config = config.model_copy(update={"targets": sorted(linear)})
    try:
        with parameters_on_meta() if empty else nullcontext():
            model.module.add_adapter(_peft(config))
    except ValueError as error:
        raise ModelError(f"roles.actor.lora: {str(error).strip().splitlines()[0]}") from error
    if mixture and any("experts." in name for name in adapter_parameters(model.module)):
        raise ModelError(
            "roles.actor.lora: the experts of a mixture get no adapters; name other layers in targets, for example [q_proj, v_proj]."
        )
    if not empty:
        with torch.no_grad():
            for name, parameter in model.module.named_parameters():
                if is_adapter(name):
                    parameter.copy_(first_adapter(name, tuple(parameter.shape)))


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_" in name


def first_adapter(name: str, shape: tuple[int, ...]) -> Tensor:
    """The value that an adapter's parameter starts from, the same on every layout: B is 0, A is drawn as peft draws it."""
    if ".lora_A." not in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed((torch.initial_seed() + zlib.crc32(name.encode())) % 2**63)
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


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


def share_adapters(source: Any, target: Any, beside: str) -> None:
    """Register the adapters of `source` with a module around the same body, which trains the layer `beside` whole."""
    configs = {name: copy.copy(config) for name, config in source.peft_config.items()}
    for config in configs.values():
        config.task_type, config.modules_to_save = "SEQ_CLS", [beside]
    target.peft_config, target._hf_peft_config_loaded = configs, True


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


def base_weights(module: Any) -> Iterator[tuple[str, nn.Parameter, str]]:
    """The parameters under the adapters, each with its name, and the path of the layer whose adapters change it, or nothing."""
    from peft.tuners.lora import LoraLayer

    layers = {path for path, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    for name, parameter in module.named_parameters():
        path, _, last = name.rpartition(BASE)
        if path in layers or not any(name.startswith(f"{path}.") for path in layers):
            yield name, parameter, path if last == "weight" else ""


def merge(layer: Any, path: str, weight: Tensor, adapters: Mapping[str, Tensor]) -> Tensor:
    """A copy of a layer's weight with its adapters added, given all adapters by name."""
    merged, precision = weight.clone(), torch.promote_types(weight.dtype, torch.float32)
    for adapter in layer.active_adapters:
        a, b = (adapters[f"{path}.lora_{side}.{adapter}.weight"].to(weight.device, precision) for side in "AB")
        delta = (b @ a) * layer.scaling[adapter]
        merged += (delta.T if layer.fan_in_fan_out else delta).to(merged.dtype)
    return merged
