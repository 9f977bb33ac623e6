"""Distillation: the divergence from a teacher."""

from dataclasses import dataclass

from torch import Tensor

from drumroll.algorithms.divergences import sampled
from drumroll.algorithms.losses.parts import Tokens
from drumroll.config.divergence import DivergenceConfig


def from_teacher(tokens: Tokens, config: DivergenceConfig, *, own: bool) -> Tensor | None:
    """[trained tokens] the divergence from the teacher, or its estimate from the sampled token, not weighted; None without a teacher."""
    if tokens.divergence is not None:
        return tokens.divergence
    return None if tokens.teacher is None else sampled(tokens.logprobs, tokens.teacher, config, own=own)


@dataclass(frozen=True)
class DistillLoss:
    """The divergence from the teacher, and a term that imitates given answers; plain data, so that it can travel to a worker."""

    divergence: DivergenceConfig
    own: bool
    """The student sampled the tokens; else they are given answers."""
    teacher: float = 1.0
    sft: float = 0.0
    name: str = "distill"
    entropy_gradient: bool = False
    skips_zero_advantage: bool = False

    @property
    def divergence_alone(self) -> bool:
        """Whether log-probs need no gradient."""
        return self.own or not self.sft

    def __call__(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        divergence = from_teacher(tokens, self.divergence, own=self.own)
        assert divergence is not None, "distillation needs the teacher's pass"
        stats = {"divergence": divergence.detach()}
        loss = self.teacher * (divergence if tokens.teacher_weight is None else tokens.teacher_weight * divergence)
        if self.sft and not self.own:
            loss = loss - self.sft * tokens.logprobs
            stats["nll"] = -tokens.logprobs.detach()
        return loss, stats
