"""The memory plan: parameter counts of public models, the arithmetic against real peaks, and refusals with what would fit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from forked import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from live_memory import LiveMemory
from test_batch import make_trace
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from drumroll import weights
from drumroll.algorithms.aggregations import Shares
from drumroll.algorithms.losses import PolicyLoss
from drumroll.batch import pack
from drumroll.checks.memory import check_memory, largest_work, memory_lines, memory_plan, nearest
from drumroll.checks.plan import planned
from drumroll.config import load as load_recipe
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.config.optim import OptimConfig
from drumroll.config.rl import RLConfig
from drumroll.engines.native import PAGE_TOKENS, NativeEngine
from drumroll.errors import ConfigError
from drumroll.learners import Update
from drumroll.learners.backends.torch import torch_learner
from drumroll.mesh import Mesh
from drumroll.models import attention, head
from drumroll.models.loading import LoadedModel, load
from drumroll.models.prefix_tree import PrefixTree
from drumroll.models.shape import KNOWN, find_shape, measure, shape_of
from drumroll.placement.layout import arrange, pool_of
from drumroll.placement.memory import BUCKET, ROWS, Learner, Training, Work, engine, key_value_bytes, predicted_peak
from drumroll.sample import Group, Owner, Prompt, Sample

RECIPES = Path(__file__).parents[2] / "recipes"
GEMMA_3_1B = {
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
}
LLAMA_32_1B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
QWEN3_06B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


# --- shapes ---


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (KNOWN["Qwen/Qwen2.5-7B"], 7_615_616_512),
        (KNOWN["Qwen/Qwen2.5-0.5B-Instruct"], 494_032_768),
        (KNOWN["Qwen/Qwen2.5-32B"], 32_763_876_352),
        (KNOWN["Qwen/Qwen3-30B-A3B-Base"], 30_532_122_624),
        (KNOWN["HuggingFaceTB/SmolLM2-135M-Instruct"], 134_515_008),
        (GEMMA_3_1B, 999_885_952),
        (LLAMA_32_1B, 1_235_814_400),
        (QWEN3_06B, 596_049_920),
    ],
)
def test_counts_are_those_that_the_models_publish(config, parameters):
    shape = shape_of(config)
    assert shape.parameters == parameters
    assert shape.layers * shape.layer + shape.root == parameters
    assert shape.tied is bool(config.get("tie_word_embeddings", True))


def test_a_shape_needs_no_hub_and_says_when_it_is_not_known(tmp_path):
    assert find_shape("tiny") == find_shape("tiny-random") == measure(load("tiny-random").module)
    assert find_shape("nobody/none") is None
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    assert find_shape(str(tmp_path)) is None
    shape = find_shape("Qwen/Qwen3-30B-A3B-Base")
    assert (shape.visits, shape.mlp, shape.norms) == (8, 8 * 768, (2 * 2048, 36 * 128))


def test_every_model_of_a_recipe_on_gpus_has_a_shape():
    for path in RECIPES.rglob("*.yaml"):
        raw = yaml.safe_load(path.read_text())
        if raw.get("cluster", {}).get("kind") == "cuda":
            names = {raw["model"], *(role["model"] for role in raw["roles"].values() if "model" in role)}
            assert all(map(find_shape, names)), path


# --- the arithmetic ---

SEVEN = find_shape("Qwen/Qwen2.5-7B")


def state(how, shape=SEVEN):
    """Bytes a parameter that an update keeps: weights, master, moments and the summed gradients."""
    rank = Learner(shape, how)
    return (sum(rank.resident().values()) + rank.summed()) / shape.parameters


def test_bytes_per_parameter():
    assert state(Training("float32")) == pytest.approx(16)
    assert state(Training("bfloat16")) == pytest.approx(18)
    assert state(Training("bfloat16", Mesh(shard=8))) == pytest.approx(16 / 8)
    assert state(Training("bfloat16", Mesh(shard=8), accumulate="local")) == pytest.approx(12 / 8 + 4)
    assert state(Training("bfloat16", Mesh(tensor=4))) == pytest.approx(18 / 4, rel=1e-3)
    assert state(Training("bfloat16", Mesh(shard=2, tensor=4))) == pytest.approx(16 / 8, rel=1e-3)
    assert state(Training("bfloat16", trained=False)) == pytest.approx(2)
    assert state(Training("bfloat16", Mesh(shard=4), trained=False)) == pytest.approx(0.5)
    assert state(Training("bfloat16", adapters=10**7)) == pytest.approx(2 + 18 * 10**7 / SEVEN.parameters)


def test_constants_are_those_of_the_code():
    assert ROWS == head.ROWS
    assert BUCKET == weights.BUCKET
    for slots, context, fixed in ((3, 300, False), (2, 40, False), (2, 300, True)):
        made = NativeEngine(load("tiny-random"), slots=slots, context=context, fixed_shape=fixed)
        assert made.page_tokens == (context if fixed else min(context, PAGE_TOKENS))
        used = engine(find_shape("tiny"), "float32", slots=slots, context=context, fixed=fixed).work
        assert used["keys and values"] == made._cache.nbytes()
    assert key_value_bytes(SEVEN, "bfloat16") == 57344


SIZES = st.sampled_from([1, 2, 4])


@given(SIZES, SIZES, st.sampled_from(["float32", "bfloat16"]), st.booleans(), st.integers(64, 32768), st.booleans())
def test_more_devices_and_less_work_never_need_more(shard, tensor, dtype, recompute, tokens, several):
    how, work = Training(dtype, Mesh(shard=shard, tensor=tensor), recompute=recompute), Work(tokens, tokens, several=several)
    peak = predicted_peak(SEVEN, how, work)
    assert predicted_peak(SEVEN, replace(how, recompute=True), work) <= peak
    assert predicted_peak(SEVEN, replace(how, mesh=Mesh(shard=shard, tensor=2 * tensor)), work) < peak
    assert predicted_peak(SEVEN, how, replace(work, tokens=tokens // 2, rows=tokens // 2)) <= peak
    assert predicted_peak(SEVEN, replace(how, reshard=False), work) >= peak
    assert predicted_peak(SEVEN, replace(how, accumulate="local"), work) >= predicted_peak(SEVEN, how, work) - 4 * SEVEN.layer
    if shard > 1:
        assert predicted_peak(SEVEN, replace(how, mesh=Mesh(shard=2 * shard, tensor=tensor)), work) < peak


# --- against real updates ---


def batch(groups, samples, prompt, length, vocabulary):
    """Groups of equal samples with a shared prompt, and advantages that skip nothing."""
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        return torch.randint(3, vocabulary, (count,), generator=generator).tolist()

    made = []
    for g in range(groups):
        row, shared = Prompt(str(g), "d", "", (1,)), draw(prompt)
        traces = [make_trace([(Owner.PROMPT, shared), (Owner.POLICY, draw(length))]) for _ in range(samples)]
        made.append(Group(row, g, [Sample(row, g, i, traces=[t], reward=float(i % 2)) for i, t in enumerate(traces)]))
    packed = pack(made)
    sign = torch.where(packed.sample_of_token() % 2 == 0, 1.0, -1.0)
    return packed.with_(behaviour=torch.where(packed.mask, -1.0, 0.0), advantages=torch.where(packed.mask, sign, 0.0))


def work_of(made, micro_tokens, *, entropy_gradient=False):
    """The largest micro-batch of a batch, as the prediction counts it."""
    cuts = [made.select(traces) for traces in made.micro_batches(micro_tokens)]
    largest = max(cuts, key=lambda cut: len(cut.tree().tokens))
    paths = largest.tree().paths
    return Work(
        tokens=len(largest.tree().tokens),
        rows=int(largest.mask.sum()),
        keys=sum(path.size[1] for path in paths),
        masked=sum(path.size[0] * path.size[1] for path in paths if path.start),
        several=len(cuts) > 1,
        entropy_gradient=entropy_gradient,
    )


def llama(dtype="float32", *, recompute=False, **changes):
    """A random Llama with SmolLM2's widths, two layers deep."""
    attention.register()
    facts = {**KNOWN["HuggingFaceTB/SmolLM2-135M-Instruct"], "num_hidden_layers": 2, **changes}
    module = LlamaForCausalLM(LlamaConfig(**{name: value for name, value in facts.items() if name != "model_type"}))
    for parameter in module.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    module.set_attn_implementation(attention.NAME)
    if recompute:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    return LoadedModel(module.eval(), None, frozenset())


def measured_peak(model, made, micro_tokens, **algorithm):
    """The peak of live tensor bytes in a second update, when the optimizer has its moments."""
    learner = torch_learner(model, OptimConfig(lr=1e-6, micro_tokens=micro_tokens), total_steps=3)
    work = Update(made, PolicyLoss(AlgorithmConfig(**algorithm)), Shares("token_mean"))
    learner.update(work)
    backend = learner.backend
    moments = [value for each in backend.optimizer.state.values() for value in each.values()]
    held = [*backend.model.module.parameters(), *backend.model.module.buffers(), *backend.master, *moments]
    with LiveMemory(held) as live:
        learner.update(work)
    return live.peak


CASES = {
    "logits": ({}, {}, (1, 4, 32, 64), 10_000),
    "tied embedding, several micro-batches": ({"vocab_size": 16384}, {}, (3, 4, 32, 32), 200),
    "untied, bfloat16": ({"dtype": "bfloat16", "tie_word_embeddings": False, "vocab_size": 8192}, {}, (3, 4, 32, 32), 200),
    "activations": ({"vocab_size": 512}, {}, (4, 4, 16, 60), 10_000),
    "recomputed": ({"vocab_size": 512, "recompute": True, "num_hidden_layers": 4}, {}, (4, 4, 16, 60), 10_000),
    "recomputed, bfloat16": ({"vocab_size": 512, "recompute": True, "dtype": "bfloat16"}, {}, (3, 4, 16, 60), 300),
    "head in chunks": ({"vocab_size": 4096, "recompute": True}, {}, (5, 4, 8, 60), 10_000),
    "entropy": ({"vocab_size": 16384}, {"entropy": 0.01}, (1, 4, 32, 96), 10_000),
}


@pytest.mark.parametrize("case", CASES)
def test_the_predicted_peak_is_the_measured_one(case):
    changes, algorithm, (groups, samples, prompt, length), micro_tokens = CASES[case]
    model = llama(**changes)
    shape = measure(model.module)
    made = batch(groups, samples, prompt, length, min(shape.vocabulary, 500))
    how = Training(changes.get("dtype", "float32"), recompute=changes.get("recompute", False))
    predicted = predicted_peak(shape, how, work_of(made, micro_tokens, entropy_gradient="entropy" in algorithm))
    assert predicted == pytest.approx(measured_peak(model, made, micro_tokens, **algorithm), rel=0.1)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("micro_tokens", [300, 10_000])
def test_the_predicted_peak_of_the_tiny_model(recompute, micro_tokens):
    made = batch(4, 4, 16, 60, 60)
    model = load("tiny-random", recompute_activations=recompute)
    predicted = predicted_peak(find_shape("tiny"), Training(recompute=recompute), work_of(made, micro_tokens))
    assert predicted == pytest.approx(measured_peak(model, made, micro_tokens), rel=0.1)


def sharded_peak(rank, meeting, changes, bfloat16, micro_batches):
    """The peak of one of two ranks under FSDP, as the prediction counts it: layers and root sharded, gradients reduced in float32."""
    store = dist.FileStore(str(meeting), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model, made = llama(**changes), batch(2, 4, 16, 60, 500)
    shape, tree, chosen = measure(model.module), made.tree(), made.tokens[made.mask]
    scorer, policy = head.LogProbModel(model.module), MixedPrecisionPolicy(torch.bfloat16 if bfloat16 else None, torch.float32)
    for layer in model.module.model.layers:
        layer.training = True  # activations are recomputed
        fully_shard(layer, mp_policy=policy)
    fully_shard(scorer, mp_policy=policy)
    optimizer = torch.optim.AdamW(scorer.parameters(), fused=True)
    before, device = tree.node_of[made.mask.nonzero()[:, 0] - 1], torch.device("cpu")

    def step():
        for _ in range(micro_batches):
            scorer(tree.tokens, PrefixTree(tree.paths, device), before, chosen, 1.0, False)[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    moments = [value for each in optimizer.state.values() for value in each.values()]
    with LiveMemory([*scorer.parameters(), *scorer.buffers(), *moments]) as live:
        step()
    store.set(f"done/{rank}", "")
    store.wait(["done/0", "done/1"])  # a rank that leaves early closes connections that its peer still reads
    how = Training("bfloat16" if bfloat16 else "float32", Mesh(shard=2), recompute=True)
    return predicted_peak(shape, how, replace(work_of(made, 10_000), several=micro_batches > 1)), live.peak


@pytest.mark.parametrize(
    ("changes", "bfloat16", "micro_batches"),
    [
        ({"vocab_size": 512, "num_hidden_layers": 4}, False, 2),
        ({"vocab_size": 8192, "tie_word_embeddings": False}, True, 2),
        ({"vocab_size": 8192, "tie_word_embeddings": False}, False, 1),
    ],
)
def test_the_predicted_peak_of_a_shard(tmp_path, changes, bfloat16, micro_batches):
    changes = {**changes, "recompute": True}
    for predicted, measured in run_ranks(sharded_peak, 2, tmp_path / "meeting", changes, bfloat16, micro_batches):
        assert predicted == pytest.approx(measured, rel=0.1)


# --- plans and refusals ---


def seven(**changes):
    """The paper's 7B recipe on 8 GPUs of 80 GB, changed."""
    return load_recipe(RECIPES / "multi-domain" / "qwen2.5-7b-8gpu.yaml", [f"{k}={v}" for k, v in changes.items()]).config


def refusal(config):
    layout = planned(config)
    with pytest.raises(ConfigError) as caught:
        check_memory(config, memory_plan(config, layout), layout)
    return str(caught.value)


@pytest.mark.parametrize("name", ["qwen2.5-7b-8gpu", "qwen2.5-7b", "qwen3-30b-a3b"])
def test_the_multi_domain_recipes_fit_devices_of_80_gb(name):
    config = load_recipe(RECIPES / "multi-domain" / f"{name}.yaml", []).config
    plan = memory_plan(config, planned(config))
    assert plan.worst is None
    assert not plan.unknown
    assert all(group.memory == 80e9 and group.peak(group.peak_stage) > 30e9 for group in plan.groups)


def test_devices_that_train_and_generate_hold_each_in_turn():
    both, judged = memory_plan(seven(), planned(seven())).groups
    assert "rollout" in both.stages["generation"]
    assert not both.stages["generation"]["actor"], "the actor moves to the host while engines generate"
    assert not both.stages["training"]["rollout"], "vLLM gives its memory back while the actor trains"
    assert list(judged.stages["training"]["judge"]) == ["weights"], "a native engine that sleeps keeps its weights"
    assert "keys and values" in judged.stages["generation"]["judge"]
    apart = seven(**{"roles.actor.devices": "0-3", "roles.actor.parallel.shard": 4, "roles.rollout.devices": "4-5"})
    actor = next(g for g in memory_plan(apart, planned(apart)).groups if "actor" in g.stages["training"])
    assert actor.stages["generation"]["actor"], "nobody else wants its devices, so it stays"


def test_what_does_not_fit_is_refused_with_the_nearest_that_does():
    whole = seven(**{"roles.actor.parallel.shard": 1})
    said = refusal(whole)
    assert "memory: training needs 162.2 GB on each of the devices cuda 6-7, which have 80.0 GB: actor (weights 15.2 + " in said
    assert said.endswith("nearest that fits: roles.actor.parallel: {shard: 4}.")
    assert memory_plan(*plan_of(seven(**{"roles.actor.parallel.shard": 4}))).worst is None
    assert memory_plan(*plan_of(seven(**{"roles.actor.parallel.shard": 2}))).worst is not None


def plan_of(config):
    return config, planned(config)


def test_recomputing_then_smaller_micro_batches_then_other_roles_are_tried():
    small = {"cluster.device_memory_gb": 40, "roles.judge.slots": 16, "roles.rollout.options.gpu_memory_utilization": 0.7}
    kept = seven(**small, **{"roles.actor.recompute_activations": "false", "roles.judge.devices": "rollout"})
    found = nearest(*plan_of(kept))
    assert found is not None
    assert "roles.actor.recompute_activations: true" in found
    less = seven(**small, **{"optim.micro_tokens": 131072})
    assert "optim.micro_tokens: " in str(nearest(*plan_of(less)))
    full = seven(**{"roles.rollout.options.gpu_memory_utilization": 0.99})
    assert nearest(*plan_of(full)) == "roles.rollout.options.gpu_memory_utilization: 0.95"
    crowded = seven(**{"roles.judge.slots": 512})
    assert nearest(*plan_of(crowded)) == "roles.judge.slots: 128"
    assert "take more devices" in refusal(seven(**{"cluster.device_memory_gb": 3}))


def test_the_local_runtime_has_one_device_where_nothing_moves():
    config = RLConfig.model_validate({"reward": "exact", "data": {"train": {"a": {"source": "drumroll.data.problems:sums"}}}})
    (group,) = memory_plan(config, planned(config)).groups
    assert {"actor", "rollout"} == set(group.stages["training"])
    assert "keys and values" in group.stages["training"]["rollout"]
    assert "weights" not in group.stages["training"]["rollout"], "at staleness 0 the engine has the learner's weights"
    lines = list(memory_lines(memory_plan(config, planned(config))))
    assert "(peak)" in lines[0]
    assert all(len(line) <= 98 for line in lines)
    tight = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device_memory_gb": 0.5})})
    assert "nearest that fits: " in refusal(tight)


def test_a_micro_batch_is_never_larger_than_a_ranks_share():
    config = seven()
    assert largest_work(config, "actor", Mesh(shard=8)).tokens == 16384
    few = seven(**{"rollout.prompts": 1, "rollout.samples": 8})
    assert largest_work(few, "actor", Mesh(shard=8)).tokens == 6144
    assert not largest_work(few, "actor", Mesh(shard=8)).several


def test_tensor_needs_a_plan_for_the_family():
    config = seven(**{"roles.actor.parallel": "{tensor: 2}", "model": "Qwen/Qwen3-30B-A3B-Base"})
    with pytest.raises(
        ConfigError, match=r"tensor 2 divides no models of type 'qwen3_moe' \(Qwen/Qwen3-30B-A3B-Base\); use shard"
    ):
        arrange(config, pool_of(config, 8), ())


def test_tensor_must_divide_the_heads():
    config = seven(**{"roles.actor.parallel": "{tensor: 8}"})
    with pytest.raises(ConfigError) as caught:
        arrange(config, pool_of(config, 8), ())
    assert str(caught.value) == (
        "roles.actor.parallel: tensor 8 does not divide the 28 heads and 4 key-value heads of Qwen/Qwen2.5-7B; "
        "on these devices tensor 1 or 2 or 4 does."
    )
    config = seven(**{"roles.actor.parallel": "{shard: 2, tensor: 4}"})
    assert arrange(config, pool_of(config, 8), ()).meshes["actor"] == Mesh(shard=2, tensor=4)


def test_context_must_divide_the_heads_that_tensor_leaves():
    for parallel, asked, able in (
        ("{context: 8}", "context 8", "context 1 or 2 or 4"),
        ("{tensor: 2, context: 4}", "tensor 2 × context 4 = 8", "context 1 or 2"),
    ):
        config = seven(**{"roles.actor.parallel": parallel})
        with pytest.raises(ConfigError) as caught:
            arrange(config, pool_of(config, 8), ())
        assert str(caught.value) == (
            f"roles.actor.parallel: {asked} does not divide the 28 heads and 4 key-value heads of Qwen/Qwen2.5-7B; "
            f"on these devices {able} does."
        )
    config = seven(**{"roles.actor.parallel": "{shard: 2, context: 2, tensor: 2}"})
    assert arrange(config, pool_of(config, 8), ()).meshes["actor"] == Mesh(shard=2, context=2, tensor=2)


def test_adapters_are_not_divided_by_tensor():
    with pytest.raises(ConfigError, match=r"lora with parallel tensor 2 is not supported for now; .* parallel: \{shard: 8\}"):
        seven(**{"roles.actor.parallel": "{shard: 4, tensor: 2}", "roles.actor.lora": "{rank: 8}"})
