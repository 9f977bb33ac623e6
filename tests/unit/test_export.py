"""Models are exported one tensor at a time, and the result is what transformers itself writes."""

import json

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from forked import run_ranks
from safetensors.torch import load_file
from transformers.generation import utils as generation

from drumroll.config.optim import OptimConfig
from drumroll.config.roles import LoraConfig
from drumroll.learners.backend import LearnerSpec
from drumroll.learners.backends.torch import open_backend
from drumroll.learners.heads import LogProbHead
from drumroll.learners.ranks import Ranks
from drumroll.mesh import Mesh
from drumroll.models import export
from drumroll.models.export import export_model
from drumroll.models.file_names import as_in_files, find_files
from drumroll.models.loading import LoadedModel, load
from drumroll.models.lora import add_adapters
from drumroll.models.tiny import tokenizer
from drumroll.processes.rendezvous import Rendezvous

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
SOME = {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
SMALL = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "llama, tied": lambda: hf.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2, tied": lambda: hf.Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": lambda: hf.Qwen3Config(**SIZES, num_key_value_heads=2),
    "gemma3": lambda: hf.Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8),
    "gpt2": lambda: hf.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "phi3": lambda: hf.Phi3Config(**SIZES, num_key_value_heads=2, pad_token_id=0),
    "mixtral": lambda: hf.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4),
    "qwen3 moe": lambda: hf.Qwen3MoeConfig(**SIZES, **SOME, num_key_value_heads=2, head_dim=8),
    "deepseek v3": lambda: hf.DeepseekV3Config(
        **SIZES, **LATENT, n_routed_experts=4, n_group=1, topk_group=1, moe_intermediate_size=24, first_k_dense_replace=1
    ),
}
"""Families that transformers saves as they are, without tied heads, and with experts that it fuses when it loads them."""


def small(family, dtype=torch.float32):
    torch.manual_seed(0)
    module = hf.AutoModelForCausalLM.from_config(SMALL[family](), dtype=dtype).eval()
    return LoadedModel(module, tokenizer(), frozenset(), files=find_files(module))


def exported(model, folder, weights=None):
    folder.mkdir()
    parameters = list(as_in_files(model.module.named_parameters(), model.files or {}))
    export_model(model, weights or parameters, {name: tuple(p.shape) for name, p in parameters}, folder)
    return folder


def tensors(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SMALL)
def test_the_files_are_those_of_transformers(tmp_path, family, dtype):
    model = small(family, dtype)
    model.module.save_pretrained(tmp_path / "theirs")
    model.tokenizer.save_pretrained(tmp_path / "theirs")
    ours = exported(model, tmp_path / "ours")
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in (tmp_path / "theirs").iterdir())
    assert same(tensors(ours), tensors(tmp_path / "theirs"))
    fused = set(tensors(ours)) - {name for name, _ in model.module.named_parameters(remove_duplicate=False)}
    assert bool(fused) == (family in ("mixtral", "qwen3 moe", "deepseek v3"))
    for name in ("config.json", "generation_config.json"):
        theirs = json.loads((tmp_path / "theirs" / name).read_text())
        assert json.loads((ours / name).read_text()) == theirs | {"pad_token_id": model.tokenizer.pad_token_id}


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapters"])
def test_an_export_pads_and_chats(tmp_path, lora, monkeypatch):
    """A base model without a padding token, and with a chat template that came from elsewhere."""
    told = []
    monkeypatch.setattr(generation.logger, "warning", lambda text, *_, **__: told.append(text))
    model = adapted() if lora else load("tiny-random", seed=1)
    model.tokenizer.pad_token = model.module.config.pad_token_id = model.module.generation_config.pad_token_id = None
    model.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}={% endfor %}"
    (tmp_path / "out").mkdir()
    weights = {n: p for n, p in model.module.named_parameters() if p.requires_grad}
    export_model(model, weights.items(), {n: tuple(p.shape) for n, p in weights.items()}, tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["pad_token_id"] == model.tokenizer.eos_token_id
    for folder in (tmp_path / "out", tmp_path / "out" / "adapter") if lora else (tmp_path / "out",):
        loaded = hf.AutoTokenizer.from_pretrained(folder, padding_side="left")
        assert len(loaded) == len(tokenizer())
        assert loaded.apply_chat_template([{"role": "user", "content": "1+2"}], tokenize=False) == "1+2="
        rows = loaded(["1+2=", "1="], padding=True, return_tensors="pt", return_token_type_ids=False)
        out = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out").generate(**rows, max_new_tokens=2)
        assert out.shape[1] > rows["input_ids"].shape[1]
        assert not rows["attention_mask"].all()
    assert not [text for text in told if "pad_token_id" in text]


@pytest.mark.parametrize("family", ["llama, tied", "mixtral"])
def test_a_large_model_is_divided_over_files(tmp_path, family, monkeypatch):
    """Each file holds what fits; the index names them; transformers loads them again."""
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)
    model = small(family)
    folder = exported(model, tmp_path / "ours")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("model-*-of-*.safetensors"))
    assert len(files) > 3
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(folder).values())
    for file in files:
        held = load_file(file)
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= 20_000
        assert {index["weight_map"][name] for name in held} == {file.name}
    again = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert same(dict(again.named_parameters()), dict(model.module.named_parameters()))


def test_tensors_of_several_types_are_aligned(tmp_path):
    """A file of types of different width must begin with the widest: no reader accepts a float32 at an odd place."""
    model = small("llama", torch.bfloat16)
    for layer in model.module.model.layers:
        layer.input_layernorm.weight = torch.nn.Parameter(torch.rand(32))
        layer.post_attention_layernorm.weight = torch.nn.Parameter(torch.rand(32))
    model.module.register_buffer("a", torch.tensor([True, False, True]))
    folder = exported(model, tmp_path / "ours")
    assert same(tensors(folder), dict(model.module.state_dict()))
    file = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(file[:8], "little")
    header = json.loads(file[8 : 8 + size])
    header.pop("__metadata__")
    width = {"F32": 4, "BF16": 2, "BOOL": 1}
    assert {entry["dtype"] for entry in header.values()} == set(width)
    assert all((8 + size + entry["data_offsets"][0]) % width[entry["dtype"]] == 0 for entry in header.values())


def test_each_tensor_is_written_before_the_next_is_taken(tmp_path):
    """The iterator reuses one buffer, as one that gathers tensors of several ranks does."""
    model, buffer = small("llama"), torch.empty(97 * 48)

    def gathered():
        for name, parameter in model.module.named_parameters():
            view = buffer[: parameter.numel()].view(parameter.shape)
            yield name, view.copy_(parameter.detach())
            buffer.fill_(float("nan"))

    folder = exported(model, tmp_path / "ours", gathered())
    assert same(tensors(folder), dict(model.module.named_parameters()))


def test_a_tensor_that_never_comes_is_missed(tmp_path):
    model = small("llama")
    with pytest.raises(AssertionError, match=r"no weights came for lm_head.weight"):
        exported(model, tmp_path / "ours", list(model.module.named_parameters())[:-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_alone_and_merged(tmp_path, dtype):
    """As peft itself writes and merges them; the model that trains is left as it was."""
    model = adapted(dtype)
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    model.module.save_pretrained(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    adapters = {n: p for n, p in model.module.named_parameters() if "lora_" in n}
    export_model(model, adapters.items(), {n: tuple(p.shape) for n, p in adapters.items()}, tmp_path / "ours")
    assert same(dict(model.module.named_parameters()), before)
    assert same(tensors(tmp_path / "ours" / "adapter"), tensors(tmp_path / "theirs"))
    theirs, ours = [
        json.loads((f / "adapter_config.json").read_text()) for f in (tmp_path / "theirs", tmp_path / "ours/adapter")
    ]
    assert ours == theirs
    assert same(tensors(tmp_path / "ours"), by_peft(model.module))
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").config.architectures == ["LlamaForCausalLM"]


def adapted(dtype="float32", name="tiny-random"):
    """A model whose adapters change it."""
    model, generator = load(name, dtype=dtype, seed=1), torch.Generator().manual_seed(0)
    add_adapters(model, LoraConfig(rank=4, alpha=8))
    for name, parameter in model.module.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


def by_peft(module):
    """The weights after peft has merged its adapters into them."""
    from peft.tuners.lora import LoraLayer

    for layer in module.modules():
        if isinstance(layer, LoraLayer):
            layer.merge(safe_merge=True)
    return {n.replace(".base_layer", ""): p for n, p in module.named_parameters() if "lora_" not in n}


def second_rank_only_iterates(rank, folder):
    model, taken = load("tiny-random", seed=1), []

    def weights():
        for name, parameter in model.module.named_parameters():
            taken.append(name)
            yield name, parameter.detach()

    shapes = {name: tuple(p.shape) for name, p in model.module.named_parameters()}
    export_model(model, weights(), shapes, folder if rank == 0 else None)
    return taken


def test_all_ranks_take_every_tensor_and_the_first_writes(tmp_path):
    first, second = run_ranks(second_rank_only_iterates, 2, tmp_path)
    assert first == second
    assert same(tensors(tmp_path), dict(load("tiny-random", seed=1).module.named_parameters()))


def divided(rank, port, mesh, source, dtype, adapters, folder):
    """Export a model of which each of two ranks holds a half."""
    ranks = Ranks.meet(Mesh(**mesh, rank=rank), Rendezvous("127.0.0.1", port, ("127.0.0.1",) * 2), device="cpu", seconds=60)
    lora = LoraConfig(rank=4, alpha=8) if adapters else None
    spec = LearnerSpec(str(source), LogProbHead(), ranks, OptimConfig(), dtype=dtype, lora=lora)
    backend, generator = open_backend(spec), torch.Generator().manual_seed(0)
    for piece in backend.pieces() if adapters else ():
        whole = torch.nn.init.normal_(torch.empty(piece.shape, dtype=piece.tensor.dtype), std=0.1, generator=generator)
        ends = (o + n for o, n in zip(piece.offsets, piece.tensor.shape, strict=True))
        piece.tensor.copy_(whole[tuple(map(slice, piece.offsets, ends))])
    backend.export(folder)
    ranks.most(0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("mesh", "adapters"), [({"shard": 2}, False), ({"shard": 2}, True), ({"tensor": 2}, False)])
def test_a_model_in_parts_is_exported_as_one_whole(tmp_path, mesh, adapters, dtype):
    source, alone, parts = (tmp_path / name for name in ("source", "alone", "parts"))
    exported(small("qwen3", torch.float32), source)
    parts.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(divided, 2, store.port, mesh, source, dtype, adapters, parts, seconds=120)
    model = adapted(dtype, str(source)) if adapters else load(str(source), dtype=dtype)
    if adapters:
        model.module.save_pretrained(alone / "adapter")
        assert same(tensors(parts / "adapter"), tensors(alone / "adapter"))
        assert same(tensors(parts), by_peft(model.module))
    else:
        assert same(tensors(parts), dict(model.module.named_parameters()))
    described = json.loads((parts / "config.json").read_text())
    assert (described["architectures"], described["dtype"]) == (["Qwen3ForCausalLM"], dtype)
