"""Teachers and students: their heads, and the models that may teach each other."""

from __future__ import annotations

from drumroll.config import RunConfig
from drumroll.config.learners import learner_traits
from drumroll.errors import ConfigError
from drumroll.learners.heads import LogProbHead
from drumroll.models.distillation import TeacherPass
from drumroll.models.loading import load_tokenizer
from drumroll.models.shape import ModelShape, find_shape
from drumroll.models.teacher_heads import open_teacher_heads


def teacher_head(config: RunConfig) -> LogProbHead:
    """What the teachers compute: log-probs of the sampled tokens, or rows that a student is compared with."""
    check_teachers(config)
    divergence, role = config.divergence_section(), config.roles.teacher
    if divergence is None or divergence.over == "sampled":
        return LogProbHead()
    vocabulary, shapes = _vocabulary(config), [_shape(model) for model in role.models()]
    count = min(divergence.top_k, vocabulary)
    width = 2 * count + 1 if divergence.over == "top_k" else max(shape.hidden for shape in shapes)
    return LogProbHead(gives=TeacherPass(divergence.over, width, vocabulary))


def student_head(config: RunConfig, device: str) -> LogProbHead:
    """What the actor computes. Compared over the whole vocabulary, it has a copy of its teachers' heads."""
    divergence, role = config.divergence_section(), config.roles.teacher
    if divergence is None or divergence.over != "all":
        return LogProbHead(teachers=role)
    check_teachers(config)
    dtype = role.dtype or config.roles.actor.dtype
    heads = open_teacher_heads(role.models(), _vocabulary(config), dtype=dtype, device=device, seed=config.seed)
    return LogProbHead(heads=heads, teachers=role)


def check_teachers(config: RunConfig) -> None:
    """Refuse teachers whose distributions cannot be compared with the actor's, or that its backend cannot hold."""
    role, actor, divergence = config.roles.teacher, config.role_model("actor"), config.divergence_section()
    models, backend = role.models() or [config.role_model("teacher")], config.learner_backend("teacher")
    words = load_tokenizer(actor).get_vocab()
    for model in models:
        if load_tokenizer(model).get_vocab() != words:
            raise ConfigError(
                f"roles.teacher.model: {model} has other tokens than the actor, so their log-probs cannot be compared."
            )
        if divergence is not None and divergence.over != "sampled" and _shape(model).vocabulary < _vocabulary(config):
            raise ConfigError(
                f"roles.teacher.model: {model} has {_shape(model).vocabulary:,} logits, fewer than the {_vocabulary(config):,} of {actor}; "
                "compare them over the sampled token (over: sampled)."
            )
    if len(models) > 1 and backend in ("megatron", "deepspeed"):
        raise ConfigError(
            f"roles.teacher.domains: {learner_traits(backend).title} holds one teacher, and here are {len(models)}; use roles.teacher.backend: torch."
        )


def _vocabulary(config: RunConfig) -> int:
    return _shape(config.role_model("actor")).vocabulary


def _shape(model: str) -> ModelShape:
    shape = find_shape(model)
    if shape is None:
        raise ConfigError(f"model: {model} has no config.json here, so its vocabulary cannot be compared with another's.")
    return shape
