"""Writes a model as a plain Hugging Face directory, from an iterator that yields one whole tensor at a time.

A safetensors file begins with the names, types and places of its tensors. All are known beforehand, so each tensor is
written to its place as it comes, and none is kept. No rank ever needs room for the whole model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drumroll.models.blocks import local_tensor
from drumroll.models.file_names import as_in_files
from drumroll.models.loading import LoadedModel, name_padding
from drumroll.models.lora import BASE, base_weights, has_adapters, is_adapter, merge

SHARD_BYTES = 4 * 10**9
"""The size of a file at most, unless a single tensor is larger."""
DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"},
}
"""What safetensors calls the types."""
IN_PEFT = "base_model.model."
"""Stands before names in the files of adapters."""
LAYER = re.compile(r".*?\.\d+\.")
Named = tuple[str, Tensor]


def export_model(
    model: LoadedModel,
    weights: Iterable[Named],
    shapes: Mapping[str, tuple[int, ...]],
    folder: Path | None,
    *,
    whole: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
    dtype: torch.dtype | None = None,
    convert: bool = False,
) -> None:
    """Write the trained weights with config and tokenizer; adapters are merged, and kept alone in `adapter/` beside.

    All ranks call it together, and the first one gives the folder. `weights` yields the trained tensors, whole, in the order
    of `shapes`, both as the model's files hold them; `whole` brings the parts of any other tensor together, whose shapes may be
    given too. `dtype` is the type of the tensors, where it is not that of the module's parameters; with `convert` they may be
    of another type, and are written as `dtype`.
    """
    module, files = model.module, model.files or {}
    buffers = _buffers(module)
    if has_adapters(module):
        adapters = _save_adapters(model, weights, folder)
        whole_shapes = ((n.replace(BASE, "."), _outline(w, shapes.get(n))) for n, w, _ in base_weights(module))
        layout = dict(as_in_files(whole_shapes, files))
        if convert and dtype is not None:
            layout = {name: outline.to(dtype) for name, outline in layout.items()}
        weights = as_in_files(_merged(module, adapters, whole), files)
    else:
        dtypes = {name: dtype or parameter.dtype for name, parameter in module.named_parameters()}
        dtypes |= {block.name: dtypes[name] for name, blocks in files.items() if name in dtypes for block in blocks}
        layout = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()}
    if model.files is not None:
        buffers = dict(_original(module, buffers.items(), _converted(module, buffers)))
    layout |= {name: _outline(buffer) for name, buffer in buffers.items()}
    converted = model.files is None and _converted(module, layout)
    write = None if folder is None else _Writer(folder, dict(_original(module, layout.items(), converted)))
    for name, tensor in _original(module, chain(weights, buffers.items()), converted):
        if write is not None:
            write(name, tensor.to(write.layout[name].dtype) if convert else tensor)
    if folder is not None and write is not None:
        write.finish()
        _describe(model, folder, dtype or module.dtype)


def _merged(module: Any, adapters: Mapping[str, Tensor], whole: Callable[[str, Tensor], Tensor]) -> Iterator[Named]:
    """The weights under the adapters, with the adapters added, and those trained beside them, under the names without adapters."""
    for name, parameter, path in base_weights(module):
        weight = adapters[name] if name in adapters else whole(name, local_tensor(parameter))
        yield name.replace(BASE, "."), merge(module.get_submodule(path), path, weight, adapters) if path else weight


def _outline(tensor: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Shape and type alone; `shape` is that of the whole tensor, where this rank holds a part."""
    return torch.empty(tensor.shape if shape is None else shape, dtype=tensor.dtype, device="meta")


def _save_adapters(model: LoadedModel, weights: Iterable[Named], folder: Path | None) -> dict[str, Tensor]:
    adapters = {name: tensor.detach().cpu().clone() for name, tensor in weights}
    if folder is not None:
        save_adapter(model, folder / "adapter", adapters)
    return adapters


def save_adapter(model: LoadedModel, folder: Path, adapters: Mapping[str, Tensor]) -> None:
    """Write adapters, and layers that are trained beside them, with the tokenizer and its chat template, as peft reads them."""
    name_padding(model)
    model.module.save_pretrained(folder, state_dict=dict(adapters))
    model.tokenizer.save_pretrained(folder)
    if beside := {f"{IN_PEFT}{name}": tensor for name, tensor in adapters.items() if not is_adapter(name)}:
        file = folder / "adapter_model.safetensors"
        save_file(load_file(file) | beside, file, metadata={"format": "pt"})


def _buffers(module: Any) -> dict[str, Tensor]:
    """The buffers that a model's files hold."""
    ignored = {name for name, _ in module.named_parameters(remove_duplicate=False)} | set(module._keys_to_ignore_on_save or ())
    return {name: tensor for name, tensor in module.state_dict().items() if name not in ignored}


def _describe(model: LoadedModel, folder: Path, dtype: torch.dtype) -> None:
    """Write config, generation config and tokenizer; also the code of a model that brought its own."""
    from transformers.dynamic_module_utils import custom_object_save

    module = model.module
    module.config.dtype = str(dtype).removeprefix("torch.")
    name_padding(model)
    module.config.architectures = [type(module).__name__.removeprefix("FSDP")]  # FSDP2 renames the class
    if module.is_remote_code():
        custom_object_save(module, folder, config=module.config)
    module.config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)


# --- names ---


def _converted(module: Any, layout: Mapping[str, Tensor]) -> bool:
    """Whether transformers changed tensors when it loaded the model (experts fused into one, say): files hold the originals."""
    from transformers.core_model_loading import revert_weight_conversion

    return set(revert_weight_conversion(module, dict(layout))) != set(layout)


def _original(module: Any, tensors: Iterable[Named], converted: bool) -> Iterator[Named]:
    """The tensors as the model's files hold them; those that were changed go back layer by layer."""
    from transformers.core_model_loading import revert_weight_conversion

    if not converted:
        yield from tensors
        return
    for _, layer in groupby(tensors, key=lambda named: found[0] if (found := LAYER.match(named[0])) else named[0]):
        yield from revert_weight_conversion(module, {name: tensor.clone() for name, tensor in layer}).items()


# --- files ---


class _Writer:
    """Writes tensors to their places in files whose layout is known."""

    def __init__(self, folder: Path, layout: Mapping[str, Tensor]) -> None:
        self.folder, self.layout = folder, layout
        self.places: dict[str, tuple[str, int]] = {}  # file, offset
        shards = _shards(layout)
        for i, names in enumerate(shards, start=1):
            file = f"model-{i:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
            self._begin(file, names)
        if len(shards) > 1:
            self._index()
        self._missing = set(layout)

    def _begin(self, file: str, names: list[str]) -> None:
        """Write a file's header, and give it its size. The widest types come first, so that every tensor is aligned."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at, begins = 0, dict[str, int]()
        for name in sorted(names, key=lambda name: (-self.layout[name].itemsize, name)):
            tensor = self.layout[name]
            begins[name], end = at, at + tensor.nbytes
            entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        header = text + b" " * (-len(text) % 8)
        with (self.folder / file).open("wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            out.truncate(8 + len(header) + at)
        self.places |= {name: (file, 8 + len(header) + begin) for name, begin in begins.items()}

    def _index(self) -> None:
        size, count = (sum(t.nbytes for t in self.layout.values()), sum(math.prod(t.shape) for t in self.layout.values()))
        index = {
            "metadata": {"total_parameters": count, "total_size": size},
            "weight_map": {name: file for name, (file, _) in sorted(self.places.items())},
        }
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def __call__(self, name: str, tensor: Tensor) -> None:
        expected = self.layout[name]
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), f"{name}: {tensor.shape} {tensor.dtype}"
        file, offset = self.places[name]
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        with (self.folder / file).open("r+b") as out:
            out.seek(offset)
            out.write(data.data)
        self._missing.discard(name)

    def finish(self) -> None:
        """Check that every tensor came."""
        assert not self._missing, f"no weights came for {sorted(self._missing)[0]}"


def _shards(layout: Mapping[str, Tensor]) -> list[list[str]]:
    """Names by file, in order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in layout.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards
