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
from drumroll.models.shape import find_shape
from drumroll.models.tensor_parallel import FAMILIES
from drumroll.placement.devices import DeviceRequest, Kind, Layout, Pool, common_divisors, lay_out


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
    """Refuse divisions that a backend does not have, or that a role's model does not allow if its shape is known."""
    for role, mesh in layout.meshes.items():
        traits = learner_traits(config.learner_backend(role))
        if mesh.data > 1 and "data" not in traits.axes:
            raise ConfigError(
                f"roles.{role}.parallel: {traits.title} divides a model over all devices of a role, and makes no replicas (data "
                f"{mesh.data} × shard {mesh.shard}); shard {mesh.size} takes all {mesh.size} devices."
            )
        if mesh.tensor > 1:
            _check_tensor(config, role, mesh.tensor, mesh.data * mesh.tensor)
        if config.learner_backend(role) == "megatron":
            _check_megatron(config, role, mesh, traits.families)


def _check_tensor(config: RunConfig, role: str, tensor: int, devices: int) -> None:
    """The family has a plan, and each device computes as many heads, and key-value heads, as the others."""
    name = getattr(config.roles, role).model or config.model
    shape = find_shape(name)
    if shape is not None and config.learner_backend(role) == "torch" and shape.family not in FAMILIES:
        raise ConfigError(
            f"roles.{role}.parallel: tensor {tensor} divides no models of type '{shape.family}' ({name}); use shard, or one of the types "
            f"{', '.join(sorted(FAMILIES))}."
        )
    if shape is None or (shape.heads % tensor == 0 and shape.kv_heads % tensor == 0):
        return
    most = math.gcd(shape.heads, shape.kv_heads)
    raise ConfigError(
        f"roles.{role}.parallel: tensor {tensor} does not divide the {shape.heads} heads and {shape.kv_heads} key-value heads of "
        f"{name}; on these devices tensor {common_divisors(most, devices)} does."
    )


def _check_megatron(config: RunConfig, role: str, mesh: Mesh, families: Collection[str]) -> None:
    """The family has a map of names; pipeline stages get equally many layers, ranks equally many columns and experts."""
    name = getattr(config.roles, role).model or config.model
    shape, key = find_shape(name), f"roles.{role}.parallel"
    if shape is None:
        return
    if shape.family not in families:
        raise ConfigError(
            f"roles.{role}.backend: megatron trains no models of type '{shape.family}' ({name}), only {', '.join(sorted(families))}; "
            "use backend: torch."
        )
    if shape.layers % mesh.pipeline:
        able = common_divisors(shape.layers, mesh.size // mesh.tensor)
        raise ConfigError(
            f"{key}: pipeline {mesh.pipeline} does not divide the {shape.layers} layers of {name}; on these devices pipeline {able} does."
        )
    if not shape.experts and shape.mlp % mesh.tensor:
        raise ConfigError(f"{key}: tensor {mesh.tensor} does not divide the {shape.mlp} columns of the MLP of {name}.")
    if mesh.expert > 1 and not shape.experts:
        raise ConfigError(f"{key}: expert {mesh.expert} divides experts, and {name} has none; leave expert out.")
    if shape.experts and shape.experts % mesh.expert:
        able = common_divisors(shape.experts, mesh.data * mesh.tensor)
        raise ConfigError(
            f"{key}: expert {mesh.expert} does not divide the {shape.experts} experts of {name}; on these devices expert {able} does."
        )
    if shape.experts and mesh.tensor > 1 and not config.parallel(cast("LearnerRole", role)).sequence:
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
