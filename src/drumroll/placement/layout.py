"""What a config asks of the devices, before anything is started. No Ray; torch only where the algorithm is asked."""

from __future__ import annotations

import math
import os
from collections.abc import Collection

from drumroll.algorithms import REFERENCE, TEACHER, VALUES
from drumroll.config import RunConfig
from drumroll.config.accelerators import USUAL
from drumroll.config.learners import AXES
from drumroll.config.roles import LearnerRole
from drumroll.errors import ConfigError
from drumroll.models.shape import ModelShape, find_shape
from drumroll.models.tensor_parallel import FAMILIES
from drumroll.placement.devices import DeviceRequest, Kind, Layout, Pool, lay_out


def requests(config: RunConfig, needs: Collection[str]) -> list[DeviceRequest]:
    """What each role of the run asks of the pool, given what the algorithm needs."""
    roles = config.roles
    asked = [
        _learner(config, "actor"),
        DeviceRequest("rollout", roles.rollout.devices, {str(k): v for k, v in roles.rollout.parallel.items()}),
    ]
    if REFERENCE in needs and not adapters_off(config):
        asked.append(_learner(config, "reference"))
    if TEACHER in needs:
        asked.append(_learner(config, "teacher"))
    if VALUES in needs:
        asked.append(_learner(config, "critic"))
    if roles.judge is not None and roles.judge.url is None:
        asked.append(DeviceRequest("judge", roles.judge.devices))
    if roles.reward_model is not None:
        asked.append(DeviceRequest("reward_model", roles.reward_model.devices))
    return asked


def _learner(config: RunConfig, role: LearnerRole) -> DeviceRequest:
    """What a training role asks of the pool; without a `data` of its own, replicas fill its devices."""
    parallel = config.parallel(role)
    sizes = {axis: size for axis in AXES if (size := getattr(parallel, axis)) is not None}
    return DeviceRequest(role, getattr(config.roles, role).devices, sizes, spreads=True)


def arrange(config: RunConfig, pool: Pool, needs: Collection[str]) -> Layout:
    """Assign devices to all roles; refuse meshes that their models do not allow."""
    layout = lay_out(pool, requests(config, needs))
    check_meshes(config, layout)
    return layout


def check_meshes(config: RunConfig, layout: Layout) -> None:
    """Refuse a `tensor` or `context` that does not divide the heads of a role's model, if the shape of the model is known."""
    for role, mesh in layout.meshes.items():
        name = getattr(config.roles, role).model or config.model
        shape = find_shape(name) if mesh.tensor * mesh.context > 1 else None
        if shape is None:
            continue
        if mesh.tensor > 1:
            if config.learner_backend(role) == "torch" and shape.family not in FAMILIES:
                raise ConfigError(
                    f"roles.{role}.parallel: tensor {mesh.tensor} divides no models of type '{shape.family}' ({name}); use shard, or one "
                    f"of the types {', '.join(sorted(FAMILIES))}."
                )
            _check_heads(role, name, shape, "tensor", mesh.tensor, 1, mesh.size // mesh.shard)
        if mesh.context > 1:
            _check_heads(role, name, shape, "context", mesh.context, mesh.tensor, mesh.size // mesh.shard)


def _check_heads(role: str, name: str, shape: ModelShape, axis: str, size: int, tensor: int, devices: int) -> None:
    """Each device attends with as many heads, and key-value heads, as the others; `tensor` has divided them already."""
    most = math.gcd(shape.heads, shape.kv_heads) // tensor
    if most % size == 0:
        return
    able = [str(n) for n in range(1, most + 1) if most % n == 0 and devices // tensor % n == 0]
    asked = f"{axis} {size}" if tensor == 1 else f"tensor {tensor} × {axis} {size} = {tensor * size}"
    raise ConfigError(
        f"roles.{role}.parallel: {asked} does not divide the {shape.heads} heads and {shape.kv_heads} key-value heads of "
        f"{name}; on these devices {axis} {' or '.join(able)} does."
    )


def adapters_off(config: RunConfig) -> bool:
    """Whether the reference is the actor without its adapters."""
    return config.roles.actor.lora is not None and config.roles.reference.model is None


def threads_of(config: RunConfig) -> int:
    """CPU threads of a device as the config asks for them; 0 lets the machine decide."""
    return config.cluster.threads or config.threads


def pool_of(
    config: RunConfig, gpus: int, gpu_memory: int | None = None, host_memory: int | None = None, found: str = USUAL
) -> Pool:
    """The devices of this machine, which has so many GPUs of the `found` kind, as the config asks for them; memory in bytes, if somebody asked."""
    wanted, cores = config.cluster, os.cpu_count() or 1
    kind = Kind(wanted.kind) if wanted.kind != "auto" else Kind(found if gpus else Kind.CPU)
    if kind is not Kind.CPU and (wanted.devices or 1) > gpus:
        raise ConfigError(f"cluster.devices: {wanted.devices or 1} GPUs were asked for, but this machine has {gpus}.")
    count = wanted.devices or (gpus if kind is not Kind.CPU else 1)
    memory = gpu_memory if kind is not Kind.CPU else host_memory and host_memory // count
    memory = memory if wanted.device_memory_gb is None else int(wanted.device_memory_gb * 1e9)
    return Pool.of([{kind: count}], threads_of(config) or (1 if kind is not Kind.CPU else max(1, cores // count)), memory)


def joins(config: RunConfig) -> bool:
    """Whether the run joins a cluster, instead of starting one here."""
    return bool(config.cluster.address or os.environ.get("RAY_ADDRESS"))
