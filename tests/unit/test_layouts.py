"""Rows as other libraries and datasets lay them out are read as they are; sources of all kinds give the same rows."""

import json
import sys
from typing import get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data import chat_renderer

from drumroll.config import load
from drumroll.config.data import DatasetConfig
from drumroll.data.layouts import _IFEVAL, LAYOUTS, arrange, instruction
from drumroll.data.rows import read
from drumroll.data.source import Reader, no_columns
from drumroll.errors import DataError, MissingExtra

USER = [{"role": "user", "content": "What is 1+1?"}]
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(5)]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(tmp_path, rows, kind="parquet", **config):
    """Through a file of the same schema, as a user would read them."""
    path = write(tmp_path / f"rows.{kind}", rows)
    return list(read("data.train.x", DatasetConfig(source=str(path), **config), 0))


def prompt_of(row, **config):
    return Reader("data.train.x", DatasetConfig(source="x", **config), chat_renderer(), no_columns).prompt(row, 0)


def test_the_config_names_every_layout():
    assert get_args(DatasetConfig.model_fields["layout"].annotation) == tuple(LAYOUTS)


# --- libraries ---


@pytest.mark.parametrize("layout", ["auto", "verl"])
def test_verl(tmp_path, layout):
    given = {
        "data_source": "openai/gsm8k",
        "prompt": USER,
        "ability": "math",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 7, "split": "train"},
    }
    [row] = rows_of(tmp_path, [given], layout=layout)
    assert (row["answer"], row["domain"], row["extra_info"]["index"]) == ("2", "openai-gsm8k", 7)
    prompt = prompt_of(row)
    assert (prompt.domain, prompt.content, prompt.columns["answer"]) == ("openai-gsm8k", tuple(USER), "2")
    [row] = rows_of(tmp_path, [given], tag="data_source", tags={"openai/gsm8k": "math"}, columns={"place": "extra_info.index"})
    assert (row["domain"], row["place"]) == ("math", 7)
    assert rows_of(tmp_path, [given], tag="ability")[0]["domain"] == "math"
    assert "answer" not in rows_of(tmp_path, [given], layout="plain")[0]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_trl(tmp_path, kind):
    text = rows_of(tmp_path, [{"prompt": "1+1=", "completion": "2"}], kind)[0]
    assert (text["prompt"], text["completion"]) == ("1+1=", "2")
    chat = rows_of(tmp_path, [{"prompt": USER, "completion": [{"role": "assistant", "content": "2"}]}], kind)[0]
    assert (prompt_of(chat).content, chat["completion"]) == (tuple(USER), "2")
    whole = rows_of(tmp_path, [{"messages": [*USER, {"role": "assistant", "content": "2"}]}], kind)[0]
    assert prompt_of(whole).columns["completion"] == "2"
    assert rows_of(tmp_path, [{"prompt": USER, "solution": "2"}], kind)[0]["answer"] == "2"
    both = rows_of(tmp_path, [{"prompt": USER, "solution": "long", "answer": "2"}], kind)[0]
    assert (both["answer"], both["solution"]) == ("2", "long")


def test_conversations_of_sharegpt_are_messages():
    turns = [("system", "be kind"), ("human", "hi"), ("gpt", "call"), ("observation", "4"), ("gpt", "yes")]
    expected = [{"role": role, "content": text} for role, text in
                (("system", "be kind"), ("user", "hi"), ("assistant", "call"), ("tool", "4"), ("assistant", "yes"))]  # fmt: skip
    dataset = DatasetConfig(source="x.jsonl")
    row = {"conversations": [{"from": who, "value": text} for who, text in turns]}
    assert arrange("x", dataset, row)["messages"] == expected
    assert arrange("x", dataset, {"conversations": expected})["messages"] == expected
    called = {
        "conversations": [{"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}],
        "system": "be kind",
    }
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    assert arrange("x", dataset, called)["messages"] == [{"role": "system", "content": "be kind"}, call]
    for other in (
        {"conversations": "hi"},
        {"conversations": [{"text": "hi"}]},
        {"conversations": None},
        {"messages": [], **row},
    ):
        assert arrange("x", dataset, other).get("messages") in (None, [])


def test_columns_and_tags(tmp_path):
    rows = [{"q": "1+1=", "meta": '{"keys": [{"gold": 2}]}', "kind": k} for k in ("a", "b", "c")]
    found = rows_of(
        tmp_path, rows, columns={"prompt": "q", "answer": "meta.keys.0.gold"}, tag="kind", tags={"a": "math", "b": "math"}
    )
    assert [(r["prompt"], r["answer"], r["domain"]) for r in found] == [
        ("1+1=", 2, "math"),
        ("1+1=", 2, "math"),
        ("1+1=", 2, "c"),
    ]
    with pytest.raises(DataError, match=r"data.train.x: a row has no 'meta.gold'; it has kind, meta, q"):
        rows_of(tmp_path, rows, "jsonl", columns={"answer": "meta.gold"})


# --- the data of the ROLL paper, each as its published schema has it ---


def test_deepmath(tmp_path):
    given = {"question": "2+2?", "final_answer": "4", "difficulty": 5.0, "topic": "Algebra"}
    [row] = rows_of(tmp_path, [given | {f"r1_solution_{n}": f"way {n}" for n in (1, 2, 3)}], layout="deepmath")
    expected = {"prompt": "2+2?", "answer": "4", "completion": "way 1", "difficulty": 5.0, "topic": "Algebra"}
    assert row == expected
    with pytest.raises(DataError, match=r"a row has no 'question' \(layout: deepmath\); it has final_answer"):
        rows_of(tmp_path, [{"final_answer": "4"}], "jsonl", layout="deepmath")


def test_kodcode(tmp_path):
    test = "from solution import twice\n\ndef test_small():\n    assert twice(1) == 2\n"
    given = {
        "version": "v1", "style": "instruct", "subset": "Prefill", "question_id": "P_1", "question": "Write twice(x).",
        "solution": "def twice(x):\n    return 2 * x", "test": test, "test_info": [{"function_name": "twice"}],
        "gpt_pass_percentage": 1.0,
    }  # fmt: skip
    [row] = rows_of(tmp_path, [given], layout="kodcode")
    assert (row["prompt"], row["answer"], row["tests"]) == ("Write twice(x).", given["solution"], [{"pytest": test}])
    assert row["gpt_pass_percentage"] == 1.0
    assert "question" not in row


def test_multi_subject(tmp_path):
    query = [{"role": "system", "content": "Reason."}, {"role": "user", "content": "What causes tides?"}]
    [row] = rows_of(tmp_path, [{"query": query, "label": "The moon", "subject": "none"}], layout="multi_subject")
    assert (prompt_of(row).content, row["answer"]) == (tuple(query), "The moon")


def test_crossthink(tmp_path):
    given = {
        "data_source": "crossthink_qa", "prompt": USER, "ability": "qa",
        "reward_model": {"ground_truth": "(A)", "style": "rule"}, "meta_data": {"index": 1, "question": "?", "split": "train"},
    }  # fmt: skip
    [row] = rows_of(tmp_path, [given], "jsonl", layout="crossthink")
    assert (row["prompt"], row["answer"]) == (USER, "(A)")
    assert "domain" not in row


def ifeval(tmp_path, **truth):
    every = dict.fromkeys(["N", "quantifier", "keyword_list", "word", "letter", "end_phrase", "i", "first_word"])
    given = {
        "messages": USER, "ground_truth": json.dumps(every | truth), "dataset": "ifeval",
        "constraint_type": "Some", "constraint": "Do so.",
    }  # fmt: skip
    [row] = rows_of(tmp_path, [given], layout="rlvr_ifeval")
    assert row["prompt"] == USER
    return list(zip(row["instruction_id_list"], row["kwargs"], strict=True))


def test_rlvr_ifeval(tmp_path):
    assert ifeval(tmp_path, func_name="validate_lowercase") == [("change_case:english_lowercase", {})]
    keywords = ("keywords:existence", {"keywords": ["a", "b"]})
    assert ifeval(tmp_path, func_name="verify_keywords", keyword_list=["a", "b"]) == [keywords]
    words = "length_constraints:number_words"
    found = ifeval(tmp_path, func_name="validate_word_constraint", N=50, quantifier="at most")
    assert found == [(words, {"relation": "less than", "num_words": 51})]
    around = ifeval(tmp_path, func_name="validate_word_constraint", N=50, quantifier="around")
    assert [k for _, k in around] == [{"relation": "at least", "num_words": 45}, {"relation": "less than", "num_words": 56}]
    letters = ifeval(tmp_path, func_name="verify_letter_frequency", letter="q", N=3)
    assert [k["let_frequency"] for _, k in letters] == [3, 4]  # at least 3 and less than 4
    assert all(k["letter"] == "q" for _, k in letters)
    with pytest.raises(DataError, match="known function in 'ground_truth'"):
        ifeval(tmp_path, func_name="validate_mood")


def test_every_function_of_rlvr_ifeval_has_an_instruction():
    assert len(_IFEVAL) == 25
    for name in _IFEVAL:
        ids, kwargs = instruction({"func_name": name, "N": 3, "quantifier": "at least"})
        assert len(ids) == len(kwargs) == 1
        assert ":" in ids[0]


# --- sources ---


def read_all(source, **config):
    return list(read("data.train.x", DatasetConfig(source=str(source), **config), 0))


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_directories_of_files(tmp_path, kind):
    write(tmp_path / "data" / f"train-00000-of-00002.{kind}", ROWS[:2])
    write(tmp_path / "data" / f"train-00001-of-00002.{kind}", ROWS[2:4])
    write(tmp_path / "data" / f"test-00000-of-00001.{kind}", ROWS[4:])
    assert read_all(tmp_path) == ROWS[:4]
    assert read_all(tmp_path, limit=3) == ROWS[:3]
    assert read_all(tmp_path, split="test") == ROWS[4:]
    with pytest.raises(DataError, match=r"has no files of split 'held_out'; it has train, test: set `split`"):
        read_all(tmp_path, split="held_out")


def test_directories_without_splits_are_read_whole(tmp_path):
    write(tmp_path / "a" / "one.jsonl", ROWS[:2])
    write(tmp_path / "b" / "two.parquet", ROWS[2:])
    assert read_all(tmp_path, split="held_out") == ROWS
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no .jsonl, .json, .csv, .parquet files"):
        read_all(tmp_path / "empty")


def test_directories_saved_by_datasets(tmp_path):
    import datasets

    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "one")
    assert read_all(tmp_path / "one") == ROWS
    datasets.DatasetDict({"train": whole.select(range(3)), "test": whole.select([3, 4])}).save_to_disk(tmp_path / "two")
    assert read_all(tmp_path / "two") == ROWS[:3]
    assert read_all(tmp_path / "two", split="test") == ROWS[3:]
    with pytest.raises(DataError, match="has no split 'dev'; it has train, test"):
        read_all(tmp_path / "two", split="dev")


def test_directories_are_found_beside_the_recipe(tmp_path, monkeypatch):
    write(tmp_path / "rows" / "train.jsonl", ROWS)
    (tmp_path / "recipe.yaml").write_text("data: {train: {x: {source: rows}}}\nreward: exact\n")
    config = load(tmp_path / "recipe.yaml").config
    assert config.data.train["x"].source == str(tmp_path / "rows")


@pytest.mark.parametrize("source", ["hf:owner/name", "owner/name"])
def test_the_hub_out_of_reach_is_one_sentence(source, monkeypatch):
    import datasets

    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub (LocalEntryNotFoundError)\nmore\nlines")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError) as caught:
        read_all(source, args={"config": "main"})
    assert "'owner/name' (split 'train') could not be read from the Hugging Face hub: Couldn't reach" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_hub_takes_a_config_a_split_and_what_else_datasets_takes(tmp_path):
    write(tmp_path / "main" / "train.jsonl", ROWS)
    found = read_all(
        "hf:json",
        split="train[:3]",
        args={"data_files": str(tmp_path / "main" / "train.jsonl"), "cache_dir": str(tmp_path / "c")},
    )
    assert found == ROWS[:3]


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"reading 'owner/name' from the Hugging Face hub needs .*drumroll\[datasets\]"):
        read_all("hf:owner/name")
