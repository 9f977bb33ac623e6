"""The endpoint, by the real `openai` client over loopback, before the real engine with the tiny model."""

import asyncio
import json
import random
import re
import signal
import subprocess
import sys

import httpx
import openai
import pytest
from served import TOOLS, House, opened, play, say, user

from drumroll.data.render import Renderer
from drumroll.engines import Completion, Sampling
from drumroll.sample import Owner
from drumroll.serve.caller import Caller
from drumroll.serve.writing import EngineClient


def test_a_plain_call_says_what_the_engine_wrote():
    async def scene():
        async with opened() as house, house.client() as client:
            answer = await say(client, [user("hi")], logprobs=True, extra_body={"top_k": 20, "min_p": 0.0})
            (call,) = house.calls().all
            assert answer.choices[0].message.content == house.text(call.written.tokens)
            assert answer.model == "m"
            assert answer.usage.prompt_tokens == len(call.seen())
            assert answer.usage.completion_tokens == len(call.written.tokens)
            listed = answer.choices[0].logprobs.content
            assert [entry.logprob for entry in listed] == call.written.logprobs[: len(listed)]
            assert house.model.tokenizer.decode(call.seen()) == "<user>hi<eos><assistant>"
            house.check_record()
            assert [model.id async for model in client.models.list()] == ["m"]
            assert (await client.models.retrieve("m")).owned_by == "drumroll"

    play(scene())


@pytest.mark.parametrize("options", [{}, {"stop": ["e", "qq"]}, {"n": 3}, {"logprobs": True}])
def test_streaming_says_the_same(options):
    async def scene():
        async with opened() as house, house.client() as client:
            for seed in range(2):
                whole = await say(client, [user("hi")], max_tokens=60, seed=seed, **options)
                stream = await say(
                    client,
                    [user("hi")],
                    max_tokens=60,
                    seed=seed,
                    stream=True,
                    stream_options={"include_usage": True},
                    **options,
                )
                texts, reasons, listed, usage = {}, {}, {}, None
                async for chunk in stream:
                    usage = chunk.usage or usage
                    for choice in chunk.choices:
                        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                        reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
                        listed.setdefault(choice.index, []).extend(choice.logprobs.content if choice.logprobs else [])
                assert texts == {c.index: c.message.content for c in whole.choices}
                assert reasons == {c.index: c.finish_reason for c in whole.choices}
                assert usage == whole.usage
                for choice in whole.choices:
                    expected = choice.logprobs.content if choice.logprobs else []
                    assert [entry.token for entry in listed[choice.index]] == [entry.token for entry in expected]
            traces = house.check_record()
            assert len(traces) == len(house.calls().all)

    play(scene())


def test_only_who_has_the_token_is_served():
    async def scene():
        async with opened() as house:
            for key in (b"wrong", "ключ".encode(), b"\xff", house.endpoint.token[:-1].encode()):
                headers = {"Authorization": b"Bearer " + key}
                async with httpx.AsyncClient(headers=headers) as http:
                    for path in ("/v1/models", "/s/x/traces", "/v1/chat/completions", "/nowhere"):
                        assert (await http.get(house.endpoint.url + path)).status_code == 401
            async with house.client(api_key="wrong") as client:
                with pytest.raises(openai.AuthenticationError):
                    await say(client, [user("hi")])
            async with httpx.AsyncClient() as http:
                assert (await http.get(f"{house.endpoint.url}/health")).json()["status"] == "ok"
            assert house.spy.seen == {}

    play(scene())


def test_refusals_are_the_protocols_own():
    async def scene():
        async with opened() as house, house.client() as client:
            with pytest.raises(openai.BadRequestError, match="'presence_penalty' is not supported") as refused:
                await say(client, [user("hi")], presence_penalty=1.0)
            assert refused.value.code == "unsupported_parameter"
            with pytest.raises(openai.BadRequestError, match="'verbosity' is not supported"):
                await say(client, [user("hi")], verbosity="low")
            with pytest.raises(openai.BadRequestError, match="the most is 256; shorten them") as refused:
                await say(client, [user("x" * 300)])
            assert refused.value.code == "context_length_exceeded"
            with pytest.raises(openai.APIStatusError, match=r"larger than 33554432 bytes \(32 MiB\)") as refused:
                await say(client, [user("x" * (33 * 2**20))])
            assert (refused.value.status_code, refused.value.code) == (413, "request_too_large")
            with pytest.raises(openai.BadRequestError, match="Input should be 'text'"):
                await say(client, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
            with pytest.raises(openai.NotFoundError):
                await client.embeddings.create(model="m", input="x")
            answer = await say(client, [user("x" * 200)], max_tokens=1000)  # as many as there is room for
            assert answer.usage.total_tokens <= house.context
            assert answer.choices[0].finish_reason in ("length", "stop")

    play(scene())


def test_a_conversation_goes_on_forks_and_is_compacted():
    async def scene():
        async with opened() as house, house.client() as client:
            talk = [user("one")]
            for text in ("two", "three"):
                answer = (await say(client, talk)).choices[0].message
                talk = [*talk, answer.model_dump(exclude_none=True), user(text)]
            await say(client, talk)
            assert len(house.check_record()) == 1
            await say(client, [*talk[:2], user("otherwise")])  # a fork after the first answer
            traces = house.check_record()
            assert len(traces) == 2
            shared = len(house.calls().all[0].after())
            assert traces[0].tokens[:shared] == traces[1].tokens[:shared]
            assert set(traces[1].owners[:shared]) == {Owner.PROMPT}
            await say(client, [user("summary"), talk[-1]])  # compacted: nothing before it was said like that
            edited = [talk[0], {"role": "assistant", "content": "never said"}, user("two")]
            await say(client, edited)
            await say(client, [user("four")], n=2)
            assert len(house.check_record()) == 6
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {house.endpoint.token}"}) as http:
                listed = (await http.get(f"{house.endpoint.url}/s/s/traces")).json()
            assert [trace["tokens"] for trace in listed] == [trace.tokens for trace in house.check_record()]

    play(scene())


def test_the_bare_address_keeps_nothing_and_samples_do_not_mix():
    async def scene():
        async with opened() as house, house.client("a") as a, house.client("b") as b:
            bare = openai.AsyncOpenAI(base_url=f"{house.endpoint.url}/v1", api_key=house.endpoint.token, max_retries=0)
            await asyncio.gather(say(a, [user("x")]), say(b, [user("y")]), say(bare, [user("z")]))
            await bare.close()
            assert [len(house.calls(name).all) for name in "ab"] == [1, 1]

    play(scene())


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_stops_the_generation(stream):
    async def scene():
        async with opened(context=1000) as house, house.client() as client:

            async def listen():
                answer = await say(client, [user("hi")], max_tokens=900, stream=stream, logit_bias={})
                if stream:
                    async for _ in answer:
                        pass

            house.spy.answers.clear()  # a completion that ends early stays in flight: nobody can miss it
            for _ in range(3):
                call = asyncio.ensure_future(listen())
                while not house.router.busy():
                    await asyncio.sleep(0.01)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                while house.router.busy():
                    await asyncio.sleep(0.01)
            assert len(house.spy.aborted) == 3
            assert house.calls().all == []
            house.spy.answers.set()
            await say(client, [user("hi")])  # and the engine goes on
            assert len(house.calls().all) == 1

    play(scene())


def test_twenty_agents_at_once_are_recorded_token_by_token():
    """Random agents: they go on, fork, rewrite, compact, stream, want several answers, and hang up."""
    hung_up = set()

    async def agent(house, number):
        choose = random.Random(number)
        talks = [[user(f"q{number}")]]
        async with house.client(f"a{number}") as client:
            for turn in range(4):
                talk = choose.choice(talks[-3:])
                options = {"max_tokens": choose.randint(1, 20), "n": choose.choice([1, 1, 2])}
                if choose.random() < 0.2:
                    task = asyncio.ensure_future(say(client, talk, **options))
                    await asyncio.sleep(choose.random() * 0.02)
                    task.cancel()
                    hung_up.add(number)
                    await asyncio.gather(task, return_exceptions=True)
                if choose.random() < 0.3:
                    answers = [""] * options["n"]
                    async for chunk in await say(client, talk, stream=True, **options):
                        for choice in chunk.choices:
                            answers[choice.index] += choice.delta.content or ""
                else:
                    answers = [choice.message.content for choice in (await say(client, talk, **options)).choices]
                for text in answers:
                    said = text if choose.random() < 0.9 else "edited"
                    talks.append([*talk, {"role": "assistant", "content": said}, user(f"t{turn}")])
                if choose.random() < 0.1:
                    talks.append([user("in short"), talk[-1]])

    async def scene():
        async with opened(context=600) as house:
            await asyncio.gather(*(agent(house, number) for number in range(20)))
            while house.router.busy():
                await asyncio.sleep(0.01)
            forks = [house.check_record(f"a{number}", hung_up=number in hung_up) for number in range(20)]
            assert len(hung_up) < 20
            assert sum(map(len, forks)) > 30

    play(scene())


def test_a_run_samples_as_it_does_and_says_once_what_it_ignores():
    async def scene():
        async with opened() as house, house.client() as client:
            served, notices = house.callers.served, []
            served.notify = notices.append
            engines = EngineClient(house.router.generate, served.spell, "s")
            own = Caller("s", served, engines, Sampling(0.0, 5), lambda number, index, asked: number, fixed=True, turns=3)
            house.endpoint.find = lambda name: own
            for most in (50, 50, 2):
                wanted = {"temperature": 2.0, "presence_penalty": 1.0, "top_p": 1.0, "seed": 3}
                await say(client, [user("hi")], max_tokens=most, **wanted)
            first, second, third = (call.written.tokens for call in own.calls.all)
            assert first == second
            assert first[:2] == third[:2]
            assert [len(first) <= 5, len(third) <= 2] == [True, True]
            assert [notice.split("=")[0] for notice in sorted(notices)] == [
                f"an agent asked for {name}" for name in ("presence_penalty", "seed", "temperature")
            ]
            with pytest.raises(openai.BadRequestError, match="has had its 3 completions") as refused:
                await say(client, [user("hi")])
            assert refused.value.code == "max_turns"
            own.close()

    play(scene())


def test_a_sample_that_is_over_ends_its_calls():
    async def scene():
        async with opened(context=1000) as house, house.client() as client:
            call = asyncio.ensure_future(say(client, [user("hi")], max_tokens=900))
            while not house.router.busy():
                await asyncio.sleep(0.01)
            house.callers.find("s").close()
            with pytest.raises(openai.NotFoundError, match="this sample is over"):
                await call
            while house.router.busy():
                await asyncio.sleep(0.01)

    play(scene())


def test_tools_are_shown_called_and_answered():
    """The model writes a tool call; its text stays as it was written, whatever the template would make of it."""
    text = 'so <tool_call>{"arguments":{"a":  1},"name":"add"}</tool_call>'
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    house = House(template=TOOLS)
    encode = Renderer(house.model.tokenizer).encode

    async def generate(request):
        tokens = encode(text)[: request.sampling.max_tokens]
        return Completion(tokens, [-1.0] * len(tokens), [0] * len(tokens))

    async def scene():
        house.generate = generate
        await house.open()
        async with house.client() as client:
            options = {"tools": [tool], "max_tokens": len(encode(text))}
            answer = (await say(client, [user("hi")], **options)).choices[0]
            assert answer.finish_reason == "tool_calls"
            assert answer.message.content == "so"
            (call,) = answer.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
            result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
            await say(client, [user("hi"), answer.message.model_dump(exclude_none=True), result], **options)
            first, second = house.calls().all
            assert second.parent is first
            shown = house.model.tokenizer.decode(second.seen())
            assert shown == f"[add]<user>hi<eos><assistant>{text}<eos><tool>2<eos><assistant>"
        await house.close()

    play(scene())


def test_the_command_serves_records_and_ends_with_ctrl_c(tmp_path):
    """What it prints works as it is."""
    record = tmp_path / "calls.jsonl"
    requests = tmp_path / "requests.jsonl"
    command = [sys.executable, "-u", "-m", "drumroll", "serve", "tiny", "--record", str(record), "--log", str(requests)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        try:
            said = ""
            while "print(" not in said:
                line = server.stdout.readline()
                assert line, said
                said += line
            example = said[said.index("import openai") :]
            answer = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120)
            assert answer.returncode == 0, answer.stderr
            assert re.search(r"http://127\.0\.0\.1:\d+/v1; Ctrl-C ends it\. Token: \S{20,}", said)
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
        finally:
            server.kill()
    assert json.loads(requests.read_text())["status"] == 200
    (line,) = record.read_text().splitlines()
    call = json.loads(line)
    assert call["sample"] == "my-sample"
    assert call["messages"][-1]["content"] == answer.stdout.removesuffix("\n")
    assert len(call["written"]) == len(call["logprobs"]) == len(call["versions"])


def test_what_cannot_be_served_is_said(drumroll, tmp_path):
    code, _, err = drumroll("serve", str(tmp_path / "nothing.yaml"))
    assert code == 2
    assert "cannot read the recipe" in err
    code, _, err = drumroll("serve", str(tmp_path / "nothing"))
    assert code == 2
    assert "there is no directory" in err
