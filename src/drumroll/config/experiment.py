"""The top of the config: one model per pipeline, and the checks that span sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

from drumroll.config.algorithm import GROUPED, WITHOUT_RATIO, AlgorithmConfig
from drumroll.config.cluster import ClusterConfig
from drumroll.config.data import DataConfig
from drumroll.config.environment import NONE, EnvironmentConfig
from drumroll.config.eval import EvalConfig
from drumroll.config.optim import OptimConfig
from drumroll.config.reward import ALL_DOMAINS, RewardConfig, RewardSpec, normalise
from drumroll.config.roles import LOCAL_DEVICE, RolesConfig
from drumroll.config.rollout import RolloutConfig
from drumroll.config.run import CheckpointConfig, TrackerConfig
from drumroll.config.sandbox import SandboxConfig
from drumroll.config.section import Section


class RunConfig(Section):
    """What every pipeline has."""

    name: str = "run"
    """Name of the run; its directory is `output`/`name`."""
    output: str = "runs"
    """Directory that holds run directories."""
    model: str = "tiny"
    """Model of all roles that name none: a built-in (tiny, tiny-random), a Hugging Face directory or hub id."""
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

    @model_validator(mode="after")
    def _mixture_names_datasets(self) -> Self:
        mixture, datasets = self.data.mixture, self.data.train
        if not datasets:
            raise ValueError("data.train is empty: name at least one dataset")
        if mixture is not None and set(mixture) != set(datasets):
            raise ValueError(
                f"data.mixture names {sorted(mixture)}, but data.train has {sorted(datasets)}; they must be the same"
            )
        if mixture is not None and (min(mixture.values()) < 0 or sum(mixture.values()) <= 0):
            raise ValueError(f"data.mixture needs shares of at least 0 with a positive sum, got {mixture}")
        self._check_devices()
        rollout = self.roles.rollout
        if rollout.backend == "native" and (rollout.parallel or rollout.options):
            raise ValueError(
                "roles.rollout.parallel and roles.rollout.options are vLLM's; they need roles.rollout.backend: vllm"
            )
        if rollout.backend == "vllm" and self.deterministic:
            raise ValueError(
                "deterministic: true needs roles.rollout.backend: native, because vLLM's batches decide its last digits"
            )
        best = self.eval.best_by
        if best is not None and best not in self.eval.sets:
            raise ValueError(f"eval.best_by is '{best}', but eval.sets has {sorted(self.eval.sets)}")
        return self

    def _check_devices(self) -> None:
        """Refuse devices that the runtime does not have, naming those that it has."""
        local = self.cluster.runtime == "local"
        for role in type(self.roles).model_fields:
            devices = getattr(getattr(self.roles, role), "devices", None)
            names_local = isinstance(devices, str) and LOCAL_DEVICE.fullmatch(devices) is not None
            if local and devices is not None and (role == "rollout" or not names_local):
                also = "the engines share the actor's device" if role == "rollout" else "a device is cpu, cuda or cuda:N there"
                raise ValueError(
                    f"roles.{role}.devices: {devices} maps a role to devices of a pool, which needs cluster.runtime: ray; on the local "
                    f"runtime all roles share this process ({also})"
                )
            if not local and names_local:
                raise ValueError(
                    f"roles.{role}.devices: {devices} is for the local runtime; with cluster.runtime: ray a role runs on devices of the "
                    f"pool: cluster.kind says GPU or CPU, roles.{role}.devices which of them, for example 0-3"
                )
        if local and self.roles.rollout.backend == "vllm":
            raise ValueError("roles.rollout.backend: vllm runs in processes of its own, so it needs cluster.runtime: ray")

    def rewards(self) -> dict[str, list[RewardConfig]]:
        """Scoring functions by domain; `*` stands for every domain not named."""
        if isinstance(self.reward, dict):
            return {domain: normalise(spec) for domain, spec in self.reward.items()}
        return {ALL_DOMAINS: normalise(self.reward)}

    def role_model(self, role: Literal["actor", "reference", "teacher", "critic"]) -> str:
        """The model a role plays with."""
        return getattr(self.roles, role).model or self.model


class RLConfig(RunConfig):
    """Reinforcement learning: generate, score, train."""

    pipeline: Literal["rl"] = "rl"
    """`rl` trains on the model's own scored samples; `sft` imitates given answers."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation of training samples."""
    environment: EnvironmentConfig = NONE
    """What the policy talks to, turn by turn."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """How rewards become gradients."""

    def has_episodes(self) -> bool:
        """Whether rows are played in an environment."""
        own = {dataset.environment for dataset in (*self.data.train.values(), *self.eval.sets.values())} - {None, "none"}
        return self.environment.use is not None or bool(own)

    def longest(self) -> int:
        """The most tokens that a sample's policy can write."""
        return self.rollout.longest * (self.environment.max_turns if self.has_episodes() else 1)

    def longest_trace(self) -> int:
        """The most tokens that a trace of training can have."""
        turn, own = self.data.max_prompt_tokens + self.rollout.longest, self.environment
        if not self.has_episodes() or own.mode == "step":
            return turn
        return own.context or turn + (own.max_turns - 1) * 2 * self.rollout.longest

    @model_validator(mode="after")
    def _context_is_a_trajectorys(self) -> Self:
        if self.environment.mode == "step" and self.environment.context is not None:
            raise ValueError(
                f"environment.context: {self.environment.context} bounds whole episodes, but with environment.mode: step a trace is "
                "one turn; data.max_prompt_tokens bounds what it shows"
            )
        return self

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        samples, mini = self.rollout.prompts * self.rollout.samples, self.optim.minibatch
        if mini is not None and samples % mini and not self.rollout.domains:
            fits = next(m for m in range(mini, 0, -1) if samples % m == 0)
            raise ValueError(
                f"{self.rollout.prompts} prompts × {self.rollout.samples} samples = {samples} samples do not divide into "
                f"minibatches of {mini}; optim.minibatch: {fits} would fit"
            )
        return self

    @model_validator(mode="after")
    def _has_a_reward(self) -> Self:
        if not self.rewards() and not self.has_episodes():
            raise ValueError(
                "reward is missing: name a built-in (reward: exact) or your own function (reward: my_rewards:correct), or an environment (environment: {use: ...})"
            )
        return self

    @model_validator(mode="after")
    def _deterministic_is_synchronous(self) -> Self:
        if self.deterministic and (self.rollout.max_staleness > 0 or self.rollout.order != "draw"):
            raise ValueError(
                "deterministic: true needs rollout.order: draw and rollout.max_staleness: 0, because which weights write "
                f"which token depends on timing otherwise; got {self.rollout.order} and {self.rollout.max_staleness:g}"
            )
        return self

    @model_validator(mode="after")
    def _algorithm_is_sound(self) -> Self:
        chosen, rollout = self.algorithm, self.rollout
        fewest = min([rollout.samples, *(d.samples for d in rollout.domains.values() if d.samples)])
        if chosen.advantage in GROUPED and fewest < 2:
            raise ValueError(
                f"algorithm.advantage: {chosen.advantage} compares the samples of a group, so rollout.samples must be at least 2, got 1"
            )
        if "group" in (chosen.reward_mean, chosen.reward_std) and fewest < 2:
            raise ValueError(
                f"algorithm.reward_mean: {chosen.reward_mean} and reward_std: {chosen.reward_std} compare the samples of a group, "
                "so rollout.samples must be at least 2, got 1"
            )
        if chosen.teacher and self.roles.teacher.model is None:
            raise ValueError(
                f"algorithm.teacher: {chosen.teacher:g} needs a model to learn from: name one under roles.teacher.model"
            )
        if chosen.advantage == "pass_at_k" and chosen.pass_k > fewest:
            raise ValueError(f"algorithm.pass_k: {chosen.pass_k} cannot be drawn from rollout.samples: {fewest}")
        if self.optim.epochs > 1 and chosen.loss in WITHOUT_RATIO:
            raise ValueError(
                f"optim.epochs: {self.optim.epochs} trains on samples again after the policy has moved, but algorithm.loss: {chosen.loss} "
                "has no ratio that would notice; set another loss (for example ppo), or epochs 1"
            )
        if rollout.max_staleness > 0 and chosen.loss in WITHOUT_RATIO and chosen.correction == "none":
            raise ValueError(
                f"rollout.max_staleness: {rollout.max_staleness:g} trains on samples of older weights, but algorithm.loss: {chosen.loss} "
                "has no ratio that would notice; set algorithm.correction (for example truncate), another loss, or staleness 0"
            )
        return self


class SFTConfig(RunConfig):
    """Supervised training on given answers."""

    pipeline: Literal["sft"]
    """`rl` trains on the model's own scored samples; `sft` imitates given answers."""
    batch: int = Field(64, ge=1)
    """Rows per step."""
    max_tokens: int = Field(1024, ge=2)
    """Longest row, prompt and completion together, in tokens; a longer one loses its tail."""
    observations: bool = False
    """Learn to predict prompts and observations too, not only the answers: a model that starts from nothing learns to read sooner."""
    eval_max_tokens: int = Field(64, ge=1)
    """Longest completion in evaluation."""


def _pipeline(value: Any) -> str:
    return str(value.get("pipeline", "rl") if isinstance(value, dict) else getattr(value, "pipeline", "rl"))


AnyConfig = RLConfig | SFTConfig
ADAPTER: TypeAdapter[AnyConfig] = TypeAdapter(
    Annotated[Annotated[RLConfig, Tag("rl")] | Annotated[SFTConfig, Tag("sft")], Discriminator(_pipeline)]
)
BY_PIPELINE: dict[str, type[AnyConfig]] = {"rl": RLConfig, "sft": SFTConfig}
