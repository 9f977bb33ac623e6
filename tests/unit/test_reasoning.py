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


# --- scorers that evaluate what a model wrote ---

PAYLOADS = (
    "__import__('pathlib').Path({path!r}).write_text('x')",
    "[open({path!r}, 'w').close()]",
    "[c for c in [open({path!r}, 'w')]]",
    "exec({code!r})",
    "x + exec({code!r})",
    "exp(exec({code!r}))",
    "{code!r}",  # a string: sympy evaluates those that it meets in a formula
    "sin({code!r})",
    "(lambda: open({path!r}, 'w'))()",
    "x.__class__.__base__.__subclasses__()",
    "f'{{open({path!r}, chr(119))}}'",
    "ｏpen({path!r}, 'w')",
)
SECRETS = ("problem", "integrand")
"""Columns of a row's metadata that scorers evaluate."""


@pytest.mark.parametrize("task", sorted(set(DATASETS) - set(DENIED)))
def test_no_answer_and_no_row_is_run_as_code(task, tmp_path):
    """Scorers of the library evaluate answers; one that writes a file must not write it."""
    made = tmp_path / "made"
    code = f"open({str(made)!r}, 'w').close()"
    for row in rows_of(task, 1):
        for payload in PAYLOADS:
            text = payload.format(path=str(made), code=code)
            evil = {name: text if name in SECRETS else value for name, value in row["metadata"].items()}
            score(row, f"<answer>{text}</answer>", partial=True)
            score(row | {"answer": text}, f"<answer>{row['answer']}</answer>", partial=True)
            score(row | {"metadata": evil}, f"<answer>{row['answer']}</answer>", partial=True)
            assert not made.exists(), text


def test_no_turn_in_its_environment_is_run_as_code(tmp_path):
    from drumroll.envs.builtin import make

    made = tmp_path / "made"
    game = make("reasoning_gym:countdown")
    game.reset(0)
    step = game.step(f"<answer>open({str(made)!r}, 'w')</answer>")
    assert step.reward == 0.0
    assert not made.exists()


def test_every_scorer_that_evaluates_is_known():
    """A new version of the library may evaluate answers in further tasks."""
    import inspect
    import re

    from drumroll.rewards.reasoning import EVALUATED

    evaluates = re.compile(r"\b(?:eval|exec|parse_expr|sympify|literal_eval|lambdify|__import__)\(")
    making = {
        "basic_arithmetic",
        "codeio",
        "gsm_symbolic",
        "propositional_logic",
    }  # questions, not answers; a parser of its own
    found = {task for task, (kind, _) in DATASETS.items() if evaluates.search(inspect.getsource(inspect.getmodule(kind)))}
    assert found - making == EVALUATED.keys()


def test_what_a_scorer_may_evaluate():
    from drumroll.rewards.reasoning import data, formula

    for text in ("3*(4 + 5)-7/2", "x**3/3 + C", "-exp(-x)*sin(2*x) + sqrt(x + 1)", "0x1f & ~0x3 << 2", "1.5e3*x"):
        assert formula(text), text
    for text in (
        "'a'",
        "x.y",
        "x[0]",
        "open(x)",
        "f(x)(y)",
        "sin(x=1)",
        "lambda: 1",
        "[1]",
        "(x := 1)",
        "x if y else z",
        "__a",
        "",
        "1;2",
    ):
        assert not formula(text), text
    for text in ("[1, 2]", "[['Q', '_']]", " (1, -2)", "ABC", "_ Q\nQ _", "[" * 5000, "\0"):
        assert data(text), text
    for text in ("[open()]", "list()", "'a' * 3", "x.y", "x[0]", "[x for x in y]", "f'{x}'", "(lambda: 1)"):
        assert not data(text), text


def test_other_solutions_than_the_rows_own_still_count():
    """The check of texts takes nothing from what the library accepts."""
    row = next(r for r in rows_of("n_queens", 50) if len(r["metadata"]["valid_answers"]) > 1)
    for answer in row["metadata"]["valid_answers"]:
        assert score(row, f"<answer>{answer}</answer>") == 1.0
        board = repr([line.split() for line in answer.splitlines()])
        assert score(row, f"<answer>{board}</answer>", partial=True) == 0.5
    row = {"answer": "x**2/2 + C", "task": "simple_integration", "prompt": "", "metadata": {"integrand": "x", "variable": "x"}}
    assert score(row, "<answer>(x**2 + sin(x)**2 + cos(x)**2)/2</answer>") == 1.0
