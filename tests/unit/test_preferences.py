"""Preferences: rows of all layouts, pairs that nothing separates, and losses against slow loops."""

import json
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batch import gradient, random_groups, relative
from thinking_templates import TEMPLATES
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from drumroll.algorithms.aggregations import unit_mean
from drumroll.algorithms.losses import Tokens
from drumroll.algorithms.preferences import PreferenceLoss
from drumroll.batch import Batch
from drumroll.config import PreferenceConfig, load
from drumroll.config.data import DatasetConfig
from drumroll.config.preferences import PreferenceTerms
from drumroll.data.drawing import Dropped
from drumroll.data.layouts import arrange
from drumroll.data.marking import marked
from drumroll.data.preferences import PreferenceReader, Preferences, held_out, mismatched, packed
from drumroll.data.render import Renderer
from drumroll.data.source import Reader, no_columns
from drumroll.errors import BadRow, ConfigError, DataError, StoreError
from drumroll.models import tiny
from drumroll.pipelines import find_pipeline
from drumroll.runfiles.reference import ReferenceLogprobs
from drumroll.sample import Owner, Trace

# --- losses ---

LOSSES = {
    "dpo": {"loss": "dpo", "beta": 0.3},
    "dpo, smoothed, with sft": {"loss": "dpo", "beta": 0.3, "label_smoothing": 0.2, "sft": 0.7},
    "ipo": {"loss": "ipo", "beta": 0.4},
    "simpo": {"loss": "simpo", "beta": 2.0, "gamma": 0.6, "label_smoothing": 0.1},
    "kto": {"loss": "kto", "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5, "sft": 0.2},
}
KL = 0.4


def slow(config, answers):
    """The mean loss of pairs, each ((log-probs, reference) chosen, (log-probs, reference) rejected), token by token."""

    def log_sigmoid(x):
        return -math.log1p(math.exp(-x))

    total, count = 0.0, 0
    for chosen, rejected in answers:
        sums = [sum(now) - sum(before) for now, before in (chosen, rejected)]
        sizes = [len(now) for now, _ in (chosen, rejected)]
        imitated = config.sft * -sum(chosen[0]) / sizes[0]
        if config.loss == "kto":
            gains = [config.beta * (sums[0] - KL), config.beta * (KL - sums[1])]
            weights = (config.desirable_weight, config.undesirable_weight)
            total += sum(w * (1 - math.exp(log_sigmoid(g))) for w, g in zip(weights, gains, strict=True)) + imitated
            count += 2
            continue
        if config.loss == "ipo":
            total += (sums[0] / sizes[0] - sums[1] / sizes[1] - 1 / (2 * config.beta)) ** 2
        else:
            margin = config.beta * (sums[0] - sums[1])
            if config.loss == "simpo":
                means = [sum(now) / len(now) for now, _ in (chosen, rejected)]
                margin = config.beta * (means[0] - means[1]) - config.gamma
            wrong = config.label_smoothing
            total += -(1 - wrong) * log_sigmoid(margin) - wrong * log_sigmoid(-margin)
        total += imitated
        count += 1
    return total / count


numbers = st.integers(-256, 0).map(lambda n: n / 64)  # sums are exact, so that ties are ties in any order
answer = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6).map(lambda each: tuple(zip(*each, strict=True)))
pairs = st.lists(st.tuples(answer, answer), min_size=1, max_size=5)


def tokens_of(answers, *, units_are_pairs, order):
    """The tokens of all answers, those of a unit anywhere among the others."""
    rows = [
        (now, before, float(side == 0), pair if units_are_pairs else 2 * pair + side)
        for pair, both in enumerate(answers)
        for side, each in enumerate(both)
        for now, before in zip(*each, strict=True)
    ]
    order.shuffle(rows)
    now, before, reward, unit = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    unit = unit.long()
    zeros = torch.zeros_like(now)
    return Tokens(now, zeros, now, now, zeros, before, unit, reward, unit=unit, units=int(unit.max()) + 1)


@pytest.mark.parametrize("name", LOSSES)
@given(answers=pairs, order=st.randoms())
def test_losses_are_those_of_a_slow_loop(name, answers, order):
    config = PreferenceTerms(**LOSSES[name])
    tokens = tokens_of(answers, units_are_pairs=config.takes_pairs(), order=order)
    per_token, found = PreferenceLoss(config, KL)(tokens)
    sizes = torch.bincount(tokens.unit)[tokens.unit]
    assert (per_token / sizes / tokens.units).sum().item() == pytest.approx(slow(config, answers), rel=1e-9, abs=1e-12)
    assert found["logprob_chosen"].mean().item() == pytest.approx(sum(sum(c[0]) for c, _ in answers) / len(answers))
    if config.loss == "kto":
        gains = [sum(n) - sum(b) for both in answers for n, b in both]
        expected = [(gain > KL) == (side % 2 == 0) for side, gain in enumerate(gains)]
        assert sorted(found["accuracy"].tolist()) == sorted(expected)
        assert found["reward_chosen"].sum().item() == pytest.approx(config.beta * sum(gains[::2]))
        assert found["reward_rejected"].sum().item() == pytest.approx(config.beta * sum(gains[1::2]))
    if config.takes_pairs():
        rewards = [(sum(n) - sum(b)) if config.takes_reference() else sum(n) / len(n) for both in answers for n, b in both]
        right = [a > b for a, b in zip(rewards[::2], rewards[1::2], strict=True)]
        assert found["accuracy"].tolist() == right
        assert found["reward_chosen"].tolist() == pytest.approx([config.beta * reward for reward in rewards[::2]])
        assert torch.allclose(found["margin"], found["reward_chosen"] - found["reward_rejected"])


def batch_of(*, pairs=True, seed=0):
    groups = random_groups(7, 2, seed=seed)
    for group in groups:
        for sample, reward in zip(group.samples, (1.0, 0.0), strict=True):
            sample.reward = reward
    batch = packed(groups, pairs=pairs)
    noise = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(seed)).double()
    return batch.with_(reference=torch.where(batch.mask, noise - 3, 0.0))


@pytest.mark.parametrize("name", ["dpo, smoothed, with sft", "kto"])
def test_the_gradient_does_not_depend_on_micro_batches_or_order(name):
    config = PreferenceTerms(**LOSSES[name])
    batch, loss = batch_of(pairs=config.takes_pairs()), PreferenceLoss(config, KL)
    whole = gradient(batch, loss, unit_mean)
    assert whole.norm() > 1e-6
    assert relative(gradient(batch, loss, unit_mean, micro_tokens=17), whole) < 1e-10
    backwards = batch.select(list(reversed(range(batch.num_traces))))
    assert relative(gradient(backwards, loss, unit_mean), whole) < 1e-10


def test_a_separated_pair_would_be_found(monkeypatch):
    whole = gradient(batch_of(), PreferenceLoss(PreferenceTerms()), unit_mean)
    monkeypatch.setattr(Batch, "micro_batches", lambda self, most: [[trace] for trace in range(self.num_traces)])
    assert relative(gradient(batch_of(), PreferenceLoss(PreferenceTerms()), unit_mean), whole) > 1e-2


def test_the_prompt_of_a_pair_is_computed_once():
    batch = batch_of()
    alone = sum(batch.lengths.tolist())
    shared = sum(unit.prefix for unit in batch.units())
    assert shared > batch.num_samples
    assert len(batch.tree().tokens) == alone - shared == sum(unit.cost(batch.lengths.tolist()) for unit in batch.units())


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=20)
def test_nothing_separates_a_pair(budget, count, size, seed):
    batch = batch_of(seed=seed)
    for cut in (batch.micro_batches(budget), batch.shares(count), batch.chunks(size)):
        assert all(len({*traces} & {2 * i, 2 * i + 1}) != 1 for traces in cut for i in range(batch.num_samples // 2))


# --- layouts ---

USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yes"), ("assistant", "no"))
)
LAYOUTS = {
    "explicit, text": {"prompt": "hi", "chosen": "yes", "rejected": "no"},
    "explicit, one message": {"prompt": [USER], "chosen": GOOD, "rejected": BAD},
    "explicit, parts of text": {
        "prompt": [USER],
        "chosen": [{**GOOD, "content": [{"type": "text", "text": "yes"}]}],
        "rejected": BAD,
    },
    "explicit, messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "implicit": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "UltraFeedback, binarised": {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD], "score_chosen": 8.0},
    "UltraFeedback": {
        "instruction": "hi",
        "completions": [
            {"response": "well", "overall_score": 6.0},
            {"response": "no", "overall_score": 2.0},
            {"response": "yes", "overall_score": 8.5},
        ],
    },
    "HH": {"chosen": "\n\nHuman: hi\n\nAssistant: yes", "rejected": "\n\nHuman: hi\n\nAssistant: no"},
}
CHAT = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


def chatty():
    """A tokenizer of characters with a chat template."""
    vocab = {piece: i for i, piece in enumerate(["<pad>", "<bos>", "<eos>", *map(chr, range(32, 127)), "\n"])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", chat_template=CHAT)


def traces_of(row, renderer, dataset=None, **changes):
    config = PreferenceConfig(data={"train": {"x": {"source": "a.jsonl"}}, **changes.pop("data", {})}, **changes)
    dataset = DatasetConfig(source="a.jsonl", **(dataset or {}))
    reader = Reader("data.train.x", dataset, renderer, no_columns, unrendered=True)
    prompt = reader.prompt(arrange("data.train.x", dataset, row), 0)
    return [sample.traces[0] for sample in PreferenceReader(config).group(reader, prompt, 0).samples]


def shown(row, renderer, **changes):
    return [marked(renderer.tokenizer, trace) for trace in traces_of(row, renderer, **changes)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_pair_in_a_chat(layout):
    assert shown(LAYOUTS[layout], Renderer(chatty())) == ["u:hi<eos>a:[y][e][s][<eos>]", "u:hi<eos>a:[n][o][<eos>]"]


@pytest.mark.parametrize("layout", ["explicit, text", "UltraFeedback, binarised", "UltraFeedback"])
def test_texts_need_no_template(layout):
    assert shown(LAYOUTS[layout], Renderer(tiny.tokenizer())) == ["<bos>hi[y][e][s][<eos>]", "<bos>hi[n][o][<eos>]"]


def test_hh_without_a_template_stays_a_text():
    chosen, rejected = shown(LAYOUTS["HH"], Renderer(tiny.tokenizer()))
    assert chosen == "<bos>\n\nHuman: hi\n\nAssistant:[ ][y][e][s][<eos>]"
    assert rejected.endswith("Assistant:[ ][n][o][<eos>]")


def test_columns_that_are_named_otherwise_are_chosen_in_the_recipe():
    row = {"question": "hi", "good": "the yes", "bad": "the no"}
    columns = {"columns": {"prompt": "question", "chosen": "good", "rejected": "bad"}}
    assert shown(row, Renderer(tiny.tokenizer()), dataset=columns)[0].startswith("<bos>hi[t][h][e]")


def test_an_answer_without_a_score_is_left_out_and_answers_of_one_score_are_dropped():
    def row(*scores):
        answers = [{"response": f"answer {i}", "overall_score": score} for i, score in enumerate(scores)]
        return {"instruction": "hi", "completions": answers}

    chosen, rejected = shown(row("N/A", 2, None, "7.5", float("nan")), Renderer(tiny.tokenizer()))
    assert [text.replace("[", "").replace("]", "") for text in (chosen, rejected)] == [
        f"<bos>hianswer {i}<eos>" for i in (3, 1)
    ]
    with pytest.raises(Dropped, match="equal"):
        shown(row(5, 5, 5), Renderer(tiny.tokenizer()))


@pytest.mark.parametrize(
    ("end", "chosen", "rejected"),
    [
        ("", " yes", "no"),
        ("\n\nAssistant:", " yes", " no"),
        ("", "\n\nAssistant: yes", "\n\nAssistant: no"),
        ("\n\nAssistant:", [GOOD], BAD),
        ("", GOOD, [BAD]),
    ],
)
def test_a_prompt_in_the_layout_of_hh_may_leave_out_whose_turn_it_is(end, chosen, rejected):
    row = {"prompt": f"\n\nHuman: hi{end}", "chosen": chosen, "rejected": rejected}
    assert shown(row, Renderer(chatty())) == ["u:hi<eos>a:[y][e][s][<eos>]", "u:hi<eos>a:[n][o][<eos>]"]


@pytest.mark.parametrize("pipeline", ["dpo", "reward_model"])
def test_rows_are_rendered_with_the_recipes_arguments_of_the_template(pipeline, tmp_path):
    rows = write_rows(tmp_path / "a.jsonl", [LAYOUTS["explicit, text"]])
    tokenizer = chatty()
    tokenizer.chat_template = "{{ mood }}" + CHAT
    config = load({"pipeline": pipeline, "data": {"train": rows, "template": {"mood": "glad "}}, "held_out": rows}).config
    parts = find_pipeline(pipeline).open(config, SimpleNamespace(tokenizer=tokenizer))
    drawn, sets = (parts.rows, parts.held_out) if pipeline == "dpo" else parts
    for group in (drawn.groups()[0], sets["rows"].groups[0]):
        shown = marked(tokenizer, group.samples[0].traces[0])
        assert shown.startswith("glad u:hi<eos>a:[")


def test_texts_without_a_prompt_share_whole_words():
    row = arrange("x", DatasetConfig(source="a"), {"chosen": "the sky is blue", "rejected": "the sky is black"})
    assert row == {"prompt": "the sky is", "chosen": " blue", "rejected": " black"}


def test_only_the_assistants_turns_of_a_long_answer_are_trained():
    more = {"role": "user", "content": "why"}
    row = {"prompt": [USER], "chosen": [BAD, more, GOOD], "rejected": [GOOD, more, BAD]}
    chosen, _ = shown(row, Renderer(chatty()))
    assert chosen == "u:hi<eos>a:[n][o][<eos>]u:why<eos>a:[y][e][s][<eos>]"
    implicit = {"chosen": [USER, BAD, more, GOOD], "rejected": [USER, GOOD, more, BAD]}
    assert shown(implicit, Renderer(chatty()))[0] == chosen


def test_calls_of_tools_and_their_results_stand_in_answers():
    """In words, for a template that knows no tools."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    row = {"prompt": [USER], "chosen": [call, {"role": "tool", "content": "2"}, GOOD], "rejected": BAD, "tools": tools}
    chosen, rejected = traces_of(row, Renderer(chatty()))
    decode = chatty().decode
    written = [
        decode([t for t, owner in zip(chosen.tokens, chosen.owners, strict=True) if owner is kind]).replace(" ", "")
        for kind in Owner
    ]
    prompt, policy, between = (text.replace("\n", "") for text in written)
    assert prompt.startswith("u:Youmaycallthesetools:<tools>")
    assert prompt.endswith("hi<eos>a:")
    assert policy == '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call><eos>yes<eos>'
    assert between == "u:<tool_response>2</tool_response><eos>a:"
    assert rejected.tokens[: rejected.owners.index(Owner.POLICY)] == chosen.tokens[: chosen.owners.index(Owner.POLICY)]


@pytest.mark.parametrize("content", [3, [{"type": "image", "url": "x"}], {"text": "yes"}])
def test_contents_that_are_no_text_are_refused(content):
    row = {"prompt": [USER], "chosen": [{**GOOD, "content": content}], "rejected": [BAD]}
    with pytest.raises(BadRow, match=r"must have role and content .a text, or parts of type text."):
        traces_of(row, Renderer(chatty()))


def test_answers_that_are_no_single_sequence_are_refused():
    more, tokenizer = {"role": "user", "content": "why"}, chatty()
    row = {"prompt": [USER], "chosen": [{**GOOD, "content": "<think>\na\n</think>\n\nyes"}, more, GOOD], "rejected": [BAD]}
    tokenizer.chat_template = TEMPLATES["since"]
    with pytest.raises(BadRow, match="rewrites earlier turns"):
        traces_of(row, Renderer(tokenizer))
    with pytest.raises(BadRow, match="needs a chat template"):
        traces_of({**row, "prompt": "hi"}, Renderer(tiny.tokenizer()))
    with pytest.raises(BadRow, match="has no chat template"):
        traces_of(row, Renderer(tiny.tokenizer()))


def test_rated_rows_are_single_answers_and_pairs_two():
    renderer = Renderer(chatty())
    rated = {"prompt": [USER], "completion": [GOOD], "label": True}
    assert shown(rated, renderer, loss="kto") == ["u:hi<eos>a:[y][e][s][<eos>]"]
    assert len(traces_of(LAYOUTS["implicit"], renderer, loss="kto")) == 2
    with pytest.raises(BadRow, match="loss: kto takes rows with completion and label"):
        traces_of(rated, renderer)
    with pytest.raises(BadRow, match="its label is None"):
        traces_of({**rated, "label": None}, renderer, loss="kto")
    assert shown({**rated, "label": "False"}, renderer, loss="kto") == shown(rated, renderer, loss="kto")
    with pytest.raises(BadRow, match="its label is 'good'"):
        traces_of({**rated, "label": "good"}, renderer, loss="kto")


# --- cutting and dropping ---


def test_both_answers_are_cut_at_the_same_place():
    row = {"prompt": "hi", "chosen": "yesyes", "rejected": "nonono"}
    assert shown(row, Renderer(tiny.tokenizer()), max_tokens=6) == ["<bos>hi[y][e][s]", "<bos>hi[n][o][n]"]


def write_rows(path, rows):
    path.write_text("\n\n".join(json.dumps(row) for row in rows))  # blank lines count too
    return {"rows": {"source": str(path)}}


def drawn(path, rows, **changes):
    """All rows by prompt, how many were dropped, and what a person is told."""
    given = {"pipeline": "dpo", "batch": 4, "data": {"train": write_rows(path, rows), "epochs": 2, **changes.pop("data", {})}}
    told = []
    made = Preferences(load({**given, **changes}).config, Renderer(tiny.tokenizer()), told.append)
    found = Counter()
    while groups := made.groups():
        assert len(groups) <= 4
        found.update(group.prompt.content for group in groups)
    return found, dict(made.dropped), told


def test_every_row_is_trained_as_often_as_epochs_say_and_others_are_named(tmp_path):
    rows = [{"prompt": f"a{i}=", "chosen": "x", "rejected": "y"} for i in range(7)]
    rows[2] = {"prompt": "a=", "chosen": "x", "rejected": "x"}
    rows[4] = {"prompt": "b=", "chosen": " ", "rejected": "x"}
    rows[5] = {"prompt": "c=", "chosen": "abcd" * 5 + "e", "rejected": "abcd" * 5 + "f"}
    path = tmp_path / "rows.jsonl"
    found, dropped, told = drawn(path, rows, max_tokens=16)
    assert found == {"a0=": 2, "a1=": 2, "a3=": 2, "a6=": 2}
    assert dropped == {"equal": 4, "empty": 2}  # cut to 16 tokens, the long answers are the same
    assert len(told) == 2
    assert any(f"{path}:9 is dropped, because an answer is empty; data/dropped/empty counts them" in text for text in told)
    found, dropped, _ = drawn(path, rows, max_tokens=16, overlong="drop")
    assert (found.total(), dropped) == (8, {"equal": 2, "empty": 2, "long": 2})
    with pytest.raises(DataError, match="set overlong to truncate or drop"):
        drawn(path, rows, max_tokens=16, overlong="fail")


def test_data_without_a_usable_row_ends_the_run_with_the_reasons(tmp_path):
    rows = [{"prompt": "a", "chosen": "x", "rejected": "x"}, {"prompt": "b", "chosen": " ", "rejected": "x"}]
    said = (
        r"no row of the training data can be used: 2 as 'equal' .first: .*a.jsonl:1: both answers are the same.*; 2 as 'empty' "
    )
    with pytest.raises(DataError, match=said):
        drawn(tmp_path / "a.jsonl", rows, data={"shuffle": False})


def test_prompts_are_limited_as_in_every_pipeline(tmp_path):
    rows = [{"prompt": "a" * n, "chosen": "x", "rejected": "y"} for n in (3, 9)]
    found, dropped, _ = drawn(tmp_path / "a.jsonl", rows, data={"max_prompt_tokens": 5})
    assert (found, dropped) == ({"aaa": 2}, {"long": 2})
    found, dropped, _ = drawn(tmp_path / "a.jsonl", rows, data={"max_prompt_tokens": 5, "overlong": "truncate"})
    assert (found.total(), dropped) == (4, {})


def test_a_bad_row_is_dropped_where_others_are_usable(tmp_path):
    good, bad = {"prompt": "a", "chosen": "x", "rejected": "y"}, {"prompt": "b", "chosen": 3, "rejected": "y"}
    for rows in ([good, bad], [bad, good]):
        found, dropped, told = drawn(tmp_path / "a.jsonl", rows, data={"shuffle": False})
        assert (found, dropped) == ({"a": 2}, {"bad": 2})
        assert "the assistant's is first" in told[0]
    for many in (2, 200):
        with pytest.raises(BadRow, match=r"the assistant's is first, got 3. It is .*a.jsonl:1"):
            drawn(tmp_path / "a.jsonl", [bad] * many, data={"shuffle": False})


def test_a_held_out_set_says_what_it_lacks(tmp_path):
    rows = [{"prompt": "a", "chosen": "x", "rejected": "x"}, {"prompt": "a", "chosen": "x", "rejected": "y"}]
    given = {"pipeline": "dpo", "data": {"train": write_rows(tmp_path / "a.jsonl", rows)}}
    config = load({**given, "held_out": write_rows(tmp_path / "a.jsonl", rows)}).config
    found = held_out(config, Renderer(tiny.tokenizer()))["rows"]
    assert len(found.groups) == 1
    assert (
        found.note
        == f"held_out.rows: 1 rows are dropped, the first of them {tmp_path}/a.jsonl:1, because both answers are the same, or have the same score."
    )
    config = load({**given, "held_out": write_rows(tmp_path / "b.jsonl", rows[:1])}).config
    with pytest.raises(DataError, match="no row that can be used"):
        held_out(config, Renderer(tiny.tokenizer()))


# --- KTO's mismatched answers, and the reference ---


def test_mismatched_answers_follow_the_prompt_of_their_neighbour():
    groups = random_groups(4, 1)
    found = mismatched(groups, 1000)
    for i, group in enumerate(found):
        own, other = groups[i].samples[0].traces[0], groups[i - 1].samples[0].traces[0]
        trace = group.samples[0].traces[0]
        prompt = own.tokens[: own.owners.index(Owner.POLICY)]
        assert trace.tokens == prompt + other.tokens[other.owners.index(Owner.POLICY) :]
        assert trace.policy_tokens() == other.policy_tokens()
    assert mismatched(groups[:1], 1000) == mismatched([groups[0], groups[0]], 1000) == []
    short = mismatched(groups, 4)
    assert all(len(g.samples[0].traces[0].tokens) <= 4 and g.samples[0].traces[0].policy_tokens() for g in short)


def test_no_answer_of_a_pair_is_taken_for_one_of_another_prompt():
    """With answers of one row side by side, the one before is often the row's own."""
    groups = random_groups(5, 2)
    found = mismatched(groups, 1000)
    assert len(found) == 10
    for i, group in enumerate(found):
        others = [sample.traces[0].policy_tokens() for sample in groups[i // 2 - 1].samples]
        assert group.samples[0].traces[0].policy_tokens() == others[i % 2]
        assert group.prompt is groups[i // 2].prompt


def test_precomputed_log_probs_come_back_in_any_order(tmp_path):
    batch = batch_of()
    known = ReferenceLogprobs()
    first = batch.select([0, 1, 2, 3])
    known.add(first.with_(reference=first.reference.float()))
    assert known.missing(batch) == list(range(4, batch.num_traces))
    assert known.missing(first) == []
    known.add(batch.with_(reference=batch.reference.float()))
    known.save(tmp_path / "reference.safetensors")
    back = batch.select(list(reversed(range(batch.num_traces)))).with_(reference=None)
    filled = ReferenceLogprobs.load(tmp_path / "reference.safetensors").fill(back)
    assert torch.equal(filled.reference, batch.select(list(reversed(range(batch.num_traces)))).reference.float())
    with pytest.raises(StoreError, match="set reference: role"):
        known.fill(batch_of(seed=1))
    other = batch.with_(mask=batch.mask & (torch.rand(len(batch.mask)) < 0.5))
    assert known.missing(other)  # other tokens are trained


# --- the config ---


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing: 0.1 belongs to loss: dpo or simpo, but loss is ipo"),
        ({"gamma": 1.0}, "gamma: 1 belongs to loss: simpo, but loss is dpo"),
        (
            {"loss": "simpo", "reference": "precomputed"},
            "loss: simpo uses no reference; leave out reference: precomputed",
        ),
        ({"reference": "lora"}, "needs roles.actor.lora"),
        ({"held_out": {"a": {"source": "x"}}, "eval": {"sets": {"a": {"source": "x"}}}}, "both have a set 'a'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        load({"pipeline": "dpo", "data": {"train": {"x": {"source": "a.jsonl"}}}, **changes})


def test_the_roles_that_a_loss_needs():
    def needs(**changes):
        return set(load({"pipeline": "dpo", "data": {"train": {"x": {"source": "a.jsonl"}}}, **changes}).config.needs())

    assert needs() == needs(loss="kto") == needs(loss="ipo") == {"reference"}
    assert needs(loss="simpo") == needs(reference="precomputed") == set()
    assert needs(reference="precomputed", roles={"reference": {"model": "tiny"}}) == {"reference"}


def test_an_empty_trace_is_marked_as_nothing():
    assert marked(tiny.tokenizer(), Trace()) == ""
