"""A sequence classifier scores prompt and completion; those who wait together are scored together."""

import asyncio

import pytest
import torch

from drumroll.config.reward import RewardConfig
from drumroll.config.roles import RewardModelRole
from drumroll.errors import ConfigError, ModelError
from drumroll.models import tiny
from drumroll.rewards import Scorer
from drumroll.rewards.model import Classifier, RewardModel
from drumroll.sample import Prompt, Sample
from drumroll.workers.group import LocalGroup, Role


def classifier(path, labels=1, seed=0):
    """A tiny random classifier, saved as a Hugging Face directory."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(seed)
    tokenizer = tiny.tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, num_labels=labels,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def scores(role, pairs, **how):
    async def go():
        model = RewardModel(role, LocalGroup(Role.REWARD_MODEL, [Classifier(role)]), tiny.tokenizer(), **how)
        try:
            return await asyncio.gather(*(model(p, c) for p, c in pairs)), model.passes
        finally:
            await model.close()

    return asyncio.run(go())


PAIRS = [("1+1=", "2"), ("1+1=", "33333333"), ("rev ab=", "ba"), ("x", ""), ("1+1=", "2")]


def test_batches_change_nothing(tmp_path):
    path = classifier(tmp_path / "m")
    alone, passes = scores(RewardModelRole(model=path, batch_size=1), PAIRS)
    together, few = scores(RewardModelRole(model=path, batch_size=3), PAIRS)
    assert together == pytest.approx(alone, abs=1e-5)
    assert (passes, few) == (5, 2)
    assert alone[0] == alone[4] != alone[1]
    assert scores(RewardModelRole(model=path, batch_size=3), PAIRS, alone=True) == (alone, 5)  # of deterministic runs


def test_it_is_the_models_own_number(tmp_path):
    from transformers import AutoModelForSequenceClassification

    path, tokenizer = classifier(tmp_path / "m"), tiny.tokenizer()
    module = AutoModelForSequenceClassification.from_pretrained(path).eval()
    tokens = [tokenizer.bos_token_id, *tokenizer.encode("1+1=2", add_special_tokens=False), tokenizer.eos_token_id]
    expected = module(torch.tensor([tokens])).logits.item()
    assert scores(RewardModelRole(model=path), PAIRS[:1])[0] == [pytest.approx(expected, abs=1e-5)]
    cut = module(torch.tensor([tokens[-3:]])).logits.item()
    assert scores(RewardModelRole(model=path, max_tokens=3), PAIRS[:1])[0] == [pytest.approx(cut, abs=1e-5)]


def test_of_several_classes_one_is_the_score(tmp_path):
    path = classifier(tmp_path / "m", labels=3)
    each = [scores(RewardModelRole(model=path, label=n), PAIRS[:1])[0][0] for n in range(3)]
    assert sum(each) == pytest.approx(1.0)
    assert scores(RewardModelRole(model=path), PAIRS[:1])[0] == [pytest.approx(each[2])]
    with pytest.raises(ModelError, match=r"roles.reward_model.label: 3, but .* has 3 outputs"):
        Classifier(RewardModelRole(model=path, label=3))


def test_a_language_model_is_no_reward_model():
    with pytest.raises(ModelError, match=r"is no sequence classifier: it has no score.weight"):
        Classifier(RewardModelRole(model=str(tiny.SHIPPED["tiny"])))


def test_as_a_reward(tmp_path):
    role = RewardModelRole(model=classifier(tmp_path / "m"))
    expected = scores(role, PAIRS[:1])[0][0]

    async def go():
        model = RewardModel(role, LocalGroup(Role.REWARD_MODEL, [Classifier(role)]), tiny.tokenizer())
        scorer = Scorer({"*": [RewardConfig(use="reward_model", weight=2.0)]}, reward_model=model)
        sample = Sample(Prompt("p", "d", "1+1=", (1,)), 0, 0, completion="2")
        await scorer.score(sample)
        await model.close()
        return sample

    assert asyncio.run(go()).reward == pytest.approx(2 * expected)
    with pytest.raises(
        ConfigError, match=r"reward 'reward_model' asks a reward model, but there is none: name one under roles"
    ):
        Scorer({"*": [RewardConfig(use="reward_model")]})


def test_what_breaks_a_pass_fails_its_samples_and_the_next_goes_on(tmp_path):
    role = RewardModelRole(model=classifier(tmp_path / "m"), batch_size=1)

    async def go():
        model = RewardModel(role, LocalGroup(Role.REWARD_MODEL, [Classifier(role)]), tiny.tokenizer())
        module = model.group.workers[0].module
        good, model.group.workers[0].module = module, None
        broken = await asyncio.gather(model("a", "b"), return_exceptions=True)
        model.group.workers[0].module = good
        found = await model("a", "b")
        await model.close()
        return broken[0], found

    broken, found = asyncio.run(go())
    assert isinstance(broken, AttributeError)
    assert isinstance(found, float)
