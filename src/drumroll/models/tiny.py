"""The built-in tiny language models: Llama architecture, about 1.3 M parameters, one token per character.

They exist so that the whole loop runs anywhere in minutes, and they are the test double of the project: real
models through the real code, never a mock. `recipes/tiny-weak` makes the shipped one by supervised training.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

SPECIAL = ["<pad>", "<bos>", "<eos>"]
ALPHABET = string.ascii_lowercase + string.ascii_uppercase + string.digits + " +-*/=<>()[]{}.,:;!?#_|@%&'\"\n"
SHIPPED = Path(__file__).parent / "shipped"


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


def random_model(seed: int, hidden: int = 160, layers: int = 4, heads: int = 5) -> Any:
    """A freshly initialised tiny Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(ALPHABET),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def ship(trained: Path) -> None:
    """Keep a trained model as the built-in one: bfloat16 weights, tokenizer, a few MB."""
    import torch
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(trained).to(torch.bfloat16).save_pretrained(SHIPPED)
    tokenizer().save_pretrained(SHIPPED)


if __name__ == "__main__":
    import sys

    ship(Path(sys.argv[1]))
