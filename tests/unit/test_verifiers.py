"""Right and wrong completions for each verifier."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.config.reward import RewardConfig
from drumroll.errors import ConfigError
from drumroll.processes.pool import KillablePool
from drumroll.rewards import REWARDS, Scorer
from drumroll.rewards.choice import choice
from drumroll.rewards.instructions import CHECKS, check
from drumroll.rewards.structured import tool_call
from drumroll.rewards.text import format, length, normalised, repetition
from drumroll.sample import Prompt, Sample

CITIES = ["London", "Paris", "New York", "Rome"]


@pytest.mark.parametrize(
    "text",
    [
        "B", "b", " B. ", "(B)", "(b)", "[B]", "**B**", "B)", "Answer: B", "answer: (b)", "The answer is B.", "The answer is (B) Paris.",
        "The answer is **B**", r"\boxed{B}", r"\boxed{\text{B}}", r"\boxed{(B)}", r"so $\boxed{\textbf{(B)}\ Paris}$", "<answer>B</answer>",
        "<answer>Paris</answer>", "The correct option is B because it is", "I choose option B", "A is wrong, so the answer is B", "Paris", "It is Paris.",
        "<think>(A)? (C)?</think> (B)", "Final answer: B) Paris", "the answer is paris", "Rome is not in France.\nB. Paris", "Answer:\nB",
    ],
)  # fmt: skip
def test_choice_named_in_many_ways(text):
    for answer in ("B", "b", "(B)", 1, "Paris"):
        assert choice(text, answer, CITIES) == 1.0
        assert choice(text, 0, CITIES) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A",
        "(A) (B) (C) (D)",
        "A) London\nB) Paris\nC) New York",
        "London or Paris",
        "E",
        r"\boxed{F}",
        "Because",
        "I say so",
        "The answer is unclear",
        "Blue",
    ],
)
def test_choice_not_named(text):
    assert choice(text, "B", CITIES) == 0.0
    assert choice(text, "B", dict(zip("ABCD", CITIES, strict=True))) == 0.0


def test_choice_without_options():
    assert choice("the answer is (C)", "C") == 1.0
    assert choice("the answer is Paris", "C") == 0.0
    assert choice("I think it is hard", "I") == 0.0


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("The  Eiffel-Tower!", "eiffel tower", 1),
        ("ＰＡＲＩＳ", "Paris", 1),
        ("Straße", "STRASSE", 1),
        ("a", "A", 1),
        ("the a", "a", 0),
        ("two", ["one", "Two."], 1),
        ("", "", 1),
        ("London", "Paris", 0),
        ("Paris France", "Paris", 0),
    ],
)
def test_normalised(text, answer, value):
    assert normalised(text, answer) == value


THINK = "<think>a b</think>\n<answer>42</answer>\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (THINK, 1), (" " + THINK, 1), ("x" + THINK, 0), (THINK + "x", 0), (THINK + THINK, 0), (THINK.replace("42", " "), 0), (THINK.replace("a b", ""), 0),
        ("<answer>1</answer><think>2</think>", 0), ("<think>1<answer>2</think></answer>", 0), ("<think>1</think> and <answer>2</answer>", 0),
        ("<think>1</think>", 0), ("<answer>1</answer>", 0), ("<think>1</think><answer>2", 0), ("", 0), ("<think><think>1</think><answer>2</answer>", 0),
    ],
)  # fmt: skip
def test_format(text, value):
    assert format(text) == value
    if text.startswith("<think>"):
        assert format(text.removeprefix("<think>"), opened=True) == value


def test_format_with_other_tags():
    assert format("<plan>a</plan><code>b</code><result>c</result>", ["plan", "code", "result"]) == 1.0
    assert format("<plan>a</plan><result>c</result><code>b</code>", ["plan", "code", "result"]) == 0.0


def test_length_and_repetition():
    assert [length("x" * n, target=100, free=50) for n in (0, 50, 75, 100, 1000)] == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert repetition("a b c d e f") == 0.0
    assert repetition("so it is " * 100) < -0.95
    assert repetition("") == 0.0
    assert repetition("a b a b", words=2) == pytest.approx(-1 / 3)


A, B = {"name": "add", "arguments": {"x": 1, "y": [2, "z"]}}, {"name": "now", "arguments": {}}
A_JSON, B_JSON = '{"arguments": {"y": [2.0, "z"], "x": 1}, "name": "add"}', '{"name": "now"}'


@pytest.mark.parametrize(
    ("text", "answer", "value", "share"),
    [
        (A_JSON, A, 1, 1), (f"<tool_call>\n{A_JSON}\n</tool_call>", A, 1, 1), (f"I call\n```json\n{A_JSON}\n```", A, 1, 1), (f"I call {A_JSON} now", A, 1, 1),
        (f"<tool_call>{B_JSON}</tool_call><tool_call>{A_JSON}</tool_call>", [A, B], 1, 1), (f"[{A_JSON}, {B_JSON}]", [B, A], 1, 1),
        ('{"function": {"name": "now", "arguments": "{}"}}', B, 1, 1), (A_JSON, "[" + A_JSON + "]", 1, 1), ("<think>{</think>" + B_JSON, B, 1, 1),
        (f"[{A_JSON}, {A_JSON}]", A, 0, 0.5), (A_JSON, [A, B], 0, 0.5), (A_JSON, B, 0, 0), (A_JSON.replace("1", "true"), A, 0, 0), (A_JSON.replace("1", "2"), A, 0, 0),
        ("", A, 0, 0), ("add(1)", A, 0, 0), ("{", A, 0, 0), ("3", A, 0, 0), (f"<tool_call>{A_JSON}", A, 1, 1), ("<tool_call>x</tool_call>", A, 0, 0),
    ],
)  # fmt: skip
def test_tool_call(text, answer, value, share):
    assert tool_call(text, answer) == value
    assert tool_call(text, answer, fraction=True) == share


def scored(use, rows, **args):
    samples = [Sample(Prompt(str(i), "d", "", (1,), columns), i, 0, completion=c) for i, (c, columns) in enumerate(rows)]

    async def go():
        scorer = Scorer({"*": [RewardConfig(use=use, args=args)]})
        try:
            await asyncio.gather(*map(scorer.score, samples))
        finally:
            await scorer.close()

    asyncio.run(go())
    return samples


def test_regex():
    rows = [
        ("ab12", {"pattern": r"\d+"}),
        ("ab", {"pattern": r"\d+"}),
        ("a\nb", {"pattern": "(?s)a.b"}),
        ("a", {"pattern": "("}),
    ]
    samples = scored("regex", rows)
    assert [s.reward for s in samples] == [1.0, 0.0, 1.0, None]
    assert "the pattern '(' is not a regular expression" in str(samples[3].failure)
    assert [s.reward for s in scored("regex", [(" 12\n", {}), ("a12", {})], pattern=r"\d+", full=True)] == [1.0, 0.0]


def test_json_schema():
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1}},
        "required": ["n"],
        "additionalProperties": False,
    }
    right = [
        '{"n": 3}',
        '{"n": 3.0}',
        'Here:\n```json\n{"n": 3}\n```',
        '```{"n": 3}```',
        'It is {"n": 3}, I think',
        '<think>{</think>{"n": 3}',
    ]
    wrong = ["", "{}", '{"n": 0}', '{"n": "3"}', '{"n": 3, "m": 1}', "[3]", "n: 3", '{"n": NaN}', '{"n": 3']
    samples = scored("json_schema", [(text, {"schema": schema}) for text in right + wrong])
    assert [s.reward for s in samples] == [1.0] * len(right) + [0.0] * len(wrong)
    remote = scored("json_schema", [("{}", {"schema": {"$ref": "https://example.org/schema.json"}})])[0]
    assert "Unresolvable" in str(remote.failure) or "Wrapped" in str(remote.failure)


KEPT_AND_BROKEN = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "Cats and DOGS", "cats"),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "at least"}, "cat cat", "cat"),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "less than"}, "cat", "cat cat"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "category", "a Cat."),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 2, "let_relation": "at least"}, "Eel", "el"),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "Dr. No is in. Is he?",
        "Dr. No is in.",
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "one two", "one two three"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "आदमी जंगल", "बूढ़ा आदमी जंगल"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
        "a\n\nSo, b",
        "so\n\nb",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. me", "Bye. PS me"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P.P.S me", "P.S. me"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n- b\n- c"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "yes"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a* and **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Part", "num_sections": 2},
        "Part 1\na\nPart 2\nb",
        "Part 1\na\nPart",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "a: 1"),
    ("detectable_format:title", {}, "<<On cats>>\nCats.", "<< >>\nCats."),
    ("combination:two_responses", {}, "one ****** two", "one ****** one"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Why?"}, "why? Because.", "Because."),
    ("startend:end_checker", {"end_phrase": "The end."}, 'It is "the end."', "It ends."),
    ("startend:quotation", {}, '"All."', 'All "."'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "I SAY so", "SAY so"),
    ("punctuation:no_comma", {}, "none", "one, two"),
]
IN_ENGLISH = "the old man was walking slowly through the forest and it started to rain"
LANGUAGE = [
    ("language:response_language", {"language": "de"}, "Der alte Mann ging langsam durch den Wald nach Hause.", IN_ENGLISH),
    ("change_case:english_capital", {}, IN_ENGLISH.upper(), IN_ENGLISH),
    ("change_case:english_lowercase", {}, IN_ENGLISH, IN_ENGLISH.capitalize()),
]


@pytest.mark.parametrize(("name", "kwargs", "kept", "broken"), KEPT_AND_BROKEN)
def test_instructions(name, kwargs, kept, broken):
    assert check(kept, [name], [{**kwargs, "unused": None}]) == [True]
    assert check(broken, [name], [kwargs]) == [False]
    assert check(" ", [name], [kwargs]) == [False]


@pytest.mark.parametrize(("name", "kwargs", "kept", "broken"), LANGUAGE)
def test_instructions_on_language(name, kwargs, kept, broken):
    test_instructions(name, kwargs, kept, broken)


def test_all_instructions_are_tested():
    assert {case[0] for case in KEPT_AND_BROKEN + LANGUAGE} == set(CHECKS)
    assert len(CHECKS) == 25


def test_instructions_as_a_reward():
    ids, kwargs = ["punctuation:no_comma", "startend:quotation"], [{}, {"x": None}]
    rows = [(text, {"instruction_id_list": ids, "kwargs": kwargs}) for text in ('"yes"', "yes", "a, b")]
    assert [s.reward for s in scored("instructions", rows)] == [1.0, 0.0, 0.0]
    assert [s.reward for s in scored("instructions", rows, fraction=True)] == [1.0, 0.5, 0.0]
    wrong = scored("instructions", [("x", {"instruction_id_list": ["punctuation:no_coma"], "kwargs": [{}]})])[0]
    assert "there is no instruction 'punctuation:no_coma'. Did you mean 'punctuation:no_comma'?" in str(wrong.failure)


@given(st.text(), st.text())
@pytest.mark.parametrize("name", ["choice", "contains", "exact", "format", "length", "normalised", "number", "repetition"])
def test_built_ins_never_raise(name, completion, answer):
    Scorer({})
    function = REWARDS.get(name)
    alone = name in ("length", "format", "repetition")
    assert -1.0 <= (function(completion) if alone else function(completion, answer)) <= 1.0


def test_what_asks_for_processes_must_be_a_coroutine(mine):
    with pytest.raises(ConfigError, match=r"asks for 'processes', so it must be a coroutine: async def f\(...\)"):
        Scorer({"*": [RewardConfig(use=f"{mine('def f(completion, processes): return 1')}:f")]})


def test_a_coroutine_may_run_functions_in_processes(mine):
    """Its own clock stands still meanwhile: waiting for a process is not billed to it."""
    name = mine(
        "import time\n"
        "def slow(n):\n    time.sleep(0.8)\n    return n\n"
        "async def f(completion, processes):\n    return await processes.run(__name__ + ':slow', {'n': 1})\n"
    )
    samples = [Sample(Prompt("p", "d", "", (1,)), 0, i, completion="x") for i in range(5)]

    async def go():
        scorer = Scorer({"*": [RewardConfig(use=f"{name}:f")]}, 3.0, KillablePool(1))
        try:
            await asyncio.gather(*map(scorer.score, samples))
        finally:
            await scorer.close()

    asyncio.run(go())
    assert [s.reward for s in samples] == [1] * 5
