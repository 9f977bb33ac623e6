"""The shapes of answers: chat completions and text completions, whole or in parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from drumroll.engines import Completion
from drumroll.sample import StopReason
from drumroll.serve.caller import Choice, Served
from drumroll.serve.protocol import finish


class Token(NamedTuple):
    """A written token as text, with its log-prob and the likeliest tokens at its position."""

    text: str
    logprob: float
    top: list[tuple[str, float]]


def listed(served: Served, written: Completion) -> Iterator[Token]:
    """Yield every token, except the one that ended the turn, which is not part of the text."""
    count = len(written.tokens) - (written.stop is StopReason.EOS)
    for i, (token, logprob) in enumerate(zip(written.tokens[:count], written.logprobs[:count], strict=True)):
        top = [(served.decode([each]), value) for each, value in (written.top[i] if written.top else ())]
        yield Token(served.decode([token]), logprob, top)


class Shape(Protocol):
    """How one route of the protocol writes its answers."""

    prefix: str
    whole: str
    chunk: str

    def choice(self, index: int, choice: Choice, logprobs: Any) -> dict[str, Any]:
        """Return a finished choice."""
        ...

    def begin(self, index: int) -> dict[str, Any] | None:
        """Return the first part of a stream, if there is one."""
        ...

    def part(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        """Return a part of a stream."""
        ...

    def end(self, index: int, choice: Choice) -> list[dict[str, Any]]:
        """Return the last parts of a stream: tool calls, the finish reason."""
        ...

    def logprobs(self, tokens: list[Token], start: int) -> dict[str, Any]:
        """Return the log-probs of the tokens from `start` on."""
        ...


class Chat:
    """`/v1/chat/completions`."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, choice: Choice, logprobs: Any) -> dict[str, Any]:
        reason = finish(choice.written.stop, choice.message)
        return {"index": index, "message": choice.message, "logprobs": logprobs, "finish_reason": reason}

    def begin(self, index: int) -> dict[str, Any]:
        return self._delta(index, {"role": "assistant", "content": ""})

    def part(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        return self._delta(index, {"content": text}, logprobs)

    def end(self, index: int, choice: Choice) -> list[dict[str, Any]]:
        assert choice.message is not None
        calls = [{"index": i, **call} for i, call in enumerate(choice.message.get("tool_calls", ()))]
        reason = finish(choice.written.stop, choice.message)
        return [*([self._delta(index, {"tool_calls": calls})] if calls else []), self._delta(index, {}, reason=reason)]

    def logprobs(self, tokens: list[Token], start: int) -> dict[str, Any]:
        def entry(text: str, logprob: float) -> dict[str, Any]:
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return {"content": [{**entry(t.text, t.logprob), "top_logprobs": [entry(*e) for e in t.top]} for t in tokens[start:]]}

    def _delta(self, index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


class Text:
    """`/v1/completions`."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, choice: Choice, logprobs: Any) -> dict[str, Any]:
        return {**self.part(index, choice.text, logprobs), "finish_reason": finish(choice.written.stop, None)}

    def begin(self, index: int) -> None:
        return None

    def part(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def end(self, index: int, choice: Choice) -> list[dict[str, Any]]:
        return [{**self.part(index, "", None), "finish_reason": finish(choice.written.stop, None)}]

    def logprobs(self, tokens: list[Token], start: int) -> dict[str, Any]:
        offset, offsets = 0, []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        kept = tokens[start:]
        return {
            "tokens": [token.text for token in kept],
            "token_logprobs": [token.logprob for token in kept],
            "top_logprobs": [dict(token.top) for token in kept] if any(token.top for token in kept) else None,
            "text_offset": offsets[start:],
        }
