"""Generated problems: gold answers are right, flawed ones wrong, and the tiny model knows every character."""

import itertools
import json
import re

import pytest

from drumroll.data.problems import TASKS, demonstrations, preferences
from drumroll.errors import DataError
from drumroll.models.tiny import ALPHABET

TINY = ("sums", "reversal", "programs", "orders", "choices")


def some(task, count=400, **args):
    return list(itertools.islice(TASKS[task]("train", 0, **args), count))


@pytest.mark.parametrize("task", TINY)
def test_the_tiny_model_knows_every_character(task):
    for row in some(task):
        assert set(row["prompt"] + row["answer"] + row["flawed"]) <= set(ALPHABET)
        assert len(row["prompt"]) <= 24
        assert len(row["answer"]) <= 8


@pytest.mark.parametrize("task", TASKS)
def test_rows_can_be_stored_and_repeat_by_seed(task):
    assert json.loads(json.dumps(some(task))) == some(task)
    assert some(task) != list(itertools.islice(TASKS[task]("train", 1), 400))


@pytest.mark.parametrize("task", ["sums", "reversal"])
def test_slips_are_other_answers_near_the_right_one(task):
    rows = list(itertools.islice(preferences("train", 0, task=task, slips=1.0), 400))
    assert all(row["chosen"] == row["answer"] != row["rejected"] != "" for row in rows)
    assert all(abs(len(row["rejected"]) - len(row["answer"])) <= 1 for row in rows)
    plain = list(itertools.islice(preferences("train", 0, task=task), 400))
    some_slips = list(itertools.islice(preferences("train", 0, task=task, slips=0.5), 400))
    assert 120 < sum(a["rejected"] == b["rejected"] for a, b in zip(plain, some_slips, strict=True)) < 280
    assert all(row["rejected"] == row["flawed"] for row in plain)


@pytest.mark.parametrize("task", TASKS)
def test_there_are_enough_different_problems(task):
    assert len({row["prompt"] for row in some(task, 2000)}) > 120
    assert len({r["prompt"] for r in itertools.islice(TASKS[task]("held_out", 0), 1000)}) > 30


def passes(program, tests):
    space = {}
    try:
        exec(program, space)
        return all(space[t["call"]["function"]](*t["call"]["args"]) == t["call"]["expected"] for t in tests)
    except Exception:
        return False


@pytest.mark.parametrize("task", ["programs", "functions"])
def test_programs_pass_their_hidden_tests_and_flawed_ones_do_not(task):
    for row in some(task, 300):
        assert passes(row["prefix"] + row["answer"], row["tests"])
        assert not passes(row["prefix"] + row["flawed"], row["tests"])


def test_programs_show_examples_that_decide():
    """Two rows with the same prompt have the same answer."""
    answers = {}
    for row in some("programs", 3000):
        assert answers.setdefault(row["prompt"], row["answer"]) == row["answer"]


@pytest.mark.parametrize("task", ["choices", "quizzes"])
def test_the_letter_is_that_of_the_right_choice(task):
    for row in some(task):
        a, b = map(int, re.search(r"(\d+) ?\+ ?(\d+)", row["prompt"]).groups())
        assert row["choices"]["ABCD".index(row["answer"])] == str(a + b)
        assert len(set(row["choices"])) == len(row["choices"])
        assert row["flawed"] != row["answer"]
        assert row["flawed"] in "ABCD"[: len(row["choices"])]
        assert all(choice in row["prompt"] for choice in row["choices"])


def test_orders_have_one_right_answer():
    kinds = set()
    for row in some("orders"):
        kind, word, *times = row["prompt"].removesuffix("=").split()
        kinds.add(kind)
        assert row["answer"] == (word * int(times[0]) if kind == "say" else word.upper())
        assert row["flawed"] != row["answer"]
    assert kinds == {"say", "caps"}


KEPT = {
    "keywords:existence": lambda text, keywords: all(k in text.lower() for k in keywords),
    "keywords:forbidden_words": lambda text, forbidden_words: not any(w in text.lower() for w in forbidden_words),
    "length_constraints:number_words": lambda text, relation, num_words: len(re.findall(r"\w+", text)) < num_words,
    "punctuation:no_comma": lambda text: "," not in text,
    "change_case:english_lowercase": lambda text: text == text.lower(),
    "change_case:english_capital": lambda text: text == text.upper(),
    "startend:quotation": lambda text: text[0] == text[-1] == '"',
    "detectable_format:title": lambda text: bool(re.search(r"<<[^\n]+>>", text)),
    "detectable_format:number_bullet_lists": lambda text, num_bullets: len(re.findall(r"(?m)^\* ", text)) == num_bullets,
    "startend:end_checker": lambda text, end_phrase: text.endswith(end_phrase),
}


def test_instructions_are_kept_by_the_answer_and_broken_by_the_flawed_one():
    met = set()
    for row in some("instructions", 1500):
        rules = list(zip(row["instruction_id_list"], row["kwargs"], strict=True))
        assert rules
        for id_, kwargs in rules:
            met.add(id_)
            assert KEPT[id_](row["answer"], **kwargs), (id_, row)
            assert not KEPT[id_](row["flawed"], **kwargs), (id_, row)
    assert met == set(KEPT)


def test_unknown_tasks_and_splits_are_named():
    with pytest.raises(DataError, match=r"there is no task 'sum'; choose one of sums, .*Did you mean 'sums'"):
        demonstrations("train", 0, "sum", 0.5)
    with pytest.raises(DataError, match="split 'test' does not exist"):
        TASKS["programs"]("test", 0)
