"""The built-in models are what their names say."""

import pytest

from drumroll.config.roles import BUILT_IN_MODELS
from drumroll.models import tiny
from drumroll.models.loading import end_tokens, load


def test_every_built_in_is_shipped_or_random():
    assert set(BUILT_IN_MODELS) == {*tiny.SHIPPED, *tiny.RANDOM}
    assert {f"{name}-random" for name in (*tiny.SHIPPED, "tiny-moe")} == set(tiny.RANDOM)


@pytest.mark.parametrize("name", BUILT_IN_MODELS)
def test_a_built_in_has_the_sizes_of_its_name(name):
    model = load(name)
    sizes, config = tiny.RANDOM[f"{name.removesuffix('-random')}-random"], model.module.config
    assert (config.hidden_size, config.num_attention_heads) == (sizes["hidden"], sizes["heads"])
    assert (config.num_key_value_heads, config.head_dim, config.num_hidden_layers) == (sizes["key_value_heads"], 32, 4)
    assert config.tie_word_embeddings
    assert model.tokenizer.get_vocab() == tiny.tokenizer().get_vocab()
    assert model.eos == end_tokens(name) == {2}
