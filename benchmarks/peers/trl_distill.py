"""TRL's own divergences and gradients on tensors from a file. Run by the Python of `.bench/trl`; knows nothing of us.

python trl_distill.py CASES OUT

Columns of CASES: `student` and `teacher`, hidden states [rows, tokens, width]; `head` and `teacher_head` [vocabulary, width];
`mask` [rows, tokens], 1 where trained. A setting is the trainer, `distillation` or `gkd`, and its `beta` and `temperature`.
Results: `loss`, and the gradients `student` and `head`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from cases import Case, answer_all
from torch import Tensor
from trl.experimental.gkd import GKDTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss


def distillation(case: Case, beta: float, temperature: float) -> Tensor:
    """The loss of DistillationTrainer, from hidden states and heads."""
    given = (case[name] for name in ("student", "teacher", "head", "teacher_head", "mask"))
    return _chunked_divergence_loss(*given, beta, temperature=temperature)[0]


def gkd(case: Case, beta: float, temperature: float) -> Tensor:
    """The loss of GKDTrainer, from logits."""
    logits = case["student"] @ case["head"].T, case["teacher"] @ case["teacher_head"].T
    labels = torch.where(case["mask"].bool(), 0, -100)
    return GKDTrainer.generalized_jsd_loss(*logits, labels=labels, beta=beta, temperature=temperature)


LOSSES = {"distillation": distillation, "gkd": gkd}


def prepare(setting: tuple[str, dict[str, float]]) -> Callable[[Case], Case]:
    """Loss and gradients of a trainer."""
    trainer, options = setting

    def answer(case: Case) -> Case:
        trained = [case[column].requires_grad_() for column in ("student", "head")]
        loss = LOSSES[trainer](case, **options)
        gradients = torch.autograd.grad(loss, trained)
        return {"loss": loss, "student": gradients[0], "head": gradients[1]}

    return answer


if __name__ == "__main__":
    answer_all(prepare)
