"""The data of the OpenAI protocol: requests, validated on entry, completions, chunks and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from drumroll.sample import Message, StopReason

LEAST_TEMPERATURE = 1e-4
MOST_TOP_K = 2**31 - 1


class Refused(Exception):
    """A request that cannot be served, with its status and body in the protocol's form."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        kind = "authentication_error" if status == 401 else "server_error" if status >= 500 else "invalid_request_error"
        self.status = status
        self.code = code
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _sound(text: str) -> str:
    text.encode()  # raises for half a surrogate pair, which is not text
    return text


def _temperature(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:  # dividing logits by less may overflow
        raise ValueError(f"must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}")
    return value


class _Part(BaseModel):
    type: Literal["text"]
    text: Annotated[str, AfterValidator(_sound)]


class _Function(BaseModel):
    name: str
    arguments: str | dict[str, Any] = "{}"


class _ToolCall(BaseModel):
    id: str = ""
    function: _Function


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[_Part] | None, BeforeValidator(_parts)] = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Tool(BaseModel):
    type: Literal["function"]
    function: dict[str, Any]


class _StreamOptions(BaseModel):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Format(BaseModel):
    type: Literal["text"]


class Body(BaseModel):
    """A request for chat completions. Parameters that are not listed here are not supported."""

    model_config = ConfigDict(extra="forbid")

    messages: list[_Message] = Field(min_length=1)
    model: str = ""
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: Annotated[list[str], BeforeValidator(_listed)] = []
    logprobs: bool = False
    top_logprobs: Literal[0] = 0
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    tools: list[_Tool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    response_format: _Format | None = None
    user: str = ""
    metadata: dict[str, str] = {}
    store: bool = False
    # Sampling parameters; those of a training run take precedence.
    temperature: Annotated[float, AfterValidator(_temperature)] | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MOST_TOP_K)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def chosen(self) -> dict[str, Any]:
        """Return the sampling parameters that the caller set."""
        return {name: value for name in CHOOSING if (value := getattr(self, name)) is not None}

    def conversation(self) -> list[Message]:
        """Return the messages as plain data. Developer messages become system messages, the role that templates know."""
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        for message in messages:
            message["content"] = "".join(part["text"] for part in message.get("content", ()))
            message["role"] = "system" if message["role"] == "developer" else message["role"]
        return messages

    def stops(self) -> tuple[str, ...]:
        """Return the strings that end a completion."""
        return tuple(stop for stop in self.stop if stop)

    def most(self) -> int | None:
        """Return the maximum number of tokens, or None."""
        return self.max_completion_tokens or self.max_tokens

    def shown_tools(self) -> list[Any]:
        """Return the tools to show to the model."""
        return [tool.model_dump() for tool in self.tools] if self.tool_choice == "auto" else []


CHOOSING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("frequency_penalty", "presence_penalty", "logit_bias"),
)


def read(text: bytes) -> Body:
    """Parse and validate the body of a request. A null value counts as absent."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}.") from None
    if not isinstance(values, Mapping):
        raise Refused(400, "the body must be a JSON object.")
    try:
        return Body.model_validate({key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or None
        if first["type"] == "extra_forbidden":
            sentence = f"the parameter '{name}' is not supported here; leave it out."
            raise Refused(400, sentence, code="unsupported_parameter", param=name) from None
        raise Refused(400, f"{name}: {first['msg']}, got {first['input']!r:.80}.", code="invalid_value", param=name) from None


def finish(stop: StopReason, message: Message) -> str:
    """Return the protocol's finish reason of a completion."""
    if message.get("tool_calls"):
        return "tool_calls"
    return "length" if stop in (StopReason.LENGTH, StopReason.CONTEXT) else "stop"


def usage(prompt: int, written: int) -> dict[str, int]:
    """Return the token counts."""
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def event(data: Any) -> bytes:
    """Format one server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
