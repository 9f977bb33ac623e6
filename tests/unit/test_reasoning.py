"""Every task of reasoning-gym is a source, its scorer a reward that no text can break."""

import asyncio
import itertools
import json

import pytest
from reasoning_gym.factory import DATASETS

from drumroll.config.data import DatasetConfig
from drumroll.config.reward import RewardConfig
from drumroll.data.reasoning import DENIED
from drumroll.data.rows import read
from drumroll.errors import DataError, MissingExtra
from drumroll.sample import Prompt, Sample

GARBAGE = ("", "garbage", "0", "[]", "{", "1,2", "None", "\x00 \\boxed{", "<answer>x</answer>")


def rows_of(task, count=3, split="train", seed=0, **args):
    rows = read("data.train.x", DatasetConfig(source=f"reasoning_gym:{task}", split=split, args=args), seed)
    return list(itertools.islice(rows, count))


def score(row, completion, **args):
    from drumroll.rewards.reasoning import reasoning_gym

    return reasoning_gym(completion, row["answer"], row["task"], row["metadata"], row["prompt"], **args)


@pytest.mark.parametrize("task", sorted(set(DATASETS) - set(DENIED)))
def test_every_task_gives_rows_whose_own_answer_scores_1_and_garbage_does_not(task):
    rows = rows_of(task)
    for row in rows:
        assert json.dumps(row)
        if row["answer"] is not None:
            assert score(row, row["answer"]) == 1.0
            assert score(row, f"I think so.\n<answer>{row['answer']}</answer>") == 1.0
    for text in GARBAGE:
        others = [row for row in rows if text != row["answer"]]
        assert not others or any(score(row, text) == 0.0 for row in others), f"{text!r} always scores"


@pytest.mark.parametrize("task", ["chain_sum", "letter_counting", "spell_backward"])
def test_splits_never_meet_and_seeds_differ(task):
    train = [r["prompt"] for r in rows_of(task, 800)]
    assert train == [r["prompt"] for r in rows_of(task, 800)]
    assert train != [r["prompt"] for r in rows_of(task, 800, seed=1)]
    assert not set(train) & {r["prompt"] for r in rows_of(task, 200, split="held_out", seed=1)}


def test_args_are_passed_through():
    for row in rows_of("chain_sum", 20, min_terms=2, max_terms=2, min_digits=1, max_digits=1):
        assert len(row["metadata"]["expression"].replace("-", "+").split("+")) == 2


@pytest.mark.parametrize(
    ("task", "args", "sentence"),
    [
        ("game_of_life_halting", {}, "is refused: its scorer gives 1 to any answer"),
        ("chain_sums", {}, "has no task 'chain_sums'. Did you mean 'chain_sum'?"),
        ("chain_sum", {"terms": 2}, "does not take args {'terms': 2}"),
        ("chain_sum", {"min_terms": -1}, "does not take args {'min_terms': -1}"),
        ("chain_sum", {"size": 3}, "args.size is not for you to set"),
    ],
)
def test_what_is_refused(task, args, sentence):
    with pytest.raises(DataError) as caught:
        rows_of(task, **args)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("completion", "value"),
    [("12", 1), ("The sum is 12.", 1), ("so \\boxed{12}", 1), ("<answer>12</answer> or 13", 1), ("12 or 13", 0), ("112", 0)],
)
def test_the_answer_is_extracted_first(completion, value):
    assert score({"answer": "12", "task": "chain_sum", "metadata": {}, "prompt": "7+5"}, completion) == value


def test_partial_credit_only_when_asked_for():
    row = {"answer": "olleh", "task": "spell_backward", "metadata": {"word": "hello"}, "prompt": "hello"}
    assert score(row, "oolleh") == 0.0
    assert 0.0 < score(row, "oollehh", partial=True) < 1.0 or score(row, "ollex", partial=True) > 0.0


def test_it_scores_in_a_process_of_its_own():
    from drumroll.rewards import Scorer

    row = rows_of("prime_factorization")[0]

    async def go():
        scorer = Scorer({"*": [RewardConfig(use="reasoning_gym")]}, 60.0)
        samples = [
            Sample(Prompt("p", "d", row["prompt"], (1,), row), 0, i, completion=c)
            for i, c in enumerate([row["answer"], "x × y"])
        ]
        try:
            for sample in samples:
                await scorer.score(sample)
        finally:
            await scorer.close()
        return samples

    assert [s.reward for s in asyncio.run(go())] == [1.0, 0.0]


def test_without_the_package_its_extra_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(MissingExtra, match=r"reasoning_gym:chain_sum needs .*drumroll\[reasoning-gym\]"):
        rows_of("chain_sum")
