"""Heads: what a model computes for each trained token, and how an update turns it into a loss.

A head is a value, not a kind of learner: every backend and the one update loop work with any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from drumroll.algorithms.losses import Loss, Tokens, ValueLoss, ValueTokens
from drumroll.batch import Batch
from drumroll.models.head import LogProbModel
from drumroll.models.loading import LoadedModel
from drumroll.models.value import value_model
from drumroll.processes.accelerator import send


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a forward pass."""

    temperature: float = 1.0
    entropy_gradient: bool = False


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

    def settings(self, loss: Loss | ValueLoss, temperature: float) -> Settings:
        """The forward pass that a loss needs."""
        ...

    def loss(
        self, loss: Loss | ValueLoss, numbers: tuple[Tensor, ...], micro: Batch, *, moved: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """[trained tokens] the loss, and diagnostics. `moved`: the weights changed since the update began."""
        ...


@dataclass(frozen=True)
class LogProbHead:
    """Log-probs and entropies of a policy."""

    area: str = "train"

    def attach(self, model: LoadedModel) -> LoadedModel:
        return model

    def scorer(self, model: LoadedModel) -> nn.Module:
        return LogProbModel(model.module, model.parallel)

    def settings(self, loss: Loss | ValueLoss, temperature: float) -> Settings:
        assert not isinstance(loss, ValueLoss)
        return Settings(temperature, loss.entropy_gradient)

    def loss(
        self, loss: Loss | ValueLoss, numbers: tuple[Tensor, ...], micro: Batch, *, moved: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert not isinstance(loss, ValueLoss)
        logprobs, entropy = numbers
        device, units = logprobs.device, None if micro.unit_of is None else micro.unit_of_token()
        old, advantages = trained(micro, micro.old, device), trained(micro, micro.advantages, device)
        tokens = Tokens(
            logprobs=logprobs,
            entropy=entropy,
            old=logprobs.detach() if old is None else old,
            behaviour=send(micro.behaviour[micro.mask], device),
            advantages=torch.zeros_like(logprobs) if advantages is None else advantages,
            reference=trained(micro, micro.reference, device),
            teacher=trained(micro, micro.teacher, device),
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
        return per_token, {**diagnostics, **more}


@dataclass(frozen=True)
class ValueHead:
    """A critic's expected return before each token."""

    area: str = "critic"

    def attach(self, model: LoadedModel) -> LoadedModel:
        return value_model(model)

    def scorer(self, model: LoadedModel) -> nn.Module:
        return model.module

    def settings(self, loss: Loss | ValueLoss, temperature: float) -> Settings:
        return Settings()

    def loss(
        self, loss: Loss | ValueLoss, numbers: tuple[Tensor, ...], micro: Batch, *, moved: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(loss, ValueLoss)
        (values,) = numbers
        old, returns = (trained(micro, column, values.device) for column in (micro.values, micro.returns))
        assert old is not None
        assert returns is not None
        return loss(ValueTokens(values.float(), old, returns))


def trained(micro: Batch, column: Tensor | None, device: torch.device) -> Tensor | None:
    """[trained tokens] of a column, on a device."""
    return None if column is None else send(column[micro.mask], device)
