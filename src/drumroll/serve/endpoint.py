"""The HTTP endpoint: routes, the token, streams. The callers produce its answers."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from drumroll.engines import Completion, EngineLost
from drumroll.errors import MissingExtra
from drumroll.sample import StopReason
from drumroll.serve import tools
from drumroll.serve.caller import Caller, ChatRequest, Choice, Served
from drumroll.serve.protocol import Refused, event, finish, read, usage

try:
    from aiohttp import web
except ImportError:
    raise MissingExtra("the endpoint for agents", "serve") from None

LARGEST = 32 * 2**20
"""The largest request in bytes."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """Serves callers, found by the path of their base URL (None: the bare `/v1`), to clients that have the token."""

    def __init__(self, served: Served, find: Callable[[str | None], Caller], token: str | None = None) -> None:
        self.served = served
        self.find = find
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
            app.router.add_post(f"{base}/v1/chat/completions", self._complete)
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
        """Check the token, and format every error as the protocol does."""
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
        except web.HTTPException as error:
            text = f"{request.method} {request.path}: {error.reason}. POST /v1/chat/completions is what is served."
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

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        caller = self.find(request.match_info.get("sample"))
        asked = caller.ask(read(await request.read()))
        head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": self.served.name}
        if asked.body.stream:
            return await _Stream(self.served, caller, asked, head).run(request)
        choices = await caller.answer(asked)
        answers = []
        for i, choice in enumerate(choices):
            logprobs = {"content": _logprobs(self.served, choice.written)} if asked.body.logprobs else None
            reason = finish(choice.written.stop, choice.message)
            answers.append({"index": i, "message": choice.message, "logprobs": logprobs, "finish_reason": reason})
        body = {**head, "object": "chat.completion", "choices": answers, "usage": _usage(asked, choices)}
        return web.json_response(body)


class _Stream:
    """One answer as server-sent events: text as it becomes final, then tool calls, finish reasons, and token counts."""

    def __init__(self, served: Served, caller: Caller, asked: ChatRequest, head: dict[str, Any]) -> None:
        self.served = served
        self.caller = caller
        self.asked = asked
        self.head = {**head, "object": "chat.completion.chunk"}
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        self.sent = [""] * asked.body.n
        self.tokens = [0] * asked.body.n

    async def run(self, request: web.Request) -> web.StreamResponse:
        """Write the whole stream.

        An error after the first byte is sent as an event, because the status has already been sent.
        """
        await self.response.prepare(request)
        try:
            for i in range(self.asked.body.n):
                await self._send(i, {"role": "assistant", "content": ""})
            choices = await self.caller.answer(self.asked, self._received)
            for i, choice in enumerate(choices):
                await self._end(i, choice)
            if self.asked.body.stream_options.include_usage:
                await self.response.write(event({**self.head, "choices": [], "usage": _usage(self.asked, choices)}))
        except Exception as error:
            await self.response.write(event((error if isinstance(error, Refused) else _fault(error)).body))
        await self.response.write(event("[DONE]"))
        await self.response.write_eof()
        return self.response

    async def _received(self, index: int, done: Completion) -> None:
        text = self.served.decode(done.tokens)
        text = tools.settled(text, self.asked.sampling.stop, tools=bool(self.asked.tools))
        if len(text) > len(self.sent[index]):
            delta, self.sent[index] = text[len(self.sent[index]) :], text
            await self._send(index, {"content": delta}, done)

    async def _end(self, index: int, choice: Choice) -> None:
        message, written = choice.message, choice.written
        rest = (message["content"] or "")[len(self.sent[index]) :]
        if rest or self.asked.body.logprobs:
            await self._send(index, {"content": rest}, written)
        if message.get("tool_calls"):
            await self._send(index, {"tool_calls": [{"index": i, **c} for i, c in enumerate(message["tool_calls"])]})
        await self._send(index, {}, reason=finish(written.stop, message))

    async def _send(self, index: int, delta: dict[str, Any], done: Completion | None = None, reason: str | None = None) -> None:
        logprobs = None
        if done is not None and self.asked.body.logprobs:
            logprobs = {"content": _logprobs(self.served, done)[self.tokens[index] :]}
            self.tokens[index] += len(logprobs["content"])
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        await self.response.write(event({**self.head, "choices": [choice]}))


def _logprobs(served: Served, written: Completion) -> list[dict[str, Any]]:
    """Return every token with its log-prob, except the token that ended the turn, which is not part of the text."""
    count = len(written.tokens) - (written.stop is StopReason.EOS)
    listed = []
    for token, logprob in zip(written.tokens[:count], written.logprobs[:count], strict=True):
        text = served.decode([token])
        listed.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return listed


def _usage(asked: ChatRequest, choices: list[Choice]) -> dict[str, int]:
    return usage(len(asked.tokens), sum(len(choice.written.tokens) for choice in choices))


def _fault(error: BaseException) -> Refused:
    """Return the error of this side as a `Refused`; a lost or late engine may be back soon, so it is a 503."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, Refused):
        return error
    if isinstance(error, asyncio.TimeoutError | EngineLost):
        return Refused(503, f"the engine did not answer: {error or 'it took too long'}.", code="engine_unavailable")
    return Refused(500, f"{type(error).__name__}: {error}")
