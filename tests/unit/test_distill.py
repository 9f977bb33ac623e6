"""Divergences equal slow loops over the vocabulary, and the head in chunks equals autograd on whole logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_memory import LiveMemory
from test_batch import random_groups
from torch import nn

from drumroll.algorithms.divergences import DIVERGENCES, sampled
from drumroll.batch import join, pack
from drumroll.config.divergence import DivergenceConfig
from drumroll.models.distillation import Comparison, Target, TeacherHeads, TeacherPass, with_rest
from drumroll.models.head import LanguageModelHead

NAMES = sorted(DIVERGENCES.parts)


def slow(name, p, q, config):
    """A divergence in plain Python from probabilities of student and teacher, by the formula of its paper."""

    def kl(a, b):
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    def mixed(a, b, share):
        return [share * x + (1 - share) * y for x, y in zip(a, b, strict=True)]

    if name == "jsd":
        middle = mixed(q, p, config.beta)
        return config.beta * kl(q, middle) + (1 - config.beta) * kl(p, middle)
    return {
        "forward": lambda: kl(q, p),
        "reverse": lambda: kl(p, q),
        "skew_forward": lambda: kl(q, mixed(q, p, config.skew)),
        "skew_reverse": lambda: kl(p, mixed(p, q, config.skew)),
    }[name]()


class PlainHead(LanguageModelHead):
    """A head that is one matrix, without a model."""

    def __init__(self, weight):
        self.weight, self.parallel = weight, None

    @property
    def dtype(self):
        return self.weight.dtype

    def logits(self, hidden):
        return nn.functional.linear(hidden, self.weight)


VOCABULARY, WIDTH, TOKENS, TEMPERATURE = 11, 4, 7, 0.7


def models(seed, tokens=TOKENS, vocabulary=VOCABULARY, dtype=torch.float64):
    """Hidden states and head weights of a student and a teacher, which has logits of two tokens more."""
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=noise, dtype=dtype)

    student = normal(tokens, WIDTH).requires_grad_(), normal(vocabulary, WIDTH).requires_grad_()
    return *student, normal(tokens, WIDTH + 2), normal(vocabulary + 2, WIDTH + 2)


def taught(hidden, weight, over, count=3, vocabulary=VOCABULARY):
    """The rows of the teacher's pass, in chunks of three tokens."""
    width = 2 * count + 1 if over == "top_k" else WIDTH + 3  # as if another teacher were wider
    (rows,) = PlainHead(weight)(
        hidden, None, TEMPERATURE, entropy_gradient=False, rows=3, asked=TeacherPass(over, width, vocabulary)
    )
    return rows


def target(rows, weight, config, vocabulary=VOCABULARY, **how):
    heads = TeacherHeads([PlainHead(weight)], [WIDTH + 2], vocabulary)
    return Target(rows, torch.zeros(len(rows), dtype=torch.int64), Comparison(config, heads, **how))


def distributions(hidden, weight):
    """Whole distributions over the tokens that the student has."""
    return torch.softmax((hidden @ weight.T)[:, :VOCABULARY] / TEMPERATURE, dim=-1)


def buckets(p, q, over, count):
    """Both distributions over the tokens that are compared."""
    if over == "all":
        return p, q
    first = q.topk(count).indices
    return tuple(torch.cat([x.gather(1, first), x.scatter(1, first, 0).sum(1, keepdim=True)], 1) for x in (p, q))


@pytest.mark.parametrize("over", ["all", "top_k"])
@pytest.mark.parametrize("name", NAMES)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, VOCABULARY - 1),
    beta=st.floats(0.05, 0.95),
    skew=st.floats(0, 0.9),
)
@settings(max_examples=12)
def test_each_divergence_is_its_formula_and_its_gradient_that_of_whole_logits(name, over, seed, count, beta, skew):
    config = DivergenceConfig(use=name, over=over, beta=beta, skew=skew, **({"top_k": count} if over == "top_k" else {}))
    student, head, teacher, other = models(seed)
    rows = taught(teacher, other, over, count)
    chosen = torch.arange(TOKENS)
    numbers = PlainHead(head)(student, chosen, TEMPERATURE, entropy_gradient=False, rows=8, asked=target(rows, other, config))
    p, q = buckets(distributions(student, head), distributions(teacher, other), over, count)
    want = [slow(name, *pair, config) for pair in zip(p.tolist(), q.tolist(), strict=True)]
    assert numbers[2].tolist() == pytest.approx(want, rel=1e-6, abs=1e-9)
    weights = torch.linspace(0.5, 2, TOKENS, dtype=torch.float64)
    got = torch.autograd.grad((numbers[2] * weights).sum(), (student, head))
    whole = torch.autograd.grad((DIVERGENCES.get(name)(p.log(), q.log(), config).sum(-1) * weights).sum(), (student, head))
    for mine, theirs in zip(got, whole, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-8)
    assert torch.allclose(numbers[0], distributions(student, head).log().gather(1, chosen[:, None])[:, 0])


@pytest.mark.parametrize("own", [True, False], ids=["own samples", "the teacher's"])
@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=8)
def test_the_mean_of_the_sampled_estimate_is_the_divergence_and_so_is_its_gradient(name, own, seed):
    """Over all tokens that may be drawn, each as often as it is drawn."""
    config = DivergenceConfig(use=name, beta=0.3, skew=0.2)
    noise = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCABULARY, generator=noise, dtype=torch.float64).requires_grad_()
    student, teacher = logits.log_softmax(-1), torch.randn(VOCABULARY, generator=noise, dtype=torch.float64).log_softmax(-1)
    whole = DIVERGENCES.get(name)(student, teacher, config).sum()
    drawn = (student if own else teacher).detach().exp()
    mean = (drawn * sampled(student, teacher, config, own=own)).sum()
    assert mean.item() == pytest.approx(whole.item(), rel=1e-9, abs=1e-12)
    got, want = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (mean, whole))
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-12)
    if own:  # nothing moves where both agree
        assert (
            not torch.autograd.grad(sampled(student, student.detach(), config, own=True).sum(), logits)[0].abs().max() > 1e-12
        )


def test_on_given_answers_forward_kl_over_the_sampled_token_is_the_likelihood():
    student = torch.tensor([-1.0, -3.0], requires_grad=True)
    sampled(student, torch.tensor([-2.0, -0.1]), DivergenceConfig(use="forward"), own=False).sum().backward()
    assert student.grad.tolist() == pytest.approx([-1, -1])


@given(seed=st.integers(0, 2**32), count=st.integers(1, VOCABULARY))
def test_a_few_tokens_and_the_rest_make_one(seed, count):
    logprobs = (9 * torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(seed))).log_softmax(-1)
    ids = logprobs.topk(count).indices
    found = with_rest(logprobs, ids, None)
    assert torch.equal(found[:, :-1], logprobs.gather(1, ids))
    assert found.exp().sum(1).tolist() == pytest.approx([1] * 5, abs=1e-5)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside another term"])
@pytest.mark.parametrize("over", ["all", "top_k"])
def test_all_logits_never_exist_at_once(over, alone):
    """In the teacher's pass and in the student's update, backward pass included."""
    tokens, vocabulary = 4096, 512
    config = DivergenceConfig(use="jsd", over=over, **({"top_k": 8} if over == "top_k" else {}))
    student, head, teacher, other = models(0, tokens, vocabulary, torch.float32)
    every = tokens * vocabulary * 4

    def update(rows):
        with LiveMemory() as live:
            how = {"entropy_gradient": False, "asked": TeacherPass(over, 17 if over == "top_k" else WIDTH + 2, vocabulary)}
            (row,) = PlainHead(other)(teacher, None, 1.0, rows=rows, **how)
            asked = target(row, other, config, vocabulary, alone=alone)
            numbers = PlainHead(head)(student, torch.zeros(tokens).long(), 1.0, entropy_gradient=False, rows=rows, asked=asked)
            (numbers[2] if alone else numbers[2] - numbers[0]).sum().backward()
        return live.peak

    assert update(256) < every / 2
    assert update(4 * tokens) > 2 * every  # the same measurement sees whole logits


def test_each_token_has_the_teacher_of_its_domain():
    _, _, hidden, weight = models(3)
    wide = models(4)[3][:, :3]
    rows = taught(hidden, weight, "all")
    heads = TeacherHeads([PlainHead(weight), PlainHead(wide)], [WIDTH + 2, 3], VOCABULARY)
    found = heads.logprobs(rows, torch.tensor([0, 1, -1, 0, 1, -1, 0]), TEMPERATURE).exp()
    first, second = distributions(hidden, weight), distributions(hidden[:, :3], wide)
    assert torch.allclose(found[[0, 3, 6]], first[[0, 3, 6]])
    assert torch.allclose(found[[1, 4]], second[[1, 4]])
    assert torch.allclose(found[[2, 5]], torch.full((2, VOCABULARY), 1 / VOCABULARY, dtype=torch.float64))


def test_rows_of_a_teacher_survive_selection_sharing_and_gathering():
    batch = pack(random_groups(4, 3, seed=1))
    rows = torch.randn(len(batch.tokens), 5)
    batch = batch.with_(teacher=rows)
    parts = [batch.select(traces).teacher for traces in batch.shares(3)]
    assert torch.equal(batch.gather(parts), rows)


def test_demonstrations_are_spread_over_minibatches_and_share_apart():
    own, rows = pack(random_groups(4, 2, seed=1)), pack(random_groups(6, 1, seed=2))
    batch = join(own.with_(advantages=torch.ones(len(own.tokens))), rows)
    assert batch.num_samples == 14
    minibatches = [batch.select(traces) for traces in batch.chunks(4)]
    assert [len(mini.sample_of.unique()) for mini in minibatches] == [7, 7]
    assert [int(mini.given[mini.sample_of.unique()].sum()) for mini in minibatches] == [3, 3]
    assert torch.equal(torch.cat([mini.tokens for mini in minibatches]).sort().values, batch.tokens.sort().values)
