"""A reward is a plain function; what it may not do is that sample's failure, with the reason."""

import asyncio

import pytest

from drumroll.config.reward import RewardConfig
from drumroll.config.roles import JudgeRole
from drumroll.engines import Completion, EngineLost
from drumroll.engines.router import Router
from drumroll.errors import ConfigError
from drumroll.models.loading import load_tokenizer
from drumroll.processes.pool import KillablePool, WorkerDied
from drumroll.rewards import Scorer
from drumroll.rewards.judge_client import open_judge
from drumroll.rewards.text import exact, number
from drumroll.sample import Prompt, Sample, StopReason


def scored(config, completion="7", timeout=30.0, **columns):
    sample = Sample(Prompt("p", "d", "3+4=", (1,), {"answer": "7", **columns}), 0, 0, completion=completion)
    configs = [RewardConfig(use=config)] if isinstance(config, str) else config

    async def go():
        scorer = Scorer({"*": configs}, timeout)
        try:
            await scorer.score(sample)
        finally:
            await scorer.close()

    asyncio.run(go())
    return sample


def test_arguments_come_by_name(mine):
    name = mine("def close(completion, answer, tolerance=1): return 1 - abs(int(completion) - int(answer)) / tolerance")
    assert scored(f"{name}:close").reward == 1.0
    assert scored([RewardConfig(use=f"{name}:close", args={"tolerance": 4})], completion="6").reward == 0.75
    assert scored(f"{name}:close", completion="6", tolerance=2).reward == 0.5  # a column fills an optional argument


def test_async_functions_and_weights(mine):
    name = mine("import asyncio\nasync def slow(completion):\n    await asyncio.sleep(0)\n    return 2")
    rewards = [RewardConfig(use=f"{name}:slow", weight=0.5), RewardConfig(use="exact"), RewardConfig(use="contains", weight=0)]
    sample = scored(rewards)
    assert sample.reward == 2.0
    assert sample.rewards == {"slow": 2.0, "exact": 1.0, "contains": 1.0}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("float('nan')", "returned nan"),
        ("float('inf')", "returned inf"),
        ("'1'", "returned '1', a str"),
        ("[1]", "returned [1], a list"),
    ],
)
def test_bad_values_fail_the_sample(mine, value, text):
    failure = scored(f"{mine(f'def bad(completion): return {value}')}:bad").failure
    assert failure is not None
    assert text in failure.text
    assert failure.boundary == "reward 'bad'"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("raise KeyError('oops')", "KeyError in reward 'f': 'oops'"),
        ("import time; time.sleep(100)", "TimeoutError in reward 'f': took longer than 1 s"),
        ("import os; os._exit(3)", "WorkerDied in reward 'f': the worker process exited with code 3"),
        ("import os; os.kill(os.getpid(), 9)", "the worker process was killed by SIGKILL"),
        ("import sys; sys.exit(0)", "SystemExit in reward 'f'"),
        ("print('noise on stdout'); return 'x'", "returned 'x', a str"),
    ],
)
def test_whatever_a_function_does_is_that_samples_failure(mine, body, sentence):
    assert sentence in str(scored(f"{mine(f'def f(completion): {body}')}:f", timeout=1).failure)


def test_hanging_coroutines_fail_the_sample(mine):
    name = mine("import asyncio\nasync def f(completion): await asyncio.sleep(100)")
    assert "took longer than 0.05 s" in str(scored(f"{name}:f", timeout=0.05).failure)


def test_the_pool_goes_on_after_hangs_and_crashes(mine):
    """Many calls on two processes, a third of them hanging or crashing: each gets its own answer, none is lost."""
    name = mine(
        "import os, time\ndef f(n):\n    if n % 6 == 0: time.sleep(100)\n    if n % 6 == 3: os._exit(1)\n    return n * n\n"
    )

    async def go():
        pool = KillablePool(2)
        try:
            return await asyncio.gather(
                *(pool.call(f"{name}:f", {"n": n}, 2.5) for n in range(18)), return_exceptions=True
            ), pool.restarts
        finally:
            await pool.close()

    answers, restarts = asyncio.run(go())
    for n, answer in enumerate(answers):
        if n % 3:
            assert answer == n * n
        else:
            assert isinstance(answer, TimeoutError if n % 6 == 0 else WorkerDied)
    assert restarts == 6


def test_none_is_not_applicable(mine):
    name = mine("def none(completion): return None")
    assert scored([RewardConfig(use=f"{name}:none"), RewardConfig(use="exact")]).reward == 1.0
    assert scored(f"{name}:none").failure is not None


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        ("exat", "Did you mean 'exact'?"),
        ("nowhere:f", "there is no module 'nowhere'"),
        ("drumroll.rewards.text:exactt", "has no 'exactt'. Did you mean 'exact'?"),
        ("drumroll.rewards.text:NUMBER", "is of type Pattern, not a function"),
    ],
)
def test_rewards_that_do_not_exist(use, sentence):
    with pytest.raises(ConfigError) as caught:
        Scorer({"*": [RewardConfig(use=use)]})
    assert sentence in str(caught.value)


def test_domains_route_and_unknown_ones_are_named():
    scorer = Scorer({"a": [RewardConfig(use="exact")]})
    assert [r.name for r in scorer.rewards("a")] == ["exact"]
    assert scorer.required_columns("a") == [("answer", "reward 'exact'")]
    with pytest.raises(ConfigError, match="no reward for domain 'b'; `reward` names a"):
        scorer.rewards("b")


def test_rewards_of_one_name_are_told_apart(mine):
    one, two = (mine(f"def score(completion, plus=0): return {value} + plus") for value in (1, 2))
    uses = [f"{one}:score", "exact", f"{two}:score", f"{one}:score"]
    sample = scored([RewardConfig(use=use, args={"plus": 0.5} if i == 3 else {}) for i, use in enumerate(uses)])
    assert sample.rewards == {f"{one}.score": 1.0, "exact": 1.0, f"{two}.score": 2.0, f"{one}.score-2": 1.5}
    assert sample.reward == 5.5
    same = [RewardConfig(use="contains"), RewardConfig(use="contains")]
    assert list(scored(same).rewards) == ["contains", "contains-2"]


def test_unknown_arguments_are_refused():
    with pytest.raises(ConfigError, match="takes no argument 'targett'"):
        Scorer({"*": [RewardConfig(use="length", args={"targett": 3})]})


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [("so 3 + 4 = 7.", "7", 1), ("1,234", 1234, 1), ("it is -5", "-5", 1), ("7 or 8", "7", 0), ("", "7", 0), ("7.0", 7, 1)],
)
def test_number(completion, answer, value):
    assert number(completion, answer) == value
    assert exact(f" {answer}\n", answer) == 1


@pytest.mark.parametrize(("says", "reward"), [("Yes.", 1.0), ("no", 0.0), ("0.5 of it", 0.5), ("1", 1.0), ("", 0.0)])
def test_a_judge_is_asked_about_the_answer(says, reward):
    from drumroll.rewards import Scorer

    heard = []

    async def ask(question):
        heard.append(question)
        return says

    scorer = Scorer({"*": [RewardConfig(use="judge", args={"template": "Q {prompt} A {completion}?"})]}, judge=ask)
    sample = Sample(Prompt("p", "d", "2+2", (1,)), 0, 0, completion="4")
    asyncio.run(scorer.score(sample))
    assert (sample.reward, heard) == (reward, ["Q 2+2 A 4?"])


def test_a_reward_that_asks_a_judge_needs_one():
    with pytest.raises(ConfigError, match=r"reward 'judge' asks a judge, but there is none: name one under roles.judge"):
        Scorer({"*": [RewardConfig(use="judge")]})


class Judges:
    """Judges behind a router, of which the first is lost, and the second has to rest in the middle of its answer."""

    def __init__(self):
        self.router = Router()
        self.asked = []
        for name, answer in (("0", self.die), ("1", self.answer)):
            self.router.join(name, answer, 1)

    async def die(self, request):
        raise EngineLost("gone")

    async def answer(self, request):
        self.asked.append((len(request.tokens), request.sampling.max_tokens))
        if len(self.asked) == 1:
            return Completion([TOKENS[0]], [0.0], [0], StopReason.ABORTED)
        return Completion(TOKENS[1:], [0.0] * 2, [0] * 2, StopReason.EOS)


TOKENS = list(load_tokenizer("tiny")("yes")["input_ids"])


def test_a_judge_that_is_lost_or_must_rest_is_asked_again(tmp_path):
    role = JudgeRole(model="tiny", max_tokens=8, backoff=0.01)

    async def main():
        judges = Judges()
        ask = open_judge(role, tmp_path, judges.router, load_tokenizer("tiny"))
        assert await ask("is it?") == "yes"
        (first, all_tokens), (second, rest) = judges.asked
        assert (second - first, all_tokens, rest) == (1, 8, 7)
        assert judges.router.busy() == 0

    asyncio.run(main())


def test_time_with_the_judge_is_not_the_rewards(mine):
    async def slow(question):
        await asyncio.sleep(0.3)
        return "yes"

    def score(use, seconds):
        scorer = Scorer({"*": [RewardConfig(use=use)]}, seconds, judge=slow)
        sample = Sample(Prompt("p", "d", "2+2", (1,)), 0, 0, completion="4")
        asyncio.run(scorer.score(sample))
        return sample

    assert score("judge", 0.1).reward == 1.0
    name = mine("import asyncio\nasync def late(completion, judge):\n    await judge('x')\n    await asyncio.sleep(60)\n")
    assert score(f"{name}:late", 0.1).failure.kind == "TimeoutError"
