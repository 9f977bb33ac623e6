"""A model is proven at load against transformers' eager attention, or refused in one sentence that names the layer type.

`python tests/unit/test_witness.py` writes the table of docs/models.md anew.
"""

import random
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf

from drumroll.config import RLConfig, check
from drumroll.errors import ModelError
from drumroll.models import attention, prefix_tree, tiny, witness
from drumroll.models.loading import kv_shapes, load
from drumroll.workers.roles import open_learner

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- table: tests/unit/test_witness.py -->\n", "<!-- end of table -->\n"
FAMILIES = {
    "Llama": hf.LlamaConfig(num_key_value_heads=8),
    "Qwen2": hf.Qwen2Config(num_key_value_heads=4),
    "Qwen2, sliding windows": hf.Qwen2Config(use_sliding_window=True, max_window_layers=8),
    "Qwen3": hf.Qwen3Config(),
    "Qwen3-MoE": hf.Qwen3MoeConfig(),
    "Mistral": hf.MistralConfig(),
    "Mixtral": hf.MixtralConfig(),
    "Gemma 2": hf.Gemma2Config(),
    "Gemma 2 without a soft cap": hf.Gemma2Config(attn_logit_softcapping=None),
    "Gemma 3": hf.Gemma3TextConfig(),
    "Phi": hf.PhiConfig(),
    "Phi-3": hf.Phi3Config(),
    "GPT-2": hf.GPT2Config(),
    "GPT-OSS": hf.GptOssConfig(),
    "DeepSeek-V3": hf.DeepseekV3Config(),
    "SmolLM3": hf.SmolLM3Config(),
    "OLMo 2": hf.Olmo2Config(),
    "Granite": hf.GraniteConfig(),
    "Cohere 2": hf.Cohere2Config(),
    "GLM-4": hf.Glm4Config(),
    "Llama 4": hf.Llama4TextConfig(),
    "Qwen3-Next": hf.Qwen3NextConfig(),
    "Jamba": hf.JambaConfig(),
    "StableLM": hf.StableLmConfig(),
    "Mamba": hf.MambaConfig(),
    "BLOOM": hf.BloomConfig(),
}
REFUSED = {
    "Gemma 2": "type sliding_attention (Gemma2DecoderLayer) use softcap",
    "GPT-OSS": "type sliding_attention (GptOssDecoderLayer) use sinks",
    "Llama 4": "type chunked_attention (Llama4TextDecoderLayer) use a mask that is not causal",
    "Qwen3-Next": "type linear_attention (Qwen3NextDecoderLayer) mix tokens outside",
    "Jamba": "type linear_attention (JambaMambaDecoderLayer) mix tokens outside",
    "StableLM": "keywords given to the model do not reach its attention",
    "Mamba": "type linear_attention (MambaBlock) mix tokens outside",
    "BLOOM": "type BloomBlock (BloomBlock) mix tokens outside",
}


@cache
def module(family):
    """A model as large as its family's, without weights."""
    with torch.device("meta"):
        return hf.AutoModelForCausalLM.from_config(FAMILIES[family])


def verdict(family):
    """The sentence that refuses a family, or None."""
    try:
        witness.prove(module(family))
    except ModelError as error:
        return str(error)
    return None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_agrees_or_is_refused_with_its_layer_type(family):
    sentence = verdict(family)
    assert (sentence is None) == (family not in REFUSED), sentence
    if sentence is not None:
        assert REFUSED[family] in sentence
        assert re.fullmatch(r"model: type '\w+' cannot be used: [^\n]+; docs/models.md says which types can\.", sentence)


def small(family):
    """The witness model of a family, under weights that show its features."""
    made = hf.AutoModelForCausalLM.from_config(witness._shrunk(module(family)), attn_implementation="eager")
    trial = witness._Trial(made)
    assert witness._judge(trial) is None
    return trial


@pytest.mark.parametrize(
    ("family", "depth"), [("Llama", 1), ("Gemma 3", 6), ("Qwen3-Next", 4), ("DeepSeek-V3", 4), ("Cohere 2", 4)]
)
def test_the_witness_has_a_layer_of_every_kind(family, depth):
    config = witness._shrunk(module(family))
    assert config.num_hidden_layers == depth
    assert getattr(config, "sliding_window", None) in (None, 8)
    made = hf.AutoModelForCausalLM.from_config(config)
    parts = [{type(part) for layer in witness.decoder_layers(m) for part in layer.modules()} for m in (module(family), made)]
    assert parts[0] == parts[1]
    assert set(witness.kinds(made)) == set(witness.kinds(module(family)))
    assert sum(p.numel() for p in made.parameters()) < 2e6


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 4096}
ODD = {
    **{
        f"heads of {dim}": hf.LlamaConfig(hidden_size=6 * dim, num_attention_heads=6, num_key_value_heads=1)
        for dim in (24, 68, 80)
    },
    "a fifth is rotated": hf.PhiConfig(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.2}
    ),
    "a factor for each frequency": hf.Phi3Config(
        rope_parameters=LONG | {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48}
    ),
    "a model that also sees": hf.Gemma3Config(),
}


@pytest.mark.parametrize("config", ODD.values(), ids=ODD.keys())
def test_odd_sizes_can_be_made_small(config):
    with torch.device("meta"):
        made = hf.AutoModelForCausalLM.from_config(config)
    witness.prove(made)


@pytest.mark.parametrize(
    ("family", "features"),
    [
        ("Llama", {"attention", "positions"}),
        ("Mistral", {"attention", "positions", "mask"}),
        ("Gemma 3", {"attention", "positions", "mask", "scaling"}),
        ("Gemma 2 without a soft cap", {"attention", "positions", "mask", "scaling", "final_logit_softcapping"}),
    ],
)
def test_every_feature_shows(family, features):
    effects = small(family).effects()
    assert {name for name, effect in effects.items() if effect} == features
    assert all(effects[name] > 100 * witness.TOLERANCE for name in features)


def ignore_window(plain):
    return lambda self, layer, q, k, v, scale, window: plain(self, layer, q, k, v, scale, None)


def ignore_scale(plain):
    return lambda self, layer, q, k, v, scale, window: plain(self, layer, q, k, v, q.shape[-1] ** -0.5, window)


def next_window(plain):
    return lambda self, layer, q, k, v, scale, window: plain(self, layer, q, k, v, scale, window and window + 1)


def other_heads(plain):
    return lambda x, heads: x.repeat(1, heads // x.shape[1], 1, 1)


def from_zero(plain):
    return lambda self: torch.arange(len(self.position))[None]


def without_cap(plain):
    def score(made, *given, **more):
        text = made.config.get_text_config()
        cap, text.final_logit_softcapping = text.final_logit_softcapping, None
        try:
            return plain(made, *given, **more)
        finally:
            text.final_logit_softcapping = cap

    return score


@pytest.mark.parametrize(
    ("family", "owner", "name", "mistake"),
    [
        ("Mistral", prefix_tree.PrefixTree, "attend", ignore_window),
        ("Mistral", prefix_tree.PrefixTree, "attend", next_window),
        ("Gemma 3", prefix_tree.PrefixTree, "attend", ignore_window),
        ("Gemma 3", prefix_tree.PrefixTree, "attend", ignore_scale),
        ("Llama", prefix_tree, "_repeat_heads", other_heads),
        ("Llama", prefix_tree.PrefixTree, "positions", from_zero),
        ("Gemma 2 without a soft cap", witness, "score", without_cap),
    ],
)
def test_a_mistake_of_ours_is_refused(monkeypatch, family, owner, name, mistake):
    monkeypatch.setattr(witness, "_VERDICTS", {})
    monkeypatch.setattr(owner, name, mistake(getattr(owner, name)))
    assert verdict(family) is not None


def test_a_proof_leaves_no_trace(monkeypatch):
    """Random numbers, threads and the model are as before; a second proof of the same config is remembered."""
    monkeypatch.setattr(witness, "_VERDICTS", {})
    made = tiny.random_model(0)
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads()]
    config, dtype, grad = made.config.to_dict(), torch.get_default_dtype(), torch.is_grad_enabled()
    witness.prove(made)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert [random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads()] == states[1:]
    assert (made.config.to_dict(), torch.get_default_dtype(), torch.is_grad_enabled()) == (config, dtype, grad)
    monkeypatch.setattr(witness, "_judge", lambda trial: 1 / 0)
    witness.prove(tiny.random_model(1, hidden=320, layers=2))


@pytest.mark.parametrize("role", ["actor", "critic", "reference"])
@pytest.mark.parametrize("backend", ["native", "vllm"])
def test_every_role_refuses_whatever_generates(tmp_path, small, role, backend):
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    hf.Gemma2ForCausalLM(hf.Gemma2Config(**sizes, num_key_value_heads=2, head_dim=8)).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    cluster = {"runtime": "ray" if backend == "vllm" else "local"}
    config = check(small(model=str(tmp_path / "model"), roles={"rollout": {"backend": backend}}, cluster=cluster))
    assert isinstance(config, RLConfig)
    with pytest.raises(ModelError, match=r"sliding_attention \(Gemma2DecoderLayer\) use softcap"):
        open_learner(config, role)


def test_what_cannot_be_made_small_is_refused(monkeypatch):
    monkeypatch.setattr(witness, "_VERDICTS", {})
    monkeypatch.setattr(witness, "LARGEST", 10)
    with pytest.raises(ModelError, match=r"no small model of class LlamaForCausalLM could be made to check it .*parameters"):
        load("tiny-random")


def rows():
    """Of the table: family, config class, kinds of layers, learner, native engine."""
    for family, config in FAMILIES.items():
        sentence = verdict(family)
        found = dict.fromkeys(witness.kinds(module(family)))
        learner = "yes" if sentence is None else "no: " + sentence.split("cannot be used: ")[1].rpartition(";")[0]
        engine = "no"
        if sentence is None:
            made = hf.AutoModelForCausalLM.from_config(witness._shrunk(module(family)))
            made.set_attn_implementation(attention.NAME)
            try:
                engine = "yes" if kv_shapes(made) else "no"
            except ModelError:
                engine = "no: keys and values differ in size; use vLLM"
        yield f"| {family} | `{type(config).__name__}` | {', '.join(found)} | {learner} | {engine} |\n"


def table():
    head = "| family | config class | layer types | trains | native engine |\n|---|---|---|---|---|\n"
    return BEGIN + head + "".join(rows()) + END


def test_the_table_of_the_docs_is_what_the_witness_says():
    text = DOCS.read_text("utf-8")
    assert text[text.index(BEGIN) : text.index(END) + len(END)] == table(), "write it anew: python tests/unit/test_witness.py"


if __name__ == "__main__":
    attention.register()
    text = DOCS.read_text("utf-8")
    DOCS.write_text(text[: text.index(BEGIN)] + table() + text[text.index(END) + len(END) :], "utf-8")
