"""The HTTP endpoint: routes, the token, streams. The callers produce its answers."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from drumroll.engines import Completion, EngineLost
from drumroll.errors import MissingExtra
from drumroll.sample import StopReason
from drumroll.serve import tools
from drumroll.serve.answers import Chat, Shape, Text, listed
from drumroll.serve.caller import Asked, Caller, Choice, Served, together
from drumroll.serve.protocol import Body, ChatBody, Refused, TextBody, event, read, usage

try:
    from aiohttp import web
except ImportError:
    raise MissingExtra("the endpoint for agents", "serve") from None

LARGEST = 32 * 2**20
"""The largest request in bytes."""
HUNG_UP = 499
"""The status in the request log of a client that disconnected before its answer."""
USAGE: ContextVar[dict[str, int]] = ContextVar("usage")
"""The token counts of the request that this task answers, for the request log."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """Serves callers, found by the path of their base URL (None: the bare `/v1`), to clients that have the token."""

    def __init__(
        self,
        served: Served,
        find: Callable[[str | None], Caller],
        token: str | None = None,
        log: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.served = served
        self.find = find
        self.log = log
        self.token = token or secrets.token_urlsafe(24)
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def open(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; port 0 picks a free one."""
        app = web.Application(client_max_size=LARGEST, middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        for base in ("", "/s/{sample}"):
            app.router.add_get(f"{base}/v1/models", self._models)
            app.router.add_get(f"{base}/v1/models/{{model:.+}}", self._model)
            app.router.add_post(f"{base}/v1/chat/completions", self._chat)
            app.router.add_post(f"{base}/v1/completions", self._text)
        app.router.add_get("/s/{sample}/traces", self._traces)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        where, number = self._runner.addresses[0][:2]
        self.url = f"http://{f'[{where}]' if ':' in where else where}:{number}"

    async def close(self) -> None:
        """Stop listening and cancel requests in progress."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token, format every error as the protocol does, and log the request."""
        began, status = time.perf_counter(), HUNG_UP
        USAGE.set(usage(0, 0))
        try:
            response = await self._handled(request, handler)
            status = response.status
            return response
        finally:
            if self.log is not None:
                seconds = round(time.perf_counter() - began, 4)
                self.log({"method": request.method, "path": request.path, "status": status, "seconds": seconds, **USAGE.get()})

    async def _handled(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
            if request.path != "/health" and not hmac.compare_digest(
                given.encode("utf-8", "surrogateescape"), self.token.encode()
            ):
                raise Refused(
                    401, "the API key is missing or wrong; give the token that the server printed.", code="invalid_api_key"
                )
            return await handler(request)
        except Refused as refused:
            return web.json_response(refused.body, status=refused.status)
        except web.HTTPRequestEntityTooLarge:
            text = (
                f"the request is larger than {LARGEST} bytes ({LARGEST >> 20} MiB), the most that is read; send less at once."
            )
            return web.json_response(Refused(413, text, code="request_too_large").body, status=413)
        except web.HTTPException as error:
            text = f"{request.method} {request.path}: {error.reason}. POST /v1/chat/completions and /v1/completions are served."
            return web.json_response(Refused(error.status, text).body, status=error.status)
        except Exception as error:
            refused = _fault(error)
            return web.json_response(refused.body, status=refused.status)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "model": self.served.name})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        if request.match_info["model"] != self.served.name:
            raise Refused(404, f"the model served is '{self.served.name}'.", code="model_not_found", param="model")
        return web.json_response(self._card())

    def _card(self) -> dict[str, Any]:
        return {"id": self.served.name, "object": "model", "created": 0, "owned_by": "drumroll"}

    async def _traces(self, request: web.Request) -> web.StreamResponse:
        """Return a sample's traces so far."""
        traces, _ = self.find(request.match_info["sample"]).calls.traces()
        columns = ("tokens", "owners", "logprobs", "versions")
        return web.json_response([{name: [*getattr(trace, name)] for name in columns} for trace in traces])

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, read(await request.read(), ChatBody), Chat())

    async def _text(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, read(await request.read(), TextBody), Text())

    async def _complete(self, request: web.Request, body: Body, shape: Shape) -> web.StreamResponse:
        caller = self.find(request.match_info.get("sample"))
        asked = caller.ask(body)
        head = {"id": f"{shape.prefix}-{secrets.token_hex(8)}", "created": int(time.time()), "model": self.served.name}
        if body.stream:
            return await _Stream(self.served, caller, asked, shape, head).run(request)
        choices = await _answers(caller, asked)
        answers = [shape.choice(i, c, _logprobs(self.served, shape, body, c.written)) for i, c in enumerate(choices)]
        counts = _usage(asked, choices)
        return web.json_response({**head, "object": shape.whole, "choices": answers, "usage": counts})


class _Stream:
    """One answer as server-sent events: text as it becomes final, then tool calls, finish reasons, and token counts."""

    def __init__(self, served: Served, caller: Caller, asked: list[Asked], shape: Shape, head: dict[str, Any]) -> None:
        self.served = served
        self.caller = caller
        self.asked = asked
        self.body = asked[0].body
        self.shape = shape
        self.head = {**head, "object": shape.chunk}
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        self.sent = [""] * (self.body.n * len(asked))
        self.tokens = [0] * len(self.sent)

    async def run(self, request: web.Request) -> web.StreamResponse:
        """Write the whole stream.

        An error after the first byte is sent as an event, because the status has already been sent.
        """
        await self.response.prepare(request)
        try:
            for i in range(len(self.sent)):
                if (first := self.shape.begin(i)) is not None:
                    await self._send(first)
            choices = await _answers(self.caller, self.asked, self._received)
            for i, choice in enumerate(choices):
                await self._end(i, choice)
            counts = _usage(self.asked, choices)
            if self.body.stream_options.include_usage:
                await self.response.write(event({**self.head, "choices": [], "usage": counts}))
        except Exception as error:
            await self.response.write(event((error if isinstance(error, Refused) else _fault(error)).body))
        await self.response.write(event("[DONE]"))
        await self.response.write_eof()
        return self.response

    async def _received(self, index: int, done: Completion) -> None:
        asked = self.asked[index // self.body.n]
        text = tools.settled(self.served.decode(done.tokens), asked.sampling.stop, tools=bool(asked.tools))
        if len(text) > len(self.sent[index]):
            delta, self.sent[index] = text[len(self.sent[index]) :], text
            await self._part(index, delta, done)

    async def _end(self, index: int, choice: Choice) -> None:
        text = choice.text if choice.message is None else choice.message["content"] or ""
        rest = text[len(self.sent[index]) :]
        if rest or self.body.alternatives() is not None:
            await self._part(index, rest, choice.written)
        for part in self.shape.end(index, choice):
            await self._send(part)

    async def _part(self, index: int, text: str, done: Completion) -> None:
        start, self.tokens[index] = self.tokens[index], len(done.tokens) - (done.stop is StopReason.EOS)
        await self._send(self.shape.part(index, text, _logprobs(self.served, self.shape, self.body, done, start)))

    async def _send(self, choice: dict[str, Any]) -> None:
        await self.response.write(event({**self.head, "choices": [choice]}))


async def _answers(
    caller: Caller, asked: list[Asked], received: Callable[[int, Completion], Awaitable[None]] | None = None
) -> list[Choice]:
    """Generate the choices of all prompts; `received` gets their growing texts, by the number of the choice."""

    def listener(first: int) -> Callable[[int, Completion], Awaitable[None]] | None:
        return None if received is None else lambda index, done: received(first + index, done)

    works = [caller.answer(each, listener(i * each.body.n)) for i, each in enumerate(asked)]
    return [choice for choices in await together(works) for choice in choices]


def _logprobs(served: Served, shape: Shape, body: Body, written: Completion, start: int = 0) -> dict[str, Any] | None:
    return None if body.alternatives() is None else shape.logprobs(list(listed(served, written)), start)


def _usage(asked: list[Asked], choices: list[Choice]) -> dict[str, int]:
    counts = usage(sum(len(each.tokens) for each in asked), sum(len(choice.written.tokens) for choice in choices))
    USAGE.set(counts)
    return counts


def _fault(error: BaseException) -> Refused:
    """Return the error of this side as a `Refused`; a lost or late engine may be back soon, so it is a 503."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, Refused):
        return error
    if isinstance(error, asyncio.TimeoutError | EngineLost):
        return Refused(503, f"the engine did not answer: {error or 'it took too long'}.", code="engine_unavailable")
    return Refused(500, f"{type(error).__name__}: {error}")
