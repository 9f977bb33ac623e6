"""Client of the judge: retries, a rate limit and a cache. The judge is one of our engines or an OpenAI-compatible endpoint.

A question that cannot be answered is that sample's failure. The endpoint's key is read from the environment here and
passed nowhere else.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumroll.config.roles import JudgeRole
from drumroll.data.render import Renderer
from drumroll.engines import EngineLost, Sampling
from drumroll.engines.continuation import Continuation
from drumroll.engines.router import Router
from drumroll.errors import ConfigError, MissingExtra
from drumroll.rewards.templates import fitting
from drumroll.runfiles.judge_answers import Answers

LONGEST_PAUSE = 60.0
PASSING = (408, 409, 425, 429)
"""HTTP status codes below 500 that are worth a retry."""


class JudgeFailed(RuntimeError):
    """The judge did not answer."""


class Passing(Exception):
    """A failure that is worth a retry; `wait` is the pause in seconds that the server asks for."""

    def __init__(self, text: str, wait: float = 0.0) -> None:
        super().__init__(text)
        self.wait = wait


@dataclass(frozen=True)
class Reply:
    """An answer and its token counts."""

    text: str
    tokens_in: int
    tokens_out: int


Transport = Callable[[str], Awaitable[Reply]]
"""Makes one attempt at an answer. Raises `Passing` if a retry may help."""


class Judge:
    """Answers questions from the cache, or asks the judge within the rate limit and retries with a growing pause."""

    def __init__(
        self, role: JudgeRole, transport: Transport, answers: Answers | None, close: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self.role = role
        self._transport, self._answers, self._close = transport, answers, close
        self._asking: dict[str, asyncio.Future[str | None]] = {}
        self._next = 0.0
        self._counts: Counter[str] = Counter()

    async def __call__(self, question: str) -> str:
        """Return the judge's answer. Concurrent calls with the same question share one request."""
        if self._answers is None:
            return await self._answer(question)
        key = Answers.key(self.role.model, question)
        known = self._answers.get(key)
        if known is not None:
            self._counts["cached"] += 1
            return known
        if key in self._asking:
            answer = await asyncio.shield(self._asking[key])
            if answer is None:  # the first caller failed or was cancelled
                return await self(question)
            self._counts["cached"] += 1
            return answer
        self._asking[key] = asyncio.get_running_loop().create_future()
        answer = None
        try:
            answer = await self._answer(question)
            self._answers.put(key, answer)
            return answer
        finally:
            self._asking.pop(key).set_result(answer)

    async def _answer(self, question: str) -> str:
        for attempt in itertools.count():
            await self._pace()
            self._counts["calls"] += 1
            try:
                reply = await self._transport(question)
            except (Passing, EngineLost, TimeoutError) as error:
                text = f"took longer than {self.role.timeout:g} s" if isinstance(error, TimeoutError) else str(error)
                if attempt >= self.role.retries:
                    self._counts["failed"] += 1
                    raise JudgeFailed(f"the judge {self.role.model} did not answer in {attempt + 1} tries: {text}") from error
                self._counts["retried"] += 1
                pause = self.role.backoff * 2**attempt * random.uniform(0.75, 1.25)
                await asyncio.sleep(min(LONGEST_PAUSE, max(pause, getattr(error, "wait", 0.0))))
            except JudgeFailed:
                self._counts["failed"] += 1
                raise
            else:
                self._counts["tokens_in"] += reply.tokens_in
                self._counts["tokens_out"] += reply.tokens_out
                return reply.text
        raise AssertionError("unreachable")

    async def _pace(self) -> None:
        """Wait until the rate limit allows the next attempt."""
        if self.role.requests_per_minute is None:
            return
        now = time.monotonic()
        start = max(now, self._next)
        self._next = start + 60.0 / self.role.requests_per_minute
        await asyncio.sleep(start - now)

    def metrics(self) -> dict[str, float]:
        """Return the counts since the last call; an empty dict if there were no questions."""
        counts, self._counts = self._counts, Counter()
        if not counts:
            return {}
        cost = (counts["tokens_in"] * self.role.price.input + counts["tokens_out"] * self.role.price.output) / 1e6
        names = ("calls", "cached", "retried", "failed", "tokens_in", "tokens_out")
        return {f"judge/{name}": float(counts[name]) for name in names} | ({"judge/cost": cost} if cost else {})

    async def close(self) -> None:
        """Close the connections."""
        if self._close is not None:
            await self._close()


def open_judge(role: JudgeRole, run: Path, router: Router | None = None, tokenizer: Any = None) -> Judge:
    """Open the judge of a config: behind the router if it runs on our engines, else at its endpoint."""
    answers = None if role.cache == "none" else Answers(run / "judge.jsonl" if role.cache == "run" else None)
    if role.url is None:
        assert router is not None
        return Judge(role, by_engine(role, router, tokenizer), answers)
    transport, close = by_endpoint(role)
    return Judge(role, transport, answers, close)


def by_engine(role: JudgeRole, router: Router, tokenizer: Any) -> Transport:
    """Make a transport that renders the question for the model and lets one of our engines answer it."""
    renderer, numbers = Renderer(tokenizer), itertools.count()

    async def ask(question: str) -> Reply:
        """Generate the answer; an engine that is interrupted continues it later."""
        number = next(numbers)
        shortened = fitting(question, lambda text: len(renderer.prompt(text)), role.max_prompt_tokens)
        if shortened is None:
            raise JudgeFailed(
                f"roles.judge.max_prompt_tokens: {role.max_prompt_tokens} leaves no room for a question: an empty one has "
                f"{len(renderer.prompt(''))} tokens."
            )
        tokens = renderer.prompt(shortened)
        sampling = Sampling(temperature=role.temperature, max_tokens=role.max_tokens)
        answer = Continuation(f"judge-{number}", tokens, sampling, number, tokenizer.decode, number)
        try:
            done = await answer.run(lambda request: router.generate(request, number, number, role.timeout, lambda: None))
        finally:
            router.forget(number)
        return Reply(str(tokenizer.decode(done.tokens, skip_special_tokens=True)), len(tokens), len(done.tokens))

    return ask


def by_endpoint(role: JudgeRole) -> tuple[Transport, Callable[[], Awaitable[None]]]:
    """Make a transport that sends the question as one user message. Retries are done here, so that they are counted."""
    try:
        import openai
    except ModuleNotFoundError:
        raise MissingExtra("roles.judge.url", "judge") from None
    key = "none"
    if role.key_env is not None:
        key = os.environ.get(role.key_env, "")
        if not key:
            raise ConfigError(f"roles.judge.key_env: the environment variable {role.key_env} is not set; it must hold the key.")
    client = openai.AsyncOpenAI(base_url=role.url, api_key=key, max_retries=0, timeout=role.timeout)
    slots = asyncio.Semaphore(role.slots)
    fields: dict[str, Any] = {"temperature": role.temperature, "max_tokens": role.max_tokens, **role.options}

    async def ask(question: str) -> Reply:
        turns: Any = [{"role": "user", "content": question}]
        async with slots:
            try:
                async with asyncio.timeout(role.timeout):
                    reply: Any = await client.chat.completions.create(model=role.model, messages=turns, **fields)
            except openai.APIStatusError as error:
                text = f"{role.url} answered {error.status_code}: {error.message[:200]}"
                if error.status_code in PASSING or error.status_code >= 500:
                    raise Passing(text, _seconds(error.response.headers.get("retry-after"))) from error
                raise JudgeFailed(text) from error
            except (openai.OpenAIError, ValueError) as error:
                raise Passing(f"{role.url}: {error}") from error
        try:
            text, usage = str(reply.choices[0].message.content or ""), reply.usage
        except (AttributeError, IndexError, TypeError):
            raise Passing(f"{role.url} sent no chat completion: {reply!r:.100}") from None
        return Reply(text, int(getattr(usage, "prompt_tokens", 0) or 0), int(getattr(usage, "completion_tokens", 0) or 0))

    return ask, client.close


def _seconds(header: str | None) -> float:
    """Return `retry-after` in seconds; 0 if it is a date."""
    try:
        return max(0.0, float(header or 0.0))
    except ValueError:
        return 0.0
