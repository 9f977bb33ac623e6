"""`openenv:http://localhost:8000`: an environment on an OpenEnv server, with one WebSocket session per episode.

It uses only the wire protocol, so the environment need not be installed here. The server describes its actions
(`/schema`).
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from drumroll.envs import Step
from drumroll.envs.adapters.calls import Call, calls_in
from drumroll.envs.adapters.chance import NUMPY_SEEDS
from drumroll.envs.episode import action_in
from drumroll.errors import ConfigError

LARGEST = 2**27
"""The largest message in bytes."""
SECONDS = 30.0
JSON = (str, int, float, bool, type(None), list, dict)
Data = dict[str, Any]


class Refused(RuntimeError):
    """The server answered with an error."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"the OpenEnv server refused ({code}): {reason}")
        self.code, self.reason = code, reason


class Form(NamedTuple):
    """The form of a server's actions."""

    fields: dict[str, Data]
    required: list[str]

    @property
    def by_tools(self) -> bool:
        """Whether actions are tool calls."""
        return "tool_name" in self.fields

    def only(self) -> str | None:
        """Return the field to fill if there is exactly one, else None."""
        names = self.required or list(self.fields)
        return names[0] if len(names) == 1 else None

    def how(self) -> str:
        """Return instructions on how to act."""
        if self.by_tools:
            return 'Act by <tool_call>{"name": …, "arguments": {…}}</tool_call>.'
        parts = [f'"{n}" ({_type(f)}{", " + f["description"] if f.get("description") else ""})' for n, f in self.fields.items()]
        only = self.only()
        if only is not None:
            field = self.fields[only]
            return f"Answer with {field.get('description') or only} ({_type(field)}) in <answer>…</answer>."
        return f"Answer with a JSON object with {', '.join(parts)} in <answer>…</answer>."

    def read(self, text: str) -> Data | None:
        """Parse the action of a turn; None if there is none."""
        if self.by_tools:
            [call, *_] = [*calls_in(text), None]
            return (
                {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments} if isinstance(call, Call) else None
            )
        answer, only = action_in(text), self.only()
        try:
            if only is not None and not answer.startswith("{"):
                return {only: answer if _type(self.fields[only]) == "string" else json.loads(answer)}
            data = json.loads(answer)
        except ValueError:
            return None
        return data if isinstance(data, dict) else None


def _type(field: Mapping[str, Any]) -> str:
    return str(field.get("type", "value"))


class OpenEnv:
    """An environment on an OpenEnv server.

    `rules` are shown first. `show`: the field of the observation to show (default: all).
    """

    def __init__(self, name: str, rules: str = "", show: str | None = None) -> None:
        address = urlsplit(name if "//" in name else f"http://{name}")
        if address.scheme not in ("http", "https", "ws", "wss") or not address.netloc:
            raise ConfigError(f"environment openenv:{name} is not an address; write openenv:http://host:port.")
        secure = "s" if address.scheme in ("https", "wss") else ""
        self.base = f"http{secure}://{address.netloc}{address.path.rstrip('/')}"
        self.socket_address = f"ws{self.base[4:]}/ws"
        self.local = address.hostname in ("localhost", "127.0.0.1", "::1")
        self.rules, self.show = rules, show
        self.socket: ClientConnection | None = None

    async def reset(self, seed: int, **row: Any) -> str:
        """Open a session; the server receives the seed and the columns of the row."""
        try:
            self.form = await asyncio.to_thread(_form, self.base, self.local)
            self.socket = await connect(self.socket_address, max_size=LARGEST, proxy=None if self.local else True)
        except (OSError, WebSocketException) as error:
            raise ConnectionError(
                f"no OpenEnv server can be reached at {self.base}: {error}; start it, or mend the address"
            ) from None
        given = {key: value for key, value in row.items() if isinstance(value, JSON)}
        reply = await self._exchange("reset", {**given, "seed": seed % NUMPY_SEEDS})
        return "\n\n".join(part for part in (self.rules, self.form.how(), self._text(reply)) if part)

    async def step(self, text: str) -> Step:
        """Play one action. If the server rejects its form, the policy is shown the reason."""
        action = self.form.read(text)
        reason = ""
        if action is not None:
            try:
                reply = await self._exchange("step", action)
            except Refused as error:
                if error.code != "VALIDATION_ERROR":
                    raise
                reason = error.reason
            else:
                reward, over = float(reply.get("reward") or 0.0), bool(reply.get("done"))
                return Step(
                    self._text(reply), reward, over, info={"effective": True} | ({"success": reward >= 1} if over else {})
                )
        return Step(f"That is no action. {reason} {self.form.how()}", info={"effective": False, "malformed": True})

    def close(self) -> None:
        """End the session."""
        if self.socket is not None:
            with suppress(RuntimeError):  # no event loop runs any more, and the socket is gone with it
                task = asyncio.get_running_loop().create_task(self.socket.close())
                _closing.add(task)
                task.add_done_callback(_closing.discard)

    async def _exchange(self, kind: str, data: Data) -> Data:
        assert self.socket is not None
        await self.socket.send(json.dumps({"type": kind, "data": data}))
        answer: Data = json.loads(await self.socket.recv())
        reply: Data = answer.get("data") or {}
        if answer.get("type") == "error":
            wrong = [f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg')}" for e in reply.get("errors", ())]
            raise Refused(str(reply.get("code")), "; ".join([str(reply.get("message")), *wrong]))
        return reply

    def _text(self, reply: Data) -> str:
        observation: Data = reply.get("observation") or {}
        if self.show is not None:
            if self.show not in observation:
                raise ConfigError(f"the observation has no field '{self.show}'; it has {', '.join(observation)}.")
            return str(observation[self.show])
        parts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in observation.items() if v is not None}
        return next(iter(parts.values())) if len(parts) == 1 else "\n".join(f"{key}: {value}" for key, value in parts.items())


_closing: set[asyncio.Task[None]] = set()
_forms: dict[str, Form] = {}


def _form(base: str, local: bool) -> Form:
    """Return the form of a server's actions, fetched once per server."""
    if base not in _forms:
        opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))
        with opener.open(f"{base}/schema", timeout=SECONDS) as answer:
            schema = json.load(answer)["action"]
        fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
        _forms[base] = Form(fields, [name for name in schema.get("required", []) if name in fields])
    return _forms[base]
