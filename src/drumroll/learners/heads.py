"""Heads: what a model computes for each trained token, and how an update turns it into a loss.

A head is a value, not a kind of learner: every backend and the one update loop work with any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from drumroll.algorithms.losses import AnyLoss, RewardLoss, Scores, Tokens, ValueLoss, ValueTokens
from drumroll.batch import Batch, Tree
from drumroll.config.roles import TeacherRole
from drumroll.models.distillation import Comparison, Target, TeacherHeads, TeacherPass
from drumroll.models.head import LogProbModel
from drumroll.models.loading import LoadedModel
from drumroll.models.score import ScoreModel, score_model
from drumroll.models.value import value_model
from drumroll.processes.accelerator import send

NOBODY = TeacherRole()


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a forward pass."""

    temperature: float = 1.0
    entropy_gradient: bool = False
    teaching: TeacherPass | Comparison | None = None
    """What else the head computes: the rows of a teacher, or the divergence of a student from them."""
    teachers: TeacherRole = NOBODY
    own_state: bool = False
    """The head reads the state of a trained token, not of the token before it."""

    def nodes(self, micro: Batch, tree: Tree) -> Tensor:
        """[trained tokens] the nodes of a micro-batch's tree whose states the head reads."""
        return tree.node_of[micro.mask.nonzero()[:, 0] - (0 if self.own_state else 1)]

    def asked(self, micro: Batch, device: torch.device) -> TeacherPass | Target | None:
        """The same for a micro-batch; without a trained token, for a token of no weight."""
        if not isinstance(self.teaching, Comparison):
            return self.teaching
        assert micro.teacher is not None, "a divergence needs the teacher's pass"
        rows = micro.teacher[micro.mask] if micro.mask.any() else micro.teacher.new_zeros(1, micro.teacher.shape[1])
        numbers = torch.tensor([self.teachers.number(domain) for domain in micro.domains])
        teacher = numbers[micro.sample_of_token()[micro.mask]] if micro.mask.any() else numbers.new_zeros(1)
        return Target(send(rows, device), send(teacher, device), self.teaching)


class Head(Protocol):
    """Numbers per trained token, and the loss on them."""

    @property
    def area(self) -> str:
        """The first part of its metrics' names."""
        ...

    def attach(self, model: LoadedModel) -> LoadedModel:
        """Give a language model the parameters of this head, if it has some of its own."""
        ...

    def scorer(self, model: LoadedModel) -> nn.Module:
        """Body and head as one module, which a backend calls once per micro-batch.

        It maps a token tree to numbers for chosen tokens: (tokens, layout, before, chosen, temperature, entropy_gradient).
        """
        ...

    def settings(self, loss: AnyLoss, temperature: float) -> Settings:
        """The forward pass that a loss needs."""
        ...

    def inference(self, temperature: float) -> Settings:
        """The forward pass of `Learner.infer`."""
        ...

    @property
    def width(self) -> int:
        """Columns that `Learner.infer` gives for each token; 0 for a plain number."""
        ...

    def loss(
        self, loss: AnyLoss, numbers: tuple[Tensor, ...], micro: Batch, *, moved: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[trained tokens] the loss, and diagnostics. `moved`: the weights changed since the update began."""
        ...


@dataclass(frozen=True)
class LogProbHead:
    """Log-probs and entropies of a policy; of a teacher, what its students are compared with."""

    area: str = "train"
    gives: TeacherPass | None = None  # of a teacher
    heads: TeacherHeads | None = None  # of the teachers, for a student that is compared over the whole vocabulary
    teachers: TeacherRole = NOBODY

    def attach(self, model: LoadedModel) -> LoadedModel:
        return model

    def scorer(self, model: LoadedModel) -> nn.Module:
        return LogProbModel(model.module, model.parallel)

    def settings(self, loss: AnyLoss, temperature: float) -> Settings:
        assert not isinstance(loss, ValueLoss | RewardLoss)
        divergence, compared = getattr(loss, "divergence", None), None
        if divergence is not None and divergence.over != "sampled":
            compared = Comparison(divergence, self.heads, alone=getattr(loss, "divergence_alone", False))
        return Settings(temperature, loss.entropy_gradient, compared, self.teachers)

    def inference(self, temperature: float) -> Settings:
        return Settings(temperature, teaching=self.gives)

    @property
    def width(self) -> int:
        return 0 if self.gives is None else self.gives.width

    def loss(
        self, loss: AnyLoss, numbers: tuple[Tensor, ...], micro: Batch, *, moved: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert not isinstance(loss, ValueLoss | RewardLoss)
        logprobs, entropy, *divergence = numbers
        device, units = logprobs.device, None if micro.unit_of is None else micro.unit_of_token()
        old, advantages = trained(micro, micro.old, device), trained(micro, micro.advantages, device)
        tokens = Tokens(
            logprobs=logprobs,
            entropy=entropy,
            old=logprobs.detach() if old is None else old,
            behaviour=send(micro.behaviour[micro.mask], device),
            advantages=torch.zeros_like(logprobs) if advantages is None else advantages,
            reference=trained(micro, micro.reference, device),
            teacher=None if divergence else trained(micro, micro.teacher, device),
            divergence=divergence[0] if divergence else None,
            teacher_weight=self._teacher_weight(micro, device),
            given=trained(micro, micro.given_tokens(), device),
            sequence=send(micro.trace_of_token()[micro.mask], device),
            sequences=micro.num_traces,
            rewards=send(micro.rewards[micro.sample_of_token()][micro.mask], device),
            unit=None if units is None else send(units[0][micro.mask], device),
            units=None if units is None else units[1],
        )
        per_token, diagnostics = loss(tokens)
        now = logprobs.detach()
        before = tokens.old if moved else now  # the first optimizer step starts from the policy before the update
        gap = before - tokens.behaviour
        kl = tokens.behaviour - now
        more = {"entropy": entropy.detach(), "kl_behaviour": kl, "mismatch": gap.abs(), "behaviour_ratio": gap.exp()}
        if tokens.given is not None:  # nobody sampled demonstrations
            more = {name: column[~tokens.given] for name, column in more.items()}
        return per_token, {**diagnostics, **more}

    def _teacher_weight(self, micro: Batch, device: torch.device) -> Tensor | None:
        """[trained tokens] the weight of the teacher of a token's domain; None where all have 1."""
        if not self.teachers.domains:
            return None
        weights = torch.tensor([self.teachers.weight(domain) for domain in micro.domains])
        return send(weights[micro.sample_of_token()[micro.mask]], device)


@dataclass(frozen=True)
class ValueHead:
    """A critic's expected return before each token."""

    name: str | None = None
    """Of the model that it starts from."""
    area: str = "critic"

    def attach(self, model: LoadedModel) -> LoadedModel:
        return value_model(model, self.name)

    def scorer(self, model: LoadedModel) -> nn.Module:
        return model.module

    def settings(self, loss: AnyLoss, temperature: float) -> Settings:
        return Settings()

    def inference(self, temperature: float) -> Settings:
        return Settings(temperature)

    @property
    def width(self) -> int:
        return 0

    def loss(
        self, loss: AnyLoss, numbers: tuple[Tensor, ...], micro: Batch, *, moved: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(loss, ValueLoss)
        (values,) = numbers
        old, returns = (trained(micro, column, values.device) for column in (micro.values, micro.returns))
        assert old is not None
        assert returns is not None
        return loss(ValueTokens(values.float(), old, returns))


@dataclass(frozen=True)
class ScoreHead:
    """A reward model's score of a sequence: the only trained token of a sequence is its last."""

    name: str
    """Of the model that it starts from."""
    area: str = "train"

    def attach(self, model: LoadedModel) -> LoadedModel:
        return score_model(model, self.name)

    def scorer(self, model: LoadedModel) -> nn.Module:
        return ScoreModel(model.module)

    def settings(self, loss: AnyLoss, temperature: float) -> Settings:
        return Settings(own_state=True)

    def inference(self, temperature: float) -> Settings:
        return Settings(own_state=True)

    @property
    def width(self) -> int:
        return 0

    def loss(
        self, loss: AnyLoss, numbers: tuple[Tensor, ...], micro: Batch, *, moved: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(loss, RewardLoss)
        (scores,) = numbers
        unit, units = micro.unit_of_token()
        sample = micro.sample_of_token()[micro.mask]
        margins = None if micro.margins is None else send(micro.margins[sample], scores.device)
        chosen = send(micro.rewards[sample] > 0, scores.device)
        return loss(Scores(scores, chosen, send(unit[micro.mask], scores.device), units, margins))


def trained(micro: Batch, column: Tensor | None, device: torch.device) -> Tensor | None:
    """[trained tokens] of a column, on a device."""
    return None if column is None else send(column[micro.mask], device)
