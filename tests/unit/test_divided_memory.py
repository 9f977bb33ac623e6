"""The predicted peak of a rank against that of a real update, for layouts and backends that divide more than shards."""

import contextlib
import importlib

import pytest
import test_parallel
from live_memory import LiveMemory
from test_memory import batch, work_of
from test_parallel import OPTIM, Matrix
from transformers import LlamaConfig, LlamaForCausalLM

from drumroll.algorithms.aggregations import Shares
from drumroll.algorithms.losses import PolicyLoss
from drumroll.checks.memory import LEARNER_MEMORY
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.learners import Update
from drumroll.models import tiny
from drumroll.models.shape import KNOWN, shape_of
from drumroll.placement import backend_memory, memory
from drumroll.placement.memory import Learner, Training

FACTS = {
    **KNOWN["HuggingFaceTB/SmolLM2-135M-Instruct"],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
BUCKET = 2**20
"""As large beside this model as the real one beside a large model."""
CASES = {
    "context 2": ({"context": 2}, "torch", {}),
    "shard 2 × context 2": ({"shard": 2, "context": 2}, "torch", {}),
    "ZeRO-2": ({"shard": 2}, "deepspeed", {"zero": 2}),
    "ZeRO-3": ({"shard": 2}, "deepspeed", {"zero": 3}),
}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    with contextlib.closing(Matrix(tmp_path_factory.mktemp("models"))) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama with SmolLM2's widths, four layers deep."""
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**{name: value for name, value in FACTS.items() if name != "model_type"})).save_pretrained(
        path
    )
    tiny.tokenizer().save_pretrained(path)
    return str(path)


def peaks(rank, folder, backend, micro_tokens, options):
    """The predicted and the measured peak of this rank in its second update."""
    ranks, made = test_parallel.RANKS[-1], batch(8, 4, 16, 60, 60)
    work = Update(made, PolicyLoss(AlgorithmConfig()), Shares("token_mean"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_parallel, "OPTIM", OPTIM.model_copy(update={"micro_tokens": micro_tokens, "minibatch": None}))
        patch.setattr(backend_memory, "REDUCED", BUCKET)
        patch.setattr(memory, "JOINED", BUCKET)
        patch.setattr("drumroll.learners.ranks.BUCKET", BUCKET)
        if backend == "deepspeed":
            patch.setattr(importlib.import_module("drumroll.learners.backends.deepspeed"), "BUCKET", BUCKET)
        with LiveMemory() as live:
            learner = test_parallel.open_learner(ranks, folder, "actor", "float32", True, backend, **options)
            learner.update(work)
            live.peak = 0
            learner.update(work)
        how = Training("float32", ranks.mesh, recompute=True, **options)
        own = made if ranks.mesh.shares == 1 else made.select(made.shares(ranks.mesh.shares)[ranks.mesh.share])
        usage = LEARNER_MEMORY.get(backend, Learner)(shape_of(FACTS), how).usage(work_of(own, micro_tokens))
    return usage.peak, live.peak, usage.moment, live.at, usage.rows()


@pytest.mark.slow
@pytest.mark.parametrize("micro_tokens", [400, 10_000])
@pytest.mark.parametrize("case", CASES)
def test_the_predicted_peak_is_the_measured_one(matrix, folder, case, micro_tokens):
    layout, backend, options = CASES[case]
    for predicted, measured, *more in matrix.run(layout, peaks, folder, backend, micro_tokens, options):
        assert predicted == pytest.approx(measured, rel=0.1), more
