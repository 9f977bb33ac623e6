"""A reward model in training: its scores are transformers' own, its loss that of a slow loop, on any layout of ranks."""

import math
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batch import random_groups
from test_parallel import EVERYWHERE, FAMILIES, LIMITS, ROLES, SIZES, Matrix
from torch.nn.functional import logsigmoid

from drumroll.algorithms.aggregations import unit_mean
from drumroll.algorithms.losses import RewardLoss, Scores
from drumroll.config.optim import OptimConfig
from drumroll.config.roles import LoraConfig, RewardModelRole
from drumroll.data.preferences import margin_of
from drumroll.errors import BadRow, ModelError
from drumroll.learners import Learner, Update
from drumroll.learners.backend import LearnerSpec
from drumroll.learners.backends import find_backend
from drumroll.learners.heads import ScoreHead, Settings
from drumroll.learners.ranks import ALONE
from drumroll.models import tiny
from drumroll.models.loading import load
from drumroll.models.score import SCORE, find_padding, score_model
from drumroll.pipelines.reward_model import scored
from drumroll.rewards.model import Classifier
from drumroll.runfiles.calibration import Calibration


def pairs(count=5, seed=0):
    groups = random_groups(count, 2, seed=seed)
    for i, group in enumerate(groups):
        group.samples[0].reward, group.samples[1].reward = 1.0, 0.0
        group.samples[0].rewards["margin"] = 0.3 * i
    return scored(groups)


def open_learner(folder, lora=None, dtype="float32", **optim):
    head, config = ScoreHead(folder), OptimConfig(**optim)
    return Learner(find_backend("torch")(LearnerSpec(folder, head, ALONE, config, dtype, lora=lora)), config, head)


def rows_of(batch):
    return [row.tolist() for row in batch.tokens.split(batch.lengths.tolist())]


def plain(path, batch):
    """What transformers' classifier gives each row by itself."""
    module = hf.AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return torch.cat([module(torch.tensor([row])).logits[:, 0] for row in rows_of(batch)])


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_exported_classifier(family, tmp_path):
    """Also of the reward that asks it, with rows padded together; and training goes on from it."""
    batch, source = pairs(), Matrix(tmp_path).model(family)
    learner = open_learner(source, lr=1e-3, micro_tokens=30)
    learner.update(Update(batch, RewardLoss(), unit_mean))
    (tmp_path / "out").mkdir()
    learner.export(tmp_path / "out")
    found = learner.infer(batch)[batch.mask]
    assert found.std() > 1e-3
    assert torch.allclose(plain(tmp_path / "out", batch), found, atol=1e-5)
    asked = Classifier(RewardModelRole(model=str(tmp_path / "out"))).score(rows_of(batch))
    assert torch.allclose(torch.tensor(asked), found, atol=1e-5)
    again = open_learner(str(tmp_path / "out"))
    assert torch.allclose(again.infer(batch)[batch.mask], found, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_trained_with_the_score_head(tmp_path, dtype):
    """The rest stays as it was; merged and alone, the exports score as the learner does, alone by peft's own loader."""
    from peft import AutoPeftModelForSequenceClassification

    batch, source = pairs(), Matrix(tmp_path).model("Llama")
    learner = open_learner(source, LoraConfig(rank=4), dtype, lr=1e-2, micro_tokens=30)
    before = {name: p.detach().clone() for name, p in learner.backend.model.module.named_parameters()}
    for _ in range(3):
        learner.update(Update(batch, RewardLoss(), unit_mean))
    after = dict(learner.backend.model.module.named_parameters())
    moved = {name for name, p in after.items() if not torch.equal(p, before[name])}
    assert moved == {name for name in after if "lora_" in name or name == SCORE}
    (tmp_path / "out").mkdir()
    learner.export(tmp_path / "out")
    near, found = 1e-5 if dtype == "float32" else 0.05, learner.infer(batch)[batch.mask]
    assert torch.allclose(plain(tmp_path / "out", batch).float(), found, atol=near)
    alone = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "out/adapter", num_labels=1).eval()
    with torch.no_grad():
        theirs = torch.cat([alone(torch.tensor([row])).logits[:, 0] for row in rows_of(batch)])
    assert torch.allclose(theirs.float(), found, atol=near)


def test_a_new_head_is_drawn_by_the_seed(tmp_path):
    source, heads = Matrix(tmp_path).model("Llama"), []
    with torch.random.fork_rng():
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            heads.append(score_model(load(source), source).module.score.weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert heads[0].std().item() == pytest.approx(0.02, rel=0.4)


def test_a_model_without_a_score_head_in_transformers_is_refused(tmp_path):
    granite = hf.GraniteForCausalLM(hf.GraniteConfig(**SIZES, vocab_size=96))
    with pytest.raises(ModelError, match="no class that scores sequences with models of type 'granite'"):
        score_model(SimpleNamespace(module=granite, tokenizer=tiny.tokenizer(), eos={2}), "x")
    hf.LlamaForSequenceClassification(hf.LlamaConfig(**SIZES, vocab_size=96, num_labels=3)).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is a classifier with 3 labels; a reward model has one"):
        score_model(load(str(tmp_path)), str(tmp_path))


def test_padding_is_a_token_that_ends_no_row():
    """Else the end token would be taken for padding, and the score would be that of the token before it."""
    tokenizer = tiny.tokenizer()
    assert find_padding(SimpleNamespace(tokenizer=tokenizer, eos=frozenset({2}))) == tokenizer.pad_token_id
    tokenizer.pad_token = tokenizer.eos_token
    found = find_padding(SimpleNamespace(tokenizer=tokenizer, eos=frozenset({2})))
    assert found not in (None, tokenizer.eos_token_id)


# --- the loss ---


@given(st.integers(1, 6), st.floats(0, 0.5), st.integers(0, 99))
@settings(max_examples=30)
def test_the_loss_is_that_of_a_slow_loop(count, center, seed):
    noise = torch.Generator().manual_seed(seed)
    scores = torch.randn(2 * count, generator=noise, dtype=torch.float64, requires_grad=True)
    margins = torch.rand(2 * count, generator=noise, dtype=torch.float64)
    order = torch.randperm(2 * count, generator=noise)
    unit, chosen = order // 2, order % 2 == 0
    per_answer, stats = RewardLoss(center)(Scores(scores, chosen, unit, count, margins))
    slow, right = scores.new_zeros(()), 0
    for pair in range(count):
        (good,), (bad,) = (((unit == pair) & (chosen == which)).nonzero()[:, 0].tolist() for which in (True, False))
        slow = slow - logsigmoid(scores[good] - scores[bad] - margins[good]) + center * (scores[good] + scores[bad]) ** 2
        right += bool(scores[good] > scores[bad])
    grads = [torch.autograd.grad(loss, scores)[0] for loss in (per_answer.mean(), slow / count)]
    assert torch.allclose(per_answer.mean(), slow / count)
    assert torch.allclose(*grads)
    assert stats["accuracy"].mean().item() == pytest.approx(right / count)


def test_only_the_last_token_of_each_answer_is_scored():
    batch = pairs()
    assert batch.mask.sum() == batch.num_traces == batch.num_samples
    ends = batch.lengths.cumsum(0) - 1
    assert torch.equal(batch.mask.nonzero()[:, 0], ends)
    assert torch.allclose(batch.margins, 0.3 * batch.group_of)


def test_margins_are_read_from_rows():
    assert margin_of({"margin": "0.5"}, "column", "x") == 0.5
    assert margin_of({"score_chosen": 4, "score_rejected": 1.5}, "scores", "x") == 2.5
    for row, kind in (({"chosen": ""}, "column"), ({"score_chosen": 4}, "scores"), ({"margin": None}, "column")):
        with pytest.raises(BadRow, match=f"x: margin: {kind} needs numbers in"):
            margin_of(row, kind, "x")


def test_calibration_by_hand():
    """Three pairs at 0.6 (two right), one tie, one sure and wrong."""
    at = math.log(0.6 / 0.4)
    found = Calibration.of([at + 1e-4, at + 1e-4, -at - 1e-4, 0.0, -50.0])
    assert found.pairs == [1, 0, 3, 0, 0, 0, 0, 0, 0, 1]
    assert found.observed[2] == pytest.approx(2 / 3)
    assert found.observed[0] == found.predicted[0] == 0.5
    assert (found.observed[9], found.predicted[9]) == (0.0, pytest.approx(1.0))
    assert found.error == pytest.approx((3 * abs(2 / 3 - 0.6) + 0 + 1) / 5, abs=1e-4)
    sure = torch.randn(20000, generator=torch.Generator().manual_seed(0)) * 2
    right = torch.rand(20000, generator=torch.Generator().manual_seed(1)) < torch.sigmoid(sure.abs())
    assert Calibration.of(torch.where(right, sure.abs(), -sure.abs()).tolist()).error < 0.02


# --- ranks ---


def with_reward(rank, function, *job):
    """Ranks are forked early, so each gets the role when it works."""
    ROLES["reward"], ROLES["reward LoRA"] = (ScoreHead("none"), None), (ScoreHead("none"), LoraConfig(rank=4, alpha=8))
    return function(rank, *job)


class Rewards(Matrix):
    """Updates of a reward model, with margins and centring and without, as every layout is given them."""

    def run(self, layout, *job):
        return super().run(layout, with_reward, *job)

    def works(self, family, role):
        return [
            Update(pairs(13), RewardLoss(0.1), unit_mean),
            Update(pairs(12, 1).with_(margins=None), RewardLoss(), unit_mean),
        ]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    made = Rewards(tmp_path_factory.mktemp("models"))
    yield made
    made.close()


@pytest.mark.parametrize(("layout", "role"), [("shard 2", "reward"), ("shard 2", "reward LoRA"), ("tensor 2", "reward")])
def test_ranks_train_a_reward_model_as_one_process(matrix, layout, role):
    found = matrix.compare(layout, "Llama", role, "float64")
    assert found.within(LIMITS["float64"]), found


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "options"), EVERYWHERE)
def test_every_backend_and_layout_trains_a_reward_model(matrix, layout, options):
    found = matrix.compare(layout, "Qwen3", "reward", "float32", **options)
    assert found.within(LIMITS["float32"]), found


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_deepspeed_trains_adapters_of_a_reward_model(matrix, zero):
    found = matrix.compare("shard 2", "Qwen3", "reward LoRA", "float32", backend="deepspeed", zero=zero)
    assert found.within(LIMITS["float32"]), found


def test_a_score_before_the_last_token_is_found(tmp_path, monkeypatch):
    """A mutation: the head reads the state before a token, as the others do."""
    batch, learner = pairs(), open_learner(Matrix(tmp_path).model("Llama"))
    found = learner.infer(batch)[batch.mask]
    monkeypatch.setattr(ScoreHead, "inference", lambda self, temperature: Settings())
    assert (learner.infer(batch)[batch.mask] - found).abs().max() > 1e-2
