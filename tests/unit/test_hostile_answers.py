"""Answers meant to break a checker: each costs its sample at most, within its deadline, and the pool stays healthy."""

import asyncio
import resource

import pytest

from drumroll.config.reward import RewardConfig
from drumroll.processes.pool import KillablePool
from drumroll.rewards import Scorer
from drumroll.sample import Prompt, Sample

MEGABYTE = 10**6
MATH = [
    r"10^{10^{10}}", "9999999!", "9" * 5 + "!" * 3, "+".join(["1"] * 100_000), "(" * 300 + "1" + ")" * 300,
    r"\sqrt{" * 200 + "2" + "}" * 200, "9" * MEGABYTE, "x" * MEGABYTE, "{" * 10**5, "}" * 10**5, r"\boxed{" * 10**5, "((" * 10**5,
    "\ud800\udfff\ud800", "\x00" * 1000 + "5", "NaN", "inf", "-Infinity", "1e400", "1e99999999999", f"{'7' * 5000}/{'3' * 5000}",
    r"\frac{1}{0}", "٤١", "４１", "\u202e24\u202c", "$" * 10**5, r"\(" * 10**5, r"2^{2^{2^{2^{2^{2}}}}}", r"\sum_{i=1}^{10^9} i^i",
    r"\int_0^{\infty} e^{e^{e^x}} dx", r"99999999^{99999999}", "5" + " " * MEGABYTE, "answer is " * 10**5, "<answer>" * 10**5, "</think>" * 10**5,
    r"\begin{pmatrix}" * 50, "1" + ",000" * 10**4, "-" * 10**5 + "1",
]  # fmt: skip
CHOICE = [
    "(" * MEGABYTE, "(A) (B) (C) (D)", "A" * MEGABYTE, r"\boxed{" * 10**5 + "B", "\x00B\x00C", "ｂ", "Option " * 10**5, "\u202eC\u202c",
    "**A" * 10**5, "\ud800",
]  # fmt: skip
JSON = [
    "[" * 10**5, "[" * 10**5 + "]" * 10**5, '{"a":' * 10**5, '{"n": NaN}', '{"n": Infinity}', '{"n": "' + "x" * MEGABYTE, "9" * 5000, "```" * 10**5,
    '{"n": 1e400}', "\x00", "\ud800", '{"n": "' + "a" * 40 + '!"}',
]  # fmt: skip
TOOLS = [
    "<tool_call>" * 10**5,
    "<tool_call>" + "[" * 10**5,
    '{"name": 1}',
    '[{"name": "f", "arguments": "{"}]',
    "null",
    "[" * 10**5,
    "\ud800",
]
REGEX = [("a" * 40 + "!", r"(a+)+$"), ("x" * 30, r"(x+x+)+y"), ("1" * 50, r"^(\d|\d\d)+$!"), ("a", "("), ("a", "[" * 10**4)]
SCHEMA = {"type": "object", "properties": {"n": {"type": "string", "pattern": "^(a+)+$"}}, "required": ["n"]}


def ask(config, rows, timeout):
    """All rows at once in one pool of two; then an honest one, which must be right."""
    samples = [Sample(Prompt(str(i), "d", "", (1,), columns), i, 0, completion=c) for i, (c, columns) in enumerate(rows)]

    async def go():
        pool = KillablePool(2)
        scorer = Scorer({"*": [config]}, timeout, pool)
        try:
            await asyncio.gather(*map(scorer.score, samples[:-1]))
            await scorer.score(samples[-1])
            return len(pool._idle)
        finally:
            await pool.close()

    before = cpu_of_workers()
    assert asyncio.run(go()) > 0
    assert cpu_of_workers() - before < (1 + len(rows)) * timeout
    assert samples[-1].reward == 1.0, samples[-1].failure
    return samples[:-1]


def cpu_of_workers():
    """CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("wrap", ["\\boxed{%s}", "%s"], ids=["boxed", "bare"])
def test_math(wrap):
    rows = [(wrap % text, {"answer": "42"}) for text in MATH]
    honest = (r"\boxed{1/2+x}", {"answer": "x+0.5"})
    for text, sample in zip(MATH, ask(RewardConfig(use="math"), [*rows, honest], 20.0), strict=True):
        assert sample.failure is not None or sample.reward == 0.0, text[:50]
        assert sample.failure is None or sample.failure.kind == "WorkerDied", sample.failure


def test_choice():
    rows = [(text, {"answer": "D", "options": ["one", "two", "three", "four"]}) for text in CHOICE]
    honest = ("(D)", {"answer": "D"})

    async def go():
        scorer = Scorer({"*": [RewardConfig(use="choice")]})
        samples = [Sample(Prompt("p", "d", "", (1,), columns), 0, 0, completion=c) for c, columns in [*rows, honest]]
        for sample in samples:
            await scorer.score(sample)
        return [s.reward for s in samples]

    assert asyncio.run(go()) == [0.0] * len(rows) + [1.0]


def test_json_and_schemas_with_patterns():
    rows = [(text, {}) for text in [*JSON, '{"n": "aaa"}']]
    for sample in ask(RewardConfig(use="json_schema", args={"schema": SCHEMA}), rows, 2.0):
        assert sample.reward == 0.0 or "CpuTimeExceeded" in str(sample.failure), sample


def test_tool_calls():
    call = {"name": "f", "arguments": {"x": 1}}
    rows = [(text, {"answer": call}) for text in TOOLS]

    async def go():
        scorer = Scorer({"*": [RewardConfig(use="tool_call")]})
        samples = [Sample(Prompt("p", "d", "", (1,), columns), 0, 0, completion=c) for c, columns in rows]
        for sample in samples:
            await scorer.score(sample)
        return [s.reward for s in samples]

    assert asyncio.run(go()) == [0.0] * len(rows)


def test_regular_expressions():
    rows = [(text, {"pattern": pattern}) for text, pattern in [*REGEX, ("abc", "b")]]
    for sample in ask(RewardConfig(use="regex"), rows, 2.0):
        assert sample.failure is not None
        assert sample.failure.kind in ("CpuTimeExceeded", "ValueError")
        assert not sample.failure.passing  # another try would end alike
