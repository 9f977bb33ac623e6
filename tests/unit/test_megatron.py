"""Megatron-Core behind the learner's loop trains as one process does, and its checkpoints go on under other backends."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import megatron_on_cpu
import pytest
import test_parallel
import torch
import transformers as hf
from forked import RankPool
from live_memory import state_bytes
from safetensors.torch import load_file
from test_parallel import LIMITS, RANKS, SIZES, Matrix, ReplicasDifferError, copied, errors, meet, open_learner, pieces

import drumroll
from drumroll.config.learners import AXES, LEARNERS
from drumroll.config.roles import ParallelConfig
from drumroll.errors import ConfigError, DrumrollError, ModelError
from drumroll.learners import Learner
from drumroll.learners.backend import LearnerSpec
from drumroll.learners.backends import find_backend
from drumroll.learners.heads import LogProbHead
from drumroll.learners.megatron.names import FAMILIES as MAPPED
from drumroll.learners.megatron.names import Names, check_mesh
from drumroll.learners.statistics import merge
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
WIDER = {"expert 2 of data 2 × tensor 2": {"data": 2, "tensor": 2, "expert": 2}, "expert 2 of data 4": {"data": 4, "expert": 2}}
"""Layouts in which several ranks hold the same experts."""
DENSE = ("Llama", "Qwen2", "Qwen3")
MIXTURES = {
    "Qwen3-MoE": hf.Qwen3MoeConfig(
        **SIZES, vocab_size=96, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True
    ),
    "Mixtral": hf.MixtralConfig(**SIZES, vocab_size=96, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
}
FAMILIES = {**{name: test_parallel.FAMILIES[name] for name in DENSE}, **MIXTURES}
SPECIAL = {
    "Llama 3": hf.LlamaConfig(
        **SIZES | {"head_dim": 32},
        vocab_size=97,
        rope_parameters={
            **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": 8,
        },
    ),
    "Mostly experts": hf.Qwen3MoeConfig(**MIXTURES["Qwen3-MoE"].to_dict() | {"num_experts": 8, "moe_intermediate_size": 128}),
    "Qwen3-MoE, plain shares": hf.Qwen3MoeConfig(**MIXTURES["Qwen3-MoE"].to_dict() | {"norm_topk_prob": False}),
}
"""What the families above do not have: scaled rotary embeddings, heads of another width, experts that are nine tenths of all
parameters, experts' shares that do not add up to 1."""
ONCE = [
    ("tensor 2, sequence", "Qwen3", "critic"),
    ("data 2 × pipeline 2", "Llama", "actor"),
    ("expert 2 × tensor 2", "Qwen3-MoE", "actor"),
]
"""Cases of `make test`."""


def layouts_of(family):
    """Experts of tensor-parallel ranks need sequence parallelism."""
    return [layout for layout in LAYOUTS if (layout != "tensor 2" if family in MIXTURES else "expert" not in layout)]


EVERY = [(layout, family, role) for family in FAMILIES for layout in layouts_of(family) for role in ("actor", "critic")]


class MegatronMatrix(Matrix):
    """Compares layouts of Megatron with one process of plain PyTorch."""

    def config(self, family):
        return {**FAMILIES, **SPECIAL}[family]

    def compare(self, layout, family, role, mistake=None, **options):
        works, alone = self.works(family, role), self.alone(family, role, "float32")
        options = {"backend": "megatron", "sequence": layout != "tensor 2", **options}
        axes = {**LAYOUTS, **WIDER}[layout]
        parts = self.run(axes, test_parallel.train, self.model(family), role, "float32", works, mistake, options)
        return errors(parts, alone, works, Mesh(**axes))


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
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("layout", WIDER)
def test_ranks_that_hold_the_same_experts_train_as_one_process(matrix, layout, family):
    """Rounding adds up: after six steps on tokens that switch between experts the mean of the KL differs in its fifth digit."""
    found = matrix.compare(layout, family, "actor")
    assert found.within(LIMITS["float32"].times(3)), found


@pytest.mark.slow
@pytest.mark.parametrize("family", SPECIAL)
def test_what_configs_may_change_is_computed_as_in_one_process(matrix, family):
    found = matrix.compare("tensor 2, sequence", family, "actor")
    assert found.within(LIMITS["float32"]), found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor 2, sequence", "pipeline 2", "expert 2"])
def test_recomputed_activations_change_nothing(matrix, layout):
    found = matrix.compare(layout, "Qwen3-MoE" if "expert" in layout else "Qwen3", "actor", recompute=True)
    assert found.within(LIMITS["float32"]), found


PLANTED = [
    ("tensor 2, sequence", "Qwen3", ("left out", "halved", "own norm")),
    ("pipeline 2", "Llama", ("left out", "halved", "own norm")),  # stages share the embedding
    ("data 2", "Llama", ("left out", "halved", "own norm", "wrong share")),
    ("expert 2", "Qwen3-MoE", ("left out", "halved", "own norm", "wrong share")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "family", "mistake"), [(a, b, mistake) for a, b, every in PLANTED for mistake in every])
def test_a_planted_error_is_found(matrix, layout, family, mistake):
    """By a number far beyond its limit, or because replicas differ."""
    try:
        found = matrix.compare(layout, family, "actor", mistake)
    except ReplicasDifferError:
        return
    assert not found.within(LIMITS["float32"].times(100)), found


# --- weights ---


def published(rank, folder, role, export):
    """The weights that a new learner publishes; it exports them too, if there is a folder."""
    learner = open_learner(RANKS[-1], folder, role, "float32", backend="megatron")
    if export is not None:
        learner.export(export)
    return {name: tensor.clone() for name, tensor in learner.weights()}


@pytest.mark.parametrize(
    ("layout", "family", "role"),
    [
        ("data 2 × pipeline 2", "Llama", "actor"),
        *(pytest.param("tensor 2 × pipeline 2", f, r, marks=pytest.mark.slow) for f in DENSE for r in ("actor", "critic")),
        *(pytest.param("expert 2 × tensor 2", f, r, marks=pytest.mark.slow) for f in MIXTURES for r in ("actor", "critic")),
        *(pytest.param("tensor 2, sequence", f, "actor", marks=pytest.mark.slow) for f in MIXTURES),
    ],
)
def test_weights_go_there_and_back_unchanged(matrix, tmp_path, layout, family, role):
    folder = matrix.model(family)
    truth = load_file(Path(folder, "model.safetensors"))
    export = tmp_path if role == "actor" else None
    for found in matrix.run(LAYOUTS[layout], published, folder, role, export):
        body = {f"model.{name.removeprefix('body.')}" if name.startswith("body.") else name: t for name, t in found.items()}
        heads = {"head.weight", "head.bias"} if role == "critic" else set()
        assert body.keys() - heads == truth.keys() - ({"lm_head.weight"} if heads else set())
        assert all(torch.equal(body[name], tensor) for name, tensor in truth.items() if name in body)
    if export is not None:
        exported = load_file(tmp_path / "model.safetensors")
        assert all(torch.equal(exported[name], tensor) for name, tensor in truth.items())
        hf.AutoModelForCausalLM.from_pretrained(tmp_path)


# --- other roles and types ---


def alone(rank, folder, batch):
    """What a frozen role computes."""
    megatron_on_cpu.install()
    learner = Learner(find_backend("megatron")(LearnerSpec(folder, LogProbHead(), RANKS[-1])))
    return learner.infer_reference(batch, test_parallel.TEMPERATURE)


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2}], ids=str)
def test_a_frozen_role_infers_on_every_stage(matrix, layout):
    work, folder = matrix.works("Qwen2", "actor")[0], matrix.model("Qwen2")
    ((truth, *_),) = matrix.run({}, test_parallel.infer, folder, "actor", [work.batch])
    for found in matrix.run(layout, alone, folder, work.batch):
        assert torch.allclose(found, truth, atol=1e-5)


def low(rank, folder, works, moved):
    """Masters, working weights and losses of a learner in bfloat16; `moved`: it goes to the host and back in between."""
    learner = open_learner(RANKS[-1], folder, "actor", "bfloat16", backend="megatron")
    statistics = [learner.update(works[0])]
    if moved:
        backend = learner.backend
        backend._offload()
        assert not any(storage.nbytes() for storage, _ in backend._offloaded)
        backend.reload()
    statistics.append(learner.update(works[1]))
    return copied(pieces(learner.backend)), {n: t.clone() for n, t in learner.weights()}, statistics


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data 2", "tensor 2, sequence"])
def test_working_weights_in_bfloat16_are_rounded_masters(matrix, layout):
    """Also where everything moved to the host and back."""
    works = matrix.works("Llama", "actor")
    plain, moved = (matrix.run(LAYOUTS[layout], low, matrix.model("Llama"), works, moved) for moved in (False, True))
    for found in (plain, moved):
        for name, tensor in found[0][1].items():
            masters = test_parallel.whole([[piece for piece in part[0] if piece.name == name] for part in found])
            assert masters.dtype is torch.float32
            assert torch.equal(masters.bfloat16(), tensor.flatten())
    assert all(torch.equal(tensor, moved[0][1][name]) for name, tensor in plain[0][1].items())


def state(rank, folder, work, backend):
    """The bytes of master weights, moments and gradients in the second update."""
    learner, found = open_learner(RANKS[-1], folder, "actor", "float32", backend=backend), []
    learner.update(work)
    if backend == "torch":
        return state_bytes(learner, work)
    clip = learner.backend.clip
    learner.backend.clip = lambda limit: (found.append(sum(s.nbytes() for s in learner.backend._storages())), clip(limit))[1]
    learner.update(work)
    return max(found)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "family"), [("pipeline 2", "Qwen2"), ("expert 2", "Mostly experts")])
def test_two_ranks_hold_little_more_than_half_of_the_state_each(matrix, layout, family):
    work, folder = matrix.works(family, "actor")[0], matrix.model(family)
    (whole,) = matrix.run({}, state, folder, work, "torch")
    found = matrix.run(LAYOUTS[layout], state, folder, work, "megatron")
    assert max(found) <= 0.6 * whole, (found, whole)


# --- checkpoints ---


def begin(rank, folder, role, works, checkpoint, backend):
    """Train, save, and go on: the statistics of the updates after saving."""
    learner = open_learner(RANKS[-1], folder, role, "float32", backend=backend)
    for work in works[:2]:
        learner.update(work)
    learner.snapshot()
    RANKS[-1].most(0)
    learner._write(checkpoint)
    return [learner.update(work) for work in works[2:]]


def resume(rank, folder, role, works, checkpoint, backend):
    """Load and go on. The learner has computed before, with other weights."""
    learner = open_learner(RANKS[-1], folder, role, "float32", backend=backend)
    learner.update(works[1])
    learner.load(checkpoint)
    assert learner.step == 2
    return [learner.update(work) for work in works[2:]]


class Changes:
    """Checkpoints of backends and layouts, and how training went on under them."""

    def __init__(self, matrix, folder):
        self.matrix, self.folder, self.known = matrix, folder, {}

    def losses(self, function, family, role, layout, checkpoint):
        works, backend = self.matrix.works(family, role) * 2, "torch" if layout == "torch" else "megatron"
        axes = LAYOUTS.get(layout, {})
        found = self.matrix.run(axes, function, self.matrix.model(family), role, works, checkpoint, backend)
        leaders = [found[rank] for rank in Mesh(**axes).leaders()]
        return [
            merge(list(update))[f"{'critic' if role == 'critic' else 'train'}/loss"] for update in zip(*leaders, strict=True)
        ]

    def begun(self, *case):
        """The checkpoint of a case, and the losses after it."""
        if case not in self.known:
            checkpoint = self.folder / " ".join(case)
            checkpoint.mkdir()
            self.known[case] = checkpoint, self.losses(begin, *case, checkpoint)
        return self.known[case]


@pytest.fixture(scope="module")
def changes(matrix, tmp_path_factory):
    return Changes(matrix, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize(
    ("family", "role", "before", "after"),
    [
        ("Llama", "actor", "data 2 × pipeline 2", "torch"),
        ("Llama", "actor", "torch", "data 2 × pipeline 2"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("Qwen3", "critic", "tensor 2 × pipeline 2", "torch"),
                ("Qwen3", "critic", "torch", "tensor 2 × pipeline 2"),
                ("Qwen2", "actor", "tensor 2, sequence", "data 2"),
                ("Qwen3-MoE", "actor", "expert 2 × pipeline 2", "expert 2 × tensor 2"),
                ("Mixtral", "actor", "data 2", "expert 2"),
                ("Mixtral", "critic", "torch", "expert 2"),
                ("Qwen3-MoE", "actor", "torch", "expert 2 × pipeline 2"),
                ("Qwen3-MoE", "actor", "expert 2 × pipeline 2", "torch"),
            ]
        ),
    ],
)
def test_training_goes_on_under_another_backend_or_layout(changes, family, role, before, after):
    checkpoint, truth = changes.begun(family, role, before)
    assert changes.losses(resume, family, role, after, checkpoint) == pytest.approx(truth, rel=1e-5, abs=1e-5)


# --- what is refused ---


def opened(rank, folder, seq=True, lora=None, shim=True):
    """The sentence with which opening is refused."""
    if shim:
        megatron_on_cpu.install()
    parallel = ParallelConfig(**{axis: getattr(RANKS[-1].mesh, axis) for axis in AXES}, sequence=seq)
    try:
        find_backend("megatron")(LearnerSpec(folder, LogProbHead(), RANKS[-1], lora=lora, parallel=parallel))
    except DrumrollError as error:
        return str(error)


def test_opening_without_cuda_is_refused(matrix):
    """In a process that has not loaded what the tests load."""
    with RankPool(1) as pool:
        pool.run(meet, {}, 0)
        (said,) = pool.run(opened, matrix.model("Llama"), True, None, False)
    assert said == "backend: megatron needs CUDA, which torch does not find here; use backend: torch."


def without_megatron(rank, folder):
    """What is said where the library is not installed."""
    sys.modules.update(dict.fromkeys(["megatron", "megatron.core"]))
    return opened(rank, folder, True, None, False)


def test_a_missing_library_is_one_sentence_with_its_command(matrix):
    with RankPool(1) as pool:
        pool.run(meet, {}, 0)
        (said,) = pool.run(without_megatron, matrix.model("Llama"))
    assert said == "backend: megatron needs an optional part that is not installed: pip install 'drumroll[megatron]'"


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("Llama", {"attention_bias": True}, "does not compute biases"),
        ("Qwen2", {"hidden_act": "gelu"}, "does not compute the activation gelu"),
        ("Mixtral", {"sliding_window": 8}, "does not compute sliding windows"),
        ("Qwen3-MoE", {"mlp_only_layers": [0]}, "does not compute layers without experts"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic"}}, "rotary embeddings of type 'dynamic'"),
        ("Llama", {"model_type": "gemma2"}, "not 'gemma2'"),
    ],
)
def test_a_model_that_the_map_cannot_express_is_refused(family, change, said):
    config = SimpleNamespace(**{**FAMILIES[family].to_dict(), "model_type": FAMILIES[family].model_type, **change})
    with pytest.raises(ModelError, match=re.escape(said)):
        Names(config, tensor=1)


def test_a_tensor_that_the_map_does_not_know_is_refused_by_name():
    names = Names(FAMILIES["Qwen3"], tensor=1)
    names.check_files([*names.shapes, "model.layers.0.self_attn.rotary_emb.inv_freq"], "here")
    with pytest.raises(ModelError, match=re.escape("here has the tensor model.layers.0.self_attn.sinks,")):
        names.check_files([*names.shapes, "model.layers.0.self_attn.sinks"], "here")
    with pytest.raises(ModelError, match=re.escape("hold no tensor model.norm.weight;")):
        names.check_files(names.shapes.keys() - {"model.norm.weight"}, "here")


@pytest.mark.parametrize(
    ("family", "sizes", "said"),
    [
        ("Llama", {"tensor": 4}, "tensor 4 does not divide the model's 2 key-value heads; nearest that does: tensor 2."),
        ("Llama", {"pipeline": 3}, "pipeline 3 does not divide the model's 2 layers; nearest that does: pipeline 2."),
        ("Llama", {"data": 2, "expert": 2}, "expert 2 does not divide the model's 0 experts; nearest that does: expert 1."),
        ("Mixtral", {"tensor": 2}, "experts with tensor > 1 need sequence: true"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused(family, sizes, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_mesh(FAMILIES[family], Mesh(**sizes), sequence=False)


def test_no_production_module_knows_the_shim():
    source = Path(drumroll.__file__).parent
    assert not [path for path in source.rglob("*.py") if "megatron_on_cpu" in path.read_text("utf-8")]


OPENED = """
from drumroll.learners.backend import LearnerSpec
from drumroll.learners.backends import find_backend
from drumroll.learners.heads import LogProbHead
from drumroll.learners.ranks import ALONE
print(type(find_backend("megatron")(LearnerSpec("tiny-random", LogProbHead(), ALONE))).__name__)
"""


@pytest.mark.slow
def test_processes_with_the_environment_of_the_shim_have_it(matrix):
    done = subprocess.run(
        [sys.executable, "-c", OPENED], env=os.environ | megatron_on_cpu.environment(), capture_output=True, text=True
    )
    assert done.stdout.strip().splitlines()[-1:] == ["MegatronBackend"], done.stderr


def test_the_families_that_are_refused_before_the_start_are_those_without_a_map():
    assert set(LEARNERS["megatron"].families) == set(MAPPED)
