"""TRL's own divergences and gradients on tensors from a file. Run by the Python of `.bench/trl`; knows nothing of us.

python trl_distill.py CASES OUT

CASES (safetensors) holds `CASE/column` for any number of cases: `student` and `teacher`, hidden states [rows, tokens, width];
`head` and `teacher_head` [vocabulary, width]; `mask` [rows, tokens], 1 where trained. Its metadata holds `settings` as JSON: name →
`beta` and `temperature`. OUT gets `TRAINER/NAME/CASE/loss`, `student` and `head` (gradients) for DistillationTrainer and GKDTrainer.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from trl.experimental.gkd import GKDTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss

Case = dict[str, Tensor]


def distillation(case: Case, beta: float, temperature: float) -> Tensor:
    """The loss of DistillationTrainer, from hidden states and heads."""
    given = (case[name] for name in ("student", "teacher", "head", "teacher_head", "mask"))
    return _chunked_divergence_loss(*given, beta, temperature=temperature)[0]


def gkd(case: Case, beta: float, temperature: float) -> Tensor:
    """The loss of GKDTrainer, from logits."""
    logits = case["student"] @ case["head"].T, case["teacher"] @ case["teacher_head"].T
    labels = torch.where(case["mask"].bool(), 0, -100)
    return GKDTrainer.generalized_jsd_loss(*logits, labels=labels, beta=beta, temperature=temperature)


def main(cases_file: str, out_file: str) -> None:
    """Both trainers, every setting, every case."""
    cases: defaultdict[str, Case] = defaultdict(dict)
    with safe_open(cases_file, "pt") as file:
        settings: dict[str, dict[str, Any]] = json.loads(file.metadata()["settings"])
    for key, value in load_file(cases_file).items():
        case, column = key.split("/")
        cases[case][column] = value
    out = {}
    for trainer, loss_of in {"distillation": distillation, "gkd": gkd}.items():
        for name, options in settings.items():
            for number, case in cases.items():
                columns = {column: value.clone() for column, value in case.items()}
                trained = [columns[column].requires_grad_() for column in ("student", "head")]
                loss = loss_of(columns, **options)
                gradients = torch.autograd.grad(loss, trained)
                key = f"{trainer}/{name}/{number}"
                out[f"{key}/loss"] = loss.detach()
                out |= {f"{key}/{c}": g.contiguous() for c, g in zip(("student", "head"), gradients, strict=True)}
    save_file(out, out_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
