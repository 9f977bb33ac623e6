"""The DeepSpeed backend: ZeRO divides optimizer state and gradients over ranks (2), or weights too (3).

The passes are those of the torch backend, through a DeepSpeed engine. Each rank holds flat runs of the float32 master weights
(`zero.py`). Under ZeRO-3 a rank allocates and reads only its own runs of a model. DeepSpeed is imported when a role is opened;
nothing is compiled, and the optimizer is torch's AdamW.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from drumroll.batch import Batch
from drumroll.errors import ConfigError, MissingExtra
from drumroll.learners.backend import BACKENDS, Count, LearnerSpec, LossFunction
from drumroll.learners.backends.division import fill_block, source_name
from drumroll.learners.backends.torch import TorchBackend
from drumroll.learners.backends.zero import Zero, Zero2, Zero3, partition, run_of
from drumroll.learners.checkpoint import MASTER, MOMENTS, Snapshot, State, adamw_state, set_adamw_state
from drumroll.learners.checkpoint import load as load_checkpoint
from drumroll.learners.pieces import Block, Piece, cut, shapes_in_files
from drumroll.learners.ranks import BUCKET, Ranks
from drumroll.learners.statistics import Statistics
from drumroll.models.blocks import BlockSource, materialise, replace_parameters
from drumroll.models.experts import Routers
from drumroll.models.export import export_model
from drumroll.models.head import LogProbModel
from drumroll.models.loading import DTYPES, LoadedModel, load_empty
from drumroll.models.lora import add_adapters
from drumroll.processes import accelerator

Shapes = dict[str, tuple[int, ...]]


@BACKENDS.register("deepspeed")
def open_backend(spec: LearnerSpec) -> DeepSpeedBackend:
    """Load this rank's part of a role's model, with its adapters or value head, and give it to DeepSpeed."""
    device = accelerator.pick(spec.device)
    if spec.dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"roles.actor.dtype: DeepSpeed computes in float32 or bfloat16, not in {spec.dtype}.")
    with spec.ranks.failing_together(), _environment(device):
        deepspeed = _import(device)
        empty, source = load_empty(
            spec.name, dtype=spec.dtype, seed=spec.seed, recompute_activations=spec.recompute_activations
        )
        prefix = empty.module.base_model_prefix
        model, scorer = _attached(empty, spec)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.module.named_parameters()}
        settings = _settings(spec, device, sum(math.prod(shape) for shape in shapes.values()))
        if spec.parallel.zero == 3:
            partition(scorer, deepspeed.zero.Init(config_dict_or_path=settings, data_parallel_group=dist.group.WORLD))
        materialise(scorer, device)
        _fill(model, shapes, source, prefix, spec)
        if spec.parallel.zero == 2 and spec.optim is None:
            return DeepSpeedBackend(model, scorer, shapes, spec.ranks, None)  # a replica that only infers
        optimizer = None if spec.optim is None else _adamw(model.module, shapes, spec)
        engine, *_ = deepspeed.initialize(model=scorer, optimizer=optimizer, config=settings)
        if spec.parallel.zero == 2:
            return DeepSpeedBackend(model, engine, shapes, spec.ranks, Zero2(engine.optimizer))
        for parameter in _of_head(scorer):
            deepspeed.zero.register_external_parameter(scorer, parameter)
        return DeepSpeedBackend(model, engine, shapes, spec.ranks, Zero3(engine.optimizer))


def _attached(model: LoadedModel, spec: LearnerSpec) -> tuple[LoadedModel, nn.Module]:
    """The model with its adapters or value head, all of the working type, and body and head as one module."""
    if spec.lora is not None:
        add_adapters(model, spec.lora, empty=True)
    model = spec.head.attach(model)
    model.module.eval()
    if spec.optim is None:
        model.module.requires_grad_(False)
    scorer, dtype = spec.head.scorer(model), DTYPES[spec.dtype]
    other = [parameter for parameter in scorer.parameters() if parameter.dtype != dtype]
    replace_parameters(scorer, {p: nn.Parameter(p.detach().to(dtype), p.requires_grad) for p in other})
    return model, scorer


def _of_head(scorer: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that are gathered once for a whole pass: ranks call a head as often as their tokens fill chunks."""
    if isinstance(scorer, LogProbModel):
        for name, part in scorer.language_model.named_children():
            if name != scorer.language_model.base_model_prefix:
                yield from part.parameters()


def _fill(model: LoadedModel, shapes: Shapes, source: BlockSource, prefix: str, spec: LearnerSpec) -> None:
    """Read this rank's part of every parameter."""
    module, files = model.module, model.files or {}
    for name, parameter in module.named_parameters():
        described: Any = parameter
        start, flat = 0, parameter.detach().flatten()
        if spec.parallel.zero == 3:
            run = run_of(parameter)
            start, flat = run.start, described.ds_tensor[: run.size]
        for piece in cut(files.get(name) or [_block(name, shapes[name])], start, flat):
            fill_block(piece, source_name(piece.name, prefix), source, module, parameter.dtype, spec.name)


def _block(name: str, shape: tuple[int, ...]) -> Block:
    return Block(name, shape, (0,) * len(shape), shape)


def _adamw(module: nn.Module, shapes: Shapes, spec: LearnerSpec) -> torch.optim.Optimizer:
    """The optimizer of the torch backend: weight decay spares norms and biases."""
    assert spec.optim is not None
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            spared = len(shapes[name]) < 2 or name.endswith("bias")
            groups.setdefault(0.0 if spared else spec.optim.weight_decay, []).append(parameter)
    chosen = [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()]
    return torch.optim.AdamW(chosen, lr=spec.optim.lr, betas=spec.optim.betas, fused=True)


def _settings(spec: LearnerSpec, device: torch.device, size: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a model of this many parameters. Gradients add up and are reduced in float32."""
    host, offload = {"device": "cpu", "pin_memory": device.type != "cpu"}, spec.parallel.offload
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": spec.dtype == "bfloat16"},
        "zero_optimization": {
            "stage": spec.parallel.zero,
            "overlap_comm": False,
            "reduce_bucket_size": min(BUCKET, size),
            "allgather_bucket_size": BUCKET,
            "memory_efficient_linear": False,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            **({"offload_optimizer": host} if offload != "none" else {}),
            **({"offload_param": host} if offload == "all" else {}),
        },
    }


def _import(device: torch.device) -> Any:
    """DeepSpeed, which uses the process group that there is; a rank alone makes one for itself."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if device.type == "cpu":
        os.environ.setdefault("LOCAL_SIZE", "1")  # else it asks the program numactl in every backward pass
    try:
        import deepspeed
    except ModuleNotFoundError:
        raise MissingExtra("roles.actor.backend: deepspeed", "deepspeed") from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it is compiled at first use
    if not dist.is_initialized():
        dist.init_process_group(accelerator.collectives(device.type), store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_init_required=None, verbose=False)
    groups: Any = deepspeed.utils.groups
    groups._WORLD_GROUP = dist.group.WORLD  # it would make another of the same ranks
    return deepspeed


@contextmanager
def _environment(device: torch.device) -> Generator[None]:
    """The variable by which DeepSpeed's launcher gives a process its device."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]
        if before is not None:
            os.environ["LOCAL_RANK"] = before


class DeepSpeedBackend(TorchBackend):
    """Implements `Backend`: the passes of the torch backend, with state that ZeRO divides. `zero` is None for whole frozen replicas."""

    count = Count(least=1)

    def __init__(self, model: LoadedModel, scorer: nn.Module, shapes: Shapes, ranks: Ranks, zero: Zero | None) -> None:
        self._model = model
        self.scorer = scorer
        self.ranks = ranks
        self.zero = zero
        self.divided = None
        self.stop = threading.Event()
        named = dict(model.module.named_parameters())
        self.device = next(iter(named.values())).device
        self.dtype = next(iter(named.values())).dtype
        self.names = [name for name, parameter in named.items() if parameter.requires_grad]
        self.parameters = [named[name] for name in self.names]
        self.master = zero.masters if zero is not None else []
        self.optimizer = zero.optimizer if self.names and zero is not None else None
        self._homes = [master.device for master in self.master]
        self.files = model.files or {}
        self._routers = Routers(scorer)
        self._sizes, self._named = shapes, named
        self._name_of = {parameter: name for name, parameter in named.items()}

    @property
    @override
    def model(self) -> LoadedModel | None:
        return None

    @property
    @override
    def working(self) -> Sequence[Tensor]:
        return ()

    # --- passes ---

    @property
    @override
    def _together(self) -> bool:
        return True

    @override
    def _add_loss(self, inputs: tuple[Any, ...], micro: Batch, loss: LossFunction, statistics: Statistics) -> Tensor:
        """DeepSpeed averages gradients over ranks; they add up."""
        return super()._add_loss(inputs, micro, loss, statistics) * self.ranks.mesh.size

    @override
    def _collect_gradients(self) -> None:
        assert self.zero is not None
        self.zero.optimizer.finalize_gradient_accumulation_boundary()

    @override
    def _release_gathered(self) -> None:
        if self.zero is not None:
            self.zero.release()

    # --- the optimizer ---

    @override
    def clip(self, limit: float) -> float:
        assert self.zero is not None
        gradients = [part for flat in self.zero.gradients() for part in flat]
        with self.ranks.computing():
            squares = torch.tensor([sum(float(part.norm()) ** 2 for part in gradients)], dtype=torch.float64)
            norm = self.ranks.total(squares.to(self.device)).sqrt().item()
        for part in gradients:
            part.mul_(min(1.0, limit / (norm + 1e-6)))
        return norm

    @override
    def step(self, rate: float) -> None:
        assert self.zero is not None, "a frozen role takes no step"
        optimizer = self.zero.optimizer
        with self.ranks.failing_together():
            optimizer.set_lr(rate)
            optimizer.step()
            assert not optimizer.overflow, "a gradient whose norm is not finite takes no step"
            self.drop_gradients()

    @override
    def drop_gradients(self) -> None:
        if self.optimizer is not None and self.zero is not None:
            self.zero.forget()

    @override
    def _refresh_working(self) -> None:
        assert self.zero is not None
        self.zero.release()
        with torch.no_grad():
            self.zero.refresh()

    # --- weights and state ---

    @override
    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in zip(self.names, self.parameters, strict=True):
            with self.ranks.failing_together(), torch.no_grad():
                whole = self._gathered(name, parameter)
            yield name, whole

    def _gathered(self, name: str, _: Tensor) -> Tensor:
        return self._named[name].detach() if self.zero is None else self.zero.whole(self._named[name])

    @override
    def pieces(self) -> list[Piece]:
        return self._cut(self.master)

    @override
    def gradient_pieces(self) -> list[Piece]:
        assert self.zero is not None
        return self._cut([torch.cat([part.flatten() for part in flat]) for flat in self.zero.gradients()])

    def _cut(self, flats: Sequence[Tensor]) -> list[Piece]:
        """Flat tensors of this rank as blocks of the whole tensors."""
        assert self.zero is not None
        found: list[Piece] = []
        for flat, runs in zip(flats, self.zero.runs(), strict=True):
            for run in runs:
                name = self._name_of[run.parameter]
                own = flat.detach().narrow(0, run.offset, run.size)
                found += cut(self.files.get(name) or [_block(name, self._sizes[name])], run.start, own)
        return found

    @override
    def snapshot(self) -> Snapshot:
        assert self.optimizer is not None, "a frozen role has no state"
        moments, step = adamw_state(self.optimizer, self.master)
        return Snapshot.take(self.ranks.mesh.rank, self._state(moments), step, self._shapes())

    @override
    def load(self, folder: Path) -> None:
        assert self.optimizer is not None, "a frozen role has no state"
        moments, _ = adamw_state(self.optimizer, self.master)
        moments = moments or {key: [torch.zeros_like(master) for master in self.master] for key in MOMENTS}
        together = isinstance(self.zero, Zero2)  # ranks give each other their parts of the working weights
        with self.ranks.agreed(self.drop_gradients) if together else nullcontext():
            step = load_checkpoint(folder, self._state(moments), self._shapes())
            set_adamw_state(self.optimizer, self.master, moments, step)
        with self.ranks.failing_together() if together else nullcontext():
            self._refresh_working()

    @override
    def _state(self, moments: Mapping[str, Sequence[Tensor]]) -> State:
        return {MASTER: self.pieces(), **{key: self._cut(flats) for key, flats in moments.items()}}

    @override
    def _shapes(self) -> Shapes:
        return shapes_in_files({name: self._sizes[name] for name in self.names}, self.files)

    @override
    def export(self, folder: Path) -> None:
        target, shapes = folder if self.ranks.mesh.rank == 0 else None, shapes_in_files(self._sizes, self.files)
        with self.ranks.failing_together(), torch.no_grad():
            export_model(self._model, self.weights(), shapes, target, whole=self._gathered, dtype=self.dtype)

    # --- sharing a device ---

    @override
    def _move(self, device: torch.device) -> None:
        """Moments move, and master weights that are not the working weights; those stay."""
        if self.device.type == "cpu" or self.optimizer is None:
            return
        for master, home in zip(self.master, self._homes, strict=True):
            target = home if device == self.device else device
            if self.dtype != torch.float32:
                master.data = master.data.to(target)
            state = self.optimizer.state.get(master, {})
            state.update({key: state[key].to(target) for key in MOMENTS if key in state})
