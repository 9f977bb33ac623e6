"""`roles`: which model plays which part, on what device, by what backend."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from drumroll.config.engines import known_backend
from drumroll.config.learners import AXES, known_learner
from drumroll.config.optim import OptimConfig
from drumroll.config.section import Section

Dtype = Literal["float32", "bfloat16"]
BUILT_IN_MODELS = ("tiny", "tiny-random", "tiny-even", "tiny-even-random", "tiny-moe", "tiny-moe-random")
"""Models that ship with the package (`models/tiny.py`)."""


LearnerRole = Literal["actor", "reference", "teacher", "critic"]
"""Roles that compute gradients or log-probs."""


def known_or_none(backend: str | None) -> str | None:
    """The same where the default is another role's."""
    return None if backend is None else known_learner(backend)


def _devices(devices: int | str | None) -> int | str | None:
    if isinstance(devices, int) and devices < 1:
        raise ValueError("a count of devices is at least 1; device number 0 alone is written 0-0")
    return None if devices == "auto" else devices


Devices = Annotated[int | str | None, AfterValidator(_devices)]
"""Where a role runs. None, written `auto`, is the default."""


class LoraConfig(Section):
    """Train low-rank adapters beside frozen weights (LoRA, 2106.09685); the reference is the model without them."""

    rank: int = Field(16, ge=1)
    """Rank of the adapters."""
    alpha: int = Field(32, ge=1)
    """Their factor is alpha / rank."""
    targets: str | list[str] = "all-linear"
    """Names of the layers that get one, or `all-linear`."""


class ParallelConfig(Section):
    """How the devices of a training role divide its work: numbers of devices, which multiply to those that the role has."""

    data: int | None = Field(None, ge=1)
    """Replicas, each on shard × pipeline × context × tensor devices and with its own part of every batch. Default: as many as the devices hold."""
    shard: int = Field(1, ge=1)
    """Devices that share one replica's weights, gradients and optimizer state (FSDP, ZeRO-3), each with its own part of every batch."""
    pipeline: int = Field(1, ge=1)
    """megatron: devices that each hold some of the layers; micro-batches go from one to the next."""
    context: int = Field(1, ge=1)
    """torch: devices that compute the same sequences, each with a part of the tokens (Ulysses): for long sequences."""
    tensor: int = Field(1, ge=1)
    """Devices that compute every layer together, each with a part of its heads, columns and vocabulary."""
    expert: int = Field(1, ge=1)
    """megatron: devices over which the experts of a layer are spread. It takes no devices of its own: it regroups those of data × tensor."""
    reshard: bool = True
    """torch, shard: free a layer's gathered weights after its forward pass, and gather them again for the backward pass: less memory, more traffic."""
    accumulate: Literal["sharded", "local"] = "sharded"
    """torch, shard: sum gradients over ranks after every micro-batch, or (`local`) after the last one only: less traffic, but whole gradients on every rank."""
    sequence: bool = True
    """megatron, tensor: divide norms and states between layers by tokens (sequence parallelism): less memory for the same traffic."""
    zero: Literal[2, 3] = 3
    """deepspeed: divide optimizer state and gradients (2), or weights too (3)."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """deepspeed: keep the optimizer's state, or also the weights (`all`, with zero: 3), in host memory."""

    @model_validator(mode="after")
    def _weights_follow(self) -> Self:
        if self.offload == "all" and self.zero == 2:
            raise ValueError(
                "offload: all needs zero: 3, because with zero: 2 every device holds whole weights; offload: optimizer works"
            )
        return self

    def sizes(self) -> dict[str, int]:
        """The axes of more than one device."""
        sizes = {axis: getattr(self, axis) or 1 for axis in AXES if axis != "expert"}
        return {axis: size for axis, size in sizes.items() if size > 1}

    def asked(self) -> list[str]:
        """The fields that are not as their defaults."""
        return [field for field in type(self).model_fields if getattr(self, field) != getattr(ParallelConfig(), field)]


class ActorRole(Section):
    """The policy being trained."""

    model: str | None = None
    """Model of this role: a built-in (tiny, tiny-even, tiny-random, tiny-even-random, tiny-moe, tiny-moe-random), a Hugging Face directory or hub id. Default: the top-level `model`."""
    backend: Annotated[str, AfterValidator(known_learner)] = "torch"
    """What trains it, divided over its devices as `parallel` says. `torch`: plain PyTorch. `megatron`: Megatron-Core, for pipelines and experts. `deepspeed`: ZeRO. Or your own as `module:function`."""
    devices: Devices = None
    """On ray, devices of the pool: a range (`0-11`, `"0-7,12-15"`, device 3 alone is `3-3`) or a count (`4`); `auto` takes all. On local: `cpu`, or an accelerator such as `cuda` or `cuda:1`; `auto` takes the accelerator where there is one."""
    dtype: Dtype = "float32"
    """Type of the working weights. With bfloat16 the optimizer keeps float32 master weights and gradients beside them: 18 bytes a parameter during an update."""
    parallel: ParallelConfig = ParallelConfig()
    """How its devices divide the work, for example {shard: 8} or {shard: 4, tensor: 2}. Default: a whole replica on each."""
    lora: LoraConfig | None = None
    """Train adapters only. Default: all weights."""
    recompute_activations: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more work."""

    @model_validator(mode="after")
    def _adapters_stay_whole(self) -> Self:
        if self.lora is not None and self.parallel.tensor > 1:
            raise ValueError(
                f"lora with parallel tensor {self.parallel.tensor} is not supported for now; use shard in its place, for example "
                f"parallel: {{shard: {self.parallel.shard * self.parallel.tensor}}}"
            )
        return self


class CriticRole(Section):
    """What a state is worth: a model with a value head; loaded only when the algorithm needs it."""

    model: str | None = None
    """Model its body starts from: a language model, or a reward model, whose score head becomes its value head. Default: the top-level `model`."""
    backend: Annotated[str | None, AfterValidator(known_or_none)] = None
    """What trains it, as for the actor. Default: the actor's."""
    devices: Devices = None
    """On ray a range, a count, or a role to share with; on local `cpu`, or an accelerator such as `cuda` or `cuda:1`. Default: the actor's."""
    parallel: ParallelConfig | None = None
    """As for the actor. Default: the actor's, without its `data`, if the backend is the same."""
    dtype: Dtype = "float32"
    """As for the actor."""
    recompute_activations: bool = False
    """As for the actor."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """Its own optimizer: learning rate, warm-up, minibatches, epochs."""


class RolloutRole(Section):
    """The policy generating samples."""

    backend: Annotated[str, AfterValidator(known_backend)] = "native"
    """What generates. `native`: the embedded engine; in one process it shares the actor's weights, so nothing is copied. `vllm`: vLLM, in processes of its own. `module:NAME`: an engine of your own."""
    devices: Devices = None
    """On ray a range, a count, or a role to share with; each replica is an engine. Default: the actor's, as always on local."""
    parallel: dict[Literal["tensor", "pipeline"], Annotated[int, Field(ge=1)]] = {}
    """vllm: how many devices one engine takes, for example {tensor: 4}."""
    options: dict[str, Any] = {}
    """vllm: fields of its AsyncEngineArgs, for example {gpu_memory_utilization: 0.8, enable_expert_parallel: true}."""
    workers: int = Field(1, ge=1)
    """How many engines on the `local` runtime; on `ray` the devices say it."""
    slots: int = Field(256, ge=1)
    """How many samples an engine generates at once."""
    cache_gb: float | None = Field(None, gt=0)
    """native: memory of keys and values; when it runs out, the youngest samples wait. Default: enough for all slots at full length, but at most a third of the free memory (with `deterministic: true`, of all memory: fewer slots then)."""


class ReferenceRole(Section):
    """The frozen policy that a KL term compares with; loaded only when the algorithm needs it."""

    model: str | None = None
    """Model of this role. Default: the top-level `model`."""
    backend: Annotated[str | None, AfterValidator(known_or_none)] = None
    """What computes it, as for the actor. Default: the actor's."""
    devices: Devices = None
    """On ray a range, a count, or a role to share with; on local `cpu`, or an accelerator such as `cuda` or `cuda:1`. Default: the actor's."""
    parallel: ParallelConfig | None = None
    """As for the actor. Default: the actor's, without its `data`, if the backend is the same."""
    dtype: Dtype | None = None
    """Type of its weights. Default: the actor's, so that the KL of a policy to itself is 0."""


class PriceConfig(Section):
    """What an endpoint charges, in your currency."""

    input: float = Field(0.0, ge=0)
    """For a million tokens of questions."""
    output: float = Field(0.0, ge=0)
    """For a million tokens of answers."""


class DomainTeacher(Section):
    """The teacher of one domain."""

    model: str
    """Its model, which must share the actor's tokenizer."""
    weight: float = Field(1.0, ge=0)
    """Factor on the divergence from it."""


class TeacherRole(ReferenceRole):
    """A frozen model with the same tokens that `algorithm.teacher` or `pipeline: distill` pulls the policy towards; loaded only then."""

    model: str | None = None
    """Model of this role, which must share the actor's tokenizer: also an earlier run (`runs/NAME`), for self-distillation."""
    domains: dict[str, DomainTeacher] = {}
    """Teachers of single domains, for example {code: {model: coder, weight: 0.5}}. Other domains learn from `model`, or without it from none."""

    def models(self) -> list[str]:
        """All models, each once; the number of a teacher is its place."""
        named = [self.model, *(own.model for own in self.domains.values())]
        return list(dict.fromkeys(model for model in named if model is not None))

    def number(self, domain: str) -> int:
        """The number of a domain's teacher; -1 if it has none."""
        model = self.domains[domain].model if domain in self.domains else self.model
        return -1 if model is None else self.models().index(model)

    def weight(self, domain: str) -> float:
        """The weight of a domain's teacher; 0 if it has none."""
        return self.domains[domain].weight if domain in self.domains else float(self.model is not None)


class JudgeRole(Section):
    """A model that rewards may ask (the argument `judge` of a reward function): an engine of ours, or an endpoint."""

    model: str
    """Model of this role: a built-in, a Hugging Face directory or hub id; with `url`, its name at that endpoint."""
    url: str | None = None
    """An OpenAI-compatible endpoint, for example http://127.0.0.1:8000/v1. Default: the model is loaded here."""
    key_env: str | None = None
    """Name of the environment variable that holds the endpoint's key; the key itself is never written down."""
    options: dict[str, Any] = {}
    """With `url`: further fields of its requests, for example {seed: 1}."""
    devices: Devices = None
    """On ray a range, a count, or a role to share with; on local `cpu`, or an accelerator such as `cuda` or `cuda:1`. Default: the actor's."""
    dtype: Dtype = "float32"
    """Type of its weights."""
    slots: int = Field(64, ge=1)
    """How many questions it answers at once."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest question of a model loaded here; in a longer one the middle of the completion is left out, and the cut marked."""
    max_tokens: int = Field(16, ge=1)
    """Longest answer."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    timeout: float = Field(120.0, gt=0)
    """Seconds for one try at an answer."""
    retries: int = Field(4, ge=0)
    """Further tries after a failure that may pass: no connection, too many requests, an error of the server."""
    backoff: float = Field(1.0, ge=0)
    """Seconds before the first of them; doubled each time, up to 60. What the server asks for in `retry-after` is waited for."""
    requests_per_minute: float | None = Field(None, gt=0)
    """At most so many tries a minute. Default: no limit."""
    cache: Literal["none", "memory", "run"] = "memory"
    """Whether a question that was answered is asked again; `run` keeps answers in the run's directory, for a resumed run."""
    price: PriceConfig = PriceConfig()
    """For the metric `judge/cost`."""

    @model_validator(mode="after")
    def _here_or_there(self) -> Self:
        if self.url is None and (self.key_env is not None or self.options):
            raise ValueError("key_env and options are of an endpoint: they need a url")
        if self.url is not None and self.devices is not None:
            raise ValueError("a judge at a url runs elsewhere, so it has no devices here")
        return self


class RewardModelRole(Section):
    """A sequence classifier that rewards may ask (the argument `reward_model` of a reward function)."""

    model: str
    """A Hugging Face directory or hub id that AutoModelForSequenceClassification can load, with its tokenizer; or a run of `pipeline: reward_model` (`runs/NAME`)."""
    devices: Devices = None
    """On ray a range, a count, or a role to share with; on local `cpu`, or an accelerator such as `cuda` or `cuda:1`. Default: the actor's."""
    dtype: Dtype = "float32"
    """Type of its weights."""
    chat: bool | None = None
    """Show text prompts as a user's chat turn, as the rows that it was trained on. Default: yes when its tokenizer has a chat template."""
    system: str | None = None
    """A system message put before every prompt, if it was trained with one."""
    template: dict[str, Any] = {}
    """Arguments of its chat template, as `data.template` of its training."""
    max_tokens: int = Field(1024, ge=1)
    """Longest prompt and completion together; of a longer one the end is kept."""
    batch_size: int = Field(16, ge=1)
    """How many samples are scored in one pass; those that wait at the same time are put together."""
    label: int | None = Field(None, ge=0)
    """Of several classes, the one whose probability is the score. Default: the only output as it is, or the last class."""
    timeout: float = Field(120.0, gt=0)
    """Seconds for one pass."""


class RolesConfig(Section):
    """Each role with its own model, backend and device."""

    actor: ActorRole = ActorRole()
    """The policy being trained."""
    rollout: RolloutRole = RolloutRole()
    """The policy generating samples."""
    teacher: TeacherRole = TeacherRole()
    """The frozen policy to learn from."""
    reference: ReferenceRole = ReferenceRole()
    """The frozen policy of a KL term."""
    critic: CriticRole = CriticRole()
    """The value model of GAE."""
    judge: JudgeRole | None = None
    """A model that rewards may ask."""
    reward_model: RewardModelRole | None = None
    """A classifier that rewards may ask."""
