"""Mixtures of experts train, generate, save and export like any other model, under the names of their files."""

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from test_batch import random_groups
from test_engine import requests, run
from test_layout_change import begin, resume
from test_parallel import (
    LAYOUTS,
    LIMITS,
    RANKS,
    Matrix,
    ReplicasDifferError,
    distance,
    errors,
    metrics_error,
    open_learner,
    train,
    whole,
)
from transformers import core_model_loading

from drumroll.algorithms import Algorithm
from drumroll.algorithms.aggregations import Shares
from drumroll.algorithms.losses import PolicyLoss
from drumroll.batch import pack
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.config.optim import OptimConfig
from drumroll.config.roles import LoraConfig
from drumroll.engines.native import NativeEngine
from drumroll.errors import ModelError
from drumroll.learners import Update, statistics
from drumroll.learners.backends.torch import torch_learner
from drumroll.learners.checkpoint import TENSORS
from drumroll.learners.statistics import merge
from drumroll.mesh import Mesh
from drumroll.models import experts, loading
from drumroll.models.experts import Routers
from drumroll.models.file_names import find_files
from drumroll.models.loading import load, load_empty
from drumroll.models.lora import add_adapters
from drumroll.models.shape import shape_of
from drumroll.sample import Group, Owner, Prompt, Sample, Trace

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURES = {
    "Qwen3-MoE": hf.Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=40, norm_topk_prob=True),
    "Mixtral": hf.MixtralConfig(**SIZES, num_local_experts=8),
}
DEEPSEEK = hf.DeepseekV3Config(
    **{**SIZES, "num_key_value_heads": 4, "head_dim": 8},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
    **{"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
)
UNEVEN = {
    "6 experts": hf.Qwen3MoeConfig(**SIZES, num_experts=6, moe_intermediate_size=40),
    "3 experts": hf.MixtralConfig(**SIZES, num_local_experts=3),
}


# --- the shape ---


@pytest.mark.parametrize(("family", "width"), [("Qwen3-MoE", 40), ("Mixtral", 48)])
def test_a_shape_counts_experts(family, width):
    config = MIXTURES[family]
    with torch.device("meta"):
        module = hf.AutoModelForCausalLM.from_config(config)
    shape = shape_of(config.to_dict())
    assert shape.parameters == sum(p.numel() for p in module.parameters())
    assert shape.layer == sum(p.numel() for p in module.model.layers[0].parameters())
    assert (shape.experts, shape.visits, shape.expert_width, shape.mlp) == (8, 2, width, 2 * width)
    assert shape.routed_layer == 8 * 3 * width * 64
    assert shape.routed == 2 * shape.routed_layer
    dense = shape_of(hf.Qwen3Config(**SIZES).to_dict())
    assert (dense.experts, dense.visits, dense.expert_width, dense.routed, dense.routed_layer) == (0, 0, 0, 0, 0)


# --- training ---

FAMILIES = MIXTURES | UNEVEN | {"DeepSeek-V3": DEEPSEEK}
ONE = {}
QUICK = [("shard 2", "Qwen3-MoE", "actor"), ("data 2 × shard 2", "Mixtral", "critic")]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    with contextlib.closing(Matrix(tmp_path_factory.mktemp("models"), FAMILIES)) as made:
        yield made


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("layout", "family", "role"), QUICK)
def test_mixtures_train_as_one_process(matrix, layout, family, role, dtype):
    found = matrix.compare(layout, family, role, dtype)
    assert found.within(LIMITS[dtype]), found


@pytest.mark.slow
@pytest.mark.parametrize("role", ["actor", "critic", "LoRA"])
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("layout", ["data 2", "shard 2", "shard 4", "data 2 × shard 2", "context 2"])
def test_every_layout_trains_mixtures_as_one_process(matrix, layout, family, role):
    for dtype, limits in LIMITS.items():
        found = matrix.compare(layout, family, role, dtype)
        assert found.within(limits), (dtype, found)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"reshard": False}, {"accumulate": "local"}, {"recompute": True}], ids=str)
def test_options_change_nothing(matrix, options):
    found = matrix.compare("shard 2", "Qwen3-MoE", "actor", "float32", **options)
    assert found.within(LIMITS["float32"]), found


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["left out", "halved", "own norm", "wrong share"])
def test_a_planted_error_is_found(matrix, mistake):
    try:
        found = matrix.compare("shard 2", "Mixtral", "actor", "float32", mistake)
    except ReplicasDifferError:
        return
    assert not found.within(LIMITS["float32"].times(100)), found


@pytest.mark.slow
@pytest.mark.parametrize("family", UNEVEN)
def test_ranks_need_not_divide_the_experts(matrix, family):
    """Of 6 experts three ranks hold two each, and the fourth none; of 3 the last holds none either."""
    works, (alone,) = matrix.works(family, "actor"), matrix.alone(family, "actor", "float32")
    parts = matrix.run(LAYOUTS["shard 4"], train, matrix.model(family), "actor", "float32", works)
    held = [{expert(piece.name) for piece in part["after"]} - {None} for part in parts]
    assert [len(experts) for experts in held] == ([2, 2, 2, 0] if family.startswith("6") else [1, 1, 1, 0])
    start, end = whole([alone["before"]]), whole([alone["after"]])
    assert torch.equal(whole([part["before"] for part in parts]), start)
    change = distance(whole([part["after"] for part in parts]) - start, end - start)
    assert change < LIMITS["float32"].change


@pytest.mark.slow
def test_ranks_read_buffers_too(matrix):
    """DeepSeek-V3 adds a bias to its routers' choices, which is no parameter."""
    file = Path(matrix.model("DeepSeek-V3")) / "model.safetensors"
    tensors, biases = load_file(file), 0
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.linspace(0, 0.5, len(tensor)))
            biases += 1
    save_file(tensors, file, {"format": "pt"})
    found = matrix.compare("shard 2", "DeepSeek-V3", "actor", "float32")
    assert found.within(LIMITS["float32"]), found
    assert biases == 1


def expert(name):
    found = re.search(r"experts\.(\d+)\.", name)
    return found and int(found[1])


# --- names: files, checkpoints, exports ---


def in_order(folder):
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def published(rank, folder, role, export=None):
    """What engines receive before training; also written to a folder."""
    learner = open_learner(RANKS[-1], folder, role, "float32")
    if export is not None:
        learner.export(export)
    return {name: tensor.clone() for name, tensor in learner.weights()}


def same(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("shard 2", "Mixtral"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("shard 4", "6 experts"), ("data 2", "Qwen3-MoE")]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("one process", "Mixtral"), ("shard 2", "Qwen3-MoE")]),
    ],
)
def test_weights_and_exports_are_the_files(matrix, layout, family, tmp_path):
    """Every rank gets every tensor, bit for bit, under the name that it has in the files."""
    files = in_order(matrix.model(family))
    for found in matrix.run(LAYOUTS.get(layout, ONE), published, matrix.model(family), "actor", tmp_path):
        assert same(found, files)
    assert same(in_order(tmp_path), files)
    assert any(expert(name) == 3 for name in files)


def swapped(module):
    """A wrong order of the tensors that are fused: each expert's projections are taken for each other's."""
    found = find_files(module)
    return {name: [blocks[i ^ 1] for i in range(len(blocks))] for name, blocks in found.items() if len(blocks) > 1}


def train_wrongly(*arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "find_files", swapped)
        return train(*arguments)


@pytest.mark.slow
def test_a_wrong_order_of_experts_is_found(matrix):
    works, alone = matrix.works("Qwen3-MoE", "actor"), matrix.alone("Qwen3-MoE", "actor", "float32")
    wrong = matrix.run(LAYOUTS["shard 2"], train_wrongly, matrix.model("Qwen3-MoE"), "actor", "float32", works)
    assert errors(wrong, alone, works, Mesh(shard=2)).logprobs > 1e-2


def test_a_model_whose_files_are_not_understood_is_not_divided(monkeypatch):
    def transposed(module, tensors):
        return {f"old.{name}": tensor.T.contiguous() if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", transposed)
    assert load("tiny-moe-random").files is None
    with pytest.raises(ModelError, match=r"the files of models of type 'qwen3_moe' hold other tensors .* use data"):
        load_empty("tiny-moe-random", dtype="float32")


@pytest.mark.parametrize("family", MIXTURES)
def test_adapters_leave_experts_alone(matrix, family, tmp_path):
    """`all-linear` are the layers of attention; the merged model has its experts and routers as they were."""
    model = load(matrix.model(family))
    add_adapters(model, LoraConfig(rank=4))
    learner = torch_learner(model, OptimConfig())
    assert {name.split(".")[-4] for name in learner.backend.names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    for parameter in learner.backend.parameters:
        parameter.data.fill_(0.1)
    learner.export(tmp_path)
    found, files = in_order(tmp_path), in_order(matrix.model(family))
    assert {name for name in files if not torch.equal(found[name], files[name])} == {
        n for n in files if "_proj" in n and "attn" in n
    }
    assert found.keys() == files.keys()
    with pytest.raises(ModelError, match="the experts of a mixture get no adapters; name other layers in targets"):
        add_adapters(load(matrix.model(family)), LoraConfig(targets=["q_proj", "w2" if family == "Mixtral" else "down_proj"]))


CHANGES = [
    ("shard 2", ONE, "Qwen3-MoE", "actor"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("shard 2", LAYOUTS["data 2"], "Mixtral", "actor"),
            ("shard 2", ONE, "Mixtral", "critic"),
            ("shard 2", LAYOUTS["shard 4"], "Qwen3-MoE", "critic"),
            ("shard 4", ONE, "6 experts", "actor"),
            ("data 2", LAYOUTS["shard 2"], "Qwen3-MoE", "actor"),
        ]
    ),
]


@pytest.mark.parametrize(("before", "after", "family", "role"), CHANGES)
def test_a_checkpoint_goes_on_under_another_layout(matrix, before, after, family, role, tmp_path):
    works, model = matrix.works(family, role) * 2, matrix.model(family)
    (step, _), *_ = told = matrix.run(LAYOUTS[before], begin, model, role, works, tmp_path, {})
    again = matrix.run(after, resume, model, role, works, tmp_path, {})
    assert again[0][0] == step == 2
    losses = [
        [merge([ranks[rank][1][i] for rank in mesh.leaders()]) for i in (0, 1)]
        for ranks, mesh in ((told, Mesh(**LAYOUTS[before])), (again, Mesh(**after)))
    ]
    for one, other in zip(*losses, strict=True):
        assert metrics_error(one, other) < 1e-5
    named = json.loads((tmp_path / TENSORS).read_text())["shapes"]
    assert {expert(name) for name in named} == {None, *range(FAMILIES[family].get_text_config().num_local_experts)}


# --- the native engine ---


def tiny_moe(seed=0):
    """With weights so large that routers and tokens are decided."""
    model = load("tiny-moe-random", seed=seed)
    for parameter in model.module.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    return model


@pytest.mark.parametrize("fixed", [False, True])
def test_the_engine_samples_what_the_learner_scores(fixed):
    """Also after a publication: per-expert tensors reach the engine's fused parameters."""
    learner = torch_learner(tiny_moe(), OptimConfig(), total_steps=1)
    engine = NativeEngine(tiny_moe(seed=1), slots=8, context=32, fixed_shape=fixed)
    engine.load(1, ((name, tensor.clone()) for name, tensor in learner.weights()), recompute=False)
    wanted = requests(20, temperature=0.7)
    groups = []
    for i, (one, done) in enumerate(zip(wanted, run(engine, wanted), strict=True)):
        trace = Trace()
        trace.extend(list(one.tokens), Owner.PROMPT)
        trace.extend(done.tokens, Owner.POLICY, done.logprobs, done.versions)
        prompt = Prompt(str(i), "d", "", one.tokens)
        groups.append(Group(prompt, i, [Sample(prompt, i, 0, traces=[trace], reward=0.0)]))
    engine.close()
    batch = pack(groups)
    gap = (learner.infer(batch, 0.7) - batch.behaviour)[batch.mask].abs().max()
    assert batch.mask.sum() > 50
    assert gap < 1e-4


def test_deterministic_generation_does_not_depend_on_company():
    """Which experts other rows visit does not change a row, to the last bit."""
    engine = NativeEngine(tiny_moe(), slots=8, context=32, fixed_shape=True)
    wanted = requests(16)
    alone, together = [run(engine, [request])[0] for request in wanted], run(engine, wanted)
    engine.close()
    assert [(c.tokens, c.logprobs) for c in alone] == [(c.tokens, c.logprobs) for c in together]


ODD = hf.Qwen3MoeConfig(**SIZES, num_experts=6, moe_intermediate_size=33)
"""Rows that grouped_mm does not take."""


@pytest.mark.parametrize("config", [*MIXTURES.values(), ODD], ids=[*MIXTURES, "odd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_experts_compute_what_transformers_computes(config, dtype):
    torch.manual_seed(0)
    module = hf.AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    tokens = torch.randint(97, (1, 40))
    with torch.no_grad():
        theirs = module(tokens).logits
        experts.use(module)
        ours = module(tokens).logits
        with experts.rows_alone():
            alone = module(tokens).logits
    limit = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    assert (ours - theirs).abs().max() <= limit * theirs.abs().max()
    assert (alone - theirs).abs().max() <= limit * theirs.abs().max()


# --- what routers choose ---


def routed(micro_tokens, order=1):
    """The metrics of an update without a step, of a batch cut and ordered in some way."""
    learner = torch_learner(tiny_moe(), OptimConfig(lr=0.0, micro_tokens=micro_tokens), total_steps=1)
    batch = pack(random_groups(5, 5))
    batch = batch.select(list(range(batch.num_traces))[::order])
    batch = Algorithm(AlgorithmConfig(), single_update=True).advantages(batch.with_(behaviour=torch.zeros(len(batch.tokens))))

    class Never(PolicyLoss):
        skips_zero_advantage = False

    found = merge([learner.update(Update(batch, Never(AlgorithmConfig()), Shares("token_mean")))])
    return batch, {name: value for name, value in found.items() if "expert" in name or "router" in name}


def test_the_load_of_experts_is_that_of_trained_tokens():
    """However they are packed: transformers computes each trace alone, and the tokens before the trained ones count."""
    batch, found = routed(micro_tokens=10_000)
    for other in (routed(micro_tokens=20)[1], routed(micro_tokens=60, order=-1)[1]):
        assert other == pytest.approx(found, rel=1e-5)
    module = tiny_moe().module
    module.set_attn_implementation("eager")
    counts, entropy, ends = torch.zeros(4, 8), [], batch.lengths.cumsum(0).tolist()
    for end, length in zip(ends, batch.lengths.tolist(), strict=True):
        tokens, mask = batch.tokens[end - length : end], batch.mask[end - length : end]
        with torch.no_grad():
            logits = module(tokens[None], output_router_logits=True).router_logits
        for layer, each in enumerate(logits):
            probabilities = each.view(length, 8)[:-1][mask[1:]].softmax(-1)
            counts[layer] += torch.zeros(8).index_add_(0, probabilities.topk(2).indices.flatten(), torch.ones(2 * mask.sum()))
            entropy.append(-(probabilities * probabilities.log()).sum(-1))
    loads = counts.amax(1) / counts.mean(1)
    expected = {f"train/expert_load/layer{i}": float(load) for i, load in enumerate(loads)}
    expected |= {"train/expert_load/max": float(loads.max()), "train/experts_idle": float((counts == 0).float().mean())}
    assert found == pytest.approx(expected | {"train/router_entropy": float(torch.cat(entropy).mean())}, rel=1e-5)
    assert 1.2 < loads.max() < 8


def test_counting_computed_tokens_would_depend_on_packing(monkeypatch):
    """A prompt that samples share is computed once for each micro-batch."""
    take = Routers.take
    monkeypatch.setattr(
        Routers, "take", lambda self, positions: take(self, torch.arange(len(next(iter(self._seen.values()))[1])))
    )
    monkeypatch.setattr(
        statistics, "_loads", lambda visits: {"experts": float(sum(counts.sum() for counts in visits.values()))}
    )
    assert routed(micro_tokens=10_000)[1]["train/experts"] != routed(micro_tokens=20)[1]["train/experts"]
