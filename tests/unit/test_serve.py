"""The endpoint's parts: requests, conversations as tokens, tool calls, completions in slices."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_data import TEMPLATE, chat_renderer

from drumroll.data.conversation import Conversation
from drumroll.data.render import Renderer
from drumroll.data.tools import teach
from drumroll.engines import Completion, EngineLost, Request, Sampling
from drumroll.envs.adapters.calls import Call, written
from drumroll.models import tiny
from drumroll.sample import StopReason
from drumroll.serve import tools
from drumroll.serve.chat import marks, place
from drumroll.serve.protocol import ChatBody, Refused, TextBody, read
from drumroll.serve.traces import Calls
from drumroll.serve.writing import SLICE, EngineClient

HI = {"role": "user", "content": "hi"}
TOOLS = "{% if tools %}[{% for t in tools %}{{ t.function.name }}{% endfor %}]{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
WITH_TOOLS = TOOLS + TEMPLATE.replace("{{ m.content }}", "{{ m.content }}" + CALLS)
THOUGHTLESS = TEMPLATE.replace("{{ m.content }}", "{{ m.content.split('!')[-1] }}")


# --- requests ---


def body(**values):
    return json.dumps({"messages": [HI], **values}).encode()


def test_a_request_is_read_and_nulls_are_left_out():
    parts = [{"role": "developer", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    assert read(body(messages=parts), ChatBody).conversation() == [{"role": "system", "content": "hi"}]
    asked = read(body(model="m", temperature=None, stop="x", max_completion_tokens=3, tool_choice="none", tools=[]), ChatBody)
    assert (asked.stops(), asked.most(), asked.chosen(), asked.conversation()) == (("x",), 3, {}, [HI])


@pytest.mark.parametrize(
    ("values", "code", "param"),
    [
        ({"functions": []}, "unsupported_parameter", "functions"),
        ({"top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "invalid_value", "response_format.type"),
        ({"n": 0}, "invalid_value", "n"),
        ({"temperature": 1e-40}, "invalid_value", "temperature"),
        ({"temperature": float("inf")}, "invalid_value", "temperature"),
        ({"temperature": float("nan")}, "invalid_value", "temperature"),
        ({"top_k": 10**30}, "invalid_value", "top_k"),
        ({"top_p": float("nan")}, "invalid_value", "top_p"),
        ({"min_p": float("nan")}, "invalid_value", "min_p"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "invalid_value", "messages.0.content.0.text"),
    ],
)
def test_what_is_not_supported_is_said(values, code, param):
    with pytest.raises(Refused) as refused:
        read(body(**values), ChatBody)
    assert refused.value.status == 400
    assert (refused.value.body["error"]["code"], refused.value.body["error"]["param"]) == (code, param)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", ""], ["a", ""]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ([[]], [[]])],
)
def test_prompts_are_texts_or_token_ids(prompt, prompts):
    assert read(json.dumps({"prompt": prompt}).encode(), TextBody).prompt == prompts


@pytest.mark.parametrize(
    ("values", "param", "words"),
    [
        ({"prompt": []}, "prompt", "must be a text, a list of token ids"),
        ({"prompt": ["a", 1]}, "prompt", "must be a text"),
        ({"prompt": [[1, -1]]}, "prompt", "must be a text"),
        ({"prompt": [True, False]}, "prompt", "must be a text"),
        ({"prompt": 3}, "prompt", "must be a text"),
        ({"prompt": "a", "echo": True}, "echo", "leave it out and generate"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"prompt": "a", "messages": [HI]}, "messages", "not supported"),
        ({}, "prompt", "required"),
    ],
)
def test_what_is_not_supported_for_texts_is_said(values, param, words):
    with pytest.raises(Refused, match=words) as refused:
        read(json.dumps(values).encode(), TextBody)
    assert (refused.value.status, refused.value.body["error"]["param"]) == (400, param)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'"x"'])
def test_a_body_that_is_no_request_is_refused(text):
    with pytest.raises(Refused):
        read(text, ChatBody)


# --- conversations ---


def test_equal_messages_have_equal_marks_however_they_are_written():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    other = {"id": "2", "function": {"name": "f", "arguments": {"a": 1}}}
    first = [HI, {"role": "assistant", "tool_calls": [call], "content": " "}]
    second = [HI, {"role": "assistant", "content": None, "tool_calls": [other], "refusal": None}]
    assert marks(first, []) == marks(second, [])
    assert marks(first, [])[1:] == marks(first, ["t"])[1:]
    assert marks(first, [])[0] != marks(first, ["t"])[0]


turns = st.lists(st.tuples(st.text("ab", max_size=4), st.text("xy", min_size=1, max_size=4)), min_size=1, max_size=4)


def talk_of(renderer, messages, written, tools=(), said=None, **options):
    """Where the last message of a conversation is placed after one call, whose message is the second."""
    calls = Calls()
    first = place(renderer, messages[:1], tools, [])
    named = marks(messages[:2], tools)
    calls.add(None, first.tokens, written, named, first.text, messages[1]["content"] if said is None else said)
    return calls, place(renderer, messages, tools, calls.along(marks(messages, tools)), **options)


@given(turns)
def test_what_follows_completes_the_rendered_conversation(turns):
    """What was seen, what was said and what follows, end to end, is the whole conversation, for a stable template."""
    renderer, calls, messages = chat_renderer(), Calls(), [HI]
    for said, observation in turns:
        now = place(renderer, messages, [], calls.along(marks(messages, [])))
        assert (now.parent is None) == (not calls.all)
        messages.append({"role": "assistant", "content": said})
        written = Completion(renderer.encode(said), stop=StopReason.LENGTH)
        calls.add(now.parent, now.tokens, written, marks(messages, []), now.text, said)
        messages.append({"role": "user", "content": observation})
    last = place(renderer, messages, [], calls.along(marks(messages, [])))
    assert last.parent is calls.all[-1]
    assert [*last.parent.after(), *last.tokens] == place(renderer, messages, [], []).tokens


def test_the_end_of_turn_that_the_model_wrote_is_not_added_again():
    renderer = chat_renderer(TEMPLATE.replace("</>", "<eos>"))
    eos = renderer.tokenizer.eos_token_id
    talk = [HI, {"role": "assistant", "content": "yo"}, HI]
    ended, was_cut = Completion([5, eos], stop=StopReason.EOS), Completion([5, 6], stop=StopReason.LENGTH)
    assert [eos, *talk_of(renderer, talk, ended)[1].tokens] == talk_of(renderer, talk, was_cut)[1].tokens


def test_a_template_that_rewrites_turns_departs_before_them():
    talk = [HI, {"role": "assistant", "content": "thought!yo"}, HI]
    calls, kept = talk_of(chat_renderer(), talk, Completion([5]))
    assert kept.parent is calls.all[0]
    renderer = chat_renderer(THOUGHTLESS)
    calls, forked = talk_of(renderer, talk, Completion([5]))
    assert forked.parent is None
    assert forked.tokens == place(renderer, talk, [], []).tokens
    calls, sampled = talk_of(renderer, talk, Completion([5]), sampled=True)
    assert sampled.parent is calls.all[0]
    assert sampled.tokens == kept.tokens


def test_tool_calls_are_kept_as_they_were_written():
    renderer = chat_renderer(WITH_TOOLS)
    function = [{"type": "function", "function": {"name": "f"}}]
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":1}'}}]}
    talk = [HI, said, {"role": "tool", "content": "2", "tool_call_id": "x"}]
    assert renderer.tokenizer.decode(place(renderer, [HI], function, []).tokens) == "[f]<user>hi</><assistant>"
    calls, added = talk_of(renderer, talk, Completion([5]), function, '<tool_call>{"name":"f"}</tool_call>')
    assert added.parent is calls.all[0]
    assert renderer.tokenizer.decode(added.tokens) == "</><tool>2</><assistant>"


def test_without_a_template_a_conversation_is_its_texts():
    plain = Renderer(tiny.tokenizer())
    talk = [HI, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    assert plain.tokenizer.decode(place(plain, talk, [], []).tokens) == "<bos>hiab"
    assert plain.tokenizer.decode(talk_of(plain, talk, Completion([5]))[1].tokens) == "b"


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_tools_in_words_are_those_of_training(system):
    """A template without tools: the endpoint shows a conversation with the same tokens as an episode with tools."""
    renderer = chat_renderer()
    task: list = [{"role": "tools", "content": teach([ADD]), "tools": [ADD]}, HI]
    episode = Conversation(renderer, task, chat=True, system=system)
    said = written(Call("add", {"a": 1}))
    seen = [*episode.prompt(), *renderer.encode(said), *episode.follow(said, [{"role": "tool", "content": "2"}], None)]
    call = {"id": "x", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = [] if system is None else [{"role": "system", "content": system}]
    talk = [*asked, HI, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    assert place(renderer, talk, [ADD], []).tokens == seen
    begun, calls = place(renderer, talk[: len(asked) + 1], [ADD], []), Calls()
    answer = Completion(renderer.encode(said), stop=StopReason.LENGTH)
    calls.add(None, begun.tokens, answer, marks(talk[: len(asked) + 2], [ADD]), begun.text, said)
    added = place(renderer, talk, [ADD], calls.along(marks(talk, [ADD])))
    assert added.parent is calls.all[0]
    assert [*begun.tokens, *renderer.encode(said), *added.tokens] == seen


# --- tool calls ---


def test_tool_calls_are_read_from_the_text():
    one, two = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', '<tool_call>{"name": "g"}'
    assert tools.split(f"so\n{one}{two}") == ("so", [("f", {"a": 1}), ("g", {})])
    assert tools.split(f"<think>{two}</think>{one}") == (f"<think>{two}</think>", [("f", {"a": 1})])
    assert tools.split('<think>so</think> {"name": "f", "arguments": {}}') == ("<think>so</think>", [("f", {})])
    assert tools.split('[{"name": "f", "parameters": {"a": 1}}]') == ("", [("f", {"a": 1})])
    for odd in ("plain", "<tool_call>{</tool_call>", "<tool_call>[1]</tool_call>", '<tool_call>{"x": 1}</tool_call>'):
        assert tools.split(odd) == (odd, [])


BARE = '{"name": "f", "arguments": {}}'
pieces = st.sampled_from(["a", " ", "\n", "<", "<tool", "<tool_call>", BARE, "</tool_call>", "<think>", "</think>", "[", "]"])
texts = st.tuples(
    st.sampled_from(["", " ", "<think>a</think>"]), st.sampled_from(["", BARE, f"[{BARE}]"]), st.lists(pieces, max_size=6)
)


@given(
    texts.map(lambda parts: parts[0] + parts[1] + "".join(parts[2])),
    st.lists(st.text("ab<", min_size=1, max_size=3), max_size=2),
    st.booleans(),
)
def test_what_is_shown_of_an_unfinished_text_stays(text, stops, use_tools):
    """Also of calls in tags, of bare calls, and of calls within thoughts."""
    whole_text = tools.cut(text, stops)
    final = tools.split(whole_text)[0] if use_tools else whole_text
    shown = ""
    for end in range(len(text) + 1):
        now = tools.settled(text[:end], stops, tools=use_tools)
        assert now.startswith(shown) or shown.startswith(now)
        shown = max(shown, now, key=len)
    assert final.startswith(shown)


# --- completions ---


def scripted(tokens, *, stop=StopReason.EOS, faults=()):
    """What a router gives whose engine writes these tokens wherever it begins; some of its calls fail."""
    faults = list(faults)

    async def generate(request: Request, key, place, seconds, started) -> Completion:
        fault = faults.pop(0) if faults else None
        if isinstance(fault, Exception):
            raise fault
        begin = len(request.tokens) - 1
        most = request.sampling.max_tokens if fault is None else min(fault, request.sampling.max_tokens)
        part = tokens[begin : begin + most]
        ended = begin + len(part) == len(tokens)
        reason = stop if ended else StopReason.LENGTH if fault is None else StopReason.ABORTED
        return Completion(part, [-1.0] * len(part), [0] * len(part), reason, [[(token, -1.0)] for token in part])

    return generate


def write(generate, most=100, stop=(), heard=None):
    decode = tiny.tokenizer().decode
    sampling = Sampling(max_tokens=most, stop=stop)
    return asyncio.run(EngineClient(generate, decode, "k").write("w", [1], sampling, 0, heard))


@given(st.lists(st.integers(3, 60), min_size=1, max_size=50), st.lists(st.integers(0, 20), max_size=4), st.booleans())
def test_interruptions_and_slices_change_nothing(tokens, faults, listen):
    told = []

    async def heard(done):
        told.append(list(done.tokens))

    done = write(scripted(tokens, faults=faults), heard=heard if listen else None)
    assert (done.tokens, done.stop) == (tokens, StopReason.EOS)
    assert done.top == [[(token, -1.0)] for token in tokens]
    assert not listen or told[-1] == tokens
    assert write(scripted(tokens), most=5).stop is (StopReason.LENGTH if len(tokens) > 5 else StopReason.EOS)


def test_a_lost_engine_is_tried_again_within_the_budget():
    assert write(scripted([5, 6], faults=[EngineLost("gone"), TimeoutError()])).tokens == [5, 6]
    with pytest.raises(EngineLost):
        write(scripted([5], faults=[EngineLost("gone")] * 3))


def test_a_stop_string_over_a_boundary_ends_the_completion():
    encode = Renderer(tiny.tokenizer()).encode
    text = "a" * (SLICE - 1) + "stop" + "b" * 8

    async def heard(done):
        pass

    done = write(scripted(encode(text), stop=StopReason.LENGTH), stop=("sto",), heard=heard)
    assert tiny.tokenizer().decode(done.tokens) == "a" * (SLICE - 1) + "sto"
    assert done.stop is StopReason.STOP_STRING
