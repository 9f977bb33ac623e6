"""`math`: what counts as the final answer, and when it is the right one."""

import asyncio
from decimal import Decimal
from fractions import Fraction
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.config.reward import RewardConfig
from drumroll.processes.pool import KillablePool
from drumroll.rewards import Scorer
from drumroll.rewards.extraction import final_answer, last_boxed
from drumroll.rewards.maths import plain, quick
from drumroll.rewards.numbers import read
from drumroll.sample import Prompt, Sample


def scores(pairs, use="math", column="answer", timeout=60.0, **options):
    """The reward of each (completion, gold) pair, in one pool."""

    async def go():
        pool = KillablePool(2)
        scorer = Scorer({"*": [RewardConfig(use=use, **options)]}, timeout, pool)
        samples = [Sample(Prompt(str(i), "d", "", (1,), {column: g}), i, 0, completion=c) for i, (c, g) in enumerate(pairs)]
        try:
            await asyncio.gather(*map(scorer.score, samples))
        finally:
            await pool.close()
        return samples, pool

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2", "1"),  # the second is cut off
        (r"\boxed{\text{a {b} c}}", r"\text{a {b} c}"),
        (r"\boxed{ \{1, 2\} }", r"\{1, 2\}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\fbox{3}", "3"),
        (r"so 5 or \boxed{12", None),
        (r"<think>\boxed{9}</think><answer>8</answer>", "8"),
        ("<answer> 12 </answer> trailing 13", "12"),
        ("<answer>12", "12"),
        ("6 * 7\n#### 42\n", "42"),
        ("The answer is 42.", "42"),
        ("**Answer:** $x^2$ as 3 is", "x^2"),
        ("The final answer is: **-3.5**", "-3.5"),
        ("the answer is 4. No! The answer is 5 because 2+3", "5"),
        (r"thus $\frac{3}{4}$.", r"\frac{3}{4}"),
        (r"we get \[ x + 1 \]", "x + 1"),
        ("it costs $5, so $6 in all", "6"),
        ("first 3, then 1,234.5 apples", "1,234.5"),
        ("5-3 is 2", "2"),
        ("it is 3/4", "3/4"),
        ("about 12.5%", "12.5%"),
        ("H2O", None),
        ("no idea", None),
        ("", None),
    ],
)
def test_the_final_answer(text, answer):
    assert final_answer(text) == answer


RIGHT = [
    # by text and numbers
    ("42", "42"), ("42.0", "42"), ("+42", "42"), ("1,234", "1234"), ("1{,}234", "1234"), ("1\\,234", "1234"), (".5", "0.5"),
    ("0.50", r"\frac{1}{2}"), (r"\dfrac12", "0.5"), ("1/2", "0.5"), ("2/4", "1/2"), (r"-\frac{1}{2}", "-0.5"),
    ("1 1/2", "1.5"), (r"1\frac{1}{2}", "3/2"), ("50%", "0.5"), (r"50\%", "50"), ("50 percent", "50%"), ("2e3", "2000"),
    (r"2 \times 10^{3}", "2000"), ("x = 5", "5"), (r"\$5.00", "5"), (r"5\text{ cm}", "5"), ("5 dollars", "5"),
    (r"45^\circ", "45"), (r"45^{\circ}", "45°"), ("−3", "-3"), ("$7$", "7"), ("7.", "7"), (r"\left(1, 2\right)", "(1,2)"),
    ("Paris", "paris"), (r"\text{Yes}", "yes"), ("x+1", "x + 1"), ("1e400", "1e400"), ("B", "B"),
    # by math-verify
    (r"2\sqrt{2}", r"\sqrt{8}"), ("x^2+2x+1", "(x+1)^2"), (r"\frac{\pi}{2}", r"0.5\pi"), (r"\{2, 1\}", r"\{1,2\}"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"), ("2^{10}", "1024"), ("3!", "6"), (r"(-\infty, 3)", r"(-\infty,3)"),
]  # fmt: skip
WRONG = [
    ("41", "42"), ("42.1", "42"), ("1.234", "1234"), ("12/34", "1/2"), ("11/2", "3/2"), ("5", "50%"), ("2 million", "2"),
    ("-3", "3"), ("1e400", "inf"), ("inf", "1e400"), ("nan", "5"), ("1/0", "5"), ("", "5"), ("five", "5"), ("5x", "5"),
    ("London", "Paris"), ("listen", "silent"), (r"\sqrt{8}", "3"), ("(2, 1)", "(1, 2)"), ("x^2", "x^3"), ("A", "B"),
    (r"\frac{1}{", "1"), ("0.333", "1/3"), ("1 2", "12"),
]  # fmt: skip


def test_right_and_wrong_answers():
    pairs = [(rf"so \boxed{{{answer}}}", gold) for answer, gold in RIGHT + WRONG]
    samples, pool = scores(pairs)
    missed = [p for p, s in zip(RIGHT, samples[: len(RIGHT)], strict=True) if s.reward != 1.0]
    fooled = [p for p, s in zip(WRONG, samples[len(RIGHT) :], strict=True) if s.reward != 0.0]
    assert (missed, fooled, pool.restarts) == ([], [], 0)


@pytest.mark.parametrize("gold", [r"We add: \boxed{12}", "6+6=12\n#### 12", 12, 12.0, "$12$"])
def test_the_gold_answer_may_be_a_solution(gold):
    assert scores([("12", gold)])[0][0].reward == 1.0


def test_our_short_cuts_give_the_verdicts_of_math_verify(monkeypatch):
    """The two-stage parser and `decide` change how long it takes, not what comes out."""
    from latex2sympy2_extended import latex2sympy2
    from math_verify import parse, verify

    from drumroll.rewards.symbolic import Parser, equal_expressions, slow_number

    pairs = [(plain(a), plain(g)) for a, g in RIGHT + WRONG if a and not plain(a).isalpha()]
    for n in range(2, 5):
        pairs += [(f"x^2+{2 * n + 1}x-1x+{n * n + off}", f"(x+{n})^2") for off in (0, 1)]
        pairs += [(rf"\frac{{{6 * n + off}\pi}}{{6}}", rf"{n}\pi") for off in (0, 1)]
        pairs += [(rf"({n}, \frac{{{3 * n + off}}}{{3}})", f"({n}, {n})") for off in (0, 1)]
        pairs += [(rf"\{{{2 * n}, {n}\}}", rf"\{{{n}, {2 * n + off}\}}") for off in (0, 1)]
        pairs += [
            (rf"0.{n}\sqrt{{2}}", rf"\frac{{{n}\sqrt{{2}}}}{{10}}"),
            (rf"\sin({n})^2+\cos({n})^2", "1"),
            (f"x < {n}", f"{n} > x"),
        ]
    ours = [equal_expressions(answer, gold) for answer, gold in pairs]
    monkeypatch.setattr(latex2sympy2, "PSParser", Parser)
    monkeypatch.setattr(latex2sympy2._Latex2Sympy, "parse_number", slow_number)
    unhurried = partial(parse, parsing_timeout=None)  # by default it has 5 s of wall time
    theirs = [verify(unhurried(f"${gold} $"), unhurried(f"${answer} $"), timeout_seconds=None) for answer, gold in pairs]
    assert [pair for pair, one, other in zip(pairs, ours, theirs, strict=True) if one != other] == []
    assert 0.3 < sum(ours) / len(ours) < 0.8


# --- properties ---

NUMBERS = st.fractions(min_value=-(10**9), max_value=10**9, max_denominator=10**4)


def spellings(number):
    """Ways to write a fraction."""
    sign, top, bottom = "-" if number < 0 else "", abs(number.numerator), number.denominator
    yield f"{number.numerator}/{number.denominator}"
    yield rf"{sign}\frac{{{top}}}{{{bottom}}}"
    yield rf"{sign} \dfrac{{{top}}} {{{bottom}}}"
    yield f"${sign}{top:,}/{bottom:,}$"
    if top > bottom > 1:
        yield f"{sign}{top // bottom} {top % bottom}/{bottom}"
    exact = Decimal(number.numerator) / Decimal(number.denominator)
    if Fraction(exact) == number:
        yield f"{exact:f}"
        yield f"{exact:,f}"
        yield f"{exact * 100:f}%"


@given(NUMBERS, st.data())
def test_spellings_of_a_number_are_equal(number, data):
    a, b = (data.draw(st.sampled_from(list(spellings(number)))) for _ in range(2))
    assert quick(plain(a), plain(b)) is True


@given(NUMBERS, NUMBERS, st.data())
def test_other_numbers_are_not(one, other, data):
    a = data.draw(st.sampled_from([s for s in spellings(one) if "%" not in s]))
    b = data.draw(st.sampled_from([s for s in spellings(other) if "%" not in s]))
    assert quick(plain(a), plain(b)) is (one == other)


@given(st.text(), st.text())
def test_comparing_is_symmetric_and_never_raises(a, b):
    first, second = read(plain(a)), read(plain(b))
    if first is not None and second is not None:
        assert first.same(second) == second.same(first)
    assert quick(plain(a), plain(a)) is True
    quick(plain(a), plain(b))


CONTENT = st.recursive(
    st.text("abc12+-\\frac ", min_size=1, max_size=5).map(lambda s: s.replace("\\", "")),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda parts: "{" + "".join(parts) + "}"),
    max_leaves=8,
)


@given(st.text(), CONTENT, st.text().filter(lambda t: "{" not in t and "}" not in t))
def test_a_box_is_found_whatever_is_around_it(before, content, after):
    before = before.rstrip("\\")  # \\boxed is a line break and a word
    assert last_boxed(f"{before}\\boxed{{{content}}}{after}") == content.strip()


@given(st.text())
def test_extraction_never_raises_and_invents_nothing(text):
    found = final_answer(text)
    assert found is None or found in text
