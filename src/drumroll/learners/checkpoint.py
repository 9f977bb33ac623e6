"""Checkpoints of a training role: master weights and AdamW's moments as Hugging-Face-named safetensors.

Each rank writes its blocks into files of its own, and reads only the parts of the files that its blocks need, however the
ranks that wrote them were divided. Files go through `torch.distributed.checkpoint`; nothing is pickled. No function here
communicates with other ranks, so a snapshot may be written while the process group trains.

    master/ exp_avg/ exp_avg_sq/    tensors by name, in `shard-<rank>-model-<i>-of-<n>.safetensors`
    tensors.json                    whole shapes by name, and the number of steps that AdamW took
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, HuggingFaceStorageReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from typing_extensions import override

from drumroll.errors import StoreError
from drumroll.learners.pieces import Piece

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")
TENSORS = "tensors.json"
OLD_FORMAT = "master.safetensors"
FILE_BYTES = 2**27
"""The size at which a rank begins its next file. While one is made, other threads wait: safetensors holds Python's lock."""


State = Mapping[str, Sequence[Piece]]
"""What a rank holds of the master weights and of AdamW's moments, by the folder that holds them in a checkpoint."""

# --- saving ---


@dataclass(frozen=True)
class Snapshot:
    """Copies of a rank's blocks in host memory; training may go on while they are written."""

    rank: int
    shapes: Mapping[str, Sequence[int]]  # of whole tensors
    step: float  # how many AdamW took; it has no moments before the first
    blocks: Mapping[str, Sequence[Piece]]  # by folder; those that this rank writes

    @classmethod
    def take(cls, rank: int, state: State, step: float, shapes: Mapping[str, Sequence[int]] | None = None) -> Snapshot:
        """Copy what this rank writes. `shapes` are needed where the first rank does not hold a piece of every tensor."""
        blocks = {folder: [_copy(piece) for piece in pieces if _writes(piece)] for folder, pieces in state.items()}
        return cls(rank, shapes or {piece.name: piece.shape for piece in state[MASTER]}, step, blocks)

    def write(self, folder: Path) -> None:
        """Write the blocks below a folder that exists; the first rank also describes all tensors."""
        if self.rank == 0:
            (folder / TENSORS).write_text(json.dumps({"shapes": self.shapes, "step": self.step}))
        for name, blocks in self.blocks.items():
            if blocks:
                (folder / name).mkdir(exist_ok=True)
                _write(folder / name, self.rank, blocks)


def _writes(piece: Piece) -> bool:
    return piece.first and piece.tensor.numel() > 0


def _copy(piece: Piece) -> Piece:
    return replace(piece, tensor=piece.tensor.detach().to("cpu", copy=True).contiguous())


def _write(folder: Path, rank: int, blocks: Sequence[Piece]) -> None:
    """Write a rank's blocks into its files. Ranks number their files themselves, so they need not agree on a plan."""
    files = _files(blocks)
    for index, part in enumerate(files, start=1):
        mapping = {block.name: index for block in part} | {"": len(files)}  # the largest number is in all names
        writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=mapping, save_distributed=True)
        writer.per_thread_copy_ahead = 0  # the blocks are in host memory
        plans = [SavePlan([])] * rank + [SavePlan([_write_item(block) for block in part])]
        writer.write_data(writer.prepare_global_plan(plans)[rank], _Source(part)).wait()


def _files(blocks: Sequence[Piece]) -> list[list[Piece]]:
    """The blocks of each of a rank's files. Of a tensor a file holds one block; further ones go into other files."""
    layers: list[list[Piece]] = []
    seen = Counter[str]()
    for block in blocks:
        if seen[block.name] == len(layers):
            layers.append([])
        layers[seen[block.name]].append(block)
        seen[block.name] += 1
    files: list[list[Piece]] = []
    for layer in layers:
        size = FILE_BYTES
        for block in layer:
            if size + block.tensor.nbytes > FILE_BYTES:
                files.append([])
                size = 0
            files[-1].append(block)
            size += block.tensor.nbytes
    return files


def _write_item(block: Piece) -> WriteItem:
    data = TensorWriteData(_chunk(block), TensorProperties.create_from_tensor(block.tensor), torch.Size(block.shape))
    return WriteItem(MetadataIndex(block.name, torch.Size(block.offsets)), WriteItemType.SHARD, tensor_data=data)


def _chunk(block: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(block.offsets), block.tensor.size())


class _Source(DefaultSavePlanner):
    """Hands the writer a rank's blocks."""

    def __init__(self, blocks: Sequence[Piece]) -> None:
        super().__init__()
        self._tensors = {block.name: block.tensor for block in blocks}

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index.fqn]


# --- loading ---


def load(folder: Path, state: State, shapes: Mapping[str, Sequence[int]] | None = None) -> float:
    """Fill a rank's pieces from a checkpoint that was written under any division; returns the steps that AdamW took.

    Before its first step there are no moments to read. A checkpoint of other tensors, or with parts missing, is refused
    before anything is changed. `shapes` are those of all tensors, where a rank does not hold a piece of every one.
    """
    step = _check(folder, shapes or {piece.name: piece.shape for piece in state[MASTER]})
    plans = {name: _plan(folder / name, state[name]) for name in (MASTER, *(MOMENTS if step else ()))}
    for name, (reader, plan) in plans.items():
        reader.read_data(plan, _Target(state[name])).wait()
    return step


def read_masters(folder: Path) -> tuple[dict[str, tuple[int, ...]], Iterator[tuple[str, Tensor]]]:
    """Return the shapes of a checkpoint's master weights, and an iterator over the weights: whole, one at a time."""
    shapes = {name: tuple(shape) for name, shape in _described(folder)["shapes"].items()}
    return shapes, _masters(folder, shapes)


def _masters(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    folder = folder / MASTER
    reader = HuggingFaceStorageReader(str(folder))
    saved = _metadata(reader, folder)
    reader.set_up_storage_reader(saved, is_coordinator=True)
    for name, shape in shapes.items():
        found = saved.state_dict_metadata.get(name)
        dtype = found.properties.dtype if isinstance(found, TensorStorageMetadata) else torch.float32
        piece = Piece(name, shape, (0,) * len(shape), torch.empty(shape, dtype=dtype))
        reader.read_data(LoadPlan(_items(saved, piece, folder)), _Target([piece])).wait()
        yield name, piece.tensor


def _described(folder: Path) -> dict[str, Any]:
    """The shapes of a checkpoint's tensors, and AdamW's count of steps."""
    if (folder / OLD_FORMAT).exists():
        raise StoreError(
            f"the checkpoint {folder} has the format of an older drumroll ({OLD_FORMAT}): resume the run with that version, or "
            "train it again with this one."
        )
    try:
        return json.loads((folder / TENSORS).read_text("utf-8"))
    except FileNotFoundError:
        raise _incomplete(folder, f"it has no {TENSORS}") from None


def _check(folder: Path, shapes: Mapping[str, Sequence[int]]) -> float:
    """Refuse a checkpoint of another model, naming the first tensor that differs; returns AdamW's count of steps."""
    described = _described(folder)
    saved, wanted = described["shapes"], {name: list(shape) for name, shape in shapes.items()}
    for name in [*wanted, *saved]:
        if name not in saved or name not in wanted:
            detail = f"{'the checkpoint' if name in wanted else 'the model'} has no {name}"
        elif saved[name] != wanted[name]:
            detail = f"{name} has shape {saved[name]} in the checkpoint and {wanted[name]} in the model"
        else:
            continue
        raise StoreError(
            f"the checkpoint {folder} holds another model than the config names: {detail}. Continue it without that override, or begin a new run."
        )
    return described["step"]


def _incomplete(folder: Path, why: str) -> StoreError:
    return StoreError(
        f"the checkpoint {folder} is not complete: {why}. Restore its files, or remove it to resume from the one before."
    )


def _plan(folder: Path, pieces: Sequence[Piece]) -> tuple[HuggingFaceStorageReader, LoadPlan]:
    """What to read of the files in a folder to fill the pieces; every element of them must be there exactly once."""
    reader = HuggingFaceStorageReader(str(folder))
    saved = _metadata(reader, folder)
    items = [item for piece in pieces for item in _items(saved, piece, folder)]
    reader.set_up_storage_reader(saved, is_coordinator=True)
    return reader, LoadPlan(items)


def _items(saved: Metadata, piece: Piece, folder: Path) -> list[ReadItem]:
    found, own = saved.state_dict_metadata.get(piece.name), list[ReadItem]()
    if isinstance(found, TensorStorageMetadata) and piece.tensor.numel():
        own = create_read_items_for_chunk_list(piece.name, found, [_chunk(piece)])
    if not _covered(own, piece.tensor.numel()):
        raise _incomplete(folder.parent, f"the files in {folder.name}/ do not hold every element of {piece.name} once")
    return own


def _metadata(reader: HuggingFaceStorageReader, folder: Path) -> Metadata:
    try:
        return reader.read_metadata()
    except FileNotFoundError:
        raise _incomplete(folder.parent, f"it has no folder {folder.name}/") from None
    except (SafetensorError, ValueError) as error:
        raise _incomplete(folder.parent, f"a file in {folder.name}/ cannot be read ({error})") from error


def _covered(items: Sequence[ReadItem], size: int) -> bool:
    """Whether the items fill a block of this many elements without overlap."""
    boxes = sorted([(*zip(item.dest_offsets, item.lengths, strict=True),) for item in items])
    open_boxes: list[Any] = []
    for box in boxes:  # by their first row: a box overlaps only those that have not ended
        open_boxes = [other for other in open_boxes if sum(other[0]) > box[0][0]] if box else open_boxes
        if any(_overlap(box, other) for other in open_boxes):
            return False
        open_boxes.append(box)
    return sum(math.prod(item.lengths) for item in items) == size


def _overlap(one: Any, other: Any) -> bool:
    return all(a < b + n and b < a + m for (a, m), (b, n) in zip(one, other, strict=True))


class _Target(DefaultLoadPlanner):
    """Tells the reader where a rank's blocks are in memory."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self._tensors = {(piece.name, piece.offsets): piece.tensor.detach() for piece in pieces}

    @override
    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._tensors[index.fqn, tuple(index.offset)]


# --- the state of torch's AdamW ---


def adamw_state(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor]) -> tuple[dict[str, list[Tensor]], float]:
    """The moments of master weights, and the steps that all of them took; there are none before the first step."""
    states = [optimizer.state.get(master, {}) for master in masters]
    counts = {float(state["step"]) for state in states if "step" in state}
    assert len(counts) <= 1, f"all tensors take the same steps, these took {counts}"
    return {key: [state[key] for state in states] for key in MOMENTS if counts}, max(counts, default=0.0)


def set_adamw_state(
    optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], moments: Mapping[str, Sequence[Tensor]], step: float
) -> None:
    """Give the optimizer other moments, which it then owns, and another count of steps."""
    optimizer.state.clear()
    for number, master in enumerate(masters) if step else ():
        own = {key: moments[key][number] for key in MOMENTS}
        optimizer.state[master] = {"step": torch.tensor(step, device=master.device), **own}
