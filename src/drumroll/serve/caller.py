"""A caller: one sample's conversations with the model. It answers requests and records the tokens read and written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from drumroll.data.render import Renderer
from drumroll.engines import Completion, Sampling
from drumroll.errors import DataError
from drumroll.sample import Message, StopReason
from drumroll.serve import tools
from drumroll.serve.chat import Added, marks, place
from drumroll.serve.protocol import Body, Refused
from drumroll.serve.traces import Call, Calls
from drumroll.serve.writing import EngineClient

T = TypeVar("T")


@dataclass
class Served:
    """The served model: its name, renderer and decoder, and its context size in tokens.

    `sampled` shows earlier turns as they were sampled, whatever the template does; `closing` is the closing tag of thoughts.
    """

    name: str
    renderer: Renderer
    decode: Callable[[list[int]], str]
    context: int
    notify: Callable[[str], None] = lambda text: None
    recorded: Callable[[Caller, Call, list[Message]], None] = lambda caller, call, messages: None
    told: set[str] = field(default_factory=set)
    sampled: bool = False
    closing: Sequence[int] = ()

    def spell(self, tokens: list[int]) -> str:
        """Decode tokens including special tokens, for finding stop strings."""
        return self.renderer.tokenizer.decode(tokens)

    def ignores(self, name: str, value: Any, own: Any) -> None:
        """Report once that a run ignores a parameter of its agents."""
        if name not in self.told:
            self.told.add(name)
            instead = "this run chooses tokens without it" if own is None else f"this run samples with {name}={own:g}"
            self.notify(f"an agent asked for {name}={value}, which is ignored while training: {instead}.")


@dataclass(frozen=True)
class ChatRequest:
    """A checked request: the call that it continues, what it adds, all its tokens, and its sampling parameters."""

    messages: list[Message]
    tools: list[Any]
    added: Added
    tokens: list[int]
    sampling: Sampling
    body: Body
    first: int


@dataclass(frozen=True)
class Choice:
    """One answer: the message, and the completion that it was parsed from."""

    message: Message
    written: Completion


class Caller:
    """Makes calls on behalf of one sample.

    With `fixed` sampling the run decides how tokens are chosen; the caller may only ask for fewer tokens, and add stop
    strings.
    """

    def __init__(
        self,
        name: str,
        served: Served,
        client: EngineClient,
        sampling: Sampling,
        seed: Callable[[int, int, int | None], int],
        *,
        fixed: bool,
        turns: int | None = None,
    ) -> None:
        self.name = name
        self.served = served
        self.client = client
        self.sampling = sampling
        self.seed = seed
        self.fixed = fixed
        self.turns = turns
        self.calls = Calls()
        self.last = ""  # the text of the last answer
        self.closed = False
        self._begun = 0
        self._work: set[asyncio.Task[Any]] = set()

    # --- a request ---

    def ask(self, body: Body) -> ChatRequest:
        """Check a request and render the tokens that it adds to the conversation it extends."""
        shown = body.shown_tools()
        self._check_tools(shown)
        if self.turns is not None and self._begun + body.n > self.turns:
            raise Refused(400, f"this sample has had its {self.turns} completions (environment.max_turns).", code=TURNS)
        messages, sampling = body.conversation(), self._sampling(body)
        added = self._place(messages, shown)
        tokens = [*(() if added.parent is None else added.parent.after()), *added.tokens]
        if not tokens:
            raise Refused(400, "the messages are empty.", param="messages")
        if len(tokens) >= self.served.context:
            raise Refused(
                400,
                f"the messages have {len(tokens)} tokens, and with the completion the most is {self.served.context}; shorten them.",
                code=CONTEXT,
                param="messages",
            )
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, self.served.context - len(tokens)))
        first, self._begun = self._begun, self._begun + body.n
        return ChatRequest(messages, shown, added, tokens, sampling, body, first)

    async def answer(
        self, asked: ChatRequest, received: Callable[[int, Completion], Awaitable[None]] | None = None
    ) -> list[Choice]:
        """Generate all choices and record them; `received` is called as each grows. If cancelled, nothing is recorded."""

        def listener(index: int) -> Callable[[Completion], Awaitable[None]] | None:
            return None if received is None else lambda done: received(index, done)

        writing = [
            self.client.write(
                f"{self.name}/{asked.first + i}",
                asked.tokens,
                asked.sampling,
                self.seed(asked.first + i, i, asked.body.seed),
                listener(i),
            )
            for i in range(asked.body.n)
        ]
        written = await self._owned(_together(writing))
        return [self._note(asked, i, done) for i, done in enumerate(written)]

    def close(self) -> None:
        """End the sample: refuse further calls and cancel those in progress."""
        self.closed = True
        for task in self._work:
            task.cancel()

    # --- its parts ---

    async def _owned(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that ends with the caller; its waiter then receives a `Refused` instead of a cancellation."""
        task = asyncio.ensure_future(work)
        self._work.add(task)
        try:
            return await task
        except (Exception, asyncio.CancelledError):
            if self.closed:
                raise Refused(404, "this sample is over.", code="sample_over") from None
            raise
        finally:
            self._work.discard(task)

    def _check_tools(self, shown: Sequence[Any]) -> None:
        renderer = self.served.renderer
        if shown and "tools" not in str(getattr(renderer.tokenizer, "chat_template", None)):
            raise Refused(
                400,
                f"the chat template of {renderer.name} does not show tools to the model; call without `tools`.",
                code="unsupported_parameter",
                param="tools",
            )

    def _sampling(self, body: Body) -> Sampling:
        """Return the sampling parameters: the run's own, or the caller's."""
        own, chosen, most = self.sampling, body.chosen(), body.most()
        sampling = replace(own, max_tokens=min(own.max_tokens, most or own.max_tokens), stop=(*own.stop, *body.stops()))
        if self.fixed:
            for name, value in chosen.items():
                kept = getattr(own, name, None)
                if value != kept:
                    self.served.ignores(name, value, kept)
            return sampling
        if wrong := [n for n in ("frequency_penalty", "presence_penalty", "logit_bias") if chosen.pop(n, None)]:
            raise Refused(
                400, f"'{wrong[0]}' is not supported here; leave it out.", code="unsupported_parameter", param=wrong[0]
            )
        chosen.pop("seed", None)
        if "top_k" in chosen:
            chosen["top_k"] = max(0, chosen["top_k"])
        return replace(sampling, **chosen)

    def _place(self, messages: list[Message], shown: list[Any]) -> Added:
        """Return the call that a conversation continues and what it adds to it."""
        try:
            earlier = self.calls.along(marks(messages, shown))
            return place(self.served.renderer, messages, shown, earlier, sampled=self.served.sampled)
        except DataError as error:
            raise Refused(400, str(error), param="messages") from None

    def _note(self, asked: ChatRequest, index: int, written: Completion) -> Choice:
        """Record a completion and return it as a message."""
        text = tools.cut(self.served.decode(written.tokens), asked.sampling.stop)
        self.last = text
        message: Message = {"role": "assistant", "content": text}
        if asked.tools:
            content, found = tools.split(text)
            if found:
                calls = found if asked.body.parallel_tool_calls else found[:1]
                message = {"role": "assistant", "content": content or None, "tool_calls": []}
                for i, call in enumerate(calls):
                    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
                    name = f"call_{asked.first + index}_{i}"
                    message["tool_calls"].append({"id": name, "type": "function", "function": function})
        conversation = [*asked.messages, message]
        parent, shown, added = asked.added
        call = self.calls.add(parent, added, written, marks(conversation, asked.tools), shown, text)
        self.served.recorded(self, call, conversation)
        return Choice(message, written)


TURNS, CONTEXT = "max_turns", "context_length_exceeded"
LIMITS = {TURNS: StopReason.TURNS, CONTEXT: StopReason.CONTEXT}
"""Error codes that end an episode instead of failing it."""


async def _together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all results; if one fails, cancel the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in work]
    return [task.result() for task in tasks]
