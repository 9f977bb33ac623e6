"""A reward is a plain function; what it may not do is that sample's failure, with the reason."""

import asyncio
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.config.reward import RewardConfig
from drumroll.errors import ConfigError
from drumroll.rewards import REWARDS, Scorer
from drumroll.rewards.text import exact, number
from drumroll.sample import Prompt, Sample


@pytest.fixture
def mine(monkeypatch):
    module = types.ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


def scored(config, completion="7", timeout=30.0, **columns):
    sample = Sample(Prompt("p", "d", "3+4=", (1,), {"answer": "7", **columns}), 0, 0, completion=completion)
    configs = [RewardConfig(use=config)] if isinstance(config, str) else config
    asyncio.run(Scorer({"*": configs}, timeout).score(sample))
    return sample


def test_arguments_come_by_name(mine):
    mine.close = lambda completion, answer, tolerance=1: 1 - abs(int(completion) - int(answer)) / tolerance
    assert scored("mine:close").reward == 1.0
    assert scored([RewardConfig(use="mine:close", args={"tolerance": 4})], completion="6").reward == 0.75
    assert scored("mine:close", completion="6", tolerance=2).reward == 0.5  # a column fills an optional argument


def test_async_functions_and_weights(mine):
    async def slow(completion):
        await asyncio.sleep(0)
        return 2

    mine.slow = slow
    sample = scored(
        [RewardConfig(use="mine:slow", weight=0.5), RewardConfig(use="exact"), RewardConfig(use="contains", weight=0)]
    )
    assert sample.reward == 2.0
    assert sample.rewards == {"slow": 2.0, "exact": 1.0, "contains": 1.0}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), "returned nan"),
        (float("inf"), "returned inf"),
        ("1", "returned '1', a str"),
        ([1], "returned [1], a list"),
    ],
)
def test_bad_values_fail_the_sample(mine, value, text):
    mine.bad = lambda completion: value
    failure = scored("mine:bad").failure
    assert failure is not None
    assert text in failure.text
    assert failure.boundary == "reward 'bad'"


def test_exceptions_and_hangs_fail_the_sample(mine):
    def broken(completion):
        raise KeyError("oops")

    async def hangs(completion):
        await asyncio.sleep(100)

    mine.broken, mine.hangs = broken, hangs
    assert str(scored("mine:broken").failure) == "KeyError in reward 'broken': 'oops'"
    assert "took longer than 0.05 s" in str(scored("mine:hangs", timeout=0.05).failure)


def test_none_is_not_applicable(mine):
    mine.none = lambda completion: None
    assert scored([RewardConfig(use="mine:none"), RewardConfig(use="exact")]).reward == 1.0
    assert scored("mine:none").failure is not None


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        ("exat", "Did you mean 'exact'?"),
        ("nowhere:f", "there is no module 'nowhere'"),
        ("drumroll.rewards.text:exactt", "has no 'exactt'. Did you mean 'exact'?"),
        ("drumroll.rewards.text:NUMBER", "is a Pattern, not a function"),
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


def test_unknown_arguments_are_refused():
    with pytest.raises(ConfigError, match="takes no argument 'targett'"):
        Scorer({"*": [RewardConfig(use="length", args={"targett": 3})]})


@given(st.text(), st.text())
@pytest.mark.parametrize("name", sorted(REWARDS.parts))
def test_built_ins_never_raise(name, completion, answer):
    function = REWARDS.get(name)
    value = function(completion=completion) if name == "length" else function(completion=completion, answer=answer)
    assert 0.0 <= value <= 1.0


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [("so 3 + 4 = 7.", "7", 1), ("1,234", 1234, 1), ("it is -5", "-5", 1), ("7 or 8", "7", 0), ("", "7", 0), ("7.0", 7, 1)],
)
def test_number(completion, answer, value):
    assert number(completion, answer) == value
    assert exact(f" {answer}\n", answer) == 1
