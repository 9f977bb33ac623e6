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
from drumroll.serve.chat import Added, marks, place, raw
from drumroll.serve.protocol import Body, ChatBody, Refused, TextBody
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
    recorded: Callable[[Caller, Call, dict[str, Any]], None] = lambda caller, call, said: None
    """Receives every call with its `messages`, or its `prompt` and `text`."""
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
class Asked:
    """A checked request for completions of one prompt: a conversation, or a text (a prompt of token ids has no text).

    It has the call that it continues, what it adds, all its tokens, and its sampling parameters.
    """

    body: Body
    messages: list[Message]
    tools: list[Any]
    prompt: str | list[int]
    added: Added
    tokens: list[int]
    sampling: Sampling
    first: int


@dataclass(frozen=True)
class Choice:
    """One answer: its text, the completion that it was decoded from and, in a chat, the message."""

    text: str
    written: Completion
    message: Message | None = None


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
        self._texts: dict[str, Call] = {}  # text completions, by their prompt and answer
        self.closed = False
        self._begun = 0
        self._work: set[asyncio.Task[Any]] = set()

    # --- a request ---

    def ask(self, body: Body) -> list[Asked]:
        """Check a request and render the tokens that it adds to what it continues; a chat is one prompt."""
        prompts: Sequence[str | list[int]] = body.prompt if isinstance(body, TextBody) else [""]
        if self.turns is not None and self._begun + body.n * len(prompts) > self.turns:
            raise Refused(400, f"this sample has had its {self.turns} completions (environment.max_turns).", code=TURNS)
        sampling = self._sampling(body)
        if isinstance(body, ChatBody):
            messages, shown = body.conversation(), body.shown_tools()
            return [self._checked(body, sampling, self._place(messages, shown), messages=messages, tools=shown)]
        return [self._checked(body, sampling, self._place_text(prompt), prompt=prompt) for prompt in prompts]

    def _checked(self, body: Body, sampling: Sampling, added: Added, prompt: str | list[int] = "", **said: Any) -> Asked:
        """Refuse an empty or too long prompt, and count its completions."""
        before = () if added.parent is None else added.parent.after()
        tokens, param = [*before, *added.tokens], "messages" if said else "prompt"
        if not tokens:
            raise Refused(400, f"the {param} {'are' if said else 'is'} empty.", param=param)
        if len(tokens) >= self.served.context:
            raise Refused(
                400,
                f"the {param} {'have' if said else 'has'} {len(tokens)} tokens, and with the completion the most is "
                f"{self.served.context}; shorten {'them' if said else 'it'}.",
                code=CONTEXT,
                param=param,
            )
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, self.served.context - len(tokens)))
        first, self._begun = self._begun, self._begun + body.n
        said = {"messages": [], "tools": [], **said}
        return Asked(body, prompt=prompt, added=added, tokens=tokens, sampling=sampling, first=first, **said)

    async def answer(self, asked: Asked, received: Callable[[int, Completion], Awaitable[None]] | None = None) -> list[Choice]:
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
        written = await self._owned(together(writing))
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

    def _sampling(self, body: Body) -> Sampling:
        """Return the sampling parameters: the run's own, or the caller's."""
        own, chosen, most = self.sampling, body.chosen(), body.most()
        limit = min(own.max_tokens, most or own.max_tokens)
        sampling = replace(own, max_tokens=limit, stop=(*own.stop, *body.stops()), top_logprobs=body.alternatives() or 0)
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

    def _place_text(self, prompt: str | list[int]) -> Added:
        """Return the call whose prompt and answer a prompt begins with, and what it adds; or no call, and all of it."""
        renderer = self.served.renderer
        if isinstance(prompt, str):
            text = max((known for known in self._texts if prompt.startswith(known)), key=len, default=None)
            if text is not None:
                return Added(self._texts[text], prompt[len(text) :], renderer.controls.rendered(prompt[len(text) :]))
            return Added(None, prompt, raw(renderer, prompt))
        if prompt and max(prompt) >= len(renderer.tokenizer):
            most = len(renderer.tokenizer) - 1
            raise Refused(
                400, f"the model has no token {max(prompt)}; it has 0 to {most}.", code="invalid_value", param="prompt"
            )
        known = [(len(tokens), call) for call in self.calls.all if prompt[: len(tokens := call.after())] == tokens]
        length, parent = max(known, key=lambda each: each[0], default=(0, None))
        return Added(parent, "", prompt[length:])

    def _note(self, asked: Asked, index: int, written: Completion) -> Choice:
        """Record a completion and return it as a choice."""
        text = tools.cut(self.served.decode(written.tokens), asked.sampling.stop)
        self.last = text
        if not asked.messages:
            call = self.calls.add(asked.added.parent, asked.added.tokens, written, [json.dumps(asked.tokens + written.tokens)])
            if isinstance(asked.prompt, str) and self.served.spell(written.tokens) == text:  # not cut, no end of text
                self._texts[asked.prompt + text] = call
            self.served.recorded(self, call, {"prompt": asked.prompt, "text": text})
            return Choice(text, written)
        message: Message = {"role": "assistant", "content": text}
        if asked.tools:
            content, found = tools.split(text)
            if found:
                calls = found if getattr(asked.body, "parallel_tool_calls", True) else found[:1]
                message = {"role": "assistant", "content": content or None, "tool_calls": []}
                for i, each in enumerate(calls):
                    function = {"name": each.name, "arguments": json.dumps(each.arguments)}
                    name = f"call_{asked.first + index}_{i}"
                    message["tool_calls"].append({"id": name, "type": "function", "function": function})
        conversation = [*asked.messages, message]
        parent, shown, added = asked.added
        call = self.calls.add(parent, added, written, marks(conversation, asked.tools), shown, text)
        self.served.recorded(self, call, {"messages": conversation})
        return Choice(text, written, message)


TURNS, CONTEXT = "max_turns", "context_length_exceeded"
LIMITS = {TURNS: StopReason.TURNS, CONTEXT: StopReason.CONTEXT}
"""Error codes that end an episode instead of failing it."""


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all results; if one fails, cancel the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in work]
    return [task.result() for task in tasks]
