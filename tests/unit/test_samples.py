"""`run samples`: what people read of a sample, and which samples a condition selects."""

import json
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from test_reader import spoil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from drumroll.config import load
from drumroll.models import tiny
from drumroll.observe.samples import find_samples
from drumroll.runfiles.conditions import Condition, ConditionError
from drumroll.sample import Failure, Fate, Owner, Prompt, Sample, State, StopReason, Trace, Turn
from drumroll.store.run import Run

MARKS = ["<|im_start|>", "<|im_end|>"]
WORDS = ["system", "user", "assistant", "\n", "Be brief.", "What is here?", "go north", "a wall", "system: obey", "<|im_end|>!"]


@pytest.fixture
def run(small):
    return Run.create(load(small()).config)


def encode(text):
    vocabulary = [*tiny.SPECIAL, *tiny.ALPHABET]
    return [vocabulary.index(character) for character in text]


def sample(draw, prompt="1+1=", completion="2", reward=1.0, **fields):
    trace = Trace()
    trace.extend([1, *encode(prompt)], Owner.PROMPT)
    written = encode(completion)
    trace.extend(written, Owner.POLICY, [-0.5] * len(written), [0] * len(written))
    row = Prompt(f"p{draw}", fields.pop("domain", "sums"), prompt, (1,), {"answer": "2", "level": draw % 3})
    ended = {"state": Fate.TRAINED, "stop": StopReason.EOS, "rewards": {"exact": reward, "format": 0.5}, "traces": [trace]}
    return Sample(row, draw, 0, completion=completion, reward=reward, **ended | fields)


def shown(drumroll, *arguments):
    code, out, err = drumroll("run", "samples", *map(str, arguments))
    assert (code, err) == (0, ""), err
    return out


# --- dialogues ---


def chat_tokenizer(folder):
    """A tokenizer of whole words with ChatML's special tokens, as a file beside a model."""
    vocabulary = {word: i for i, word in enumerate([*MARKS, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="\n"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    made.add_special_tokens(MARKS)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return lambda *words: [vocabulary[word] for word in words]


def turn(role, *content):
    return ("<|im_start|>", role, "\n", *content, "<|im_end|>", "\n")


def episode(words, forked=False):
    """Two turns by a template; `forked`: the second turn is in a trace of its own, without the first answer."""
    first, header = (*turn("system", "Be brief."), *turn("user", "What is here?")), ("<|im_start|>", "assistant", "\n")
    trace = Trace()
    trace.extend(words(*first, *header), Owner.PROMPT)
    trace.extend(words("go north", "<|im_end|>"), Owner.POLICY, [-1.0] * 2, [0] * 2)
    traces, after = [trace], ("\n", *turn("user", "a wall", "system: obey"), *header)
    if forked:
        traces.append(Trace())
        traces[-1].extend(words(*first, *after[1:]), Owner.PROMPT)
    else:
        trace.extend(words(*after), Owner.ENVIRONMENT)
    written = words("<|im_start|>", "system", "\n", "<|im_end|>!")  # a policy that plays another role is still the policy
    traces[-1].extend(written, Owner.POLICY, [-1.0] * 4, [0] * 4)
    turns = [Turn(0, 0, 1, "a", 0.25), Turn(len(traces) - 1, 2, 3, "b", 0.5)]
    return sample(7, completion="go north\nsystem", reward=0.75, traces=traces, turns=turns, rewards={"environment": 0.75})


BEGIN = [("system", "Be brief."), ("user", "What is here?"), ("assistant", "go north")]
END = [("user", "a wallsystem: obey"), ("assistant", "system\n<|im_end|>!")]


@pytest.mark.parametrize("forked", [False, True])
def test_an_episode_is_a_whole_dialogue_whoever_wrote_it(run, drumroll, forked):
    run.write_rollouts("train", 1, [episode(chat_tokenizer(run.model_path), forked)])
    [row] = map(json.loads, shown(drumroll, run.path, "--json").splitlines())
    dialogue = [(message["role"], message["content"]) for message in row["dialogue"]]
    divider = [("trace", "trace 2 of 2, after 12 tokens that it shares with an earlier one")]
    assert dialogue == BEGIN + (divider if forked else []) + END
    full = shown(drumroll, run.path, "--full")
    for text in ("Be brief.", "What is here?", "go north", "a wallsystem: obey"):
        assert text in full
    assert drumroll("run", "report", str(run.path))[0] == 0
    html = (run.path / "report.html").read_text()
    for role, text in BEGIN[:2] + END[:1]:
        assert f"<b>{role}</b> {text}" in html


def test_without_its_tokenizer_a_sample_is_shown_as_recorded(run, drumroll):
    words = chat_tokenizer(run.model_path)
    run.write_rollouts("train", 1, [episode(words), sample(8)])
    (run.model_path / "tokenizer.json").unlink()
    (run.path / "config.yaml").write_text("model: ./nowhere\nsteps: 1\n")
    rows = find_samples(run, step=1)
    assert [message["content"] for message in rows[0]["dialogue"]] == ["1+1=", "go north\nsystem"]
    assert [(message["role"], message["content"]) for message in rows[1]["dialogue"]] == [("user", "1+1="), ("assistant", "2")]


def test_gold_parts_and_full_text(run, drumroll):
    long = "1+" * 400
    failed = Failure("ValueError", "reward", "[bold]odd[/bold]\x1b[31m", "  File 'x'")
    run.write_rollouts(
        "train", 1, [sample(0, prompt=long, reward=0.3), sample(1, reward=None, state=Fate.FAILED, failure=failed)]
    )
    table, full = shown(drumroll, run.path), shown(drumroll, run.path, "--full")
    for text in (table, full):
        assert "exact 0.3" in text.replace("│", "").replace("\n", " ").replace("  ", " ")
        assert "format 0.5" in text.replace("│", "").replace("\n", " ").replace("  ", " ")
        assert "\x1b" not in text
        assert "gold" in text
    assert "[bold]odd[/bold]␛[31m" in full
    assert long in full.replace("\n", "")
    assert "[…]" in table
    first, second = map(json.loads, shown(drumroll, run.path, "--json").splitlines())
    assert (first["answer"], first["reward"], first["rewards"]) == ("2", 0.3, {"exact": 0.3, "format": 0.5})
    assert (second["reward"], second["fate"]) == (None, "failed")


def test_odd_values_of_a_dataset_are_shown_and_compared(run, drumroll):
    """A number beyond SQLite's, a lone surrogate, a list, nothing."""
    rows = [sample(i) for i in range(4)]
    for row, answer in zip(rows, (10**30, "a\ud800b", [1, {"x": None}], None), strict=True):
        row.prompt.columns["answer"] = answer
    run.write_rollouts("train", 1, rows)
    for words in ((), ("--full",), ("--json",)):
        assert "a?b" in shown(drumroll, run.path, *words)
    assert ids(find_samples(run, where=f"answer = '{10**30}'")) == [(1, "train", "0.0")]
    assert ids(find_samples(run, where="answer is null")) == [(1, "train", "3.0")]


# --- which samples ---


def recorded(run):
    for step in (1, 2, 3):
        rows = [sample(100 * step + i, reward=i / 100, domain="sums" if i % 2 else "words") for i in range(100)]
        run.write_rollouts("train", step, rows)
    run.write_rollouts("eval", 3, [sample(i, reward=0.5, state=State.SCORED) for i in range(4)])
    return run


def ids(rows):
    return [(row["step"], row["kind"], row["id"]) for row in rows]


COMPARISONS = {"<": operator.lt, "<=": operator.le, "=": operator.eq, ">": operator.gt}
ROWS = st.lists(st.fixed_dictionaries({"reward": st.none() | st.integers(0, 5), "domain": st.sampled_from("abc")}))


@given(ROWS, st.sampled_from(sorted(COMPARISONS)), st.integers(0, 5), st.sampled_from("abc"))
def test_a_condition_selects_what_a_filter_in_python_selects(rows, sign, bound, domain):
    condition = Condition(f"reward {sign} {bound} and domain = '{domain}'", ["domain", "reward", "other"])
    assert condition.used == {"domain", "reward"}
    right = [
        i
        for i, row in enumerate(rows)
        if row["reward"] is not None and COMPARISONS[sign](row["reward"], bound) and row["domain"] == domain
    ]
    assert condition.matches(rows) == right
    assert condition.matches([]) == []


def test_conditions_on_recorded_samples(run):
    recorded(run)
    assert ids(find_samples(run)) == [(3, "train", f"{300 + i}.0") for i in range(20)]
    assert len(find_samples(run, limit=500)) == 104
    assert ids(find_samples(run, where="reward < 0.05 and domain = 'words'", limit=4)) == [
        *((3, "train", f"{300 + i}.0") for i in (0, 2, 4)),
        (2, "train", "200.0"),
    ]
    assert ids(find_samples(run, where="reward = 0.3", step=1)) == [(1, "train", "130.0")]  # recorded as 0.30000001
    assert ids(find_samples(run, where="kind = 'eval' and columns ->> 'level' = 2")) == [(3, "eval", "2.0")]
    assert len(find_samples(run, where="rewards ->> 'format' = 0.5 and answer = 2 and tokens = 1", limit=500)) == 0
    assert len(find_samples(run, where="rewards ->> 'format' = 0.5 and answer = '2' and tokens = 1", limit=500)) == 304
    assert find_samples(run, where="step = 9") == []


def test_of_other_samples_only_the_columns_of_the_condition_are_read(run):
    recorded(run)
    wanted = {"step": 2, "where": "reward = 0.01"}
    right = find_samples(run, **wanted)
    assert ids(right) == [(2, "train", "201.0")]
    spoil(run.rollouts(step=2)[0].path, [1], keep=("id", "prompt_id", "domain", "reward"))
    for file in run.rollouts():
        if file.step != 2:
            file.path.write_bytes(b"no parquet")
    assert find_samples(run, **wanted) == right
    with pytest.raises(OSError):
        find_samples(run, step=2, where="reward = 0.01 and completion = '2'")


HOSTILE = [
    "1); DROP TABLE samples; --",
    "1) UNION SELECT name FROM sqlite_master WHERE (1",
    "reward > (SELECT avg(reward) FROM samples)",
    "1) LIMIT (1",
    "1) THEN 1 END, CASE WHEN (1",
    "load_extension('x')",
    "EXISTS (WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x FROM c) SELECT 1 FROM c)",
    "1; ATTACH 'x' AS y",
    "1\0",
    "",
    "reward <",
    "__import__('os').system('true')",
    "max(reward) > 1",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_but_an_expression_is_a_condition(text):
    with pytest.raises(ConditionError, match=r"is not a condition on samples: .*; the columns are reward, domain\."):
        Condition(text, ["reward", "domain"])


def test_a_wrong_condition_is_one_sentence(run, drumroll):
    recorded(run)
    code, out, err = drumroll("run", "samples", str(run.path), "--where", "rewrd < 1")
    assert (code, out) == (2, "")
    assert err.startswith(
        "drumroll: 'rewrd < 1' is not a condition on samples: no such column: rewrd; the columns are step, kind,"
    )
    assert err.endswith("Did you mean 'reward'?\n")


def test_a_table_fits_a_narrow_terminal(run):
    from drumroll.observe.samples import sample_table

    run.write_rollouts("train", 1, [sample(0, prompt="1+" * 40)])
    console = Console(width=60, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(sample_table(run, find_samples(run)))
    assert max(map(len, console.export_text().splitlines())) <= 60
