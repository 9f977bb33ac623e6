"""The endpoint's text completions, alternatives, tools in words and request log, by the real `openai` client."""

import asyncio
import json

import openai
import pytest
import torch
from served import House, opened, play, say, user

from drumroll.data.render import Renderer
from drumroll.engines import Completion
from drumroll.models import loading
from drumroll.runfiles.calls import CallLog


async def told(stream):
    """The texts, token strings and usage of a stream of text completions."""
    texts, listed, usage = {}, {}, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            listed.setdefault(choice.index, []).extend(choice.logprobs.tokens if choice.logprobs else [])
    return texts, listed, usage


def test_text_completions_of_texts_and_token_ids():
    """Several prompts, several choices, log-probs, whole and in a stream; token ids are taken as they are."""

    async def scene():
        async with opened() as house, house.client() as client:
            ask = client.completions.create
            options = {"model": "m", "max_tokens": 40, "n": 2, "seed": 1, "logprobs": 2, "stop": ["e"]}
            ids = Renderer(house.model.tokenizer).encode("abc")
            for prompt, tokens in (["one", "two"], None), (ids, [ids]), ([ids, ids[:1]], [ids, ids[:1]]):
                answer = await ask(prompt=prompt, **options)
                calls = house.calls().all[-len(answer.choices) :]
                assert [call.seen() for call in calls[::2]] == (tokens or [[1, *map(ord_of(house), text)] for text in prompt])
                for choice, call in zip(answer.choices, calls, strict=True):
                    shown = house.text(call.written.tokens)
                    assert choice.text == shown.partition("e")[0]
                    assert choice.finish_reason == ("length" if call.written.stop == "length" else "stop")
                    listed = choice.logprobs
                    assert listed.token_logprobs == call.written.logprobs[: len(listed.tokens)]
                    assert [
                        shown[i : i + len(t)] for i, t in zip(listed.text_offset, listed.tokens, strict=True)
                    ] == listed.tokens
                    assert all(len(top) == 2 for top in listed.top_logprobs)
                texts, tokens, usage = await told(
                    await ask(prompt=prompt, stream=True, stream_options={"include_usage": True}, **options)
                )
                assert texts == {c.index: c.text for c in answer.choices}
                assert tokens == {c.index: c.logprobs.tokens for c in answer.choices}
                assert usage == answer.usage
            house.check_record()

    play(scene())


def ord_of(house):
    return lambda character: Renderer(house.model.tokenizer).encode(character)[0]


def test_a_text_that_goes_on_continues_its_trace():
    """Not one that was cut at a stop string or ended by the model: its tokens are not those of the text."""

    async def scene():
        async with opened() as house, house.client() as client:

            async def ask(prompt, **options):
                answer = await client.completions.create(model="m", prompt=prompt, temperature=0, **options)
                return answer.choices[0]

            first = await ask("ab", max_tokens=3)
            assert first.finish_reason == "length"
            await ask(f"ab{first.text}cd", max_tokens=3)
            [_, second] = house.calls().all
            assert second.parent is house.calls().all[0]
            await ask([*second.after(), 5], max_tokens=3)
            assert house.calls().all[-1].parent is second
            assert len(house.check_record()) == 1
            stopped = await ask("ab", max_tokens=3, stop=[first.text[1]])
            await ask(f"ab{stopped.text}!", max_tokens=3)
            assert house.calls().all[-1].parent is None
            with pytest.raises(openai.BadRequestError, match=f"has no token {10**6}; it has 0 to"):
                await ask([1, 10**6])
            with pytest.raises(openai.BadRequestError, match="the prompt has 301 tokens") as refused:
                await ask("x" * 300)
            assert refused.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match="the prompt is empty"):
                await ask([[]])
            house.check_record()

    play(scene())


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_top_logprobs_are_the_likeliest_of_the_distribution_sampled_from(temperature):
    async def scene():
        async with opened() as house, house.client() as client:
            options = {"max_tokens": 20, "temperature": temperature, "logprobs": True, "seed": 3}
            plain = (await say(client, [user("hi")], **options)).choices[0]
            answer = (await say(client, [user("hi")], top_logprobs=20, **options)).choices[0]
            assert answer.message.content == plain.message.content  # asking changes no token
            call = house.calls().all[-1]
            tokens = torch.tensor([[*call.seen(), *call.written.tokens]])
            reference = loading.load("tiny-random").module
            reference.set_attn_implementation("eager")
            logits = reference(input_ids=tokens).logits[0, len(call.seen()) - 1 : -1].float()
            expected = (logits / (temperature or 1.0)).log_softmax(-1).topk(20)
            assert len(call.written.top) == len(call.written.tokens)
            for top, values, token, logprob in zip(
                call.written.top, expected.values.tolist(), call.written.tokens, call.written.logprobs, strict=True
            ):
                assert [value for _, value in top] == pytest.approx(values, abs=1e-4)
                assert dict(top).get(token, logprob) == pytest.approx(logprob, abs=1e-4)
            for entry, top in zip(answer.logprobs.content, call.written.top, strict=False):
                assert [(e.token, e.logprob) for e in entry.top_logprobs] == [(house.text([t]), value) for t, value in top]

    play(scene())


def test_every_request_is_logged_on_a_line(tmp_path):
    async def scene():
        async with opened(context=1000) as house, house.client() as client:
            log = CallLog(tmp_path / "requests.jsonl")
            house.endpoint.log = log.add
            answer = await say(client, [user("hi")])
            streamed = await say(client, [user("hi")], stream=True)
            async for _ in streamed:
                pass
            with pytest.raises(openai.NotFoundError):
                await client.embeddings.create(model="m", input="x")
            house.spy.answers.clear()
            call = asyncio.ensure_future(client.completions.create(model="m", prompt="a"))
            while not house.router.busy():
                await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            while len(log.path.read_text().splitlines()) < 4:
                await asyncio.sleep(0.01)
            house.spy.answers.set()
        lines = [json.loads(line) for line in log.path.read_text().splitlines()]
        assert [(line["path"], line["status"]) for line in lines] == [
            ("/s/s/v1/chat/completions", 200),
            ("/s/s/v1/chat/completions", 200),
            ("/s/s/v1/embeddings", 404),
            ("/s/s/v1/completions", 499),
        ]
        assert [line["completion_tokens"] > 0 for line in lines] == [True, True, False, False]
        assert lines[0]["total_tokens"] == answer.usage.total_tokens
        assert all(line["time"] > 0 and line["seconds"] >= 0 for line in lines)

    play(scene())


def test_tools_are_shown_in_words_to_templates_without_them():
    text = '{"name": "add", "arguments": {"a": 1}}'
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    house = House(context=2000)
    encode = Renderer(house.model.tokenizer).encode

    async def generate(request):
        all_ = encode(text)
        begun = max(k for k in range(len(all_)) if request.tokens[len(request.tokens) - k :] == tuple(all_[:k]))
        tokens = all_[begun:][: request.sampling.max_tokens]
        return Completion(tokens, [-1.0] * len(tokens), [0] * len(tokens))

    async def scene():
        house.generate = generate
        await house.open()
        async with house.client() as client:
            options = {"tools": [tool], "max_tokens": len(encode(text))}
            answer = (await say(client, [user("hi")], **options)).choices[0]
            (call,) = answer.message.tool_calls
            assert (answer.message.content, answer.finish_reason) == (None, "tool_calls")
            result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
            talk = [user("hi"), answer.message.model_dump(exclude_none=True), result]
            streamed = await say(client, talk, stream=True, **options)
            calls = [c async for chunk in streamed for choice in chunk.choices for c in choice.delta.tool_calls or ()]
            assert [c.function.name for c in calls] == ["add"]
            first, second = house.calls().all
            assert second.parent is first
            shown = house.model.tokenizer.decode(second.seen())
            assert shown.startswith("<user>You may call these tools:")
            assert shown.endswith(
                f"\n\nhi<eos><assistant>{text}<eos><user><tool_response>\n2\n</tool_response><eos><assistant>"
            )
        await house.close()

    play(scene())
