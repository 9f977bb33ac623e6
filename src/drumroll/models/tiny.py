"""The built-in tiny language models: Llama architecture, about a million parameters, one token per character.

They exist so that the whole loop runs anywhere in minutes, and they are the test double of the project: real
models through the real code, never a mock. `recipes/tiny-weak` makes the shipped ones by supervised training.
`tiny` has 5 heads; `tiny-even` has 4 heads and 2 key-value heads, so that 2 devices can share every layer.
`tiny-moe` is a Qwen3-MoE: 8 experts, of which a token visits 2, hold seven eighths of its parameters.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

SPECIAL = ["<pad>", "<bos>", "<eos>"]
ALPHABET = string.ascii_lowercase + string.ascii_uppercase + string.digits + " +-*/=<>()[]{}.,:;!?#_|@%&'\"\n"
SHIPPED = {name: Path(__file__).parent / "shipped" / name for name in ("tiny", "tiny-even", "tiny-moe")}
"""Directories of the trained models, by name."""
RANDOM = {
    "tiny-random": {"hidden": 160, "heads": 5, "key_value_heads": 5},
    "tiny-even-random": {"hidden": 128, "heads": 4, "key_value_heads": 2},
    "tiny-moe-random": {"hidden": 64, "heads": 4, "key_value_heads": 2, "experts": 8},
}
"""Sizes of the untrained models, by name."""


def tokenizer() -> Any:
    """A character tokenizer as a plain Hugging Face fast tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {piece: i for i, piece in enumerate([*SPECIAL, *ALPHABET])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def config(hidden: int = 160, layers: int = 4, heads: int = 5, key_value_heads: int | None = None, experts: int = 0) -> Any:
    """The config of a tiny Llama, or with experts of a tiny Qwen3-MoE; by default each head has keys and values of its own."""
    from transformers import LlamaConfig, Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "vocab_size": len(SPECIAL) + len(ALPHABET),
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads or heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if not experts:
        return LlamaConfig(**sizes)
    sizes |= {"num_experts": experts, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 2 * hidden}
    return Qwen3MoeConfig(**sizes | {"head_dim": 32})


def random_model(seed: int, **sizes: int) -> Any:
    """A freshly initialised tiny model."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config(**sizes), dtype=torch.float32)


def ship(name: str, trained: Path) -> None:
    """Keep a trained model as a built-in one: bfloat16 weights, tokenizer, a few MB."""
    import torch
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(trained).to(torch.bfloat16).save_pretrained(SHIPPED[name])
    tokenizer().save_pretrained(SHIPPED[name])


if __name__ == "__main__":
    import sys

    ship(sys.argv[1], Path(sys.argv[2]))
