"""The native engine runs any causal model of transformers: it writes what the model's own `generate` writes."""

import asyncio
import random
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

from drumroll.engines import Request, Sampling
from drumroll.engines.native import NativeEngine
from drumroll.errors import ModelError
from drumroll.models import attention, experts
from drumroll.models.loading import LoadedModel, kv_shapes

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = SIZES | {
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=16)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(
            **GROUPED, head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        )
    ),
    "qwen3 moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**GROUPED, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=4)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2)
    ),
}
NEW = 20


def made(family):
    torch.manual_seed(5)
    module = FAMILIES[family]().eval()
    for parameter in module.parameters():  # the usual small start would leave every token as likely as the next
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    attention.register()
    module.set_attn_implementation(attention.NAME)
    experts.use(module)
    return LoadedModel(module, SimpleNamespace(), frozenset())


def run(engine, wanted):
    async def go():
        return await asyncio.gather(*(engine.generate(r) for r in wanted))

    return asyncio.run(go())


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_and_logprobs_equal_transformers(family, fixed):
    model = made(family)
    rng = random.Random(0)
    prompts = [tuple(rng.randint(3, 96) for _ in range(rng.randint(1, 24))) for _ in range(6)]
    prompts.append(prompts[0] + prompts[1])
    wanted = [Request(f"r{i}", prompts[i % 7], Sampling(0.0, NEW), i, order=i) for i in range(14)]
    engine = NativeEngine(model, slots=6, context=80, fixed_shape=fixed, page_tokens=8)
    ours = run(engine, wanted)
    engine.close()
    model.module.set_attn_implementation("eager")
    ties = 0
    for request, done in zip(wanted, ours, strict=True):
        whole = torch.tensor([[*request.tokens, *done.tokens]])
        with torch.no_grad():
            logits = model.module(input_ids=whole).logits[0, len(request.tokens) - 1 : -1]
        logprobs = logits.log_softmax(-1)
        best = logprobs.topk(2).values
        for i, token in enumerate(done.tokens):
            ties += bool(best[i, 0] - best[i, 1] < 1e-5)
            assert logprobs[i, token] > best[i, 0] - 1e-5, (request.id, i)
        assert (logprobs.gather(1, torch.tensor(done.tokens)[:, None])[:, 0] - torch.tensor(done.logprobs)).abs().max() < 1e-4
        if not ties:
            plain = model.module.generate(
                torch.tensor([request.tokens]), max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None
            )
            assert done.tokens == plain[0, len(request.tokens) :].tolist()
    assert ties <= 2
    assert len({tuple(c.tokens) for c in ours}) > 3, "the model says the same whatever it is asked"


def test_keys_and_values_of_different_size_are_refused():
    """Latent attention trains, but the pages of the native engine hold keys and values of one size."""
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    module = hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**SIZES, **heads, first_k_dense_replace=3)).eval()
    attention.register()
    module.set_attn_implementation(attention.NAME)
    with pytest.raises(ModelError, match=r"keys of size 12 and values of size 8 .* use roles.rollout.backend: vllm"):
        kv_shapes(module)
