"""Megatron-Core's process groups on our mesh.

Megatron keeps them in global variables, so a process has one set at a time. It numbers ranks with `pipeline` slowest; our
meshes have `data` slowest. Its groups are therefore made from its own numbers, translated into ours.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from drumroll.learners.megatron.names import Place
from drumroll.learners.ranks import Ranks
from drumroll.mesh import Mesh
from drumroll.processes.accelerator import collectives

_Generator: Any = parallel_state.RankGenerator
_made: list[Any] = []
"""For which process group and mesh the present groups were made."""


def join(ranks: Ranks, device: str) -> None:
    """Make Megatron's groups, unless they exist: they are shared by all roles that open on the same ranks."""
    mesh = ranks.mesh
    if not dist.is_initialized():
        dist.init_process_group(collectives(device), store=dist.HashStore(), rank=0, world_size=1)
    key = [dist.group.WORLD, mesh]
    if _made == key:
        return
    parallel_state.destroy_model_parallel()
    parallel_state.RankGenerator = _on(mesh)
    try:
        parallel_state.initialize_model_parallel(
            mesh.tensor,
            mesh.pipeline,
            expert_model_parallel_size=mesh.expert,
            expert_tensor_parallel_size=expert_tensor(mesh),
            distributed_timeout_minutes=ranks.seconds / 60,  # type: ignore[bad-argument-type]
            create_gloo_process_groups=False,
        )
    finally:
        parallel_state.RankGenerator = _Generator
    tensor_parallel.model_parallel_cuda_manual_seed(0)  # nothing is random, but its layers ask for the states
    _made[:] = key


def expert_tensor(mesh: Mesh) -> int:
    """How many ranks divide each expert: those along `tensor`, or none where `expert` spreads whole experts over them."""
    return mesh.tensor if mesh.expert == 1 else 1


def _on(mesh: Mesh) -> Any:
    """A generator of Megatron's groups in the numbers of a mesh."""
    ours = [
        (data * mesh.pipeline + stage) * mesh.tensor + tensor
        for stage in range(mesh.pipeline)
        for data in range(mesh.data)
        for tensor in range(mesh.tensor)
    ]

    class OnMesh(_Generator):
        def get_ranks(self, token: str) -> list[list[int]]:
            return [[ours[rank] for rank in group] for group in super().get_ranks(token)]

    return OnMesh


def place(layers: int, experts: int) -> Place:
    """Where this rank stands, of a model with so many layers and experts."""
    state: Any = parallel_state
    stage, stages = state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()
    expert, spread = state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()
    return Place(
        layer=stage * layers // stages,
        expert=expert * experts // spread,
        tensor=(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
        expert_tensor=(state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
    )


def is_first_replica(*, expert: bool) -> bool:
    """Whether this is the first of the ranks that hold the same part of the model, or the same experts."""
    find: Any = parallel_state.get_expert_data_parallel_rank if expert else parallel_state.get_data_parallel_rank
    return find() == 0
