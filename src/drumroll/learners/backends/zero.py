"""What DeepSpeed's ZeRO optimizers hold on one rank: flat master weights, their gradients, and where parameters lie in them.

Only this file knows the insides of DeepSpeed 0.19. A rank's part of a parameter is a run of its elements, which begins and ends
anywhere in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumroll.models.blocks import replace_parameters


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of a parameter in a flat tensor of this rank."""

    parameter: nn.Parameter
    start: int  # the first of them in the parameter
    offset: int  # and in the flat tensor
    size: int


class Zero(Protocol):
    """An optimizer that holds a rank's part of master weights and gradients as flat tensors, one for each of its groups."""

    optimizer: Any
    masters: list[Tensor]

    def runs(self) -> list[list[Run]]:
        """What each flat tensor consists of, but for padding."""
        ...

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's working weights; a collective where ranks divide them."""
        ...

    def gradients(self) -> list[list[Tensor]]:
        """The gradient of each flat tensor, in parts that follow each other."""
        ...

    def forget(self) -> None:
        """Drop the gradient."""
        ...

    def release(self) -> None:
        """Free gathered weights."""
        ...

    def refresh(self) -> None:
        """Copy master weights to working weights; a collective where ranks hold whole weights."""
        ...


class Zero2:
    """ZeRO-2: a group's parameters end to end, cut into as many equal parts as there are ranks. Working weights are whole."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.masters: list[Tensor] = optimizer.single_partition_of_fp32_groups
        rank = dist.get_rank()
        _share_memory(self.masters, [parts[rank] for parts in optimizer.parallel_partitioned_bit16_groups])

    def runs(self) -> list[list[Run]]:
        return [list(self._runs(number)) for number in range(len(self.masters))]

    def _runs(self, group: int) -> Iterator[Run]:
        size = self.masters[group].numel()
        begin = size * dist.get_rank()
        parameters = self.optimizer.round_robin_bit16_groups[group]
        for parameter, at in zip(parameters, self.optimizer.round_robin_bit16_offsets[group], strict=True):
            first, last = max(at, begin), min(at + parameter.numel(), begin + size)
            if first < last:
                yield Run(parameter, first - at, first - begin, last - first)

    def whole(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach()

    def gradients(self) -> list[list[Tensor]]:
        if self.optimizer.cpu_offload:
            return [[master.grad] for master in self.masters if master.grad is not None]
        return [list(self.optimizer.averaged_gradients[number]) for number in range(len(self.masters))]

    def forget(self) -> None:
        optimizer = self.optimizer
        optimizer.zero_grad()
        optimizer.micro_step_id = -1
        optimizer.averaged_gradients.clear()
        optimizer.all_grad_tensors.clear()
        optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear()
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            optimizer._offload_accumulated_param_ids.clear()

    def release(self) -> None:
        pass

    def refresh(self) -> None:
        self.optimizer.update_lp_params()


class Zero3:
    """ZeRO-3: of every parameter each rank has an equal part, also as working weights; those of a group lie end to end.

    DeepSpeed would record in which order modules are called, to prefetch weights, and insist that ranks call them equally often.
    They do not: each calls its head as often as its tokens fill chunks. So nothing is recorded.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.masters: list[Tensor] = getattr(optimizer, "fp32_partitioned_groups_flat", [])  # a frozen role has none
        if self.masters and not optimizer.offload_optimizer:
            _share_memory(self.masters, optimizer.fp16_partitioned_groups_flat)
        coordinator = self._offload().get_param_coordinator()
        coordinator.reset_step = coordinator._clean_inflight_param_registry

    def _offload(self) -> Any:
        return getattr(self.optimizer, "parameter_offload", self.optimizer)

    def runs(self) -> list[list[Run]]:
        return [list(self._runs(group)) for group in self.optimizer.fp16_groups]

    def _runs(self, group: Sequence[nn.Parameter]) -> Iterator[Run]:
        offset = 0
        for parameter in group:
            yield run_of(parameter, offset)
            offset += _part(parameter).numel()

    def whole(self, parameter: nn.Parameter) -> Tensor:
        described: Any = parameter
        part = _part(parameter).to(parameter.device)
        parts = part.new_empty((dist.get_world_size(), part.numel()))
        dist.all_gather(list(parts.unbind()), part.contiguous())
        return parts.flatten()[: described.ds_numel].view(described.ds_shape)

    def gradients(self) -> list[list[Tensor]]:
        if self.optimizer.offload_optimizer:
            return [[master.grad] for master in self.masters if master.grad is not None]
        return [self.optimizer.averaged_gradients[number] for number in range(len(self.masters))]

    def forget(self) -> None:
        optimizer = self.optimizer
        optimizer.zero_grad()
        optimizer.averaged_gradients = {}
        optimizer._offload_boundary_param_ids.clear()
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear_params()
        self.release()

    def release(self) -> None:
        self._offload().partition_all_parameters()

    def refresh(self) -> None:
        for number in range(len(self.masters)):
            self.optimizer._reassign_or_swap_out_partitioned_parameters(number)


def _share_memory(masters: Sequence[Tensor], working: Sequence[Tensor]) -> None:
    """Let float32 working weights be the master weights; DeepSpeed keeps two copies."""
    for master, own in zip(masters, working, strict=True):
        if (master.dtype, master.device) == (own.dtype, own.device):
            master.data = own.data


def partition(scorer: nn.Module, init: Any) -> None:
    """Put divided parameters in the places of those on the meta device. Of each a rank keeps its part, uninitialised.

    One whole tensor at a time is allocated, and never written.
    """
    divided: dict[nn.Parameter, nn.Parameter] = {}
    for parameter in scorer.parameters():
        new: Any = nn.Parameter(torch.empty_like(parameter, device=init.local_device), parameter.requires_grad)
        init._convert_to_deepspeed_param(new)
        new.partition()
        _part(new).zero_()
        divided[parameter] = new
    replace_parameters(scorer, divided)


def run_of(parameter: nn.Parameter, offset: int = 0) -> Run:
    """A rank's part of a parameter that `partition` divided, without padding."""
    described: Any = parameter
    size = _part(parameter).numel()
    start = min(size * dist.get_rank(), described.ds_numel)
    return Run(parameter, start, offset, min(size, described.ds_numel - start))


def _part(parameter: nn.Parameter) -> Tensor:
    divided: Any = parameter
    return divided.ds_tensor
