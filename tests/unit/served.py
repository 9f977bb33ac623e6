"""A model, its real engine and the endpoint before it, called by the real `openai` client over loopback."""

import asyncio
from contextlib import asynccontextmanager

import openai
from test_data import TEMPLATE

from drumroll.data.render import Renderer
from drumroll.engines.native import NativeEngine
from drumroll.engines.router import Router
from drumroll.models import loading
from drumroll.serve.caller import Served
from drumroll.serve.endpoint import Endpoint
from drumroll.serving import Callers

CHAT = TEMPLATE.replace("</>", "<eos>")
TOOLS = "{% if tools %}[{{ tools[0].function.name }}]{% endif %}" + CHAT


class Spied:
    """The engine, and all that it was asked and answered."""

    def __init__(self, engine):
        self.engine = engine
        self.seen = {}
        self.aborted = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def generate(self, request):
        try:
            done = await self.engine.generate(request)
            await self.answers.wait()
        except asyncio.CancelledError:
            self.aborted.append(request.id)
            raise
        self.seen[request.id] = (list(request.tokens), list(done.tokens), list(done.logprobs))
        return done


class House:
    """A model, its engine, and the endpoint before it."""

    def __init__(self, model="tiny-random", template=CHAT, context=256, generate=None):
        self.model = loading.load(model)
        self.model.tokenizer.chat_template = template
        self.context = context
        self.generate = generate

    async def open(self):
        self.engine = NativeEngine(self.model, slots=8, context=self.context)
        self.spy, self.router = Spied(self.engine), Router()
        self.router.join("engine", self.generate or self.spy.generate, 8)
        tokenizer = self.model.tokenizer
        decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)  # noqa: E731
        served = Served("m", Renderer(tokenizer), decode, self.context)
        self.callers = Callers(served, self.router)
        self.endpoint = Endpoint(served, self.callers.find)
        await self.endpoint.open()

    async def close(self):
        await self.endpoint.close()
        await asyncio.to_thread(self.engine.close)

    def client(self, sample="s", **options):
        options = {"api_key": self.endpoint.token, "max_retries": 0, **options}
        return openai.AsyncOpenAI(base_url=f"{self.endpoint.url}/s/{sample}/v1", **options)

    def calls(self, sample="s"):
        return self.callers.find(sample).calls

    def text(self, tokens):
        return self.model.tokenizer.decode(tokens, skip_special_tokens=True)

    def check_record(self, sample="s", *, hung_up=False):
        """What is on record is what the engine saw and wrote, call by call and token by token.

        A client that hung up leaves nothing on record, though the engine may have finished one of its answers.
        """
        calls = self.calls(sample)
        seen = {name: got for name, got in self.spy.seen.items() if name.startswith(f"{sample}/")}
        recorded, engine = sorted((c.seen(), c.written.tokens, c.written.logprobs) for c in calls.all), joined(seen)
        if hung_up:
            engine = [row for row in engine if tuple(row) in recorded]
        assert recorded == sorted(map(tuple, engine))
        traces, turns = calls.traces()
        for call, turn in zip(calls.all, turns, strict=True):
            assert traces[turn.trace].tokens[: turn.end] == [*call.seen(), *call.written.tokens]
        return traces


def joined(seen):
    """Slices of one completion put together: {name}#{try}.{position}."""
    whole = {}
    for name, (tokens, written, logprobs) in sorted(seen.items(), key=lambda item: int(item[0].rpartition(".")[2])):
        row = whole.setdefault(name.partition("#")[0], [tokens, [], []])
        assert tokens == [*row[0], *row[1]]
        row[1] += written
        row[2] += logprobs
    return list(whole.values())


@asynccontextmanager
async def opened(**options):
    house = House(**options)
    await house.open()
    try:
        yield house
    finally:
        await house.close()


def user(text):
    return {"role": "user", "content": text}


async def say(client, messages, **options):
    options = {"max_tokens": 12, **options}
    return await client.chat.completions.create(model="any", messages=messages, **options)


def play(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))
