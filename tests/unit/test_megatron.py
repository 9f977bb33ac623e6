"""Megatron-Core behind the learner's loop trains as one process does, and its checkpoints go on under other backends."""

import dataclasses
import re

import pytest
import test_parallel
import transformers as hf
from test_parallel import LIMITS, SIZES, Matrix, errors

from drumroll.learners.pieces import Piece
from drumroll.mesh import Mesh

LAYOUTS = {
    "tensor 2": {"tensor": 2},
    "tensor 2, sequence": {"tensor": 2},
    "pipeline 2": {"pipeline": 2},
    "tensor 2 × pipeline 2": {"tensor": 2, "pipeline": 2},
    "data 2": {"data": 2},
    "data 2 × pipeline 2": {"data": 2, "pipeline": 2},
    "expert 2": {"data": 2, "expert": 2},
    "expert 2 × pipeline 2": {"data": 2, "pipeline": 2, "expert": 2},
    "expert 2 × tensor 2": {"tensor": 2, "expert": 2},
}
DENSE = ("Llama", "Qwen2", "Qwen3")
MIXTURES = {
    "Qwen3-MoE": hf.Qwen3MoeConfig(
        **SIZES, vocab_size=96, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True
    ),
    "Mixtral": hf.MixtralConfig(**SIZES, vocab_size=96, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
}
FAMILIES = {**{name: test_parallel.FAMILIES[name] for name in DENSE}, **MIXTURES}
ONCE = [
    ("tensor 2, sequence", "Llama", "actor"),
    ("tensor 2 × pipeline 2", "Qwen3", "critic"),
    ("expert 2 × pipeline 2", "Qwen3-MoE", "actor"),
]
"""Cases of `make test`."""


def layouts_of(family):
    """Experts of tensor-parallel ranks need sequence parallelism."""
    return [layout for layout in LAYOUTS if (layout != "tensor 2" if family in MIXTURES else "expert" not in layout)]


EVERY = [(layout, family, role) for family in FAMILIES for layout in layouts_of(family) for role in ("actor", "critic")]


MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def named_as_in_files(pieces, family):
    """One process may have the experts of a layer in one tensor."""
    mixtral = family == "Mixtral"
    for piece in pieces:
        found = re.fullmatch(r"(.*)\.mlp\.(gate.weight|experts\.gate_up_proj|experts\.down_proj)", piece.name)
        if not found:
            yield piece
            continue
        module, kind = f"{found[1]}.{'block_sparse_moe' if mixtral else 'mlp'}", found[2]
        if kind == "gate.weight":
            yield dataclasses.replace(piece, name=f"{module}.gate.weight")
            continue
        names = ("gate_proj", "up_proj") if "gate_up" in kind else ("down_proj",)
        for number, tensor in enumerate(piece.tensor):
            for name, part in zip(names, tensor.chunk(len(names)), strict=True):
                whole = f"{module}.experts.{number}.{MIXTRAL[name] if mixtral else name}.weight"
                yield Piece(whole, tuple(part.shape), (0, 0), part)


class MegatronMatrix(Matrix):
    """Compares layouts of Megatron with one process of plain PyTorch."""

    def config(self, family):
        return FAMILIES[family]

    def compare(self, layout, family, role, mistake=None, **options):
        works, alone = self.works(family, role), self.alone(family, role, "float32")
        options = {"backend": "megatron", "sequence": layout != "tensor 2", **options}
        parts = self.run(LAYOUTS[layout], test_parallel.train, self.model(family), role, "float32", works, mistake, options)
        for done in alone:
            for key in ("before", "after"):
                done[key] = list(named_as_in_files(done[key], family))
            done["grads"] = [list(named_as_in_files(grad, family)) for grad in done["grads"]]
        return errors(parts, alone, works, Mesh(**LAYOUTS[layout]))


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    made = MegatronMatrix(tmp_path_factory.mktemp("models"))
    yield made
    made.close()


@pytest.mark.parametrize(("layout", "family", "role"), ONCE)
def test_each_strategy_trains_as_one_process(matrix, layout, family, role):
    found = matrix.compare(layout, family, role)
    assert found.within(LIMITS["float32"]), found


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "family", "role"), EVERY)
def test_every_layout_trains_every_model_as_one_process(matrix, layout, family, role):
    found = matrix.compare(layout, family, role)
    assert found.within(LIMITS["float32"]), found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor 2, sequence", "pipeline 2", "expert 2"])
def test_recomputed_activations_change_nothing(matrix, layout):
    found = matrix.compare(layout, "Qwen3-MoE" if "expert" in layout else "Qwen3", "actor", recompute=True)
    assert found.within(LIMITS["float32"]), found
