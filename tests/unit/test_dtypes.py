"""Models in bfloat16 compute what transformers' own bfloat16 models compute."""

import asyncio
from pathlib import Path

import pytest
import torch
import transformers as hf

from drumroll.batch import Batch, pack
from drumroll.config import RLConfig, check
from drumroll.engines import Request, Sampling
from drumroll.engines.native import NativeEngine
from drumroll.learners.backends.torch import torch_learner
from drumroll.models import tiny
from drumroll.models.loading import load, load_classifier
from drumroll.sample import Group, Owner, Prompt, Sample, Trace
from drumroll.workers.roles import open_learner

LENGTH = 1100
SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = hf.LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
"""Its frequencies rounded to bfloat16 would turn keys at distance 1,000 by up to a radian."""
DEEPSEEK = hf.DeepseekV3Config(
    **SIZES | {"num_key_value_heads": 2},
    **{"moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
    first_k_dense_replace=1,
)


def saved(config: hf.PreTrainedConfig, folder: Path, kind=hf.AutoModelForCausalLM) -> str:
    """A model with random weights, large enough that attention looks at certain places."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = kind.from_config(config)
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(30.0 if "q_proj" in name or "k_proj" in name else 8.0)
    module.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def sequence() -> list[int]:
    return torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()


def one_sample(tokens: list[int]) -> Batch:
    """All tokens but the first are trained."""
    trace, count = Trace(), len(tokens) - 1
    trace.extend(tokens[:1], Owner.PROMPT)
    trace.extend(tokens[1:], Owner.POLICY, [0.0] * count, [0] * count)
    prompt = Prompt("p", "d", "", (1,))
    return pack([Group(prompt, 0, [Sample(prompt, 0, 0, traces=[trace], reward=0.0)])])


def theirs(folder: str, tokens: list[int]) -> torch.Tensor:
    """[tokens - 1] the log-prob of each token after the first, by transformers alone."""
    module = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]


def test_the_learner_in_bfloat16_equals_transformers(tmp_path):
    folder, tokens = saved(LLAMA, tmp_path), sequence()
    ours = torch_learner(load(folder, dtype="bfloat16"), None).infer(one_sample(tokens), 1.0)[1:]
    assert (ours - theirs(folder, tokens)).abs().mean() < 0.02  # 0.23 with frequencies in bfloat16


def test_the_native_engine_in_bfloat16_equals_transformers(tmp_path):
    folder, tokens = saved(LLAMA, tmp_path), sequence()
    engine = NativeEngine(load(folder, dtype="bfloat16"), slots=2, context=LENGTH + 40)
    done = asyncio.run(engine.generate(Request("r", tuple(tokens), Sampling(1.0, 32), 0)))
    engine.close()
    expected = theirs(folder, tokens + done.tokens)[LENGTH - 1 :]
    assert (torch.tensor(done.logprobs) - expected).abs().mean() < 0.05  # 0.27 with frequencies in bfloat16


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama", "deepseek_v3"])
def test_every_tensor_has_the_dtype_and_value_that_transformers_gives_it(tmp_path, config):
    folder = saved(config, tmp_path)
    plain = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ours = load(folder, dtype="bfloat16").module
    for kind in ("named_parameters", "named_buffers"):
        expected = dict(getattr(plain, kind)())
        assert expected.keys() == dict(getattr(ours, kind)()).keys()
        for name, tensor in getattr(ours, kind)():
            assert tensor.dtype is expected[name].dtype, name
            assert torch.equal(tensor, expected[name]), name


def test_the_random_model_and_classifiers_keep_their_frequencies(tmp_path):
    random = load("tiny-random", dtype="bfloat16").module
    assert {p.dtype for p in random.parameters()} == {torch.bfloat16}
    assert torch.equal(random.model.rotary_emb.inv_freq, load("tiny-random").module.model.rotary_emb.inv_freq)
    folder = saved(hf.LlamaConfig(**LLAMA.to_dict() | {"num_labels": 1}), tmp_path, hf.AutoModelForSequenceClassification)
    classifier = load_classifier(folder, dtype="bfloat16", device="cpu")[0]
    assert {p.dtype for p in classifier.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in classifier.buffers()} == {torch.float32}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_takes_the_actors_dtype(small, dtype):
    """The KL of the policy to its reference is exactly 0 before the first update."""
    config = check(small(roles={"actor": {"dtype": dtype}, "teacher": {"model": "tiny"}}, algorithm={"teacher": 1.0}))
    assert isinstance(config, RLConfig)
    batch = one_sample([3 + token % 90 for token in sequence()[:40]])
    actor, reference, teacher = (open_learner(config, role).infer(batch, 1.0) for role in ("actor", "reference", "teacher"))
    assert torch.equal(actor, reference)
    assert torch.equal(actor, teacher)


def test_a_role_may_have_a_dtype_of_its_own(small):
    config = check(small(roles={"actor": {"dtype": "bfloat16"}, "reference": {"dtype": "float32"}}))
    assert isinstance(config, RLConfig)
    assert open_learner(config, "reference").backend.model.module.dtype is torch.float32
