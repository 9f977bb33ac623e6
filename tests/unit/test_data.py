"""Rows in, prompts out: shares hold, splits never meet, the order resumes, mistakes are named."""

import itertools
import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumroll.components import scan_data
from drumroll.config import load
from drumroll.config.data import DataConfig, DatasetConfig
from drumroll.data.conversation import Conversation
from drumroll.data.problems import TASKS, demonstrations
from drumroll.data.render import Renderer
from drumroll.data.rows import read
from drumroll.data.source import PromptSource, no_columns
from drumroll.errors import ConfigError, DataError
from drumroll.models import tiny
from drumroll.rollout.admission import Admission
from drumroll.sample import Owner

RENDERER = Renderer(tiny.tokenizer())
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_renderer(template=TEMPLATE):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    return Renderer(tokenizer)


def source(tmp_path, rows, required=lambda domain: (), renderer=RENDERER, dataset=(), **config):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    train = {"rows": DatasetConfig(source=str(path), **dict(dataset))}
    return PromptSource(DataConfig(train=train, **config), 0, renderer, required)


@pytest.mark.parametrize("task", TASKS)
def test_splits_never_meet(task):
    train = {r["prompt"] for r in itertools.islice(TASKS[task]("train", 0), 3000)}
    held_out = {r["prompt"] for r in itertools.islice(TASKS[task]("held_out", 1), 1000)}
    assert train
    assert held_out
    assert not train & held_out


@pytest.mark.parametrize("task", TASKS)
def test_teachers_are_wrong_as_often_as_told(task):
    rows = list(itertools.islice(demonstrations("train", 0, task, 0.7), 2000))
    wrong = sum(r["completion"] != r["answer"] for r in rows) / 2000
    assert 0.6 < wrong < 0.75
    assert all(r["completion"] in (r["answer"], r["flawed"]) for r in rows)


@given(st.dictionaries(st.sampled_from("abcde"), st.floats(0.05, 5), min_size=1), st.integers(1, 200))
def test_mixture_holds_to_one_prompt_at_any_time(mixture, draws):
    train = {n: DatasetConfig(source="drumroll.data.problems:sums") for n in mixture}
    made = PromptSource(DataConfig(train=train, mixture=mixture), 0, RENDERER)
    counts = dict.fromkeys(mixture, 0)
    total = sum(mixture.values())
    for n in range(1, draws + 1):
        counts[made.draw().domain] += 1
        for name, share in mixture.items():
            assert abs(counts[name] - share / total * n) <= max(1, len(mixture) - 1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_epochs_cover_every_row_and_the_order_resumes(tmp_path, shuffle):
    rows = [{"prompt": f"p{i}"} for i in range(7)]
    made = source(tmp_path, rows, shuffle=shuffle)
    drawn = [made.draw().content for _ in range(21)]
    for epoch in range(3):
        assert sorted(drawn[7 * epoch : 7 * epoch + 7]) == sorted(r["prompt"] for r in rows)
    assert (drawn[:7] == drawn[7:14]) != shuffle
    resumed = source(tmp_path, rows, shuffle=shuffle)
    other = source(tmp_path, rows, shuffle=shuffle)
    for _ in range(10):
        other.draw()
    resumed.restore(json.loads(json.dumps(other.state())))
    assert [resumed.draw().content for _ in range(11)] == drawn[10:]


def test_function_sources_resume():
    config = DataConfig(train={"sums": DatasetConfig(source="drumroll.data.problems:sums")})
    first = PromptSource(config, 5, RENDERER)
    drawn = [first.draw().content for _ in range(20)]
    second = PromptSource(config, 5, RENDERER)
    for _ in range(8):
        second.draw()
    third = PromptSource(config, 5, RENDERER)
    third.restore(second.state())
    assert [third.draw().content for _ in range(12)] == drawn[8:]


def test_epochs_end_the_data(tmp_path):
    made = source(tmp_path, [{"prompt": "a"}, {"prompt": "b"}], epochs=2)
    for _ in range(4):
        assert not made.exhausted()
        made.draw()
    assert made.exhausted()


def datasets(folder, sizes, **more):
    """Datasets of so many rows; their prompts say which row of which dataset they are."""
    for name, size in sizes.items():
        text = "".join(json.dumps({"prompt": f"{name}{row}"}) + "\n" for row in range(size))
        (folder / f"{name}.jsonl").write_text(text)
    config = DataConfig(train={name: DatasetConfig(source=str(folder / f"{name}.jsonl")) for name in sizes}, **more)
    return PromptSource(config, 0, RENDERER)


@given(st.dictionaries(st.sampled_from("abcde"), st.integers(1, 9), min_size=1), st.integers(1, 3), st.integers(0, 40))
@settings(max_examples=20)
def test_epochs_draw_every_row_of_every_dataset_as_often(sizes, epochs, stop):
    """Also through a resume; every dataset is spread over the whole run."""
    with TemporaryDirectory() as folder:
        made, drawn = datasets(Path(folder), sizes, epochs=epochs), []
        while not made.exhausted():
            drawn.append(made.draw().content)
            if len(drawn) == stop:
                state = json.loads(json.dumps(made.state()))
                made = datasets(Path(folder), sizes, epochs=epochs)
                made.restore(state)
    assert Counter(drawn) == {f"{name}{row}": epochs for name, size in sizes.items() for row in range(size)}
    total = len(drawn)
    for name, size in sizes.items():
        for n in range(total):
            assert abs(sum(each[0] == name for each in drawn[:n]) - n * size * epochs / total) <= len(sizes)


def test_with_a_mixture_epochs_are_those_of_the_largest_dataset(tmp_path):
    made = datasets(tmp_path, {"a": 6, "b": 2}, epochs=1, mixture={"a": 0.5, "b": 0.5})
    drawn = Counter()
    while not made.exhausted():
        drawn[made.draw().content] += 1
    assert all(drawn[f"a{row}"] == 1 for row in range(6))
    assert drawn["b0"] + drawn["b1"] in (5, 6)


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", '{"prompt": "a"}'), ("a.json", '[{"prompt": "a"}]'), ("a.csv", "prompt\na\n")]
)
def test_a_mark_of_byte_order_is_no_part_of_a_row(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert list(read("x", DatasetConfig(source=str(tmp_path / name)), 0)) == [{"prompt": "a"}]


def test_a_path_in_a_directory_that_is_here_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(DataError, match="x: cannot read runs/nope: No such file"):
        read("x", DatasetConfig(source="runs/nope"), 0)


def test_overlong_prompts(tmp_path):
    rows = [{"prompt": "x" * 50}, {"prompt": "ok"}]
    dropping = source(tmp_path, rows, max_prompt_tokens=10, shuffle=False)
    assert [dropping.draw().content for _ in range(3)] == ["ok"] * 3
    assert dropping.overlong == 3
    cut = source(tmp_path, rows, max_prompt_tokens=10, shuffle=False, overlong="truncate").draw()
    assert len(cut.tokens) == 10
    with pytest.raises(DataError, match=r"51 tokens, more than data.max_prompt_tokens=10"):
        source(tmp_path, rows, max_prompt_tokens=10, shuffle=False, overlong="fail").draw()
    with pytest.raises(DataError, match="1000 prompts in a row"):
        source(tmp_path, rows[:1], max_prompt_tokens=10).draw()


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=3), st.integers(1, 2), st.integers(0, 20))
def test_overlong_prompts_do_not_bring_rows_of_the_next_epoch(fits, epochs, stop):
    """Every row that fits is drawn once an epoch, also where over-long ones end it and through a resume."""
    with TemporaryDirectory() as folder:
        for number, rows in enumerate(fits):
            texts = [f"{number}{row}" + ("" if fit else "x" * 20) for row, fit in enumerate(rows)]
            Path(folder, f"{number}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        train = {str(number): DatasetConfig(source=f"{folder}/{number}.jsonl") for number in range(len(fits))}

        def opened():
            return PromptSource(DataConfig(train=train, max_prompt_tokens=10, epochs=epochs), 0, RENDERER)

        made, drawn = opened(), Counter()
        if not any(map(any, fits)):
            with pytest.raises(
                DataError, match=r"all \d+ prompts of data.train are longer than data.max_prompt_tokens=10, up to 23"
            ):
                made.draw()
            return
        for _ in range(40):  # more than there are
            if (prompt := made.draw()) is None:
                break
            drawn[prompt.content] += 1
            if drawn.total() == stop:
                state, made = json.loads(json.dumps(made.state())), opened()
                made.restore(state)
    assert drawn == {f"{number}{row}": epochs for number, rows in enumerate(fits) for row, fit in enumerate(rows) if fit}
    assert made.draw() is None


def test_missing_columns_are_named(tmp_path):
    made = source(tmp_path, [{"prompt": "a", "result": 1}], required=lambda domain: [("answer", "reward 'exact'")])
    with pytest.raises(DataError, match="row 1 lacks the column 'answer', which reward 'exact' needs; it has prompt, result"):
        made.draw()
    with pytest.raises(DataError, match="lacks the column 'prompt', which the prompt needs"):
        source(tmp_path, [{"question": "a"}]).draw()


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("rows.jsonl", "", "holds no rows"),
        ("rows.jsonl", '{"a": 1}\n{oops', "rows.jsonl:2 is not valid JSON"),
        ("rows.jsonl", "3\n", "must be an object"),
        ("rows.json", "{}", "must hold a list"),
        ("rows.parquet", "junk", "could not be parsed"),
        ("rows.txt", "junk", "no known kind"),
    ],
)
def test_bad_files(tmp_path, name, text, sentence):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        list(read("data.train.x", DatasetConfig(source=str(path)), 0))
    assert sentence in str(caught.value)


def test_files_of_all_kinds_read_the_same(tmp_path):
    import csv

    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "r.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet")
    with (tmp_path / "r.csv").open("w") as file:
        writer = csv.DictWriter(file, ["prompt", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    for kind in ("jsonl", "json", "parquet", "csv"):
        assert list(read("x", DatasetConfig(source=str(tmp_path / f"r.{kind}")), 0)) == rows


def test_plain_text_and_chat_rendering():
    plain = RENDERER.prompt("1+1=")
    assert RENDERER.tokenizer.decode(plain, skip_special_tokens=True) == "1+1="
    chat = chat_renderer()
    assert chat.tokenizer.decode(chat.prompt("hi")) == "<user>hi</><assistant>"
    assert chat.tokenizer.decode(chat.prompt("hi", system="be kind")) == "<system>be kind</><user>hi</><assistant>"
    assert chat.tokenizer.decode(chat.prompt("hi", chat=False), skip_special_tokens=True) == "hi"
    assert chat.tokenizer.decode(chat.answer("hi", "yo"), skip_special_tokens=True) == "yo</>"
    with pytest.raises(DataError, match="has no chat template"):
        RENDERER.prompt(({"role": "user", "content": "hi"},))


def test_an_unstable_template_is_reported():
    unstable = chat_renderer("{{ messages | length }}" + TEMPLATE)
    with pytest.raises(DataError, match="not prefix-stable: the prompt alone reads '1<user>hi"):
        unstable.answer("hi", "yo")


def test_chat_rows_give_their_last_turn_as_completion(tmp_path):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    made = source(tmp_path, [{"messages": turns}], renderer=chat_renderer())
    prompt, reader = made.draw_with_reader()
    assert prompt.content == (turns[0],)
    assert reader.renderer.tokenizer.decode(reader.answer(prompt), skip_special_tokens=True) == "yo</>"


@given(st.lists(st.floats(0.02, 1), min_size=1, max_size=6), st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_every_batch_has_each_streams_share_to_within_one(weights, batches):
    shares = {str(i): w for i, w in enumerate(weights)}
    admission, total, seen = Admission(64, shares), sum(weights), Counter()
    for count in batches:
        quotas = admission.quotas(count)
        assert sum(quotas.values()) == count
        assert all(abs(quotas[s] - count * shares[s] / total) <= 1 + 1e-6 for s in shares)
        seen.update(quotas)
    drawn = sum(batches)
    assert all(abs(seen[s] - drawn * shares[s] / total) <= len(shares) for s in shares)  # nothing is denied for good


@pytest.mark.parametrize("renderer", [RENDERER, chat_renderer()])
def test_an_episode_is_imitated_as_it_would_be_played(tmp_path, renderer):
    drawn, reader = source(
        tmp_path, [{"prompt": "a", "completion": "b", "more": ["c", "d", "e", "f"]}], renderer=renderer
    ).draw_with_reader()
    pieces = reader.answers(drawn)
    assert [owner for owner, _ in pieces] == [Owner.POLICY, Owner.ENVIRONMENT] * 2 + [Owner.POLICY]
    talk = Conversation(renderer, "a")
    assert list(drawn.tokens) == talk.prompt()
    eos = renderer.tokenizer.eos_token_id
    for turn, (said, seen) in enumerate((("b", "c"), ("d", "e"), ("f", None))):
        assert pieces[2 * turn][1] == [*renderer.encode(said), eos]
        if seen is not None:
            assert pieces[2 * turn + 1][1] == talk.follow(said, seen, eos)


def test_an_episode_that_cannot_be_imitated_is_named(tmp_path):
    drawn, reader = source(tmp_path, [{"prompt": "a", "completion": "b", "more": ["c"]}]).draw_with_reader()
    with pytest.raises(DataError, match="observed and answered in turn"):
        reader.answers(drawn)


def scanned(path, **dataset):
    recipe = {"data": {"train": {"rows": {"source": str(path), **dataset}}}, "reward": "exact"}
    scan_data(load(recipe).config, lambda domain, played=False: [("answer", "reward 'exact'")])


@pytest.mark.parametrize(
    "named",
    [
        {"rollout": {"domains": {"math": {"samples": 2}}}},
        {"algorithm": {"domain_weights": {"math": 2.0}}},
        {"roles": {"teacher": {"domains": {"math": {"model": "tiny"}}}}, "algorithm": {"teacher": 0.1}},
    ],
    ids=["rollout.domains", "algorithm.domain_weights", "roles.teacher.domains"],
)
def test_settings_of_a_domain_that_no_row_has_are_refused(tmp_path, named, request):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "a", "answer": "b", "domain": d}) + "\n" for d in ("maths", "code")))

    def look(**datasets):
        config = load({"data": {"train": {"rows": {"source": str(rows)}, **datasets}}, "reward": "exact", **named}).config
        scan_data(config, lambda domain, played=False: [])

    key = f"{request.node.callspec.id}.math"
    with pytest.raises(ConfigError, match=rf"^{key}: no training row has the domain 'math'; they have code, maths\..*'maths'"):
        look()
    with pytest.raises(ConfigError, match=r"they have code, maths, other\."):
        look(made={"source": "drumroll.data.problems:sums", "domain": "other"})
    look(made={"source": "drumroll.data.problems:sums"})  # its rows may have any domain
    look(made={"source": "drumroll.data.problems:sums", "domain": "math"})


def test_all_rows_of_local_files_are_looked_at(tmp_path):
    """Each kind of file, with the place of the first bad row and how many there are."""
    good, bad = {"prompt": "a", "answer": "b"}, {"prompt": "a"}
    table = [good, bad, good, bad]
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "x.json").write_text(json.dumps(table))
    (tmp_path / "x.csv").write_text("prompt,answer\na,b\na\na,b\na\n")
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "x.parquet")
    for number in (1, 2):
        pq.write_table(pa.Table.from_pylist([good] * number), folder / f"train-{number}.parquet")
    for name in ("x.json", "x.csv", "x.parquet"):
        with pytest.raises(DataError, match=rf"lacks the column 'answer'.*It is row 2 of .*{name}; 2 of 4 rows cannot be used"):
            scanned(tmp_path / name)
        scanned(tmp_path / name, limit=1)
    scanned(folder)
    pq.write_table(pa.Table.from_pylist([good, bad]), folder / "train-3.parquet")
    with pytest.raises(DataError, match=r"row 5 lacks .*It is row 2 of .*train-3.parquet; 1 of 5 rows"):
        scanned(folder)
    (tmp_path / "x.jsonl").write_text('{"question": "a", "answer": "b"}\n\n{"answer": "b"}\n')
    with pytest.raises(DataError, match=r"a row has no 'question'.*It is .*x.jsonl:3; 1 of 2 rows"):
        scanned(tmp_path / "x.jsonl", columns={"prompt": "question"})


def test_supervised_rows_need_their_completion(tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"prompt": "a", "completion": "b"}, {"messages": chat}, {"prompt": "a", "answer": "b"}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = load({"pipeline": "sft", "data": {"train": {"rows": {"source": str(tmp_path / "x.jsonl")}}}}).config
    with pytest.raises(DataError, match=r"lacks the column 'completion', which supervised training needs.*x.jsonl:3; 1 of 3"):
        scan_data(config, no_columns)
