"""What a group's samples share is computed once, and the gradient is that of every sequence alone."""

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from test_batch import exact, make_trace, random_groups, relative
from torch.utils._python_dispatch import TorchDispatchMode

from drumroll.batch import pack
from drumroll.config.optim import OptimConfig
from drumroll.learners.backends.torch import torch_learner
from drumroll.learners.heads import Settings
from drumroll.models import attention
from drumroll.models.head import LanguageModelHead
from drumroll.models.loading import LoadedModel
from drumroll.models.value import value_model
from drumroll.sample import Group, Owner, Prompt, Sample

SHAPE = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 2.0}
FAMILIES = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHAPE)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SHAPE, **WINDOWS)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=4, **NO_DROPOUT)),
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def forward(learner, batch, settings):
    """The head's numbers at the trained tokens."""
    return learner.backend._forward(learner.backend._inputs(batch, settings))


def make(family, dtype=torch.float64, *, own_norms=False):
    attention.register()
    torch.manual_seed(0)
    module = FAMILIES[family]().to(dtype).eval()
    module.set_attn_implementation(attention.NAME)
    model = LoadedModel(module, None, frozenset())
    return model if own_norms else exact(model)


def shares(batch):
    """A weight for every trained token's log-prob and entropy."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, int(batch.mask.sum()), generator=generator, dtype=torch.float64)


def ours(model, batch):
    learner = torch_learner(model, OptimConfig(), total_steps=1)
    logprobs, entropy = forward(learner, batch, Settings(0.7, True))
    weights = shares(batch)
    (logprobs * weights[0] + entropy * weights[1]).sum().backward()
    return torch.cat([p.grad.flatten() for p in learner.backend.master])


def plain(model, batch):
    """Hugging Face alone, sequence by sequence. Its eager attention rounds to float32, so float64 uses its sdpa."""
    module, weights, done = model.module, shares(batch), 0
    module.set_attn_implementation("sdpa" if module.dtype is torch.float64 else "eager")
    for tokens, mask in zip(batch.tokens.split(batch.lengths.tolist()), batch.mask.split(batch.lengths.tolist()), strict=True):
        logits = module(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        distribution = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / 0.7, -1)[mask[1:]]
        mine = weights[:, done : done + len(distribution)]
        done += len(distribution)
        chosen = distribution.gather(1, tokens[1:][mask[1:], None])[:, 0]
        (chosen * mine[0] - (distribution.exp() * distribution).sum(-1) * mine[1]).sum().backward()
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in module.parameters()])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_gradient_equals_every_sequence_alone(family, dtype, bound):
    batch = pack(random_groups())
    assert len(batch.tree().tokens) < 0.7 * len(batch.tokens)
    assert relative(ours(make(family, dtype), batch), plain(make(family, dtype), batch)) < bound


def test_bfloat16_is_no_worse_than_plain():
    batch = pack(random_groups())
    truth = plain(make("llama", torch.float32, own_norms=True), batch)
    errors = [relative(way(make("llama", torch.bfloat16, own_norms=True), batch).float(), truth) for way in (ours, plain)]
    assert errors[0] <= 1.1 * errors[1]


tokens = st.lists(st.integers(3, 6), min_size=1, max_size=5)
segments = st.lists(st.tuples(st.sampled_from(list(Owner)), tokens), min_size=1, max_size=3)


@st.composite
def groups(draw):
    """Shared and differing prompts, one-token ones too; several traces; environment tokens anywhere."""
    made = []
    for g in range(draw(st.integers(1, 3))):
        prompt, shared = Prompt(str(g), "d", "", (1,)), draw(st.lists(st.integers(3, 60), max_size=8))
        traces = st.lists(st.tuples(st.booleans(), segments), min_size=1, max_size=2)
        samples = []
        for i in range(draw(st.integers(1, 4))):
            own = [make_trace(([(Owner.PROMPT, shared)] if same and shared else []) + s) for same, s in draw(traces)]
            samples.append(Sample(prompt, g, i, traces=own, reward=0.0))
        made.append(Group(prompt, g, samples))
    return made


@given(groups(), st.integers(5, 60))
def test_any_groups_cut_anywhere(made, budget):
    batch = pack(made)
    if not batch.mask.any():
        return
    model = make("gemma3")
    learner = torch_learner(model, OptimConfig(), total_steps=1)
    weights = torch.zeros(2, len(batch.tokens), dtype=torch.float64)
    weights[:, batch.mask] = shares(batch)
    starts = (torch.cumsum(batch.lengths, 0) - batch.lengths).tolist()
    for chunk in batch.micro_batches(budget):
        micro = batch.select(chunk)
        where = torch.cat([torch.arange(starts[t], starts[t] + int(batch.lengths[t])) for t in chunk])[micro.mask]
        if len(where):
            logprobs, entropy = forward(learner, micro, Settings(0.7, True))
            (logprobs * weights[0, where] + entropy * weights[1, where]).sum().backward()
    found = torch.cat([p.grad.flatten() for p in model.module.parameters()])
    truth = plain(make("gemma3"), batch)
    assert float((found - truth).norm()) <= 1e-10 * float(truth.norm()) + 1e-13


@given(groups())
def test_a_tree_holds_every_trace_and_shares_nothing_trained(made):
    batch = pack(made)
    tree = batch.tree()
    assert torch.equal(tree.tokens[tree.node_of], batch.tokens)
    assert len(set(tree.node_of[batch.mask].tolist())) == int(batch.mask.sum())
    assert len(tree.tokens) == batch.computed(batch.families(), range(batch.num_traces))
    assert sorted(n for p in tree.paths for n in p.nodes[p.start :].tolist()) == list(range(len(tree.tokens)))


def test_values_under_a_shared_prompt_are_those_of_every_sequence_alone():
    learner = torch_learner(value_model(make("llama")), OptimConfig(), total_steps=1)
    torch.nn.init.normal_(learner.backend.model.module.head.weight)
    batch = pack(random_groups())
    alone = torch.cat([forward(learner, batch.select([t]), Settings())[0] for t in range(batch.num_traces)])
    assert (forward(learner, batch, Settings())[0] - alone).abs().max() < 1e-12


class Largest(TorchDispatchMode):
    """The most rows by `vocab` that any tensor had."""

    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[-1] == 64:
                self.rows = max(self.rows, x.numel() // 64)
        return out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_a_head_in_chunks_is_the_whole_head(family, entropy_gradient):
    """And no tensor of it is larger than a chunk."""
    found = []
    for rows in (10_000, 17):
        module = make(family).module
        hidden = torch.randn(100, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        output = type(module.base_model(torch.ones(1, 1, dtype=torch.int64), layout=attention.Packed([1])))
        with Largest() as largest:
            head = LanguageModelHead(module, output)
            logprobs, entropy = head(hidden, torch.arange(100) % 64, 0.7, entropy_gradient=entropy_gradient, rows=rows)
            (logprobs.sum() + (entropy.sum() if entropy_gradient else 0)).backward()
        assert largest.rows == (100 if rows > 100 else 17)
        assert entropy.requires_grad == entropy_gradient
        weight = module.get_output_embeddings().weight.grad
        found.append([logprobs.detach(), entropy.detach(), hidden.grad, weight])
    for one, other in zip(*found, strict=True):
        assert relative(one, other) < 1e-12


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_of_log_probs_is_autograds(temperature):
    """Log-probs without an entropy term have a backward pass of their own."""
    found = []
    for entropy_gradient in (False, True):
        module, draw = make("gemma3").module, torch.Generator().manual_seed(1)
        hidden, weights = (torch.randn(100, n, dtype=torch.float64, generator=draw) for n in (16, 1))
        output = type(module.base_model(torch.ones(1, 1, dtype=torch.int64), layout=attention.Packed([1])))
        head = LanguageModelHead(module, output)
        numbers = head(hidden.requires_grad_(), torch.arange(100) % 64, temperature, entropy_gradient=entropy_gradient)
        (numbers[0] * weights[:, 0]).sum().backward()
        found.append([*(n.detach() for n in numbers), hidden.grad, module.get_output_embeddings().weight.grad])
    for one, other in zip(*found, strict=True):
        assert relative(one, other) < 1e-12


@pytest.mark.parametrize("window", [None, 3])
def test_packed_attention_picks_what_a_mask_would(window):
    """Indices from the host pick the same as a boolean mask, which would make the host wait for a device."""
    lengths, draw = [5, 1, 9, 2], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 8, generator=draw) for heads in (4, 2, 2))
    packed = attention.Packed(lengths)
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rows = [
        torch.zeros(*valid.shape, *x.shape[1:]).masked_scatter(valid[..., None, None], x).transpose(1, 2) for x in (q, k, v)
    ]
    keys, values = (x.repeat_interleave(2, dim=1) for x in rows[1:])
    mask = attention.band_mask(torch.arange(max(lengths)), torch.arange(max(lengths)), window)
    seen = torch.nn.functional.scaled_dot_product_attention(rows[0], keys, values, attn_mask=mask, scale=0.5)
    torch.testing.assert_close(packed.attend(0, q, k, v, 0.5, window), seen.transpose(1, 2)[valid])
    assert packed.positions().tolist() == [[i for length in lengths for i in range(length)]]
