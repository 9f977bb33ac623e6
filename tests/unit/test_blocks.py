"""Ranks that divide a model read only their blocks of its files, and get what transformers would load."""

import json
import math
import re

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from forked import RankPool
from safetensors.torch import load_file, save_file
from test_parallel import FAMILIES, LAYOUTS, RANKS, SIZES, meet

from drumroll.config.roles import ParallelConfig
from drumroll.errors import ModelError
from drumroll.learners.backend import LearnerSpec
from drumroll.learners.backends.torch import open_backend
from drumroll.learners.heads import LogProbHead
from drumroll.mesh import Mesh
from drumroll.models import tiny
from drumroll.models.blocks import INDEX, SINGLE, BlocksInFiles
from drumroll.models.loading import DTYPES, load_empty

CONFIGS = {**FAMILIES, "untied Llama": hf.LlamaConfig(**SIZES, vocab_size=97, tie_word_embeddings=False)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A directory with a random model, by family."""
    found = {}
    for family, config in CONFIGS.items():
        found[family] = tmp_path_factory.mktemp("model")
        with torch.random.fork_rng():
            torch.manual_seed(1)
            module = hf.AutoModelForCausalLM.from_config(config)
            for parameter in module.parameters():
                parameter.data.normal_(std=0.1)
        module.save_pretrained(found[family], max_shard_size=60_000 if family == "Qwen2" else "1GB")
        tiny.tokenizer().save_pretrained(found[family])
    return found


# --- files ---


def test_blocks_come_from_one_file_and_from_several(models):
    for family, several in (("Llama", False), ("Qwen2", True)):
        folder = models[family]
        assert (folder / INDEX).is_file() is several
        source, whole = BlocksInFiles(folder), hf.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert len(set(source.file_of.values())) > 1 or not several
        for name in source.file_of:
            tensor = whole[name]
            offsets, sizes = [n // 3 for n in tensor.shape], [n // 2 for n in tensor.shape]
            cut = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            assert torch.equal(source.block(name, tensor.shape, offsets, sizes), cut)
            assert source.block(name, tensor.shape, tensor.shape, [0] * tensor.dim()).numel() == 0
        assert "model.nothing" not in source


def test_a_folder_without_safetensors_is_refused(models, tmp_path):
    with pytest.raises(ModelError, match=r"has no safetensors files.*save_pretrained"):
        BlocksInFiles(tmp_path)


@pytest.mark.parametrize("shape", [[63], [65], [64, 1]])
def test_a_tensor_of_another_shape_is_refused(models, shape):
    source, zeros = BlocksInFiles(models["Llama"]), [0] * len(shape)
    said = f"model.norm.weight has the shape [64], but the config says {shape}."
    with pytest.raises(ModelError, match=re.escape(said)):
        source.block("model.norm.weight", shape, zeros, zeros)


# --- empty models ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma 3"])
def test_an_empty_model_is_the_loaded_one_without_values(models, family, dtype):
    """Buffers are those of transformers, bit by bit: rotary frequencies are no part of the files."""
    empty, _ = load_empty(str(models[family]), dtype=dtype)
    loaded = hf.AutoModelForCausalLM.from_pretrained(models[family], dtype=DTYPES[dtype])
    own, whole = dict(empty.module.named_parameters()), dict(loaded.named_parameters())
    assert all(parameter.is_meta for parameter in own.values())
    assert {n: (p.shape, p.dtype) for n, p in own.items()} == {n: (p.shape, p.dtype) for n, p in whole.items()}
    buffers = dict(empty.module.named_buffers())
    assert any("inv_freq" in name for name in buffers)
    assert buffers.keys() == dict(loaded.named_buffers()).keys()
    for name, buffer in loaded.named_buffers():
        assert buffers[name].dtype == buffer.dtype
        assert torch.equal(buffers[name], buffer), name


# --- divided models ---


def open_divided(folder, dtype):
    ranks = RANKS[-1]
    mesh = ranks.mesh
    parallel = ParallelConfig(data=mesh.data, shard=mesh.shard, tensor=mesh.tensor)
    return open_backend(LearnerSpec(str(folder), LogProbHead(), ranks, optim=None, dtype=dtype, parallel=parallel))


def whole_weights(rank, folder, dtype):
    """All weights, frozen ones too, gathered; and the bytes that this rank asked of the files, against those it holds."""
    asked, largest, plain = [], [], BlocksInFiles.block

    def spy(self, name, shape, offsets, sizes):
        found = plain(self, name, shape, offsets, sizes)
        asked.append(found.nbytes)
        largest.append(math.prod(shape) * found.itemsize)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlocksInFiles, "block", spy)
        backend = open_divided(folder, dtype)
    division = backend.divided.division
    named = [(n, getattr(p, "_local_tensor", p).detach()) for n, p in backend._model.module.named_parameters()]
    weights = {name: division.whole(name, local.to(division.dtype)).clone() for name, local in named}
    held = sum(local.numel() for _, local in named) * 4  # the files are float32
    return weights, sum(asked), held, max(largest)


def refusal(rank, folder):
    try:
        open_divided(folder, "float32")
    except ModelError as error:
        return str(error)


@pytest.fixture(scope="module", params=["shard 2", "tensor 2"])
def pool(request):
    layout = LAYOUTS[request.param]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with RankPool(Mesh(**layout).size) as made:
        made.run(meet, layout, store.port)
        yield made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["Llama", "untied Llama", "Qwen2", "Gemma 3"])
def test_ranks_hold_together_what_transformers_loads(models, pool, family, dtype):
    truth = dict(hf.AutoModelForCausalLM.from_pretrained(models[family], dtype=DTYPES[dtype]).named_parameters())
    for weights, asked, held, largest in pool.run(whole_weights, models[family], dtype):
        assert weights.keys() == truth.keys()
        for name, tensor in weights.items():
            assert tensor.dtype == truth[name].dtype
            assert torch.equal(tensor, truth[name]), name
        assert asked <= held + largest
        assert held < 0.6 * sum(p.numel() for p in truth.values()) * 4


def test_files_that_do_not_fit_the_config_are_refused_by_all_ranks(models, pool, tmp_path):
    """With the tensor that is missing, or has another shape."""
    tensors = load_file(models["Llama"] / SINGLE)
    for file in models["Llama"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    lacking = "model.layers.1.mlp.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != lacking}, tmp_path / SINGLE)
    for text in pool.run(refusal, tmp_path):
        assert f"hold no tensor {lacking};" in text
    save_file(tensors, tmp_path / SINGLE)
    config = json.loads((models["Llama"] / "config.json").read_text())
    for size in (128, 64):
        (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": size}))
        for text in pool.run(refusal, tmp_path):
            assert f"gate_proj.weight has the shape [96, 64], but the config says [{size}, 64]." in text
