"""The memory plan of a recipe: bytes for each role on each device, the stage that peaks, and a layout that fits.

Roles that share devices take turns. While learners train, engines on their devices sleep: a native engine keeps its
weights, vLLM gives all its GPU memory back. While engines generate, trained roles on GPUs move to the host; frozen roles
and the reward model stay. On the local runtime, and on CPUs, nothing moves.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from drumroll.config import RunConfig
from drumroll.config.learners import AXES, learner_traits
from drumroll.config.roles import LearnerRole, ParallelConfig
from drumroll.errors import ConfigError
from drumroll.mesh import Mesh
from drumroll.models.shape import ModelShape, find_shape
from drumroll.placement import memory
from drumroll.placement.backend_memory import DeepSpeedLearner, MegatronLearner
from drumroll.placement.devices import Device, Kind, Layout, ranges
from drumroll.placement.layout import check_meshes
from drumroll.placement.memory import NAMES, Rows, Training, Usage, Work
from drumroll.processes.memory import SHARE
from drumroll.workers.runtime import context_length, open_algorithm

TRAINED = ("actor", "critic")
FROZEN = ("reference", "teacher")
LEARNERS = (*TRAINED, *FROZEN)
ENGINES = ("rollout", "judge")
STAGES = ("training", "generation")
LEARNER_MEMORY = {"megatron": MegatronLearner, "deepspeed": DeepSpeedLearner}
"""The arithmetic of backends other than torch; a backend of the user's own is taken for one like torch."""
UTILIZATION = 0.9
"""vLLM's default share of a device."""
NEAREST = ("shard", "expert", "pipeline", "context", "tensor")
"""The axes in the order in which others are tried: `tensor`, which costs the most messages, last."""
CPU_CACHE = 2**30
"""Keys and values of vLLM on a CPU, unless an option says otherwise."""


@dataclass(frozen=True)
class Plan:
    """The memory of a run: for each set of like devices, the rows of each role in each stage."""

    groups: list[Group]
    unknown: list[str]
    """Models whose shape is not known; their roles are not counted."""

    @property
    def worst(self) -> tuple[Group, str] | None:
        """The devices and the stage that exceed their memory most; None if all fit or their memory is unknown."""
        over = [(group, stage, group.peak(stage) - (group.memory or math.inf)) for group in self.groups for stage in STAGES]
        group, stage, excess = max(over, key=lambda item: item[2])
        return (group, stage) if excess > 0 else None


@dataclass(frozen=True)
class Group:
    """Devices that hold the same roles, and the same pipeline stage of each."""

    devices: tuple[Device, ...]
    stages: Mapping[str, Mapping[str, Rows]]
    """Rows by stage and role."""
    holds: str = ""
    """Which pipeline stages they hold, for sentences."""
    host: Mapping[str, Rows] = field(default_factory=dict)
    """Rows in host memory for each device, by role."""

    @property
    def memory(self) -> int | None:
        """Bytes of one device."""
        return self.devices[0].memory

    @property
    def name(self) -> str:
        """The devices as a range, and their pipeline stages."""
        return f"{self.devices[0].kind.value} {ranges([d.index for d in self.devices])}{self.holds}"

    def peak(self, stage: str) -> int:
        """Bytes on one device in a stage."""
        return sum(sum(rows.values()) for rows in self.stages[stage].values())

    @property
    def peak_stage(self) -> str:
        """The stage that needs most."""
        return max(STAGES, key=self.peak)


def memory_plan(config: RunConfig, layout: Layout) -> Plan:
    """Compute the memory of every role on every device."""
    together: dict[tuple[tuple[str, int], ...], list[Device]] = {}
    for device in dict.fromkeys(d for devices in layout.devices.values() for d in devices):
        roles = tuple(
            (role, _mesh(layout, role, device).coordinates["pipeline"])
            for role, devices in layout.devices.items()
            if device in devices
        )
        together.setdefault(roles, []).append(device)
    usages = _Usages(config, layout)
    groups = [usages.group(dict(roles), tuple(devices)) for roles, devices in together.items()]
    return Plan(groups, usages.unknown)


def _mesh(layout: Layout, role: str, device: Device) -> Mesh:
    """The mesh of a role, with the rank that runs on this device; engines and reward models have none."""
    mesh = layout.meshes.get(role)
    return Mesh() if mesh is None else replace(mesh, rank=layout.devices[role].index(device) % mesh.size)


class _Usages:
    """The memory of each role of a config under a layout."""

    def __init__(self, config: RunConfig, layout: Layout) -> None:
        self.config, self.layout, self.local = config, layout, config.cluster.runtime == "local"
        self.unknown: list[str] = []
        learning = {d for role in LEARNERS for d in layout.devices.get(role, ())}
        self.turns = any(d in learning for role in ENGINES for d in layout.devices.get(role, ()))

    def group(self, roles: Mapping[str, int], devices: tuple[Device, ...]) -> Group:
        """Like devices, given their roles and the pipeline stage of each."""
        found = {role: usage for role in roles if (usage := self.usage(role, devices[0])) is not None}
        depth = {role: self.layout.meshes[role].pipeline for role in roles if role in self.layout.meshes}
        held = [f"{role}'s pipeline stage {roles[role] + 1} of {size}" for role, size in depth.items() if size > 1]
        host = {role: usage.host for role, usage in found.items() if usage.host}
        return Group(devices, self._stages(found, devices[0]), f" ({', '.join(held)})" if held else "", host)

    def _stages(self, found: Mapping[str, Usage], device: Device) -> dict[str, dict[str, Rows]]:
        """Rows by stage and role on a device."""
        learners = [role for role in found if role in LEARNERS]
        busy = max(learners, key=lambda role: sum(found[role].work.values()), default="")
        training = {role: self._in_training(role, usage, device, role == busy, bool(learners)) for role, usage in found.items()}
        generation = {role: self._in_generation(role, usage, device) for role, usage in found.items()}
        return {"training": training, "generation": generation}

    def _in_training(self, role: str, usage: Usage, device: Device, busy: bool, learns: bool) -> Rows:
        if role in ENGINES:
            vllm_on_cpu = device.kind is Kind.CPU and self._backend(role) == "vllm"
            return usage.rows(working=self.local or not learns or vllm_on_cpu)
        return usage.rows(working=busy)

    def _in_generation(self, role: str, usage: Usage, device: Device) -> Rows:
        if role in ENGINES or role == "reward_model":
            sent = memory.buckets(self._shape(role), self._dtype(role)) if role == "rollout" and not self.local else 0
            return usage.rows() | ({"buckets": sent} if sent else {})
        away = role in TRAINED and self.turns and device.kind is not Kind.CPU and not self.local
        return usage.staying if away else usage.rows(working=False)

    def usage(self, role: str, device: Device) -> Usage | None:
        """The memory of a role on one of its devices; None if its model's shape is not known."""
        name = self._model(role)
        if find_shape(name, classifier=role == "reward_model") is None:
            self.unknown += [name] if name not in self.unknown else []
            return None
        if role in LEARNERS:
            return self._learner(cast("LearnerRole", role), _mesh(self.layout, role, device))
        return {"rollout": self._rollout, "judge": self._judge, "reward_model": self._reward_model}[role](device)

    def _learner(self, role: LearnerRole, mesh: Mesh) -> Usage:
        config, shape = self.config, self._shape(role)
        section, parallel, lora = getattr(config.roles, role), config.parallel(role), config.roles.actor.lora
        how = Training(
            dtype=self._dtype(role),
            mesh=mesh,
            trained=role in TRAINED,
            adapters=memory.adapter_parameters(shape, lora.rank) if lora is not None and role == "actor" else 0,
            values=role == "critic" or (role == "actor" and config.trains_scores()),
            recompute=getattr(section, "recompute_activations", False),
            reshard=parallel.reshard,
            accumulate=parallel.accumulate,
            sequence=parallel.sequence and mesh.tensor > 1 and config.learner_backend(role) == "megatron",
            zero=parallel.zero,
            offload=parallel.offload,
        )
        made = LEARNER_MEMORY.get(config.learner_backend(role), memory.Learner)
        usage, more = made(shape, how).usage(largest_work(config, role, mesh)), 0
        teachers = [found for model in config.roles.teacher.models() if (found := find_shape(model)) is not None]
        divergence = config.divergence_section()
        if role == "teacher":
            more = sum(made(other, how).resident().get("weights", 0) for other in teachers[1:])
        elif role == "actor" and divergence is not None and divergence.over == "all":  # a copy of the teachers' heads
            more = sum(memory.WIDTH[self._dtype("teacher")] * other.vocabulary * other.hidden for other in teachers)
        weights = {"weights": usage.resident.get("weights", 0) + more} if more else {}
        return replace(usage, resident={**usage.resident, **weights})

    def _rollout(self, device: Device) -> Usage:
        config, role, shape = self.config, self.config.roles.rollout, self._shape("rollout")
        dtype, context = self._dtype("rollout"), context_length(config)
        if role.backend == "vllm":
            parts = math.prod(role.parallel.values())
            if device.kind is Kind.CPU:
                kept = int(role.options.get("kv_cache_memory_bytes", CPU_CACHE))
                return Usage({}, {"weights": memory.WIDTH[dtype] * shape.parameters // parts, "keys and values": kept})
            share = float(role.options.get("gpu_memory_utilization", UTILIZATION))
            return memory.vllm(shape, dtype, parts=parts, context=context, memory=device.memory, utilization=share)
        packed = device.kind is Kind.CPU
        cache_gb = role.cache_gb
        if cache_gb is None and device.memory is not None:
            cache_gb = device.memory / SHARE / (role.workers if self.local else 1) / 2**30
        found = memory.engine(
            shape, dtype, slots=role.slots, context=context, cache_gb=cache_gb, packed=packed, fixed=config.deterministic
        )
        if not self.local:
            return found
        shared = config.rollout_section().max_staleness == 0 and config.engine_traits().shares_weights
        each = {name: size * role.workers for name, size in found.work.items()}
        return Usage({} if shared else {"weights": found.resident["weights"] * role.workers}, each)

    def _judge(self, device: Device) -> Usage:
        role, packed = self.config.roles.judge, device.kind is Kind.CPU
        assert role is not None
        context = role.max_prompt_tokens + role.max_tokens
        return memory.engine(
            self._shape("judge"), role.dtype, slots=role.slots, context=context, packed=packed, fixed=self.config.deterministic
        )

    def _reward_model(self, device: Device) -> Usage:
        role = self.config.roles.reward_model
        assert role is not None
        return memory.classifier(self._shape("reward_model"), role.dtype, role.batch_size * role.max_tokens)

    def _model(self, role: str) -> str:
        if role in (*LEARNERS, "rollout"):
            return self.config.role_model(cast("LearnerRole", "actor" if role == "rollout" else role))
        return getattr(self.config.roles, role).model or self.config.model

    def _shape(self, role: str) -> ModelShape:
        shape = find_shape(self._model(role), classifier=role == "reward_model")
        assert shape is not None, "asked before"
        return shape

    def _dtype(self, role: str) -> str:
        return getattr(getattr(self.config.roles, role), "dtype", None) or self.config.roles.actor.dtype

    def _backend(self, role: str) -> str:
        return self.config.roles.rollout.backend if role == "rollout" else "native"


def largest_work(config: RunConfig, role: str, mesh: Mesh) -> Work:
    """The largest micro-batch that a training role can get: full, of the longest traces, with shared prompts."""
    optim = config.roles.critic.optim if role == "critic" else config.optim
    longest, batch = config.longest_trained(), config.batch_size()
    most = math.inf if batch is None else -(-(optim.minibatch or batch) // mesh.shares) * longest
    tokens = int(min(max(optim.micro_tokens, longest), max(most, longest)))
    several, count = most > tokens, max(1, -(-most // tokens))
    samples = config.rollout_section().most_samples if config.has_rollouts() else 1
    entropy = role == "actor" and config.has_rollouts() and open_algorithm(config).loss.entropy_gradient
    if samples == 1 or tokens < 2 * longest:
        return Work(tokens, tokens, several=several, entropy_gradient=entropy, micro_batches=count)
    prompt = min(config.data.max_prompt_tokens, longest - 1)
    spread = samples * longest / (prompt + samples * (longest - prompt))
    return Work(tokens, tokens, int(tokens * spread), tokens * longest, several, entropy, count)


# --- for people ---


def memory_lines(plan: Plan) -> Iterator[str]:
    """Yield a table for each set of like devices: GB of each role in each stage, and which stage peaks."""
    for name in plan.unknown:
        yield f"the memory of {name} is not counted: its config.json is neither here nor in the hub's cache."
    for group in plan.groups:
        if group.peak(group.peak_stage):
            yield from _table(group)


def _table(group: Group) -> Iterator[str]:
    has = f", of {group.memory / 1e9:.1f} GB" if group.memory else ""
    sums = (f"{stage} {group.peak(stage) / 1e9:.2f} GB{' (peak)' * (stage == group.peak_stage)}" for stage in STAGES)
    yield f"memory of each device {group.name}{has}: {', '.join(sums)}"
    for role, rows in group.host.items():
        yield f"host memory of {role} for each of them: {_sum(rows)} = {sum(rows.values()) / 1e9:.1f} GB"
    columns = [(stage, role, rows) for stage in STAGES for role, rows in group.stages[stage].items() if rows]
    table = Table()
    table.add_column("GB")
    for stage, role, _ in columns:
        table.add_column(f"{stage}\n{role}", justify="right")
    for name in (name for name in NAMES if any(name in rows for *_, rows in columns)):
        table.add_row(name, *(f"{rows[name] / 1e9:.2f}" if name in rows else "" for *_, rows in columns))
    table.add_section()
    table.add_row("all", *(f"{sum(rows.values()) / 1e9:.2f}" for *_, rows in columns))
    text = io.StringIO()
    Console(width=98, file=text).print(table)
    yield from text.getvalue().splitlines()


def _sum(rows: Rows) -> str:
    """Rows as terms of a sum, in GB."""
    return " + ".join(f"{name} {size / 1e9:.1f}" for name, size in rows.items())


def check_memory(config: RunConfig, plan: Plan, layout: Layout) -> None:
    """Refuse a plan that does not fit, with its arithmetic and the nearest one that fits."""
    if plan.worst is None:
        return
    group, stage = plan.worst
    sums = [f"{role} ({_sum(rows)})" for role, rows in group.stages[stage].items() if rows]
    hint = "take more devices, or a smaller model: nothing tried (parallel, recompute_activations, micro_tokens, slots) fits"
    if found := nearest(config, layout):
        hint = f"nearest that fits: {found}"
    raise ConfigError(
        f"memory: {stage} needs {group.peak(stage) / 1e9:.1f} GB on each of the devices {group.name}, which have "
        f"{(group.memory or 0) / 1e9:.1f} GB: {' + '.join(sums)}; {hint}."
    )


def nearest(config: RunConfig, layout: Layout) -> str | None:
    """The smallest changes that make a config fit, as keys and values; None if those tried do not."""
    made: dict[str, Any] = {}
    for _ in range(4):
        worst = memory_plan(config, layout).worst
        if worst is None:
            return ", ".join(f"{key}: {_written(value)}" for key, value in made.items())
        step = next(_steps(config, layout, *worst), None)
        if step is None:
            return None
        changes, config, layout = step
        made |= changes
    return None


def _steps(config: RunConfig, layout: Layout, group: Group, stage: str) -> Iterator[tuple[dict[str, Any], RunConfig, Layout]]:
    """Changes after which these devices fit in this stage, the nearest first."""
    for changes in _candidates(config, layout, group, stage):
        changed = config
        for key, value in changes.items():
            changed = _changed(changed, key.split("."), value)
        again = _again(changed, layout)
        if again is None:
            continue
        now = [other for other in memory_plan(changed, again).groups if not set(other.devices).isdisjoint(group.devices)]
        if all(other.peak(stage) <= (group.memory or math.inf) for other in now):
            yield changes, changed, again


def _candidates(config: RunConfig, layout: Layout, group: Group, stage: str) -> list[dict[str, Any]]:
    """Changes of one role, the heaviest first; then of the two heaviest together, small changes of both first."""
    heaviest = sorted(group.stages[stage], key=lambda role: -sum(group.stages[stage][role].values()))
    each = [list(_changes(config, layout, role)) for role in heaviest]
    both = product(*(enumerate(changes) for changes in each[:2])) if len(each) > 1 else ()
    pairs = sorted(both, key=lambda pair: sum(place for place, _ in pair))
    return [*chain(*each), *(one | other for (_, one), (_, other) in pairs)]


def _again(config: RunConfig, layout: Layout) -> Layout | None:
    """The layout with the meshes that a changed config asks for; None if they do not fill the devices or divide the heads."""
    meshes: dict[str, Mesh] = {}
    for role, mesh in layout.meshes.items():
        asked = config.parallel(cast("LearnerRole", role))
        sizes = {axis: getattr(asked, axis) for axis in AXES if axis != "data"}
        replicas, rest = divmod(mesh.size, math.prod(size for axis, size in sizes.items() if axis != "expert"))
        if rest or asked.data not in (None, replicas) or replicas * asked.shard * asked.tensor % asked.expert:
            return None
        meshes[role] = Mesh(data=replicas, **sizes)
    again = replace(layout, meshes=meshes)
    try:
        check_meshes(config, again)
    except ConfigError:
        return None
    return again


def _changes(config: RunConfig, layout: Layout, role: str) -> Iterator[dict[str, Any]]:
    """Other settings of a role: shard and tensor; recomputed activations; smaller micro-batches; fewer slots."""
    if role in LEARNERS:
        yield from _learner_changes(config, role, layout.meshes[role])
    elif role == "rollout" and config.roles.rollout.backend == "vllm":
        used = float(config.roles.rollout.options.get("gpu_memory_utilization", UTILIZATION))
        shares = (round(0.05 * twentieths, 2) for twentieths in range(int(used * 20), 1, -1))
        yield from ({"roles.rollout.options.gpu_memory_utilization": share} for share in shares if share < used)
    elif role in ENGINES:
        slots = getattr(config.roles, role).slots
        yield from ({f"roles.{role}.slots": slots >> halvings} for halvings in range(1, slots.bit_length()))


def _learner_changes(config: RunConfig, role: str, mesh: Mesh) -> Iterator[dict[str, Any]]:
    parallel, section = config.parallel(cast("LearnerRole", role)), getattr(config.roles, role)
    optim = "roles.critic.optim" if role == "critic" else "optim"
    tokens = section.optim.micro_tokens if role == "critic" else config.optim.micro_tokens
    more: list[dict[str, Any]] = [{}]
    if role in TRAINED:
        recompute = {} if section.recompute_activations else {f"roles.{role}.recompute_activations": True}
        fewer = [tokens >> halvings for halvings in range(1, 8) if tokens >> halvings >= 256]
        more += [recompute, *(recompute | {f"{optim}.micro_tokens": size} for size in fewer)]
    for extra, sized in product(more, _divisions(config.learner_backend(role), parallel, mesh)):
        if changes := ({} if sized == parallel else {f"roles.{role}.parallel": sized}) | extra:
            yield changes


def _divisions(backend: str, parallel: ParallelConfig, mesh: Mesh) -> list[ParallelConfig]:
    """All ways of a backend to divide a model over the devices of a mesh, this one first.

    After it those that change only the first axis, then those that change the second; DeepSpeed's from the fastest to the
    smallest.
    """
    if backend == "deepspeed":
        ways = [(2, "none"), (3, "none"), (2, "optimizer"), (3, "optimizer"), (3, "all")]
        return [parallel.model_copy(update={"zero": zero, "offload": offload}) for zero, offload in ways]
    axes = [axis for axis in NEAREST if axis in learner_traits(backend).axes]
    divisors = [size for size in range(1, mesh.size + 1) if mesh.size % size == 0]
    sizes = [dict(zip(axes, each, strict=True)) for each in product(divisors, repeat=len(axes))]
    sizes = [each for each in sizes if mesh.size % math.prod(size for axis, size in each.items() if axis != "expert") == 0]
    sizes.sort(key=lambda each: [abs(math.log(each[axis] / getattr(mesh, axis))) for axis in reversed(axes)])
    return [parallel, *(parallel.model_copy(update={"data": None, **each}) for each in sizes[1:])]


def _changed(section: Any, path: list[str], value: Any) -> Any:
    """A copy of a section with one key replaced."""
    name, rest = path[0], path[1:]
    if isinstance(section, dict):
        return section | {name: value}
    return section.model_copy(update={name: _changed(getattr(section, name), rest, value) if rest else value})


def _written(value: Any) -> str:
    """A value as a recipe writes it."""
    if isinstance(value, ParallelConfig):
        sizes = {field: getattr(value, field) for field in value.asked()} | value.sizes()
        return "{" + ", ".join(f"{axis}: {_written(size)}" for axis, size in (sizes or {"shard": 1}).items()) + "}"
    return str(value).lower()
