"""`RunConfig`: the keys that every pipeline has, and what a pipeline's config says of itself."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator
from typing_extensions import override

from drumroll import objects
from drumroll.config.accelerators import LOCAL_DEVICE, USUAL
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.config.cluster import ClusterConfig
from drumroll.config.data import DataConfig, DatasetConfig
from drumroll.config.divergence import DivergenceConfig
from drumroll.config.engines import ENGINES, EngineTraits, traits_of
from drumroll.config.environment import NONE, EnvironmentConfig
from drumroll.config.eval import EvalConfig, HeldOutConfig
from drumroll.config.learners import learner_traits, who_takes
from drumroll.config.optim import OptimConfig
from drumroll.config.reward import ALL_DOMAINS, RewardConfig, RewardSpec, normalise
from drumroll.config.roles import LearnerRole, ParallelConfig, RolesConfig
from drumroll.config.rollout import RolloutConfig
from drumroll.config.sandbox import SandboxConfig
from drumroll.config.section import Section
from drumroll.errors import ConfigError
from drumroll.registry import search


class CheckpointConfig(Section):
    """Resumable states under `checkpoints/`."""

    every: int = Field(50, ge=0)
    """Save every so many steps; 0 only at the end. The best and the last are kept whatever `keep` says."""
    keep: int = Field(2, ge=1)
    """How many of the newest to keep."""


class TrackerConfig(Section):
    """Where metrics go besides `metrics.jsonl`."""

    kind: Literal["tensorboard", "wandb", "trackio"]
    """TensorBoard event files in the run directory, Weights & Biases, or trackio's local store."""
    project: str = "drumroll"
    """Project name (wandb, trackio)."""
    entity: str | None = None
    """User or team that the run belongs to (wandb)."""
    group: str | None = None
    """Group of runs to show together (wandb, trackio)."""
    tags: list[str] = []
    """Tags to find the run by (wandb; in trackio's config)."""
    name: str | None = None
    """Name of the run there (wandb, trackio). Default: `name`."""
    mode: Literal["online", "offline"] = "online"
    """wandb without a network: offline."""
    samples: int = Field(16, ge=0)
    """With every evaluation, send a table of so many held-out samples and of so many samples of the step; 0 sends none."""
    required: bool = False
    """Stop before the first step when it cannot be opened (no login, no network). Default: the run goes on without it and says so."""

    @model_validator(mode="after")
    def _keys_fit(self) -> Self:
        lacking = {"tensorboard": ("project", "entity", "group", "tags", "name", "mode"), "trackio": ("entity", "mode")}
        for key in lacking.get(self.kind, ()):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{self.kind} has no `{key}`; leave it out, or use `kind: wandb`")
        return self


class RunConfig(Section):
    """The keys of every pipeline.

    A pipeline's config adds its own keys, and overrides the methods from `has_rollouts` on: the rest of the package asks
    those, and never which pipeline it is.
    """

    name: str = "run"
    """Name of the run; its directory is `output`/`name`."""
    output: str = "runs"
    """Directory that holds run directories."""
    model: str = "tiny"
    """Model of all roles that name none: a built-in (tiny, tiny-even, tiny-random, tiny-even-random, tiny-moe, tiny-moe-random), a Hugging Face directory or hub id."""
    roles: RolesConfig = RolesConfig()
    """Each role with its own model, backend and device."""
    cluster: ClusterConfig = ClusterConfig()
    """Where the roles run."""
    data: DataConfig
    """Training rows."""
    reward: RewardSpec | dict[str, RewardSpec] = {}
    """Scoring functions: one for all domains (`reward: exact`), or by domain (`reward: {sums: exact}`)."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where programs that the model wrote are run, for the reward `code`."""
    eval: EvalConfig = EvalConfig()
    """Held-out sets."""
    optim: OptimConfig = OptimConfig()
    """The optimizer."""
    steps: int = Field(100, ge=0)
    """Training steps."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of everything random."""
    deterministic: bool = False
    """Same seed, same machine, same bytes; costs some speed."""
    threads: int = Field(0, ge=0)
    """CPU threads for torch; 0 takes one per core. On ray: of each device, where `cluster.threads` says nothing else."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Resumable states."""
    trackers: list[TrackerConfig] = []
    """Where metrics go besides `metrics.jsonl`."""
    import_from: list[str] = []
    """Directories where `module:function` is looked up. The recipe's directory and the current one are added."""
    pipeline: str = "rl"
    """`rl` trains on the model's own scored samples; `sft` imitates given answers; `dpo` learns from preferences; `reward_model` learns to score answers from preferences; `distill` follows a teacher; `module:NAME` is a pipeline of your own."""

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        self._check_mixture()
        self._check_learners()
        self._check_devices()
        if self.roles.rollout.backend in ENGINES:  # a user's engine is imported, and checked, only by verbs that run it
            self._check_engine()
        self._check_thoughts()
        self._check_held_out()
        return self

    def _check_held_out(self) -> None:
        """Refuse two sets of one name, and a best checkpoint by a set that is not there."""
        best, held_out = self.eval.best_by, self.held_out_sets()
        if both := sorted({*held_out} & {*self.eval.sets}):
            raise ValueError(f"held_out and eval.sets both have a set '{both[0]}'; their metrics would have the same names")
        if best is not None and not best.removeprefix("-").startswith("eval/"):
            found = {"eval.sets": self.eval.sets, **({"held_out": held_out} if held_out else {})}
            if not any(best.removeprefix("-") in sets for sets in found.values()):
                has = ", and ".join(f"{key} has {sorted(sets)}" for key, sets in found.items())
                raise ValueError(f"eval.best_by is '{best}', but {has}; a metric is named whole, as eval/NAME/loss")

    def _check_thoughts(self) -> None:
        """Refuse limits of thoughts that leave no room for an answer."""
        rollout = self.rollout_section()
        for name, each in self.eval.sets.items():
            limit, most = each.max_thinking_tokens or rollout.max_thinking_tokens, each.max_tokens or rollout.max_tokens
            if limit is not None and most is not None and limit >= most:
                raise ValueError(
                    f"eval.sets.{name}: max_thinking_tokens {limit} leaves no room for an answer within max_tokens {most}; choose fewer"
                )

    def _check_mixture(self) -> None:
        mixture, datasets = self.data.mixture, self.data.train
        if not datasets:
            raise ValueError("data.train is empty: name at least one dataset")
        if mixture is not None and set(mixture) != set(datasets):
            raise ValueError(
                f"data.mixture names {sorted(mixture)}, but data.train has {sorted(datasets)}; they must be the same"
            )
        if mixture is not None and (min(mixture.values()) < 0 or sum(mixture.values()) <= 0):
            raise ValueError(f"data.mixture needs shares of at least 0 with a positive sum, got {mixture}")

    def _check_devices(self) -> None:
        """Refuse devices that the runtime does not have, naming those that it has."""
        local = self.cluster.runtime == "local"
        for role in type(self.roles).model_fields:
            devices = getattr(getattr(self.roles, role), "devices", None)
            names_local = isinstance(devices, str) and LOCAL_DEVICE.fullmatch(devices) is not None
            if local and devices is not None and (role == "rollout" or not names_local):
                also = (
                    "the engines share the actor's device"
                    if role == "rollout"
                    else f"a device is cpu or {USUAL}, {USUAL}:N there"
                )
                raise ValueError(
                    f"roles.{role}.devices: {devices} maps a role to devices of a pool, which needs cluster.runtime: ray; on the local "
                    f"runtime all roles share this process ({also})"
                )
            if not local and names_local:
                raise ValueError(
                    f"roles.{role}.devices: {devices} is for the local runtime; with cluster.runtime: ray a role runs on devices of the "
                    f"pool: cluster.kind says GPU or CPU, roles.{role}.devices which of them, for example 0-3"
                )
            parallel = getattr(getattr(self.roles, role), "parallel", None)
            sizes = {} if not isinstance(parallel, ParallelConfig) else parallel.sizes()
            if local and sizes:
                asked = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
                raise ValueError(
                    f"roles.{role}.parallel: {asked} needs {math.prod(sizes.values())} devices, but the local runtime has one; "
                    "set cluster.runtime: ray"
                )

    def _check_learners(self) -> None:
        """Refuse ways to divide a role that its backend does not know."""
        for role in get_args(LearnerRole):
            backend = self.learner_backend(role)
            traits, parallel = learner_traits(backend), getattr(self.roles, role).parallel
            for name in () if parallel is None else parallel.asked():
                if name not in (*traits.axes, *traits.choices):
                    raise ValueError(
                        f"roles.{role}.parallel.{name} needs `backend: {who_takes(name)}`; roles.{role}.backend is {backend}"
                    )

    def _check_engine(self) -> None:
        """Refuse what the engine backend does not support, by its traits."""
        role, traits = self.roles.rollout, self.engine_traits()
        if traits.own_process and self.cluster.runtime == "local":
            raise ValueError(
                f"roles.rollout.backend: {role.backend} runs in processes of its own, so it needs cluster.runtime: ray"
            )
        if (role.parallel and not traits.parallel) or (role.options and not traits.options):
            raise ValueError(
                "roles.rollout.parallel and roles.rollout.options are vLLM's; they need roles.rollout.backend: vllm"
            )
        if self.deterministic and not traits.deterministic:
            raise ValueError(
                f"deterministic: true needs roles.rollout.backend: native, because {traits.title}'s batches decide its last digits"
            )
        if self.roles.actor.lora is not None and not traits.adapters:
            raise ValueError(
                f"roles.actor.lora needs an engine that takes adapters, which roles.rollout.backend: {role.backend} does not"
            )
        if self.has_rollouts() and not traits.replayable:
            raise ValueError(
                f"roles.rollout.backend: {role.backend} gives no log-probs that the learner can reproduce, so its samples cannot be "
                "trained on; it can only evaluate"
            )

    def rewards(self) -> dict[str, list[RewardConfig]]:
        """Scoring functions by domain; `*` stands for every domain not named."""
        if isinstance(self.reward, dict):
            return {domain: normalise(spec) for domain, spec in self.reward.items()}
        return {ALL_DOMAINS: normalise(self.reward)}

    def named_domains(self) -> dict[str, str]:
        """Domains of training rows that have settings of their own, each with the key that names it."""
        sections = {
            "rollout.domains": self.rollout_section().domains,
            "roles.teacher.domains": self.roles.teacher.domains,
            "algorithm.domain_weights": self.algorithm_section().domain_weights,
        }
        return {domain: f"{key}.{domain}" for key, section in sections.items() for domain in section}

    def role_model(self, role: LearnerRole) -> str:
        """The model a role plays with; of several teachers, the first."""
        teachers = self.roles.teacher.models() if role == "teacher" else []
        return next(iter(teachers), None) or getattr(self.roles, role).model or self.model

    def generating_models(self) -> dict[str, str]:
        """The models that must be language models, by the key that names them."""
        roles, judge = self.roles, self.roles.judge
        named = {"roles.actor.model": roles.actor.model, "model": None if roles.actor.model else self.model}
        found = {} if self.trains_scores() else named
        found |= {"roles.reference.model": roles.reference.model, "roles.teacher.model": roles.teacher.model}
        found |= {f"roles.teacher.domains.{domain}.model": own.model for domain, own in roles.teacher.domains.items()}
        found["roles.judge.model"] = None if judge is None or judge.url is not None else judge.model
        return {key: model for key, model in found.items() if model is not None}

    def parallel(self, role: LearnerRole) -> ParallelConfig:
        """How the devices of a training role divide its work: by its own section, else as the actor's, if they have one backend."""
        own: ParallelConfig | None = getattr(self.roles, role).parallel
        if own is None and self.learner_backend(role) != self.roles.actor.backend:
            return ParallelConfig()
        return self.roles.actor.parallel.model_copy(update={"data": None}) if own is None else own

    def learner_backend(self, role: LearnerRole | str) -> str:
        """What trains a role, or computes its log-probs: its own backend, else the actor's."""
        return getattr(self.roles, role).backend or self.roles.actor.backend

    def engine_traits(self) -> EngineTraits:
        """What the engine backend supports; imports an engine of the user's own."""
        return traits_of(self.roles.rollout.backend, self.import_from)

    def check_engine(self) -> None:
        """Refuse what an engine of the user's own does not support."""
        try:
            self._check_engine()
        except ValueError as error:
            raise ConfigError(f"{error}.") from None

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle so that a worker finds the class of a user's config in the recipe's folders, and the objects of Python."""
        own = type(self)
        return _unpickle, (own.__module__, own.__qualname__, self.import_from, objects.pack()), self.__getstate__()

    # --- What a pipeline's config overrides. ---

    def has_rollouts(self) -> bool:
        """Whether training generates and scores samples."""
        return False

    def learns_from_rewards(self) -> bool:
        """Whether training follows the rewards of its samples."""
        return self.has_rollouts()

    def trains_scores(self) -> bool:
        """Whether the actor is a reward model: its head gives a score, and it generates nothing, so there are no engines."""
        return False

    def rollout_section(self) -> RolloutConfig:
        """How samples are generated and scored: those of evaluation, and of training if it has rollouts."""
        return RolloutConfig()

    def environment_section(self) -> EnvironmentConfig:
        """How rows are played in an environment."""
        return NONE

    def has_episodes(self) -> bool:
        """Whether rows are played in an environment."""
        return False

    def held_out_sets(self) -> Mapping[str, HeldOutConfig]:
        """Held-out sets with answers, whose loss the loop measures with every evaluation, as `eval/<name>/loss`."""
        return {}

    def algorithm_section(self) -> AlgorithmConfig:
        """The algorithm that the stages `infer`, `advantages` and `update` use."""
        return AlgorithmConfig()

    def divergence_section(self) -> DivergenceConfig | None:
        """How the actor is compared with its teachers; None if it has none."""
        return None

    def demonstrations_section(self) -> Any:
        """Rows with answers (`DemonstrationsConfig`) that are imitated beside the policy's own samples; None if there are none."""
        return None

    def needs(self) -> dict[str, str]:
        """Passes that the loop needs besides the algorithm's (`reference`, `teacher`, `values`), each with the reason.

        They start the roles: `reference`, `teacher` and, for `values`, `critic`.
        """
        return {}

    def single_update(self) -> bool:
        """Whether a batch is one optimizer step, so that the policy before the update is the policy in it."""
        return True

    def with_lengths(self, context: int | None) -> Self:
        """Fill in the lengths that depend on the model's context in tokens; None if that is not known."""
        return self

    def longest(self) -> int:
        """The most tokens that the policy writes in one sample."""
        return self.rollout_section().longest

    def longest_trace(self) -> int:
        """The most tokens of one generated trace, prompt included."""
        return self.data.max_prompt_tokens + self.rollout_section().longest

    def longest_trained(self) -> int:
        """The most tokens of one trace in an update."""
        return self.longest_trace()

    def batch_size(self) -> int | None:
        """The most samples that a step trains on; None if the config does not say."""
        return None

    def training_columns(self, dataset: DatasetConfig) -> list[tuple[str, str]] | None:
        """Columns that training rows of a dataset must have, each with who asks for it. None: those that the rewards need."""
        return None

    def arithmetic(self) -> list[str]:
        """How a step is made of rows, samples and optimizer steps, and the run of steps; a line each."""
        return [f"{self.steps} steps"]


def _unpickle(module: str, name: str, import_from: list[str], packed: dict[str, bytes | str]) -> RunConfig:
    """An empty config of a class, for pickle to fill."""
    search(import_from)
    objects.unpack(packed)
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found.__new__(found)
