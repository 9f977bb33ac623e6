"""`openenv:http://localhost:8000`: an environment on an OpenEnv server, a session on its WebSocket for each episode.

Only the wire protocol is used, so nothing of the environment needs to be installed here. What an action looks like is asked
of the server (`/schema`).
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
"""Bytes of a message."""
SECONDS = 30.0
JSON = (str, int, float, bool, type(None), list, dict)
Data = dict[str, Any]


class Refused(RuntimeError):
    """The server answered with an error."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"the OpenEnv server refused ({code}): {reason}")
        self.code, self.reason = code, reason


class Form(NamedTuple):
    """What an action of a server looks like."""

    fields: dict[str, Data]
    required: list[str]

    @property
    def by_tools(self) -> bool:
        """Whether actions are tool calls."""
        return "tool_name" in self.fields

    def only(self) -> str | None:
        """The one field there is to fill, if it is one."""
        names = self.required or list(self.fields)
        return names[0] if len(names) == 1 else None

    def how(self) -> str:
        """How to act, in words."""
        if self.by_tools:
            return 'Act by <tool_call>{"name": …, "arguments": {…}}</tool_call>.'
        told = [f'"{n}" ({_type(f)}{", " + f["description"] if f.get("description") else ""})' for n, f in self.fields.items()]
        only = self.only()
        if only is not None:
            field = self.fields[only]
            return f"Answer with {field.get('description') or only} ({_type(field)}) in <answer>…</answer>."
        return f"Answer with a JSON object with {', '.join(told)} in <answer>…</answer>."

    def read(self, text: str) -> Data | None:
        """The action in a turn, or None where there is none."""
        if self.by_tools:
            [call, *_] = [*calls_in(text), None]
            return (
                {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments} if isinstance(call, Call) else None
            )
        said, only = action_in(text), self.only()
        try:
            if only is not None and not said.startswith("{"):
                return {only: said if _type(self.fields[only]) == "string" else json.loads(said)}
            data = json.loads(said)
        except ValueError:
            return None
        return data if isinstance(data, dict) else None


def _type(field: Mapping[str, Any]) -> str:
    return str(field.get("type", "value"))


class OpenEnv:
    """`rules` are shown first. `show`: the observation's field to show (default: all of them)."""

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
        """Open a session; the server gets the seed and the row's columns."""
        try:
            self.form = await asyncio.to_thread(_form, self.base, self.local)
            self.socket = await connect(self.socket_address, max_size=LARGEST, proxy=None if self.local else True)
        except (OSError, WebSocketException) as error:
            raise ConnectionError(
                f"no OpenEnv server can be reached at {self.base}: {error}; start it, or mend the address"
            ) from None
        given = {key: value for key, value in row.items() if isinstance(value, JSON)}
        told = await self._exchange("reset", {**given, "seed": seed % NUMPY_SEEDS})
        return "\n\n".join(part for part in (self.rules, self.form.how(), self._text(told)) if part)

    async def step(self, text: str) -> Step:
        """One action; what the server finds wrong with its form is answered."""
        action = self.form.read(text)
        reason = ""
        if action is not None:
            try:
                told = await self._exchange("step", action)
            except Refused as error:
                if error.code != "VALIDATION_ERROR":
                    raise
                reason = error.reason
            else:
                reward, over = float(told.get("reward") or 0.0), bool(told.get("done"))
                return Step(
                    self._text(told), reward, over, info={"effective": True} | ({"success": reward >= 1} if over else {})
                )
        return Step(f"That is no action. {reason} {self.form.how()}", info={"effective": False, "malformed": True})

    def close(self) -> None:
        """End the session."""
        if self.socket is not None:
            with suppress(RuntimeError):  # no loop runs any more, and no socket with it
                task = asyncio.get_running_loop().create_task(self.socket.close())
                _closing.add(task)
                task.add_done_callback(_closing.discard)

    async def _exchange(self, kind: str, data: Data) -> Data:
        assert self.socket is not None
        await self.socket.send(json.dumps({"type": kind, "data": data}))
        answer: Data = json.loads(await self.socket.recv())
        told: Data = answer.get("data") or {}
        if answer.get("type") == "error":
            wrong = [f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg')}" for e in told.get("errors", ())]
            raise Refused(str(told.get("code")), "; ".join([str(told.get("message")), *wrong]))
        return told

    def _text(self, told: Data) -> str:
        observation: Data = told.get("observation") or {}
        if self.show is not None:
            if self.show not in observation:
                raise ConfigError(f"the observation has no field '{self.show}'; it has {', '.join(observation)}.")
            return str(observation[self.show])
        parts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in observation.items() if v is not None}
        return next(iter(parts.values())) if len(parts) == 1 else "\n".join(f"{key}: {value}" for key, value in parts.items())


_closing: set[asyncio.Task[None]] = set()
_forms: dict[str, Form] = {}


def _form(base: str, local: bool) -> Form:
    """What actions look like, asked of a server once."""
    if base not in _forms:
        opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))
        with opener.open(f"{base}/schema", timeout=SECONDS) as answer:
            schema = json.load(answer)["action"]
        fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
        _forms[base] = Form(fields, [name for name in schema.get("required", []) if name in fields])
    return _forms[base]
