"""The embedded engine: continuous batching in plain PyTorch on the Hugging Face module itself.

A thread of its own admits waiting requests into free slots (computing a prompt that several of them share only
once), decodes one token for all live rows, and hands out what has ended. It never waits for a batch to be full.

With `fixed_shape` every prompt is prefilled alone, a request's place in the draw order decides its row, and every
decode step has all rows over the whole context: a sample's numbers are then the same to the last bit whatever else is
being generated, at some cost in speed.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drumroll.engines import Completion, EngineLost, Request
from drumroll.engines.sampler import choose, keyed_uniform
from drumroll.models.attention import Decode, KVCache, Prefill
from drumroll.models.loading import LoadedModel, kv_shapes
from drumroll.sample import StopReason, Version

PREFILL_TOKENS = 8192
WIDTH_STEP = 16


@dataclass(slots=True)
class _Row:
    """A live or waiting request, and where its result goes."""

    request: Request
    future: asyncio.Future[Completion]
    completion: Completion = field(default_factory=Completion)

    @property
    def length(self) -> int:
        return len(self.request.tokens) + len(self.completion.tokens)


class NativeEngine:
    """Implements `Engine` in this process."""

    def __init__(self, model: LoadedModel, *, slots: int, context: int, fixed_shape: bool = False) -> None:
        self.model = model
        self.slots = slots
        self.context = context
        self.fixed_shape = fixed_shape
        self.version: Version = 0
        self.device = next(model.module.parameters()).device
        self._kept: KVCache | None = self._new_cache()
        self._rows: list[_Row | None] = []
        self._waiting: deque[_Row] = deque()
        self._inbox: list[_Row] = []
        self._aborts: set[str] = set()
        self._interrupted = False
        self._changes: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="native-engine", daemon=True)
        self._thread.start()

    # --- the contract, called from the event loop ---

    async def generate(self, request: Request) -> Completion:
        if len(request.tokens) >= self.context:
            return Completion(stop=StopReason.CONTEXT)
        row = _Row(request, asyncio.get_running_loop().create_future())
        with self._wake:
            if self._closed:
                raise EngineLost("the engine is closed")
            self._inbox.append(row)
            self._wake.notify()
        try:
            return await row.future
        except asyncio.CancelledError:
            self.abort(request.id)
            raise

    def abort(self, request_id: str) -> None:
        with self._wake:
            self._aborts.add(request_id)
            self._wake.notify()

    def interrupt(self) -> None:
        with self._wake:
            self._interrupted = bool(self._inbox or self._waiting or self._live())
            self._wake.notify()

    def set_version(self, version: Version) -> None:
        self.version = version

    def load(self, version: Version, weights: Mapping[str, Tensor], *, recompute: bool) -> None:
        self._change(lambda: self._apply(version, weights, recompute))

    def sleep(self) -> None:
        self._change(self._fall_asleep)

    def wake(self) -> None:
        self._change(self._wake_up)

    def capacity(self) -> int:
        return self.slots

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout=10)

    def _change(self, work: Callable[[], None]) -> None:
        """Have the thread do something between two tokens. What fails leaves it half changed, so the engine is then lost."""
        done: Future[None] = Future()
        with self._wake:
            if self._closed:
                raise EngineLost("the engine is closed")
            self._changes.append((work, done))
            self._wake.notify()
        done.result()

    # --- the engine's own thread ---

    @property
    def _cache(self) -> KVCache:
        assert self._kept is not None, "the engine sleeps"
        return self._kept

    def _new_cache(self) -> KVCache:
        module = self.model.module
        return KVCache(kv_shapes(module), self.slots, self.context, module.dtype, self.device)

    def _run(self) -> None:
        reason = "the engine was closed"
        try:
            while self._collect():
                try:
                    with torch.inference_mode():
                        self._admit()
                        self._decode()
                except Exception as error:
                    self._fail_all(error)
        except BaseException as error:  # the thread dies, and the requests carry the reason to whoever waits
            reason = f"the engine died of {type(error).__name__}: {error}"
        finally:
            with self._wake:
                self._closed = True
                self._waiting.extend(self._inbox)
                self._inbox.clear()
            for _, done in self._changes:
                done.set_exception(EngineLost(reason))
            self._fail_all(EngineLost(reason))

    def _collect(self) -> bool:
        """Wait for work; take in new requests, aborts and changes. False when closed."""
        with self._wake:
            while not (self._inbox or self._can_go_on() or self._closed or self._changes):
                self._wake.wait()
            self._waiting.extend(self._inbox)
            self._inbox.clear()
            aborts, self._aborts = self._aborts, set()
            interrupted, self._interrupted = self._interrupted, False
        if interrupted:
            aborts = {row.request.id for row in (*self._waiting, *self._rows) if row is not None}
        if aborts:
            self._abort_rows(aborts)
        while self._changes and not self._closed:
            work, done = self._changes.popleft()
            try:
                work()
            except BaseException as error:
                done.set_exception(EngineLost(f"the engine could not change its state: {type(error).__name__}: {error}"))
                raise
            done.set_result(None)
        return not self._closed

    def _can_go_on(self) -> bool:
        """While it sleeps, requests that come late wait; they can only be aborted."""
        if self._kept is None:
            return bool(self._waiting and (self._aborts or self._interrupted))
        return bool(self._waiting) or self._live()

    def _apply(self, version: Version, weights: Mapping[str, Tensor], recompute: bool) -> None:
        own = dict(self.model.module.named_parameters())
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(value)
        self.version = version
        if recompute:
            with torch.inference_mode():
                self._recompute()

    def _fall_asleep(self) -> None:
        self._abort_rows({row.request.id for row in (*self._waiting, *self._rows) if row is not None})
        self._kept = None

    def _wake_up(self) -> None:
        self._kept = self._kept or self._new_cache()

    def _recompute(self) -> None:
        """Compute the keys and values of all live rows anew; their last token has none yet."""
        for slot, row in enumerate(self._rows):
            if row is not None:
                tokens = [*row.request.tokens, *row.completion.tokens][:-1]
                layout = Prefill(self._cache, [slot], torch.tensor([len(tokens)], device=self.device))
                self._forward(torch.tensor(tokens, device=self.device), layout.position, layout, torch.tensor([0]))

    def _live(self) -> bool:
        return any(row is not None for row in self._rows)

    def _abort_rows(self, ids: set[str]) -> None:
        ended = [row for row in (*self._waiting, *self._rows) if row is not None and row.request.id in ids]
        self._waiting = deque(row for row in self._waiting if row.request.id not in ids)
        for row in ended:
            row.completion.stop = StopReason.ABORTED
        self._release(ended)

    def _fail_all(self, error: Exception) -> None:
        rows = [row for row in (*self._waiting, *self._rows) if row is not None]
        self._waiting.clear()
        self._rows.clear()
        for row in rows:
            _deliver(row.future, error)

    def _free_slots(self) -> list[int]:
        free = [i for i, row in enumerate(self._rows) if row is None]
        return free + list(range(len(self._rows), self.slots))

    def _admit(self) -> None:
        """Prefill waiting requests while slots are free, those with equal prompts together."""
        if self._kept is None:
            return
        by_prompt: dict[tuple[int, ...], list[tuple[int, _Row]]] = {}
        for slot, row in self._seats():
            while len(self._rows) <= slot:
                self._rows.append(None)
            self._rows[slot] = row
            by_prompt.setdefault(row.request.tokens, []).append((slot, row))
        for prompts in self._prefill_batches(list(by_prompt)):
            self._prefill({tokens: by_prompt[tokens] for tokens in prompts})

    def _seats(self) -> list[tuple[int, _Row]]:
        """Which waiting request goes to which free slot; takes them off the queue."""
        free = self._free_slots()
        if not self.fixed_shape:
            return [(slot, self._waiting.popleft()) for slot in free[: len(self._waiting)]]
        open_slots, seated = set(free), []
        for row in self._waiting:
            slot = row.request.place % self.slots
            if slot in open_slots:
                open_slots.remove(slot)
                seated.append((slot, row))
        gone = {id(row) for _, row in seated}
        self._waiting = deque(row for row in self._waiting if id(row) not in gone)
        return seated

    def _prefill_batches(self, prompts: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        if self.fixed_shape:
            return [[p] for p in prompts]
        batches: list[list[tuple[int, ...]]] = []
        used = PREFILL_TOKENS
        for prompt in prompts:
            if used + len(prompt) > PREFILL_TOKENS:
                batches.append([])
                used = 0
            batches[-1].append(prompt)
            used += len(prompt)
        return batches

    def _prefill(self, prompts: dict[tuple[int, ...], list[tuple[int, _Row]]]) -> None:
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        layout = Prefill(self._cache, [members[0][0] for members in prompts.values()], lengths)
        tokens = torch.tensor([t for p in prompts for t in p], device=self.device)
        last = torch.cumsum(lengths, 0) - 1
        logits = self._forward(tokens, layout.position, layout, last)
        for (prompt, members), row_logits in zip(prompts.items(), logits, strict=True):
            source, *others = [slot for slot, _ in members]
            if others:
                self._cache.copy(source, others, len(prompt))
            self._append([row for _, row in members], row_logits.expand(len(members), -1))

    def _decode(self) -> None:
        """One token for every live row."""
        self._compact()
        rows = [row for row in self._rows if row is not None]
        if not rows:
            return
        shape = self.slots if self.fixed_shape else len(self._rows)
        tokens = np.zeros(shape, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        for i, row in enumerate(self._rows):
            if row is not None:
                tokens[i] = row.completion.tokens[-1]
                positions[i] = row.length - 1
        width = int(positions.max()) + 1
        width = self.context if self.fixed_shape else min(self.context, -(-width // WIDTH_STEP) * WIDTH_STEP)
        at = torch.from_numpy(positions).to(self.device)
        layout = Decode(self._cache, at, width)
        logits = self._forward(torch.from_numpy(tokens).to(self.device), at, layout, None)
        live = [i for i, row in enumerate(self._rows) if row is not None]
        self._append(rows, logits[live])

    def _forward(self, tokens: Tensor, positions: Tensor, layout: Prefill | Decode, keep: Tensor | None) -> Tensor:
        kept: dict[str, Any] = {} if keep is None else {"logits_to_keep": keep}
        out = self.model.module(input_ids=tokens[None], position_ids=positions[None], use_cache=False, layout=layout, **kept)
        return out.logits[0]

    def _append(self, rows: list[_Row], logits: Tensor) -> None:
        """Draw each row's next token, and release the rows that end with it."""
        sampling = [row.request.sampling for row in rows]
        seeds = np.array([row.request.seed for row in rows], dtype=np.uint64)
        positions = np.array([row.length for row in rows], dtype=np.uint64)
        temperature = torch.tensor([s.temperature for s in sampling], device=self.device)
        uniform = torch.from_numpy(keyed_uniform(seeds, positions)).to(self.device)
        top: tuple[Tensor, ...] = ()
        if any(s.top_p < 1 or s.top_k for s in sampling):
            top = (
                torch.tensor([s.top_p for s in sampling], device=self.device),
                torch.tensor([s.top_k for s in sampling], device=self.device),
            )
        tokens, logprobs = choose(logits, temperature, uniform, *top)
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.completion.tokens.append(token)
            row.completion.logprobs.append(logprob)
            row.completion.versions.append(self.version)
        self._release([row for row in rows if self._ended(row)])

    def _ended(self, row: _Row) -> bool:
        completion, sampling = row.completion, row.request.sampling
        if completion.tokens[-1] in self.model.eos:
            completion.stop = StopReason.EOS
        elif sampling.stop and self._stop_string(row):
            completion.stop = StopReason.STOP_STRING
        elif len(completion.tokens) >= sampling.max_tokens:
            completion.stop = StopReason.LENGTH
        elif row.length >= self.context:
            completion.stop = StopReason.CONTEXT
        else:
            return False
        return True

    def _stop_string(self, row: _Row) -> bool:
        longest = max(len(s) for s in row.request.sampling.stop)
        tail = self.model.tokenizer.decode(row.completion.tokens[-(longest + 4) :])
        return any(s in tail for s in row.request.sampling.stop)

    def _release(self, ended: list[_Row]) -> None:
        if not ended:
            return
        gone = {id(row) for row in ended}
        self._rows = [None if row is not None and id(row) in gone else row for row in self._rows]
        for row in ended:
            _deliver(row.future, row.completion)

    def _compact(self) -> None:
        """Close the gaps that ended rows left by moving the last rows into them."""
        if self.fixed_shape:
            return
        while self._rows and self._rows[-1] is None:
            self._rows.pop()
        for slot in range(len(self._rows)):
            if slot < len(self._rows) and self._rows[slot] is None:
                row = self._rows.pop()
                assert row is not None
                self._rows[slot] = row
                self._cache.copy(len(self._rows), [slot], row.length - 1)
                while self._rows and self._rows[-1] is None:
                    self._rows.pop()


def _deliver(future: asyncio.Future[Completion], outcome: Completion | Exception) -> None:
    """Hand an outcome to the event loop that waits for it; a loop that is gone wants nothing any more."""
    with suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(_settle, future, outcome)


def _settle(future: asyncio.Future[Completion], outcome: Completion | Exception) -> None:
    if future.done():
        return
    if isinstance(outcome, Completion):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
