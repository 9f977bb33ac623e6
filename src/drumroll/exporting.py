"""`drumroll run export`: writes the model of any kept checkpoint as a Hugging Face directory with a model card.

Tensors go from the checkpoint's files to the model's, one at a time; of the base model only its config, its tokenizer and, to
merge adapters, one tensor at a time are read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drumroll.config.roles import LoraConfig
from drumroll.errors import ModelError, StoreError
from drumroll.learners.backends.division import fill_block
from drumroll.learners.checkpoint import read_masters
from drumroll.learners.pieces import Piece, in_files
from drumroll.models.blocks import BlockSource
from drumroll.models.export import export_model
from drumroll.models.loading import DTYPES, LoadedModel, load, load_empty
from drumroll.models.lora import BASE, add_adapters
from drumroll.models.score import SCORE, score_model
from drumroll.observe.model_card import base_model, write_card
from drumroll.observe.runs import setting
from drumroll.runfiles.durable import new_folder
from drumroll.runfiles.reader import RunReader

Whole = Callable[[str, Tensor], Tensor]


def export(
    run: RunReader, to: Path, *, step: str = "best", merge_lora: bool = False, dtype: str | None = None, overwrite: bool = False
) -> int:
    """Write the model of a step (`best`, `last`, or a checkpoint's number) into a directory; returns the number."""
    number, lora = find_step(run, step), setting(run.settings, "roles.actor.lora")
    if merge_lora and lora is None:
        raise StoreError(f"{run.path} trained all weights, so it has no adapters to merge; leave out --merge-lora.")
    target = check_target(run, to, overwrite=overwrite)
    alone = lora is not None and not merge_lora
    with new_folder(target) as folder:
        _write(run, run.checkpoints.path(number), folder, dtype, alone=alone)
        write_card(folder, run, number, adapter=alone)
    return number


def find_step(run: RunReader, step: str) -> int:
    """Return the number of a step whose checkpoint is kept."""
    kept, best = run.checkpoints.steps(), run.checkpoints.best_step()
    there = f"there are checkpoints of steps {', '.join(map(str, kept))}"
    if not kept:
        raise StoreError(f"{run.path} has no checkpoint to export: the first is written at a step that checkpoint.every names.")
    if step == "last":
        return kept[-1]
    if step == "best":
        if best not in kept:
            raise StoreError(
                f"{run.path} has no best checkpoint, because no held-out set was measured; use --step last ({there})."
            )
        return best
    if not step.isdecimal() or int(step) not in kept:
        raise StoreError(f"--step {step}: {run.path} keeps no such checkpoint; use best, last or a number ({there}).")
    return int(step)


def check_target(run: RunReader, to: Path, *, overwrite: bool) -> Path:
    """Return the directory to write; refuse one with something in it, unless it is a model to overwrite."""
    target = to.expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise StoreError(f"--to {to} is a file; name a directory.")
    if run.path.resolve().is_relative_to(target):
        raise StoreError(f"--to {to} holds the run itself; name another directory.")
    if not target.exists() or not any(target.iterdir()):
        return target
    if not any((target / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise StoreError(f"--to {to} is not empty, and holds no model that could be replaced; name another directory.")
    if not overwrite:
        raise StoreError(f"--to {to} is not empty; replace the model in it with --overwrite, or name another directory.")
    return target


def _write(run: RunReader, checkpoint: Path, folder: Path, dtype: str | None, *, alone: bool) -> None:
    settings, lora = run.settings, setting(run.settings, "roles.actor.lora")
    working = setting(settings, "roles.actor.dtype") or "float32"
    name = base_model(settings)
    model, whole = _open(name, working, int(settings.get("seed") or 0), LoraConfig(**lora) if lora else None)
    shapes, weights = read_masters(checkpoint)
    if SCORE in shapes:
        model = score_model(model, name)
    if alone:
        given = {n: tensor if dtype is None else tensor.to(DTYPES[dtype]) for n, tensor in weights}
        model.module.save_pretrained(folder, state_dict=given)
        model.tokenizer.save_pretrained(folder)
        return
    if lora is None:  # as the working weights of the run were rounded
        weights = ((n, tensor.to(DTYPES[working])) for n, tensor in weights)
    with torch.no_grad():
        export_model(model, weights, shapes, folder, whole=whole, dtype=DTYPES[dtype or working], convert=True)


def _open(name: str, dtype: str, seed: int, lora: LoraConfig | None) -> tuple[LoadedModel, Whole]:
    """Open a model without its weights, and what reads one of them; a model that cannot be opened so is loaded."""
    try:
        model, source = load_empty(name, dtype=dtype, seed=seed)
        _fill_buffers(model, source)
    except ModelError:
        model = load(name, dtype=dtype, seed=seed)
        if lora is not None:
            add_adapters(model, lora)
        return model, lambda _, tensor: tensor
    if lora is not None:
        add_adapters(model, lora, empty=True)
    return model, _reader(model, source, DTYPES[dtype], name)


def _reader(model: LoadedModel, source: BlockSource, dtype: torch.dtype, name: str) -> Whole:
    def whole(parameter: str, outline: Tensor) -> Tensor:
        found = torch.empty(outline.shape, dtype=dtype)
        for block in in_files(Piece(parameter, tuple(found.shape), (0,) * found.dim(), found), model.files or {}):
            fill_block(block, block.name.replace(BASE, "."), source, model.module, dtype, name)
        return found

    return whole


def _fill_buffers(model: LoadedModel, source: BlockSource) -> None:
    """Read the buffers that the model's files hold."""
    saved: dict[str, Any] = model.module.state_dict()
    for name, buffer in model.module.named_buffers():
        if name in saved:
            if name not in source:
                raise ModelError(f"the files of the model name the buffer {name} otherwise")
            buffer.copy_(source.block(name, buffer.shape, (0,) * buffer.dim(), buffer.shape))
