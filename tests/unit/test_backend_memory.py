"""The memory plan of context parallelism, Megatron-Core and DeepSpeed: the arithmetic, refusals, and recipes that fit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.checks.memory import check_memory, memory_lines, memory_plan, nearest
from drumroll.checks.plan import planned
from drumroll.config import load as load_recipe
from drumroll.errors import ConfigError
from drumroll.learners.ranks import BUCKET
from drumroll.mesh import Mesh
from drumroll.models.shape import find_shape, shape_of
from drumroll.placement.backend_memory import REDUCED, DeepSpeedLearner, MegatronLearner
from drumroll.placement.layout import arrange, pool_of
from drumroll.placement.memory import JOINED, Learner, Training, Work, predicted_peak

RECIPES = Path(__file__).parents[2] / "recipes"
SEVEN, MIXTURE = find_shape("Qwen/Qwen2.5-7B"), find_shape("Qwen/Qwen3-30B-A3B")
TIED = find_shape("Qwen/Qwen2.5-0.5B")
LONG = Work(32768, 32768, micro_batches=8)


def megatron(mesh, shape=SEVEN, stage=0, **how):
    """The rank of a pipeline stage, in bfloat16 with sequence parallelism."""
    ranks = mesh.context * mesh.tensor
    return MegatronLearner(shape, Training("bfloat16", replace(mesh, rank=stage * ranks), sequence=mesh.tensor > 1, **how))


def state(learner):
    return sum(learner.resident().values())


# --- context ---


def test_context_divides_tokens_but_neither_state_nor_masks():
    one, two = (Learner(SEVEN, Training("bfloat16", Mesh(shard=2, context=size), recompute=True)) for size in (1, 2))
    assert two.resident() == one.resident()
    assert two.summed() == one.summed()
    assert two.kept_activations(LONG) * 2 == one.kept_activations(LONG)
    assert two.layer_activations(LONG) * 2 == one.layer_activations(LONG)
    few = replace(LONG, rows=1000)
    assert two.logits(few)[0] * 2 == one.logits(few)[0]
    assert two.logits(LONG) == one.logits(LONG), "a chunk of logits has 1,024 rows on every rank"
    masked = replace(LONG, masked=10**6)
    assert two.layer_activations(masked) - two.layer_activations(LONG) == 2 * 10**6


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", [SEVEN, MIXTURE, TIED], ids=lambda shape: shape.family)
def test_context_2_keeps_at_most_0_6_of_the_activations_of_8k_tokens(shape, recompute):
    def rows(context):
        how = Training("bfloat16", Mesh(context=context), recompute=recompute)
        return Learner(shape, how).training(Work(8192, 8192))["last layer, backward"]["activations"]

    assert rows(2) <= 0.6 * rows(1)


# --- Megatron ---


def test_bytes_per_parameter_of_megatron():
    count = SEVEN.parameters
    assert state(megatron(Mesh())) == 18 * count
    assert state(megatron(Mesh(data=4))) == pytest.approx((2 + 4 + 12 / 4) * count)
    assert state(megatron(Mesh(tensor=4))) == pytest.approx(18 / 4 * count, rel=1e-3)
    assert state(megatron(Mesh(data=2, tensor=2))) == pytest.approx((2 + 4 + 12 / 2) / 2 * count, rel=1e-3)
    assert state(megatron(Mesh(data=2), trained=False)) == 2 * count
    whole = MegatronLearner(SEVEN, Training("float32"))
    assert state(whole) == 16 * count, "float32 weights are the master"


@pytest.mark.parametrize("shape", [SEVEN, TIED, MIXTURE], ids=lambda shape: shape.family)
def test_pipeline_stages_add_up_to_the_model(shape):
    stages = [megatron(Mesh(pipeline=4), shape, stage) for stage in range(4)]
    twice = shape.embedding if shape.tied else 0
    assert sum(stage.own for stage in stages) == shape.parameters + twice, "tied weights are on the first and the last stage"
    assert stages[0].own - stages[1].own == shape.embedding
    assert stages[3].own - stages[2].own == shape.vocabulary * shape.hidden + shape.hidden
    assert max(map(state, stages)) <= 0.6 * state(megatron(Mesh(), shape))
    value = megatron(Mesh(pipeline=4), shape, 3, values=True)
    assert stages[3].own - value.own == shape.vocabulary * shape.hidden


def test_experts_are_divided_by_expert_and_their_optimizer_by_the_ranks_that_hold_them():
    dense = MIXTURE.parameters - MIXTURE.routed
    assert MIXTURE.routed == 48 * 128 * 3 * 2048 * 768
    rank = megatron(Mesh(data=4, expert=2), MIXTURE)
    rows = rank.resident()
    assert rows["weights"] == 2 * (dense + MIXTURE.routed // 2)
    assert rows["gradients"] == 4 * (dense + MIXTURE.routed // 2)
    assert rows["moments"] == 8 * (dense // 4 + MIXTURE.routed // 4), "2 of 4 ranks hold the same experts"
    cut = megatron(Mesh(tensor=2), MIXTURE)
    assert cut.experts == MIXTURE.routed // 2, "without `expert` each expert is cut by `tensor`"
    both = megatron(Mesh(data=2, tensor=2, expert=4), MIXTURE)
    assert both.experts == MIXTURE.routed // 4
    assert both.resident()["moments"] == pytest.approx(8 * (dense / 4 + MIXTURE.routed / 4), rel=1e-3)
    assert state(megatron(Mesh(data=2, expert=2), MIXTURE)) <= 0.6 * state(megatron(Mesh(), MIXTURE))


def test_an_earlier_stage_keeps_activations_of_more_micro_batches():
    kept = [megatron(Mesh(pipeline=4), stage=stage, recompute=True).kept_activations(LONG) for stage in range(4)]
    states, tables = 32768 * 3584 * 2, 32768 * 2 * 128 * 4
    assert kept[:3] == [ahead * (7 * states + tables) for ahead in (4, 3, 2)], "7 of 28 layers each"
    assert kept[3] == 7 * states + tables + 32768 * 3584 * 8 + states, "the final norm, and the states of trained tokens"
    few = megatron(Mesh(pipeline=4), recompute=True).kept_activations(replace(LONG, micro_batches=2))
    assert few == kept[2], "no more than there are"


def test_sequence_parallelism_divides_norms_and_states():
    with_it, without = (MegatronLearner(SEVEN, Training("bfloat16", Mesh(tensor=4), sequence=on)) for on in (True, False))
    saved = without.layer_activations(LONG) - with_it.layer_activations(LONG)
    assert saved == 32768 * (2 * 3584 * (4 + 2) + 2 * 3584 * 2) * 3 // 4
    assert with_it._states(LONG) == 32768 * 3584 * 2 // 4


SIZES = st.sampled_from([1, 2, 4])


@given(SIZES, SIZES, SIZES, st.booleans(), st.integers(256, 32768), st.integers(1, 8), st.sampled_from([SEVEN, MIXTURE]))
def test_more_devices_along_any_axis_never_need_more(data, tensor, pipeline, recompute, tokens, count, shape):
    work, how = Work(tokens, tokens, several=count > 1, micro_batches=count), {"recompute": recompute}

    def worst(mesh):
        return max(megatron(mesh, shape, stage, **how).usage(work).peak for stage in range(mesh.pipeline))

    mesh = Mesh(data=data, tensor=tensor, pipeline=pipeline)
    assert worst(replace(mesh, data=2 * data)) <= worst(mesh)
    assert worst(replace(mesh, tensor=2 * tensor)) < worst(mesh)
    if count == 1 or recompute:  # else the first stage keeps as many activations as one device
        assert worst(replace(mesh, pipeline=2 * pipeline)) < worst(mesh) or shape.layers % (2 * pipeline)
    if shape.experts and data % 2 == 0:  # without `expert`, `tensor` divides experts
        assert worst(replace(mesh, expert=2 * tensor)) < worst(mesh)
    context = [predicted_peak(shape, Training("bfloat16", Mesh(data=2, context=size), **how), work) for size in (1, 2, 4)]
    assert context == sorted(context, reverse=True)


# --- DeepSpeed ---


def zero(stage, offload="none", shard=4, **how):
    return DeepSpeedLearner(SEVEN, Training("bfloat16", Mesh(shard=shard), zero=stage, offload=offload, **how))


def test_bytes_per_parameter_of_zero():
    count, bucket = SEVEN.parameters, 4 * REDUCED
    assert REDUCED == JOINED == BUCKET
    assert state(zero(3)) == pytest.approx(18 / 4 * count + bucket)
    assert state(zero(2)) + zero(2).summed() == pytest.approx((2 + 16 / 4) * count + bucket)
    assert zero(3).summed() == 0, "its sum stays"
    assert zero(3).staying() == {name: zero(3).resident()[name] for name in ("weights", "gradients")}
    assert state(zero(3, "optimizer")) == pytest.approx(2 / 4 * count + bucket)
    assert state(zero(3, "all")) == bucket
    for stage, offload, divided in ((2, "optimizer", 16), (3, "optimizer", 16), (3, "all", 18)):
        assert sum(zero(stage, offload).host().values()) == pytest.approx(divided / 4 * count)
    assert state(zero(3, trained=False)) == pytest.approx(2 / 4 * count)
    assert state(zero(2, trained=False)) == 2 * count
    assert state(zero(3, shard=2)) <= 0.6 * state(zero(3, shard=1))
    whole = DeepSpeedLearner(SEVEN, Training("float32", Mesh(shard=4)))
    assert state(whole) == pytest.approx(16 / 4 * count + bucket), "float32 weights are the master"


def test_zero_3_gathers_one_linear_layer_and_the_head_and_zero_2_nothing():
    assert zero(2).gathered(2) == 0
    assert zero(3).gathered(2) == 2 * (152064 * 3584 + 18944 * 3584)


# --- plans and refusals ---


def recipe(name, **changes):
    return load_recipe(RECIPES / "large" / f"{name}.yaml", [f"{key}={value}" for key, value in changes.items()]).config


def plan(config):
    return memory_plan(config, planned(config))


@pytest.mark.parametrize(
    ("name", "devices", "stages"), [("qwen2.5-32b-32gpu", 32, 2), ("qwen3-30b-a3b-16gpu", 16, 1), ("qwen2.5-7b-32k", 8, 1)]
)
def test_the_large_recipes_fit_devices_of_80_gb_with_a_tenth_left_free(name, devices, stages):
    made = plan(recipe(name))
    assert made.worst is None
    assert not made.unknown
    assert [len(group.devices) for group in made.groups] == [devices // stages] * stages
    assert all(group.memory == 80e9 and 30e9 < group.peak(group.peak_stage) < 72e9 for group in made.groups)


def test_the_large_models_do_not_fit_without_their_layout():
    for name, changes in (
        ("qwen2.5-32b-32gpu", {"roles.actor.parallel": "{tensor: 2}"}),
        ("qwen3-30b-a3b-16gpu", {"roles.actor.parallel": "{data: 16}"}),
        ("qwen2.5-7b-32k", {"roles.actor.recompute_activations": "false"}),
    ):
        assert plan(recipe(name, **changes)).worst is not None


def test_devices_of_a_pipeline_are_shown_by_stage():
    config = recipe("qwen2.5-32b-32gpu")
    lines = [line for line in memory_lines(plan(config)) if line.startswith("memory of each device")]
    assert [line.split(", of 80.0 GB")[0] for line in lines] == [
        "memory of each device cuda 0-3,8-11,16-19,24-27 (actor's pipeline stage 1 of 2)",
        "memory of each device cuda 4-7,12-15,20-23,28-31 (actor's pipeline stage 2 of 2)",
    ]
    assert "32 = data 4 × pipeline 2 × tensor 4" in planned(config).describe()
    assert "16 = data 4 × tensor 4, expert 8" in planned(recipe("qwen3-30b-a3b-16gpu")).describe()


def test_what_does_not_fit_is_refused_with_the_nearest_layout_of_the_backend():
    deep = recipe("qwen2.5-32b-32gpu", **{"roles.actor.parallel": "{tensor: 2}"})
    layout = planned(deep)
    with pytest.raises(
        ConfigError, match=r"memory: training needs .* nearest that fits: roles.actor.parallel: \{pipeline: 2, tensor: 2\}"
    ):
        check_memory(deep, memory_plan(deep, layout), layout)
    wide = recipe("qwen3-30b-a3b-16gpu", **{"roles.actor.parallel": "{data: 16}"})
    assert nearest(wide, planned(wide)) == "roles.actor.parallel: {expert: 8}"
    shallow = recipe("qwen3-30b-a3b-16gpu", **{"roles.actor.parallel": "{tensor: 4, sequence: false}"})
    with pytest.raises(ConfigError, match=r"experts with tensor 4 need sequence: true, which is the default\."):
        planned(shallow)


def zero_recipe(**changes):
    return recipe(
        "qwen2.5-7b-32k", **{"roles.actor.backend": "deepspeed", "roles.actor.parallel": "{shard: 8, zero: 2}", **changes}
    )


def test_deepspeed_goes_from_zero_2_to_offload():
    def tight(memory):
        config = zero_recipe(**{"cluster.device_memory_gb": memory, "roles.rollout.options.gpu_memory_utilization": 0.5})
        return nearest(config, planned(config))

    assert tight(80) == ""
    assert tight(48) == "roles.actor.parallel: {shard: 8}"
    assert tight(32) == "roles.actor.parallel: {shard: 8, offload: optimizer}"
    (group,) = plan(zero_recipe(**{"roles.rollout.options.gpu_memory_utilization": 0.5})).groups
    assert list(group.stages["generation"]["actor"]) == ["weights"], "they stay while engines generate"
    moved = zero_recipe(**{"roles.actor.parallel": "{shard: 8, offload: all}"})
    (host,) = [line for line in memory_lines(plan(moved)) if line.startswith("host memory")]
    assert host == "host memory of actor for each of them: master 3.8 + moments 7.6 + gradients 3.8 + weights 1.9 = 17.1 GB"


@pytest.mark.parametrize(
    ("name", "parallel", "said"),
    [
        (
            "qwen2.5-32b-32gpu",
            "{tensor: 2, pipeline: 16, expert: 2}",
            "roles.actor.parallel: expert 2 divides experts, and Qwen/Qwen2.5-32B has none; leave expert out.",
        ),
        (
            "qwen3-30b-a3b-16gpu",
            "{tensor: 4, expert: 3}",
            "roles.actor.parallel: expert 3 does not divide data × shard × tensor = 16, the ranks over which experts are spread; "
            "expert 1 or 2 or 4 or 8 or 16 does.",
        ),
        (
            "qwen2.5-32b-32gpu",
            "{tensor: 16}",
            "roles.actor.parallel: tensor 16 does not divide the 40 heads and 8 key-value heads of Qwen/Qwen2.5-32B; on these devices "
            "tensor 1 or 2 or 4 or 8 does.",
        ),
    ],
)
def test_megatron_refuses_layouts_with_the_arithmetic(name, parallel, said):
    with pytest.raises(ConfigError) as caught:
        planned(recipe(name, **{"roles.actor.parallel": parallel}))
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"num_hidden_layers": 7},
            "roles.actor.parallel: pipeline 2 does not divide the 7 layers of {name}; on these devices pipeline 1 does.",
        ),
        (
            {"intermediate_size": 65},
            "roles.actor.parallel: tensor 2 does not divide the 65 columns of the MLP of {name}.",
        ),
        (
            {"model_type": "gemma3_text"},
            "roles.actor.backend: megatron trains no models of type 'gemma3_text' ({name}), only llama, mixtral, qwen2, qwen3, "
            "qwen3_moe; use backend: torch.",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2},
            "roles.actor.parallel: expert 2 does not divide the 3 experts of {name}; on these devices expert 1 does.",
        ),
    ],
)
def test_megatron_refuses_models_that_it_cannot_divide(tmp_path, changes, said):
    facts = {"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 4}
    facts |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, **changes}
    assert shape_of(facts) is not None
    (tmp_path / "config.json").write_text(json.dumps(facts))
    parallel = "{tensor: 2, pipeline: 2, expert: 2}" if "num_experts" in facts else "{tensor: 2, pipeline: 2}"
    config = recipe("qwen2.5-32b-32gpu", **{"model": tmp_path, "roles.actor.parallel": parallel})
    with pytest.raises(ConfigError) as caught:
        arrange(config, pool_of(config, 32), ())
    assert str(caught.value) == said.format(name=tmp_path)


def test_deepspeed_has_no_replicas():
    with pytest.raises(ConfigError) as caught:
        planned(zero_recipe(**{"roles.actor.parallel": "{shard: 2}"}))
    assert str(caught.value) == (
        "roles.actor.parallel: DeepSpeed divides a model over all devices of a role, and makes no replicas (data 4 × shard 2); "
        "shard 8 takes all 8 devices."
    )
    with pytest.raises(
        ConfigError, match=r"parallel.tensor needs `backend: torch or megatron`; roles.actor.backend is deepspeed"
    ):
        zero_recipe(**{"roles.actor.parallel": "{tensor: 2}"})
    with pytest.raises(ConfigError, match=r"parallel.pipeline needs `backend: megatron`; roles.actor.backend is torch"):
        recipe("qwen2.5-7b-32k", **{"roles.actor.parallel": "{pipeline: 2}"})
