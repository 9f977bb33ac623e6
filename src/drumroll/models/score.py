"""A reward model: the body of a language model and a linear head, which scores a sequence by the state of its last token.

The module is transformers' own class for sequence classification with one label. Its names are those of checkpoints and
exports, so an export is what `AutoModelForSequenceClassification` loads.
"""

from __future__ import annotations

import copy
import dataclasses
import zlib
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from drumroll.errors import ModelError
from drumroll.models.blocks import BlocksInFiles, parameters_on_meta
from drumroll.models.loading import LoadedModel, downloaded
from drumroll.models.lora import has_adapters, share_adapters
from drumroll.models.shape import is_classifier

SCORE = "score.weight"
"""The name of the head's weight."""


class ScoreModel(nn.Module):
    """A sequence classifier as one module that is called once per micro-batch: token tree in, a score at each chosen node out."""

    def __init__(self, classifier: Any) -> None:
        super().__init__()
        self.classifier = classifier

    @override
    def forward(self, tokens: Tensor, layout: Any, at: Tensor, *_: Any) -> tuple[Tensor]:
        body, head = self.classifier.base_model, self.classifier.score
        out = body(input_ids=tokens[None], position_ids=layout.positions(), use_cache=False, layout=layout)
        scores = head(out.last_hidden_state[0].index_select(0, at))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return (scores[:, 0].clone(),)  # no view of another tensor: FSDP hangs its hooks on outputs


def score_model(model: LoadedModel, name: str) -> LoadedModel:
    """The same model with a score head in place of its language-model head: that of its files, or a new one."""
    body, tokenizer = model.module.base_model, copy.deepcopy(model.tokenizer)
    config = copy.deepcopy(model.module.config)
    trained = is_reward_model(config, name)
    padding = find_padding(model)
    config.num_labels, config.problem_type, config.get_text_config().pad_token_id = 1, "regression", padding
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)
    module = _classifier(config, body, name)
    module.score = nn.Linear(module.score.in_features, 1, bias=False, device=_first(body).device, dtype=_first(body).dtype)
    if has_adapters(model.module):  # they are in the body
        share_adapters(model.module, module, "score")
    if not module.score.weight.is_meta:  # else whoever gives it memory reads its block
        found = saved_score(name, module.score.weight) if trained else first_score(module, tuple(module.score.weight.shape))
        with torch.no_grad():
            module.score.weight.copy_(found)
    return dataclasses.replace(model, module=module.eval(), tokenizer=tokenizer)


def first_score(classifier: Any, shape: tuple[int, ...]) -> Tensor:
    """The head that training starts from, by the run's seed: drawn as transformers draws linear layers, the same on every layout."""
    generator = torch.Generator().manual_seed((torch.initial_seed() + zlib.crc32(SCORE.encode())) % 2**63)
    spread = getattr(classifier.config.get_text_config(), "initializer_range", 0.02)
    return torch.empty(shape).normal_(0.0, spread, generator=generator)


def find_padding(model: LoadedModel) -> int:
    """A token that no row ends with: a classifier takes the last token that is not padding for the end of a row."""
    tokenizer, ends = model.tokenizer, {*model.eos, model.tokenizer.eos_token_id}
    known = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, *tokenizer.all_special_ids)
    return next((int(token) for token in known if token is not None and token not in ends), len(tokenizer) - 1)


def _classifier(config: Any, body: Any, name: str) -> Any:
    """An empty classifier of the model's family around its body."""
    from transformers import AutoModelForSequenceClassification

    known: Any = AutoModelForSequenceClassification._model_mapping
    refused = f"model: transformers has no class that scores sequences with models of type '{config.model_type}' ({name})"
    if type(config) not in known:
        raise ModelError(f"{refused}; choose another, for example of type llama or qwen3.")
    with parameters_on_meta():
        module: Any = known[type(config)](config)
    head = getattr(module, "score", None)
    if type(module.base_model) is not type(body) or not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(
            f"{refused} by a linear layer on their last state; choose another, for example of type llama or qwen3."
        )
    setattr(module, module.base_model_prefix, body)
    return module


def is_reward_model(config: Any, name: str) -> bool:
    """Whether the files of a model hold a score head."""
    trained = is_classifier(config.architectures)
    if trained and config.num_labels != 1:
        raise ModelError(f"model: {name} is a classifier with {config.num_labels} labels; a reward model has one.")
    return trained


def saved_score(name: str, weight: Tensor) -> Tensor:
    """The head in a reward model's files, for a weight of its shape."""
    source, shape = BlocksInFiles(downloaded(name)), tuple(weight.shape)
    if SCORE not in source:
        raise ModelError(f"model: {name} says that it is a sequence classifier, but its files hold no {SCORE}.")
    return source.block(SCORE, shape, (0, 0), shape)


def _first(body: Any) -> Tensor:
    return next(body.parameters())
