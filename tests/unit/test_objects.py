"""Objects in a config: their names, their way to other processes, what a run records of them, and rows of every kind."""

import asyncio
import functools
import math
import pickle
import sys
import threading
import types

import datasets
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumroll import objects
from drumroll.config import load
from drumroll.config.data import DatasetConfig
from drumroll.data.problems import sums
from drumroll.data.rows import read
from drumroll.errors import ConfigError, DataError
from drumroll.objects import describe, held, named, select, take
from drumroll.processes.pool import KillablePool, RemoteError
from drumroll.registry import Registry, import_path

ROWS = [{"prompt": "1+1=", "answer": "2"}]


def module_level(completion):
    return 7.0


def local(thing):
    """A copy of a function or class that no module has, as those of a notebook or a closure."""

    def module_level(completion):
        return 7.0

    class Guess:
        def reset(self, seed): ...
        def step(self, text): ...

    async def solve(task, base_url): ...

    return locals()[thing]


def recipe(**changes):
    return {"data": {"train": {"sums": {"source": ROWS}}}, "reward": "exact", **changes}


# --- names ---


def test_objects_become_names_and_are_kept_beside():
    def correct(completion): ...

    values, kept = take(recipe(reward=[correct, {"use": lambda completion: 1.0, "weight": 0.5}]), {})
    assert values["reward"] == ["python:correct", {"use": "python:lambda", "weight": 0.5}]
    assert values["data"]["train"]["sums"]["source"] == "python:sums"
    assert kept["correct"] is correct
    assert kept["sums"] is ROWS
    assert load(values).config.data.train["sums"].source == "python:sums"


def test_a_function_of_a_module_is_named_by_it_and_needs_no_object():
    values, kept = take(recipe(data={"train": {"sums": {"source": sums}}}), {})
    assert values["data"]["train"]["sums"]["source"] == "drumroll.data.problems:sums"
    assert kept == {}
    assert [folder.endswith("src") for folder in values["import_from"]] == [True]


def test_different_objects_get_different_names_and_the_same_one_its_own():
    first, second = (lambda completion: 0.0), (lambda completion: 1.0)
    values, kept = take(recipe(reward={"a": first, "b": second, "c": first}), {"lambda_2": None})
    assert values["reward"] == {"a": "python:lambda", "b": "python:lambda_3", "c": "python:lambda"}
    assert (kept["lambda"], kept["lambda_3"]) == (first, second)


def test_an_environment_is_a_class_and_an_agent_a_function_that_takes_the_endpoint():
    guess = local("Guess")
    other = {"source": ROWS, "environment": local("solve")}
    values, _ = take(recipe(environment={"use": guess}, data={"train": {"sums": other}}), {})
    assert values["environment"]["use"] == "python:Guess"
    assert values["data"]["train"]["sums"]["environment"] == "agent:python:solve"
    values, _ = take(recipe(environment={"use": lambda task, base_url: 0.0}), {})
    assert values["environment"]["use"] == "agent:python:lambda"
    values, _ = take(recipe(environment={"use": lambda size=3: guess()}), {})
    assert values["environment"]["use"] == "python:lambda"
    values, _ = take(recipe(environment={"use": functools.partial(guess)}), {})
    assert values["environment"]["use"] == "python:Guess"


def test_arguments_hold_plain_values():
    with pytest.raises(ConfigError, match=r"environment\.args\.scorer is function 'module_level', but args holds plain values"):
        take(recipe(environment={"use": "own", "args": {"scorer": module_level}}), {})


@pytest.mark.parametrize("data", [{"train": ROWS}, {"train": {"sums": pd.DataFrame(ROWS)}}])
def test_rows_without_a_source_are_told_where_they_belong(data):
    with pytest.raises(ConfigError, match=r"data\.train.* is a \w+; give rows as data\.train: \{'\w+': \{'source': rows\}\}"):
        take(recipe(data=data), {})


def test_all_names_of_a_config_are_found():
    values = {"reward": ["python:a", {"use": "python:b"}], "environment": {"use": "agent:python:c"}, "n": 1}
    tools = {"environment": {"use": "tools:python:d, python:e"}, "system": "write python: code"}
    assert list(named(values)) == [("reward", "a"), ("reward.use", "b"), ("environment.use", "c")]
    assert [name for _, name in named(tools)] == ["d", "e"]


def test_one_sentence_says_which_objects_to_pass():
    values = {"reward": "python:a", "data": {"train": {"x": {"source": "python:b"}}}}
    with pytest.raises(ConfigError) as told:
        select(values, {"c": 1})
    assert str(told.value) == (
        "reward is python:a and data.train.x.source is python:b: only Python can give these objects; pass objects={'a': ..., 'b': ...} to "
        "drumroll.train, evaluate or rescore, or name a module:function or a file instead."
    )
    assert select(values, {"a": 1, "b": 2, "c": 3}) == {"a": 1, "b": 2}
    assert select(values, {"a": 1}, ("reward",)) == {"a": 1}


# --- finding, here and elsewhere ---


def test_objects_are_found_while_they_are_held():
    with held({"x": module_level}):
        with held({"x": module_level}):  # two runs with the same object
            pass
        assert import_path("python:x", "reward") is module_level
        with pytest.raises(ConfigError, match="still uses another object named 'x'"), held({"x": local}):
            pass
    with pytest.raises(
        ConfigError, match=r"reward is python:x: only Python can give this object; pass objects=\{'x': \.\.\.\}"
    ):
        import_path("python:x", "reward")


def call(path, **arguments):
    async def run():
        pool = KillablePool(1)
        try:
            return await pool.call(path, arguments, 30)
        finally:
            await pool.close()

    return asyncio.run(run())


def test_closures_and_functions_of_lost_modules_run_in_worker_processes(monkeypatch):
    """Other processes cannot import a module that was made here."""
    offset, lost = 3, types.ModuleType("lost")
    monkeypatch.setitem(sys.modules, "lost", lost)
    exec("def own(completion): return 7.0", vars(lost))

    def shifted(x):
        return x + offset

    with held({"shifted": shifted, "own": lost.own}):
        assert call("python:shifted", x=4) == 7
        assert call("python:own", completion="") == 7.0


def test_a_function_that_cannot_travel_says_so_where_it_is_needed():
    lock = threading.Lock()
    with held({"locked": lambda completion: lock.locked()}):
        with pytest.raises(
            RemoteError, match=r"'python:locked' cannot be sent to another process: TypeError: cannot pickle '_thread.lock'"
        ):
            call("python:locked", completion="")
        with pytest.raises(ConfigError, match="reward: 'python:locked' cannot be sent to another process"):
            objects.check_sent("locked", "reward")
        assert import_path("python:locked", "reward")("") is False  # here it works


def test_rows_do_not_travel_and_a_config_takes_functions_along():
    values, kept = take(recipe(reward=local("module_level")), {})
    config = load(values).config
    with held(kept):
        assert objects.pack().keys() == {"module_level"}
        data = pickle.dumps(config)
    with pytest.raises(ConfigError):
        import_path("python:module_level", "reward")
    try:
        assert pickle.loads(data).reward == "python:module_level"
        assert import_path("python:module_level", "reward")("") == 7.0
    finally:
        objects._held.pop("module_level")
        objects._packed.pop("module_level")


def test_traits_travel_with_a_part():
    parts = Registry("part")

    @parts.register("own", per_token=True)
    def own(): ...

    with held({"own": own}):
        packed = objects.pack()
    sent = pickle.loads(packed["own"])
    elsewhere = Registry("part")
    with held({"own": sent}):
        assert elsewhere.traits("python:own") == {"per_token": True}
    with held({"plain": lambda: 0}):
        assert elsewhere.traits("python:plain") == {}


# --- records ---


def test_a_run_records_sources():
    assert describe(module_level) == {"kind": "function", "source": "def module_level(completion):\n    return 7.0\n"}
    assert describe(functools.partial(module_level))["source"].startswith("def module_level")
    assert describe(local("Guess"))["kind"] == "class"
    assert describe(eval("lambda: 0"))["source"] is None
    assert describe(ROWS) == {"kind": "list", "rows": 1}
    assert describe(pd.DataFrame(ROWS)) == {"kind": "DataFrame", "rows": 1}


# --- rows ---


def rows_of(value, **keys):
    with held({"rows": value}):
        return list(read("data.train.x", DatasetConfig(source="python:rows", **keys), 0))


cells = st.none() | st.text(max_size=5)
tables = st.lists(
    st.fixed_dictionaries({"prompt": st.text(min_size=1, max_size=5), "answer": cells, "n": st.integers(-9, 9)}),
    min_size=1,
    max_size=5,
)


@given(tables)
@settings(max_examples=15)
def test_lists_frames_tables_and_datasets_hold_the_same_rows(rows):
    schema = pa.schema([("prompt", pa.string()), ("answer", pa.string()), ("n", pa.int64())])
    table = pa.Table.from_pylist(rows, schema=schema)
    frame = pl.from_arrow(table)
    kinds = [table, table.to_pandas(), frame, frame.lazy(), datasets.Dataset(table), {"train": rows}]
    want = rows_of(rows)
    for kind in kinds:
        assert rows_of(kind) == want, type(kind)


def test_the_index_of_a_pandas_frame_is_no_column_and_missing_values_are_none():
    frame = pd.DataFrame({"prompt": ["a", "b", "c"], "n": [1.0, math.nan, 3.0], "tags": [["x"], ["y", "z"], None]})
    assert rows_of(frame[frame.prompt != "a"]) == [
        {"prompt": "b", "n": None, "tags": ["y", "z"]},
        {"prompt": "c", "n": 3.0, "tags": None},
    ]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ((row for row in ROWS), "rows cannot be read from a generator; give a list of rows, a DataFrame"),
        (pd.DataFrame({"prompt": ["a", "b"], "answer": [1, "x"]}), "the frame mixes types in a column: .*convert it"),
        ({"test": ROWS}, "it has no split 'train'; it has test: set `split`"),
        ([], "python:rows holds no rows"),
    ],
)
def test_what_holds_no_rows_is_one_sentence(value, told):
    with pytest.raises(DataError, match=told):
        rows_of(value)


def test_a_function_yields_rows_by_split_and_seed():
    assert rows_of(lambda split, seed: [{"prompt": f"{split}{seed}"}], split="dev") == [{"prompt": "dev0"}]
