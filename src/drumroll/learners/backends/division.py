"""Opens a model that ranks compute together: tensor parallelism divides its layers, FSDP the rows of what is left.

Every parameter of a rank is then a block of the whole tensor (`Piece`); ranks along `context` hold the same blocks. Blocks are
read from files one by one, and whole tensors exist one at a time, where they are sent or exported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from drumroll.config.roles import ParallelConfig
from drumroll.errors import ConfigError, ModelError
from drumroll.learners.backend import LearnerSpec
from drumroll.learners.pieces import Piece, in_files
from drumroll.learners.ranks import Ranks
from drumroll.models.blocks import BlockSource, Files, local_tensor, materialise, replace_parameters
from drumroll.models.loading import DTYPES, LoadedModel, load_empty
from drumroll.models.lora import BASE, add_adapters, first_adapter, is_adapter
from drumroll.models.score import SCORE, first_score
from drumroll.models.tensor_parallel import TensorParallel, check_heads, divide
from drumroll.models.value import BODY, HEAD, ValueModel
from drumroll.models.witness import decoder_layers
from drumroll.processes import accelerator


def source_name(name: str, prefix: str) -> str:
    """The name of a parameter in the model's files, where those of the body begin with `prefix`."""
    if name.startswith(f"{BODY}."):
        name = f"{prefix}.{name.removeprefix(f'{BODY}.')}"
    return name.replace(BASE, ".")


@dataclass
class Division:
    """How the parameters of one rank lie in the whole ones."""

    ranks: Ranks
    dtype: torch.dtype  # of the working weights
    prefix: str  # of the body's parameters in the model's files
    parallel: TensorParallel | None
    rows: dict[str, int]  # of each parameter before FSDP divides them

    def source_name(self, name: str) -> str:
        """The name of a parameter in the model's files."""
        return source_name(name, self.prefix)

    def copies(self, name: str) -> int:
        """How many ranks hold the same block of a parameter."""
        mesh = self.ranks.mesh
        return mesh.data * mesh.context * (1 if self._part(name) else mesh.tensor)

    def is_partial(self, name: str) -> bool:
        """Whether the gradient of a parameter that tensor-parallel ranks hold whole is a part on each."""
        return self.parallel is not None and self.source_name(name) in self.parallel.partial

    def piece(self, name: str, local: Tensor) -> Piece:
        """A parameter of this rank, or its gradient or moment, as a block of the whole."""
        mesh, at, part = self.ranks.mesh, self.ranks.mesh.coordinates, self._part(name)
        shape, offsets = [self.rows[name], *local.shape[1:]], [0] * local.dim()
        if mesh.shard > 1:
            offsets[0] = min(at["shard"] * -(-self.rows[name] // mesh.shard), self.rows[name])
        if part is not None:
            shape[part.dim], offsets[part.dim] = part.whole, offsets[part.dim] + part.start
        first = at["data"] == at["context"] == 0 and (part is not None or at["tensor"] == 0)
        return Piece(name, tuple(shape), tuple(offsets), local, first)

    def whole(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor of which each rank has a block; a collective of the ranks along `shard` and `tensor`."""
        mesh, part = self.ranks.mesh, self._part(name)
        if mesh.shard > 1:
            local = _joined(local, 0, self.rows[name], mesh.shard, self.ranks.along["shard"])
        if part is not None:
            local = _joined(local, part.dim, part.whole, mesh.tensor, self.ranks.along["tensor"])
        return local

    def _part(self, name: str) -> Any:
        return None if self.parallel is None else self.parallel.parts.get(self.source_name(name))


def _joined(local: Tensor, dim: int, whole: int, count: int, group: Any) -> Tensor:
    """The ranks' blocks along a dimension, each but the last ones of the same size."""
    each = -(-whole // count)
    if local.shape[dim] < each:
        padding = [(0 if d != dim else each - n) for d, n in enumerate(local.shape)]
        local = torch.nn.functional.pad(local, [x for n in reversed(padding) for x in (0, n)])
    blocks = local.new_empty((count, *local.shape))
    dist.all_gather(list(blocks.unbind()), local.contiguous(), group=group)
    return blocks.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, whole)


def open_divided(spec: LearnerSpec) -> tuple[LoadedModel, nn.Module, Division]:
    """A role's model with this rank's part of its weights, body and head as one module, and how it is divided."""
    mesh = spec.ranks.mesh
    model, source = load_empty(spec.name, dtype=spec.dtype, seed=spec.seed, recompute_activations=spec.recompute_activations)
    prefix, layers = model.module.base_model_prefix, list(decoder_layers(model.module))
    if mesh.context > 1:
        check_heads(model.module.config, "context", mesh.context, mesh.tensor)
    if mesh.tensor > 1:
        if spec.lora is not None:
            raise ConfigError("roles.actor.lora: adapters are not trained with tensor > 1 for now; use shard.")
        model.parallel = divide(model.module, spec.ranks.along["tensor"])
    if spec.lora is not None:
        add_adapters(model, spec.lora, empty=True)
        if spec.dtype == "float64":  # peft makes adapters of the type of weights that exist
            adapters = [p for name, p in model.module.named_parameters() if is_adapter(name)]
            replace_parameters(model.module, {p: nn.Parameter(p.detach().double()) for p in adapters})
    model = spec.head.attach(model)
    if spec.optim is None:
        model.module.requires_grad_(False)
    scorer = spec.head.scorer(model)
    rows = {name: parameter.shape[0] for name, parameter in model.module.named_parameters()}
    division = Division(spec.ranks, DTYPES[spec.dtype], prefix, model.parallel, rows)
    if mesh.shard > 1:
        _shard(scorer, layers, spec.ranks, spec.parallel, DTYPES[spec.dtype])
    materialise(scorer, accelerator.pick(spec.device))
    _fill(model.module, model.files or {}, source, division, spec.name)
    return model, scorer, division


def _shard(scorer: nn.Module, layers: Iterable[nn.Module], ranks: Ranks, parallel: ParallelConfig, dtype: torch.dtype) -> None:
    """Divide the rows of every parameter over the ranks along `shard` (FSDP2); what is trained is kept in float32."""
    low = dtype is torch.bfloat16
    if low:
        trained = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
        replace_parameters(scorer, {parameter: nn.Parameter(parameter.detach().float()) for parameter in trained})
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
    mesh, layers = _device_mesh(ranks), list(layers)
    for part in (*layers, scorer):
        fully_shard(part, mesh=mesh, reshard_after_forward=parallel.reshard and part is not scorer, mp_policy=policy)
    units: list[Any] = [part for part in scorer.modules() if isinstance(part, FSDPModule)]
    for unit in units:  # the loss of a token is its share of the whole batch: gradients add up
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def drop_accumulated(scorer: nn.Module) -> None:
    """Forget gradients that FSDP accumulates whole on each rank until the last micro-batch; it has no public call for it."""
    for part in scorer.modules():
        group: Any = part._get_fsdp_state()._fsdp_param_group if isinstance(part, FSDPModule) else None
        for parameter in () if group is None else group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                whole.grad = None


def _device_mesh(ranks: Ranks) -> DeviceMesh:
    """The ranks with this one's `context` and `tensor` coordinates, as FSDP sees them: replicas × shards, or shards alone."""
    mesh, kind = ranks.mesh, accelerator.takes(dist.get_backend(ranks.group))
    mine = next(group for group in mesh.along("data", "shard") if mesh.rank in group)
    if mesh.data == 1:
        return DeviceMesh.from_group(ranks.along["shard"], kind, mesh_dim_names=("shard",))
    groups = [ranks.along["data"], ranks.along["shard"]]
    return DeviceMesh.from_group(groups, kind, torch.tensor(mine).view(mesh.data, mesh.shard), mesh_dim_names=("data", "shard"))


def _fill(module: nn.Module, files: Files, source: BlockSource, division: Division, model: str) -> None:
    """Read this rank's block of every parameter, rounded to the type of the working weights, and the buffers that files hold."""
    for name, parameter in module.named_parameters():
        for block in in_files(division.piece(name, local_tensor(parameter)), files):
            fill_block(block, division.source_name(block.name), source, module, division.dtype, model)
    saved = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        own = division.source_name(name)
        if name in saved and own in source:
            buffer.copy_(source.block(own, buffer.shape, (0,) * buffer.dim(), buffer.shape))
        elif name in saved and files:
            raise ModelError(f"model: the files of {model} name the buffer {own} otherwise; use data in place of shard.")


def fill_block(block: Piece, own: str, source: BlockSource, module: nn.Module, dtype: torch.dtype, model: str) -> None:
    """Read a block of a parameter of a module; `own` is its name in the files of the model."""
    if isinstance(module, ValueModel) and block.name == HEAD:  # starts from the score head of a reward model
        own = SCORE
    if own in source:
        found = source.block(own, block.shape, block.offsets, tuple(block.tensor.shape)).to(dtype)
    elif is_adapter(block.name):
        found = first_adapter(block.name, block.shape)[tuple(map(slice, block.offsets, _ends(block)))]
    elif isinstance(module, ValueModel) and not block.name.startswith(f"{BODY}."):
        found = torch.zeros(block.tensor.shape)
    elif block.name == SCORE:
        found = first_score(module, block.shape)[tuple(map(slice, block.offsets, _ends(block)))]
    else:
        raise ModelError(f"model: the files of {model} hold no tensor {own}; load it with transformers, and save it anew.")
    block.tensor.copy_(found)


def _ends(block: Piece) -> tuple[int, ...]:
    return tuple(begin + size for begin, size in zip(block.offsets, block.tensor.shape, strict=True))
