"""Two tensor-parallel ranks compute what one process computes, for every family that has a plan; others are refused."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from forked import RankPool
from test_batch import random_groups, relative
from test_parallel import RANKS, SIZES, gradients, meet, open_learner, whole

from drumroll.batch import pack
from drumroll.errors import ConfigError
from drumroll.learners.heads import Settings
from drumroll.models import tiny
from drumroll.models.tensor_parallel import FAMILIES, check

LIMIT = 1e-9
WITHOUT_HEAD_SIZE = {name: size for name, size in SIZES.items() if name != "head_dim"}
ODD, EVEN = {"vocab_size": 97}, {"vocab_size": 96}
CONFIGS = {
    "llama": hf.LlamaConfig(**SIZES, **ODD, tie_word_embeddings=True),
    "qwen2": hf.Qwen2Config(**SIZES, **EVEN, tie_word_embeddings=False),
    "qwen3": hf.Qwen3Config(**SIZES, **ODD, tie_word_embeddings=False),
    "gemma2": hf.Gemma2Config(**SIZES, **ODD, sliding_window=6, attn_logit_softcapping=None),
    "gemma3_text": hf.Gemma3TextConfig(**SIZES, **ODD, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    "mistral": hf.MistralConfig(**SIZES, **ODD),
    "phi": hf.PhiConfig(**WITHOUT_HEAD_SIZE, **ODD),
    "phi3": hf.Phi3Config(**WITHOUT_HEAD_SIZE, **EVEN),
    "smollm3": hf.SmolLM3Config(**SIZES, **ODD),
    "olmo2": hf.Olmo2Config(**WITHOUT_HEAD_SIZE, **ODD),
    "granite": hf.GraniteConfig(**SIZES, **ODD),
    "cohere2": hf.Cohere2Config(**SIZES, **ODD, sliding_window=6),
    "glm4": hf.Glm4Config(**SIZES, **ODD),
}


def exact_layer_norms(module):
    """As `exact` for RMS norms: Cohere's layer norm rounds to float32 on the way."""
    for norm in module.modules():
        if type(norm).__name__.startswith("Cohere") and type(norm).__name__.endswith("LayerNorm"):

            def forward(x, norm=norm):
                centred = x - x.mean(-1, keepdim=True)
                return norm.weight * centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)

            norm.forward = forward


def compute(rank, folder, micro_batches):
    """Log-probs, entropies, and the gradient of a loss of both."""
    backend = open_learner(RANKS[-1], folder, "actor", "float64").backend
    exact_layer_norms(backend.scorer)
    numbers = []

    def loss(found, micro):
        numbers.append([number.detach().clone() for number in found])
        weights = torch.linspace(-1, 1, len(found[0]), dtype=torch.float64)
        return (weights * found[0] + weights.flip(0) * found[1]).sum(), {}

    backend.train(micro_batches, Settings(0.8, entropy_gradient=True), loss)
    logprobs, entropies = (torch.cat(column) for column in zip(*numbers, strict=True))
    return SimpleNamespace(logprobs=logprobs, entropies=entropies, gradients=gradients(backend))


def refusal(rank, folder):
    try:
        open_learner(RANKS[-1], folder, "LoRA", "float32")
    except ConfigError as error:
        return str(error)


class Pools:
    """Two tensor-parallel ranks, and one process."""

    def __init__(self):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.two, self.one = RankPool(2), RankPool(1)
        self.two.run(meet, {"tensor": 2}, self.store.port)
        self.one.run(meet, {}, self.store.port)

    def close(self):
        self.two.close()
        self.one.close()


@pytest.fixture(scope="module")
def pools():
    made = Pools()
    yield made
    made.close()


def save(family, path):
    """A random model, no parameter of which is 0 or 1."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = hf.AutoModelForCausalLM.from_config(CONFIGS[family])
        for parameter in module.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    module.save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return str(path)


def test_every_family_is_compared():
    assert CONFIGS.keys() == FAMILIES


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_two_ranks_compute_what_one_process_computes(pools, family, tmp_path):
    batch = pack(random_groups(count=3))
    micro_batches = [batch.select(traces) for traces in batch.micro_batches(60)]
    assert len(micro_batches) > 1
    folder = save(family, tmp_path)
    (alone,) = pools.one.run(compute, folder, micro_batches)
    parts = pools.two.run(compute, folder, micro_batches)
    for part in parts:
        assert relative(part.logprobs, alone.logprobs) <= LIMIT
        assert relative(part.entropies, alone.entropies) <= LIMIT
    assert relative(whole([part.gradients for part in parts]), whole([alone.gradients])) <= LIMIT


@pytest.mark.parametrize(
    ("config", "size", "said"),
    [
        (CONFIGS["llama"], 3, "parallel: tensor 3 does not divide the model's 4 heads; nearest that does: tensor 2."),
        (CONFIGS["llama"], 4, "parallel: tensor 4 does not divide the model's 2 key-value heads; nearest that does: tensor 2."),
        (hf.LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3), 2, "nearest that does: tensor 1."),
        (
            hf.LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3),
            9,
            "3 key-value heads; nearest that does: tensor 3.",
        ),
        (
            hf.GPT2Config(),
            2,
            "parallel: tensor 2: models of type 'gpt2' are not divided by tensor; use shard. It works for cohere2, ",
        ),
        (hf.Qwen3MoeConfig(), 2, "models of type 'qwen3_moe' are not divided by tensor; use shard."),
    ],
)
def test_models_that_do_not_divide_are_refused(config, size, said):
    with pytest.raises(ConfigError) as refused:
        check(config, size)
    assert said in str(refused.value)


def test_the_nearest_that_is_named_divides():
    for heads, key_value_heads, size in [(9, 3, 2), (12, 4, 5), (32, 8, 16), (40, 40, 16), (4, 2, 3)]:
        config = hf.LlamaConfig(hidden_size=16 * heads, num_attention_heads=heads, num_key_value_heads=key_value_heads)
        with pytest.raises(ConfigError) as refused:
            check(config, size)
        check(config, int(str(refused.value).rstrip(".").split()[-1]))


def test_adapters_are_refused_by_all_ranks(pools, tmp_path):
    said = "roles.actor.lora: adapters are not trained with tensor > 1 for now; use shard."
    assert pools.two.run(refusal, save("llama", tmp_path)) == [said, said]
