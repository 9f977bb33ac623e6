"""Rows to imitate as traces: from files larger than memory, from runs, cut and dropped as the recipe says."""

import json
import tracemalloc
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data import chat_renderer

from drumroll.config import SFTConfig
from drumroll.config.data import DatasetConfig
from drumroll.data import files
from drumroll.data.demonstrations import Demonstrations
from drumroll.data.render import Renderer
from drumroll.data.rows import place, read
from drumroll.data.source import _Stream
from drumroll.errors import BadRow, ConfigError, DataError
from drumroll.models import tiny
from drumroll.sample import Owner

RENDERER = Renderer(tiny.tokenizer())
EPISODES = {
    "source": "drumroll.envs.rows:demonstrations",
    "args": {"env": "frozen_lake", "style": "compact", "form": "episodes"},
}


def demonstrations(rows=EPISODES, renderer=RENDERER, heard=None, data=(), **changes):
    made = {"train": {"rows": rows}, "max_prompt_tokens": 40, **dict(data)}
    config = SFTConfig(**{"pipeline": "sft", "model": "tiny", "steps": 1, "batch": 4, "data": made, **changes})
    return Demonstrations(config, renderer, (lambda text: None) if heard is None else heard.append)


def traces(**changes):
    return [group.samples[0].traces[0] for group in demonstrations(**changes).groups()]


def written(path, rows):
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    return {"source": str(path)}


def test_all_tokens_are_trained_when_asked_for():
    for plain, whole in zip(traces(), traces(train_on="all"), strict=True):
        assert plain.tokens == whole.tokens
        assert {Owner.PROMPT, Owner.POLICY} < set(plain.owners)
        assert whole.owners == [Owner.PROMPT] + [Owner.POLICY] * (len(whole.tokens) - 1)


def test_a_long_row_is_cut_dropped_or_refused(tmp_path):
    for whole, short in zip(traces(), traces(max_tokens=50), strict=True):
        assert short.tokens == whole.tokens[:50]
    rows = written(tmp_path / "x.jsonl", [{"prompt": "1+1=", "completion": "2" * n} for n in (1, 2, 30, 40)])
    common = {"rows": rows, "max_tokens": 20, "data": {"epochs": 1}}
    heard = []
    cut = demonstrations(heard=heard, **common)
    assert sorted(len(g.samples[0].traces[0].tokens) for g in cut.groups()) == [7, 8, 20, 20]
    assert (cut.metrics()["data/truncated"], len(heard)) == (2, 1)
    assert "is cut to max_tokens=20" in heard[0]
    dropping = demonstrations(overlong="drop", heard=heard, **common)
    assert (len(dropping.groups()), dropping.metrics()["data/dropped/long"]) == (2, 2)
    assert heard[1].partition("x.jsonl:")[2][0] in "57"
    assert "is dropped, because it has no room in max_tokens: 20 or its prompt none in data.max_prompt_tokens: 40" in heard[1]
    with pytest.raises(DataError, match=r"x\.jsonl:[57] has (36|46) tokens, more than max_tokens=20; set overlong"):
        demonstrations(overlong="fail", **common).groups()
    prompts = {"epochs": 1, "max_prompt_tokens": 4}
    with pytest.raises(
        DataError, match=r"no row of the training data can be used: 4 as 'long' .first: .*x\.jsonl:\d: it has no room"
    ):
        demonstrations(**{**common, "data": prompts}).groups()
    kept = demonstrations(**{**common, "data": {**prompts, "overlong": "truncate"}}).groups()
    assert {len(g.samples[0].traces[0].owners) - len(g.samples[0].policy_tokens()) for g in kept} == {4}
    with pytest.raises(DataError, match=r"x\.jsonl:\d has a prompt of 5 tokens"):
        demonstrations(**{**common, "data": {**prompts, "overlong": "fail"}}).groups()


@pytest.mark.parametrize("epochs", [1, 2, 1.5])
def test_every_row_is_trained_as_often_as_epochs_say_also_after_a_resume(tmp_path, epochs):
    count = 10
    rows = [{"prompt": f"{n}=", "completion": f"{n}"} for n in range(count)]
    rows[4]["completion"] = None
    source, heard = written(tmp_path / "x.jsonl", rows), []

    def opened():
        return demonstrations(source, heard=heard, data={"epochs": epochs}, batch=3)

    first, seen, states = opened(), [], []
    while groups := first.groups():
        seen.append([group.prompt.content for group in groups])
        states.append((json.loads(json.dumps(first.state())), len(seen)))
    trained = Counter(prompt for batch in seen for prompt in batch)
    assert trained["4="] == 0
    if epochs == int(epochs):
        assert all(trained[f"{n}="] == epochs for n in range(count) if n != 4)
        assert first.metrics() == {"data/epoch": epochs, "data/dropped/bad": epochs}
        assert len([text for text in heard if "x.jsonl:9 is dropped, because" in text]) == 1  # blank lines between
    else:
        assert sum(trained.values()) + first.dropped["bad"] == count * epochs
    for state, done in states:
        again = opened()
        again.restore(state)
        rest = []
        while groups := again.groups():
            rest.append([group.prompt.content for group in groups])
        assert rest == seen[done:]
        assert again.state() == first.state()


def test_a_first_row_that_is_bad_ends_the_run_with_its_place(tmp_path):
    source = written(tmp_path / "x.jsonl", [{"prompt": "a", "completion": 3}])
    with pytest.raises(BadRow, match=r"must be a text or messages, got 3 .int.\. It is .*x\.jsonl:1\."):
        demonstrations(source).groups()
    chat = written(tmp_path / "y.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(
        DataError,
        match=r"1000 consecutive rows cannot be used; dropped so far: 1000 as 'untrained' .first: .*y\.jsonl:1: train_on: ",
    ):
        demonstrations(chat, chat_renderer()).groups()


def test_a_column_that_chooses_turns_must_be_there(tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": talk, "mine": [False, True]}, {"messages": talk}]
    source, common = written(tmp_path / "x.jsonl", rows), {"data": {"epochs": 1, "shuffle": False}}
    made = demonstrations(source, chat_renderer(), train_column="mine", **common)
    assert (len(made.groups()), made.metrics()["data/dropped/bad"]) == (1, 1)
    with pytest.raises(
        BadRow, match=r"a row has no 'other', which train_column names; it has completion, messages, mine\. It is .*:1"
    ):
        demonstrations(source, chat_renderer(), train_column="other", **common).groups()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_on": []}, "nothing would be trained"),
        ({"train_on": "all", "train_column": "x"}, "leave train_column out"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, said):
    with pytest.raises((ConfigError, ValueError), match=said):
        demonstrations(**changes)


# --- data larger than memory ---


def parted(folder, rows, kind):
    """Rows in three files of a folder."""
    folder.mkdir()
    for number in range(3):
        part, path = rows[number::3], folder / f"train-{number}.{kind}"
        if kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in part))
        else:
            pq.write_table(pa.Table.from_pylist(part), path, row_group_size=50)
    return [row for number in range(3) for row in rows[number::3]]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_large_files_are_not_held_in_memory(tmp_path, kind, monkeypatch):
    """And the order of rows is that of rows in a list."""
    monkeypatch.setattr(files, "HELD", 1000)
    text = "word " * 200
    rows = [{"prompt": f"{n}", "completion": f"{n} {text}", **({"more": n} if n % 3 == 1 else {})} for n in range(6000)]
    given = parted(tmp_path / "rows", rows, kind)
    config = DatasetConfig(source=str(tmp_path / "rows"))
    pool = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        table = read("x", config, 0)
        stream = _Stream(None, table, 1.0, "0/x")
        lazily = [stream.next()[1] for _ in range(6500)]
        assert [table[i]["prompt"] for i in range(0, 6000, 370)] == [given[i]["prompt"] for i in range(0, 6000, 370)]
        assert sum(1 for _ in table) == len(table) == 6000
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = sum(len(row["completion"]) for row in rows)
    assert held < size / 10
    assert peak < size / 2
    assert pa.total_allocated_bytes() - pool < size / 10
    listed = _Stream(None, given, 1.0, "0/x")
    assert [listed.next()[1] for _ in range(6500)] == lazily
    for i in (0, 2050, 5999):
        assert {k: v for k, v in table[i].items() if v is not None} == given[i]
    assert place("x", config, 2050).endswith(
        "train-1.jsonl:51" if kind == "jsonl" else "row 51 of " + str(tmp_path / "rows/train-1.parquet")
    )


def test_lines_that_are_no_rows_are_named_when_they_are_read(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n[1]\n{"prompt": \n\xff\n')
    table = read("x", DatasetConfig(source=str(path)), 0)
    assert (len(table), table[0]) == (4, {"prompt": "a"})
    for i, said in (
        (1, "x.jsonl:3 must be an object with columns, it is a list"),
        (2, "x.jsonl:4 is not valid JSON"),
        (3, "x.jsonl:5 is not"),
    ):
        with pytest.raises(DataError, match=said):
            table[i]
    for key in ({"where": "reward > 1"}, {"best": 1}):
        with pytest.raises(DataError, match=r"chooses samples of a run directory, and .* is none"):
            read("x", DatasetConfig(source=str(path), **key), 0)
