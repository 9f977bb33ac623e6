"""A value model: the body of a causal language model, or of a reward model, and a linear head."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from drumroll.models.file_names import renamed
from drumroll.models.loading import LoadedModel
from drumroll.models.prefix_tree import PrefixTree
from drumroll.models.score import is_reward_model, saved_score

BODY, HEAD = "body", "head.weight"
"""The names of the language model's body, and of the head's weight, in a value model."""


class ValueModel(nn.Module):
    """Token tree in, one number for each chosen token out: the value before it; 0 everywhere with a new head."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        parameter = next(body.parameters())
        width = body.config.get_text_config().hidden_size
        self.head = nn.Linear(width, 1, device=parameter.device, dtype=parameter.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @override
    def forward(self, tokens: Tensor, layout: PrefixTree, before: Tensor, *_: Any) -> tuple[Tensor]:
        out = self.body(input_ids=tokens[None], position_ids=layout.positions(), use_cache=False, layout=layout)
        values = self.head(out.last_hidden_state[0])[:, 0].to(torch.promote_types(self.head.weight.dtype, torch.float32))
        return (values.index_select(0, before),)


def value_model(model: LoadedModel, name: str | None = None) -> LoadedModel:
    """The same model with a value head in place of its language-model head; of a reward model of this name, its score head."""
    files = renamed(model.files, f"{model.module.base_model_prefix}.", f"{BODY}.")
    module = ValueModel(model.module.base_model)
    weight = module.head.weight
    if name is not None and not weight.is_meta and is_reward_model(model.module.config, name):
        with torch.no_grad():
            weight.copy_(saved_score(name, weight))
    return dataclasses.replace(model, module=module, files=files)
