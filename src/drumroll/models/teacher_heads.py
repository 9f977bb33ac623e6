"""The heads of teachers alone, read from the files of their models: a rank of the student computes the teachers' distributions with them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from drumroll.models.blocks import replace_parameters
from drumroll.models.distillation import TeacherHeads
from drumroll.models.head import LanguageModelHead
from drumroll.models.loading import load_empty
from drumroll.processes import accelerator


def open_teacher_heads(models: Sequence[str], vocabulary: int, *, dtype: str, device: str, seed: int) -> TeacherHeads:
    """The heads of some models; of their bodies nothing is loaded."""
    found = [_open(name, dtype, device, seed) for name in models]
    return TeacherHeads([head for head, _ in found], [width for _, width in found], vocabulary)


def _open(name: str, dtype: str, device: str, seed: int) -> tuple[LanguageModelHead, int]:
    """A model's head, and the width of its hidden states."""
    model, source = load_empty(name, dtype=dtype, seed=seed)
    names: dict[nn.Parameter, list[str]] = {}
    for own, parameter in model.module.named_parameters(
        remove_duplicate=False
    ):  # a tied head has the embedding's name in files
        names.setdefault(parameter, []).append(own)
    head, where = LanguageModelHead(model.module, MoeModelOutputWithPast), accelerator.pick(device)
    loaded = {}
    for parameter in head.module.parameters():
        own = next(name for name in names[parameter] if name in source)
        whole = source.block(own, parameter.shape, (0,) * parameter.dim(), parameter.shape)
        loaded[parameter] = nn.Parameter(whole.to(where, parameter.dtype), requires_grad=False)
    replace_parameters(head.module, loaded)
    return head, model.module.config.get_text_config().hidden_size
