"""Conversations to imitate: which tokens are trained, against a loop that renders turn by turn."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_controls import made
from test_data import chat_renderer
from thinking_templates import DROPS, KEEPS, OPENS, SINCE

from drumroll.config import SFTConfig
from drumroll.config.data import DataConfig, DatasetConfig
from drumroll.data.demonstrations import Demonstrations
from drumroll.data.layouts import arrange
from drumroll.data.marking import marked
from drumroll.data.source import Reader, no_columns
from drumroll.errors import BadRow
from drumroll.sample import Owner

CALLS = (
    "{% if tools %}<tools>{{ tools | tojson }}<eos>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A template that knows tools."""
RENDERERS = {
    **{name: chat_renderer(text) for name, text in {"keeps": KEEPS, "drops": DROPS, "opens": OPENS, "since": SINCE}.items()},
    **{name: made(name) for name in ("chatml", "smollm2", "llama3")},
}
SCHEMA = {
    "type": "function",
    "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}},
}


def config_of(**changes):
    endless = DatasetConfig(source="drumroll.data.problems:demonstrations", args={"task": "sums", "flawed": 0.0})
    data = DataConfig(train={"rows": endless}, max_prompt_tokens=10_000)
    return SFTConfig(pipeline="sft", steps=1, data=data, **{"max_tokens": 10_000, **changes})


def sample_of(row, renderer, dataset=(), **changes):
    """The sample of one row, without its file."""
    own = DatasetConfig(source="rows.jsonl", **dict(dataset))
    reader = Reader("rows", own, renderer, no_columns, unrendered=True)
    return (
        Demonstrations(config_of(**changes), renderer).group(reader, reader.prompt(arrange("rows", own, row), 0), 0).samples[0]
    )


def shown(row, renderer, **changes):
    """The traces of a row, with the trained tokens in brackets: neighbours in one."""
    return [marked(renderer.tokenizer, t).replace("][", "") for t in sample_of(row, renderer, **changes).traces]


def segments(trace):
    """The trained turns of a trace, each with all that stands before it."""
    found = []
    for i, owner in enumerate(trace.owners):
        if owner is Owner.POLICY:
            if not i or trace.owners[i - 1] is not Owner.POLICY:
                found.append((trace.tokens[:i], []))
            found[-1][1].append(trace.tokens[i])
    return found


WORDS = st.lists(st.sampled_from(["a", "b ", " ", "\n", "<eos>", "<|im_end|>", "42"]), max_size=5).map("".join)
THOUGHTS = st.one_of(WORDS, st.tuples(WORDS, WORDS).map(lambda both: f"<think>\n{both[0]}\n</think>\n\n{both[1]}"))


@st.composite
def conversations(draw):
    """Turns of a user and the assistant in any order that templates take, some with a mark."""
    messages = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages += [{"role": "user", "content": draw(WORDS)}, {"role": "assistant", "content": draw(THOUGHTS)}]
        if draw(st.integers(0, 4)) == 0:
            messages[-1][draw(st.sampled_from(["train", "weight"]))] = draw(st.sampled_from([0, 1]))
    return messages


@pytest.mark.parametrize("name", RENDERERS)
@settings(max_examples=15)
@given(conversations(), st.booleans())
def test_every_trained_turn_follows_what_the_model_is_shown_there(name, messages, alone):
    """A slow loop renders the conversation anew for every turn, and knows no other."""
    renderer = RENDERERS[name]
    row = {"prompt": messages[:-1], "completion": messages[-1:]} if alone else {"messages": messages}
    chosen = [
        i for i, m in enumerate(messages)
        if m.get("train", m.get("weight", m["role"] == "assistant" and (i == len(messages) - 1 or not alone)))
    ]  # fmt: skip
    if not chosen:
        with pytest.raises(Exception, match="untrained"):
            sample_of(row, renderer)
        return
    expected, plain = [], [{"role": m["role"], "content": m["content"]} for m in messages]
    for i in chosen:
        answer = [{"role": "user", "content": "-"}, plain[i]]  # what the template makes of it after anything
        own = renderer.answer(tuple(answer[:1]), plain[i]["content"], chat=True)
        expected.append((list(renderer.prompt(tuple(plain[:i]), chat=True)), own))
    traces = sample_of(row, renderer).traces
    assert [segment for trace in traces for segment in segments(trace)] == expected
    if name not in ("drops", "opens", "since"):
        (trace,) = traces
        whole, decode = renderer.controls.rendered(renderer.whole(plain[: chosen[-1] + 1])), renderer.tokenizer.decode
        assert decode(whole).startswith(decode(trace.tokens))
        assert decode(whole)[len(decode(trace.tokens)) :].strip() == ""
        assert name != "keeps" or trace.tokens == whole


def test_turns_are_chosen_by_role_by_mark_and_by_column():
    renderer, talk = (
        chat_renderer(KEEPS),
        [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)],
    )
    row = {"messages": talk, "mine": [False, True, True, False]}
    assert shown(row, renderer) == ["<user>a<eos><assistant>[b<eos>]<user>c<eos><assistant>[d<eos>]"]
    assert shown(row, renderer, train_on=["user"]) == ["<[user>a<eos>]<assistant>b<eos>[<user>c<eos>]"]
    assert shown(row, renderer, train_column="mine") == ["<user>a<eos><assistant>[b<eos><user>c<eos>]"]
    assert shown(row, renderer, train_on="all") == ["<[user>a<eos><assistant>b<eos><user>c<eos><assistant>d<eos>]"]
    assert shown({"prompt": talk[:1], "completion": talk[1:]}, renderer) == shown(row, renderer)
    assert shown({"prompt": talk[:3], "completion": talk[3:]}, renderer) == [
        "<user>a<eos><assistant>b<eos><user>c<eos><assistant>[d<eos>]"
    ]
    talk[3]["weight"], row["messages"] = 0, [*talk, {"role": "user", "content": "e"}]
    assert shown(row, renderer) == ["<user>a<eos><assistant>[b<eos>]"]
    system = shown(row, renderer, dataset={"system": "s"})
    assert system == ["<system>s<eos><user>a<eos><assistant>[b<eos>]"]
    for wrong, said in (({"mine": [True]}, "each of 5 messages"), ({"mine": [0.5] * 5}, "must be true, false, 0 or 1")):
        with pytest.raises(BadRow, match=said):
            sample_of(row | wrong, renderer, train_column="mine")


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_tool_calls_are_rendered_by_the_template_or_in_words(arguments):
    talk = [
        {"role": "user", "content": "1+1"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": arguments}}],
        },
        {"role": "tool", "content": "2", "name": None},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "two"},
    ]
    for tools in ([SCHEMA], json.dumps([SCHEMA]), [SCHEMA["function"]]):
        (text,) = shown({"messages": talk, "tools": tools}, chat_renderer(CALLS))
        assert (
            text
            == f'<tools>{json.dumps([SCHEMA])}<eos><user>1+1<eos><assistant>[[add {{"a": 1}}]<eos>]<tool>2<eos><tool>3<eos><assistant>[two<eos>]'
        )
    (text,) = shown({"messages": talk, "tools": [SCHEMA]}, chat_renderer(CALLS.replace("tools", "other")))
    begin, call, results = text.partition('[<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><eos>]')
    assert (begin.startswith("<user>You may call these tools"), bool(call)) == (True, True)
    assert (
        results == "<user><tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response><eos><assistant>[two<eos>]"
    )
    with pytest.raises(BadRow, match="does not show the call of 'add'"):
        sample_of({"messages": talk, "tools": [SCHEMA]}, chat_renderer(KEEPS))
    (text,) = shown({"prompt": "1+1", "completion": talk[1:2], "tools": [SCHEMA]}, chat_renderer(CALLS))
    assert text.endswith('<user>1+1<eos><assistant>[[add {"a": 1}]<eos>]')


def test_a_thought_that_the_prompt_opens_is_continued():
    """As in generation; R1's and others' templates show no thoughts of given answers."""
    renderer, asked = chat_renderer(OPENS), {"role": "user", "content": "a"}
    for said, trained in (
        ("b", "\n</think>\n\nb"),
        ("<think>\nso\n</think>\n\nb", "so\n</think>\n\nb"),
        ("so</think>b", "so</think>b"),
    ):
        row = {"messages": [asked, {"role": "assistant", "content": said}]}
        assert shown(row, renderer) == [f"<user>a<eos><assistant><think>\n[{trained}<eos>]"]
    talk = [asked, {"role": "assistant", "content": "b"}, asked, {"role": "assistant", "content": "c"}]
    first, second = shown({"messages": talk}, renderer)
    assert first == "<user>a<eos><assistant><think>\n[\n</think>\n\nb<eos>]"
    assert second == "<user>a<eos><assistant>b<eos><user>a<eos><assistant><think>\n[\n</think>\n\nc<eos>]"


def test_rows_that_cannot_be_rendered_are_bad_rows():
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    refusing = chat_renderer("{{ raise_exception('no') }}")
    for row, renderer, said in (
        ({"messages": talk}, refusing, "refused a conversation: no"),
        ({"messages": [*talk, {"role": "assistant"}]}, chat_renderer(KEEPS), "must have role and content"),
        ({"messages": [*talk[:1], {"role": "assistant", "tool_calls": [{"name": "x"}]}]}, chat_renderer(CALLS), "tool_calls with the"),
        ({"messages": talk, "tools": "x"}, chat_renderer(CALLS), "schemas of tools"),
        ({"prompt": "a"}, chat_renderer(KEEPS), "has no 'completion' to imitate"),
        ({"messages": [talk[0], {**talk[1], "train": "yes"}]}, chat_renderer(KEEPS), "must be true, false, 0 or 1"),
        ({"messages": talk}, made_plain(), "has no chat template"),
    ):  # fmt: skip
        with pytest.raises(BadRow, match=said):
            sample_of(row, renderer)


def made_plain():
    return chat_renderer(None)
