"""What a config asks of the devices, before anything is started. No Ray; torch only where the algorithm is asked."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from typing import cast

from drumroll.algorithms import REFERENCE, TEACHER, VALUES
from drumroll.config import RunConfig
from drumroll.config.accelerators import USUAL
from drumroll.config.learners import AXES, learner_traits
from drumroll.config.roles import LearnerRole
from drumroll.errors import ConfigError
from drumroll.mesh import Mesh
from drumroll.models.shape import ModelShape, find_shape
from drumroll.models.tensor_parallel import FAMILIES
from drumroll.placement.devices import DeviceRequest, Kind, Layout, Pool, common_divisors, lay_out


def requests(config: RunConfig, needs: Collection[str]) -> list[DeviceRequest]:
    """What each role of the run asks of the pool, given what the algorithm needs."""
    roles = config.roles
    asked = [_learner(config, "actor")]
    if not config.trains_scores():
        asked.append(DeviceRequest("rollout", roles.rollout.devices, {str(k): v for k, v in roles.rollout.parallel.items()}))
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
    """Refuse divisions that a backend does not have, or that a role's model does not allow if its shape is known."""
    for role, mesh in layout.meshes.items():
        backend, name = config.learner_backend(role), config.role_model(cast("LearnerRole", role))
        traits = learner_traits(backend)
        if mesh.data > 1 and "data" not in traits.axes:
            raise ConfigError(
                f"roles.{role}.parallel: {traits.title} divides a model over all devices of a role, and makes no replicas (data "
                f"{mesh.data} × shard {mesh.shard}); shard {mesh.size} takes all {mesh.size} devices."
            )
        shape = find_shape(name) if mesh.tensor * mesh.context > 1 or traits.families else None
        if shape is None:
            continue
        if traits.families and shape.family not in traits.families:
            raise ConfigError(
                f"roles.{role}.backend: {backend} trains no models of type '{shape.family}' ({name}), only "
                f"{', '.join(sorted(traits.families))}; use backend: torch."
            )
        _check_heads(role, name, shape, mesh, torch=backend == "torch")
        if backend == "megatron":
            sequence = config.parallel(cast("LearnerRole", role)).sequence
            _check_megatron(f"roles.{role}.parallel", name, shape, mesh, sequence=sequence)


def _check_heads(role: str, name: str, shape: ModelShape, mesh: Mesh, *, torch: bool) -> None:
    """The family has a plan, and each device attends with as many heads, and key-value heads, as the others."""
    tensor, heads = mesh.tensor, math.gcd(shape.heads, shape.kv_heads)
    if torch and tensor > 1 and shape.family not in FAMILIES:
        raise ConfigError(
            f"roles.{role}.parallel: tensor {tensor} divides no models of type '{shape.family}' ({name}); use shard, or one of the types "
            f"{', '.join(sorted(FAMILIES))}."
        )
    for axis, size, most in (("tensor", tensor, heads), ("context", mesh.context, heads // tensor)):
        if most % size:
            both = axis == "context" and tensor > 1
            asked = f"tensor {tensor} × context {size} = {tensor * size}" if both else f"{axis} {size}"
            devices = mesh.data * mesh.context * (tensor if axis == "tensor" else 1)
            raise ConfigError(
                f"roles.{role}.parallel: {asked} does not divide the {shape.heads} heads and {shape.kv_heads} key-value heads of "
                f"{name}; on these devices {axis} {common_divisors(most, devices)} does."
            )


def _check_megatron(key: str, name: str, shape: ModelShape, mesh: Mesh, *, sequence: bool) -> None:
    """Pipeline stages get equally many layers, ranks equally many columns and experts."""
    if shape.layers % mesh.pipeline:
        able = common_divisors(shape.layers, mesh.data * mesh.pipeline)
        raise ConfigError(
            f"{key}: pipeline {mesh.pipeline} does not divide the {shape.layers} layers of {name}; on these devices pipeline {able} does."
        )
    if mesh.expert > 1 and not shape.experts:
        raise ConfigError(f"{key}: expert {mesh.expert} divides experts, and {name} has none; leave expert out.")
    if mesh.expert > 1 and shape.experts % mesh.expert:
        able = common_divisors(shape.experts, mesh.data * mesh.tensor)
        raise ConfigError(
            f"{key}: expert {mesh.expert} does not divide the {shape.experts} experts of {name}; on these devices expert {able} does."
        )
    columns = shape.expert_width or shape.mlp
    if mesh.expert == 1 and columns % mesh.tensor:  # `expert` leaves experts whole
        raise ConfigError(f"{key}: tensor {mesh.tensor} does not divide the {columns} columns of the MLP of {name}.")
    if shape.experts and mesh.tensor > 1 and not sequence:
        raise ConfigError(f"{key}: experts with tensor {mesh.tensor} need sequence: true, which is the default.")


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
