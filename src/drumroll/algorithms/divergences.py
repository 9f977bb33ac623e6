"""Divergences between a student's and a teacher's distribution of the next token.

A divergence is one function on log-probs that gives a term for each token of the vocabulary; the sum of the terms is the divergence.
So it can be summed over parts of a vocabulary, over a few tokens and a bucket for the rest, or estimated from one sampled token. A
user's own is named as `module:function`. Gradients flow to the student only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from drumroll.algorithms.statistics import log_ratio
from drumroll.config.divergence import DivergenceConfig
from drumroll.registry import Registry

Terms = Callable[[Tensor, Tensor, DivergenceConfig], Tensor]
"""(log-probs of the student, of the teacher, config) → a term for each of them."""
DIVERGENCES: Registry[Terms] = Registry("divergence.use")


@DIVERGENCES.register("forward")
def forward(student: Tensor, teacher: Tensor, config: DivergenceConfig) -> Tensor:
    """KL(teacher ‖ student): the student covers all that the teacher does."""
    return teacher.exp() * (teacher - student)


@DIVERGENCES.register("reverse")
def reverse(student: Tensor, teacher: Tensor, config: DivergenceConfig) -> Tensor:
    """KL(student ‖ teacher): the student does only what the teacher does."""
    return student.exp() * (student - teacher)


@DIVERGENCES.register("jsd")
def jsd(student: Tensor, teacher: Tensor, config: DivergenceConfig) -> Tensor:
    """Generalised Jensen–Shannon divergence (GKD, 2306.13649): β KL(teacher ‖ mixture) + (1 - β) KL(student ‖ mixture)."""
    middle = _mixture(teacher, student, config.beta)
    return config.beta * teacher.exp() * (teacher - middle) + (1 - config.beta) * student.exp() * (student - middle)


@DIVERGENCES.register("skew_forward")
def skew_forward(student: Tensor, teacher: Tensor, config: DivergenceConfig) -> Tensor:
    """KL(teacher ‖ student mixed with some of the teacher) (DistiLLM, 2402.03898)."""
    return teacher.exp() * (teacher - _mixture(teacher, student, config.skew))


@DIVERGENCES.register("skew_reverse")
def skew_reverse(student: Tensor, teacher: Tensor, config: DivergenceConfig) -> Tensor:
    """KL(student ‖ teacher mixed with some of the student) (DistiLLM, 2402.03898)."""
    return student.exp() * (student - _mixture(student, teacher, config.skew))


def _mixture(some: Tensor, other: Tensor, share: float) -> Tensor:
    """Log-probs of a mixture with this share of the first distribution."""
    return other if share == 0 else torch.logaddexp(some + math.log(share), other + math.log1p(-share))


def sampled(student: Tensor, teacher: Tensor, config: DivergenceConfig, *, own: bool) -> Tensor:
    """Unbiased estimate of a divergence, and of its gradient, from the log-probs of one token at each place.

    The student drew the tokens if they are its `own`, else the teacher did. With F(p, q) the term of a token, the gradient is
    the mean of F' ∇log p over the student's own tokens; F' is taken less its value at p = q, which changes no mean and is
    nothing where both agree. Over the teacher's tokens p / q weighs it: then `forward` is the negative log-likelihood.
    """
    exact = student.detach().double()
    target = exact - log_ratio(exact, teacher.double())
    terms, slope = _slope(exact, target, config)
    if own:
        value, weight = terms / exact.exp(), slope - _slope(exact, exact, config)[1]
    else:
        value, weight = terms / target.exp(), slope * (exact - target).exp()
    return value.to(student.dtype) + weight.to(student.dtype) * (student - student.detach())


def _slope(student: Tensor, teacher: Tensor, config: DivergenceConfig) -> tuple[Tensor, Tensor]:
    """The terms, and their derivative by the student's probability."""
    with torch.enable_grad():
        leaf = student.detach().requires_grad_()
        terms = DIVERGENCES.get(config.use)(leaf, teacher, config)
        (by_logprob,) = torch.autograd.grad(terms.sum(), leaf)
    return terms.detach(), by_logprob / student.exp()
