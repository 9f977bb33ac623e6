"""The data of the OpenAI protocol: requests, validated on entry, completions, chunks and errors."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError
from typing_extensions import override

from drumroll.sample import Message, StopReason

LEAST_TEMPERATURE = 1e-4
MOST_TOP_K = 2**31 - 1
MOST_LISTED = 20
"""The most alternatives that `top_logprobs` may ask for."""
TEXT_TOKENS = 16
"""The protocol's default of `max_tokens` for text completions."""


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


def _prompts(prompt: Any) -> list[str] | list[list[int]]:
    """Return the prompts of a request for texts as a list: texts, or lists of token ids."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(isinstance(t, int) for t in prompt)):
        prompt = [prompt]
    good = isinstance(prompt, list) and prompt
    if good and all(isinstance(text, str) for text in prompt):
        return [_sound(text) for text in prompt]
    if good and all(isinstance(ids, list) and all(type(t) is int and t >= 0 for t in ids) for ids in prompt):
        return prompt
    raise ValueError("must be a text, a list of token ids, or a list of these")


def _no_echo(echo: bool) -> bool:
    if echo:
        raise ValueError(
            "is not supported: log-probs are computed only of tokens that the model writes, so tasks that score given answers "
            "(log-likelihood) cannot run here; leave it out and generate"
        )
    return echo


class Body(BaseModel, ABC):
    """What requests for chat and for text completions share. Parameters that are not listed are not supported."""

    model_config = ConfigDict(extra="forbid")

    model: str = ""
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    stop: Annotated[list[str], BeforeValidator(_listed)] = []
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    user: str = ""
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

    def stops(self) -> tuple[str, ...]:
        """Return the strings that end a completion."""
        return tuple(stop for stop in self.stop if stop)

    def most(self) -> int | None:
        """Return the maximum number of tokens, or None."""
        return self.max_tokens

    @abstractmethod
    def alternatives(self) -> int | None:
        """Return how many of the likeliest tokens to list beside each token; None if no log-probs are wanted."""


class ChatBody(Body):
    """A request for chat completions."""

    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LISTED)
    tools: list[_Tool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    response_format: _Format | None = None
    metadata: dict[str, str] = {}
    store: bool = False

    def conversation(self) -> list[Message]:
        """Return the messages as plain data. Developer messages become system messages, the role that templates know."""
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        for message in messages:
            message["content"] = "".join(part["text"] for part in message.get("content", ()))
            message["role"] = "system" if message["role"] == "developer" else message["role"]
        return messages

    @override
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @override
    def alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def shown_tools(self) -> list[Any]:
        """Return the tools to show to the model."""
        return [tool.model_dump() for tool in self.tools] if self.tool_choice == "auto" else []


class TextBody(Body):
    """A request for text completions: of one prompt or several, each a text or a list of token ids."""

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_prompts)]
    logprobs: int | None = Field(None, ge=0, le=MOST_LISTED)
    echo: Annotated[bool, AfterValidator(_no_echo)] = False

    @override
    def most(self) -> int | None:
        return self.max_tokens or TEXT_TOKENS

    @override
    def alternatives(self) -> int | None:
        return self.logprobs


B = TypeVar("B", bound=Body)

CHOOSING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("frequency_penalty", "presence_penalty", "logit_bias"),
)


def read(text: bytes, kind: type[B]) -> B:
    """Parse and validate the body of a request. A null value counts as absent."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON: {error}.") from None
    if not isinstance(values, Mapping):
        raise Refused(400, "the body must be a JSON object.")
    try:
        return kind.model_validate({key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or None
        if first["type"] == "extra_forbidden":
            sentence = f"the parameter '{name}' is not supported here; leave it out."
            raise Refused(400, sentence, code="unsupported_parameter", param=name) from None
        message = first["msg"].removeprefix("Value error, ")
        raise Refused(400, f"{name}: {message}, got {first['input']!r:.80}.", code="invalid_value", param=name) from None


def finish(stop: StopReason, message: Message | None) -> str:
    """Return the protocol's finish reason of a completion."""
    if message and message.get("tool_calls"):
        return "tool_calls"
    return "length" if stop in (StopReason.LENGTH, StopReason.CONTEXT) else "stop"


def usage(prompt: int, written: int) -> dict[str, int]:
    """Return the token counts."""
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def event(data: Any) -> bytes:
    """Format one server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
