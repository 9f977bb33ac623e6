"""Megatron-Core's distributed optimizer: each rank along `data` keeps the masters and moments of a part of every parameter.

Master weights are runs of parameters, which begin and end anywhere; `Names` says which blocks of Hugging Face tensors they
hold. Clipping is ours; Megatron steps AdamW on the runs, and gathers the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from drumroll.config.optim import OptimConfig
from drumroll.learners.checkpoint import MASTER, MOMENTS, State, adamw_state, set_adamw_state
from drumroll.learners.pieces import Block, Piece, cut

_Ddp: Any = DistributedDataParallel
_adamw: Any = get_megatron_optimizer


@dataclass(frozen=True)
class Run:
    """A run of a parameter's elements that this rank steps."""

    blocks: Sequence[Block]  # of the whole parameter
    start: int  # in the parameter
    parameter: Tensor
    master: Tensor  # [elements of the run] float32
    optimizer: Any  # AdamW that steps it
    first: bool  # no other rank before this one holds the same elements

    def pieces(self, flat: Tensor) -> list[Piece]:
        """The named pieces of a tensor that has the run's elements."""
        return cut(self.blocks, self.start, flat, first=self.first)

    @property
    def gradient(self) -> Tensor:
        """Summed over all ranks, in the buffer of gradients."""
        whole: Any = self.parameter
        return whole.main_grad.view(-1)[self.start : self.start + self.master.numel()]


class Optimizer:
    """The optimizer of a model, and the buffers of its gradients."""

    def __init__(
        self, model: Any, blocks: Mapping[str, tuple[Sequence[Block], bool]], config: OptimConfig, *, low: bool
    ) -> None:
        """`blocks` are those of each parameter, and whether this rank is the first that holds them; `low` is bfloat16."""
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.ddp = _Ddp(model.config, ddp_config, model)
        model.config.no_sync_func = self.ddp.no_sync
        model.config.finalize_model_grads_func = _sums
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = True  # also where Apex or TransformerEngine bring another AdamW
        self.chain = _adamw(
            OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=1e-8,
                clip_grad=0.0,
                bf16=low,
                use_distributed_optimizer=True,
            ),
            [self.ddp],
            use_gloo_process_groups=False,
        )
        for group in self.groups():
            group["weight_decay"] = config.weight_decay * group["wd_mult"]  # spares norms and biases
        self.runs = list(self._runs(model, blocks))

    def groups(self) -> Iterator[dict[str, Any]]:
        """The parameter groups of every AdamW."""
        for part in self.chain.chained_optimizers:
            if part.optimizer is not None:
                yield from part.optimizer.param_groups

    def _runs(self, model: Any, blocks: Mapping[str, tuple[Sequence[Block], bool]]) -> Iterator[Run]:
        parts = self.chain.chained_optimizers
        for name, parameter in model.named_parameters():
            for part in parts:
                if parameter in getattr(part, "model_param_gbuf_map", ()):
                    where = part._get_model_param_range_map(parameter)["param"]
                    group, order = part.model_param_group_index_map[parameter]
                    master = part.optimizer.param_groups[group]["params"][order]
                    assert master.numel() == where.size, f"{name}: a run of {where.size} has a master of {master.numel()}"
                    yield Run(blocks[name][0], where.start, parameter, master, part.optimizer, blocks[name][1])

    # --- gradients ---

    def squares(self, device: torch.device) -> Tensor:
        """The sum of the squared gradient over this rank's runs, those that other ranks also hold counted once."""
        norms = [run.gradient.norm() for run in self.runs if run.first]
        return torch.stack([torch.zeros((), device=device), *norms]).double().square().sum()

    def scale(self, factor: float) -> None:
        """Scale the gradient."""
        for run in self.runs:
            run.gradient.mul_(factor)

    def step(self, rate: float) -> None:
        """Step AdamW, and gather the new weights."""
        for group in self.groups():
            group["lr"] = rate
        self.chain.prepare_grads()
        self.chain.step_with_ready_grads()

    def drop_gradients(self) -> None:
        """Forget the gradient."""
        self.ddp.zero_grad_buffer()
        self.chain.zero_grad()

    # --- state ---

    def masters(self) -> list[Piece]:
        """Master weights as named pieces."""
        return [piece for run in self.runs for piece in run.pieces(run.master.detach())]

    def gradients(self) -> list[Piece]:
        """The gradient as named pieces."""
        return [piece for run in self.runs for piece in run.pieces(run.gradient)]

    def state(self) -> tuple[State, float]:
        """Masters and moments, and the steps that AdamW took."""
        found: dict[str, list[Piece]] = {MASTER: self.masters()}
        steps = 0.0
        for run in self.runs:
            moments, step = adamw_state(run.optimizer, [run.master])
            steps = max(steps, step)
            for key, (moment,) in moments.items():
                found.setdefault(key, []).extend(run.pieces(moment))
        return found, steps

    def empty_state(self) -> tuple[State, dict[str, list[Tensor]]]:
        """Masters and new moments to be filled, as pieces and as tensors of the runs."""
        moments = {key: [torch.zeros_like(run.master) for run in self.runs] for key in MOMENTS}
        pieces = {
            key: [piece for run, moment in zip(self.runs, of, strict=True) for piece in run.pieces(moment)]
            for key, of in moments.items()
        }
        return {MASTER: self.masters(), **pieces}, moments

    def set_state(self, moments: Mapping[str, Sequence[Tensor]], step: float) -> None:
        """Take other moments and another count of steps."""
        for inner in {id(run.optimizer): run.optimizer for run in self.runs}.values():
            own = [number for number, run in enumerate(self.runs) if run.optimizer is inner]
            masters = [self.runs[number].master for number in own]
            set_adamw_state(inner, masters, {key: [of[number] for number in own] for key, of in moments.items()}, step)

    def refresh_working(self) -> None:
        """Working weights from the masters of all ranks along `data`; a collective."""
        for part in self.chain.chained_optimizers:
            part._copy_main_params_to_model_params()
        self.ddp.start_param_sync()


def _sums(models: Any, *_: Any, **__: Any) -> None:
    """Sum gradients over ranks; what Megatron would divide by is in the loss already."""
    finalize_model_grads(models, None)
