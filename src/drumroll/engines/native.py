"""The embedded engine: continuous batching in plain PyTorch on the Hugging Face module itself.

A thread, which lives while there is work, admits waiting requests, computes a bounded number of prompt tokens, decodes
one token for all rows that are ready, and returns the requests that have ended. It never waits for a full batch. Keys
and values are stored in pages (`pages.py`): a prefix that several requests share is computed and stored once.

With `fixed_shape` every prompt is prefilled alone, a request's position in the draw order determines its row and its
pages, and every decode step computes all rows over the whole context. A sample's numbers are then the same to the last
bit whatever else is being generated, at some cost in speed.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumroll.config.engines import ENGINES
from drumroll.engines import Completion, EngineBackend, EngineLost, EngineSetup, Request
from drumroll.engines.pages import Chain, FixedPages, Pages
from drumroll.engines.rows import Chunk, Row, deliver
from drumroll.engines.sampler import Restriction, choose, keyed_uniform, likeliest
from drumroll.errors import ConfigError
from drumroll.models.attention import Decode, KVCache, PageSlots, Prefill, Reads
from drumroll.models.experts import rows_alone
from drumroll.models.file_names import as_in_files
from drumroll.models.loading import LoadedModel, kv_shapes
from drumroll.models.lora import adapter_parameters
from drumroll.models.packing import PackedLinears, quicken_norms
from drumroll.processes.accelerator import empty_cache, send
from drumroll.processes.memory import spare_gb
from drumroll.processes.threads import CORES, LINGER, ComputingThread
from drumroll.sample import StopReason, Version
from drumroll.weights import Named, fill

PREFILL_TOKENS = 512
PAGE_TOKENS = 128


class NativeEngine:
    """Implements `Engine` in this process.

    `cache_gb` limits the memory of keys and values, in GiB. Without it there is enough for every slot at full length, or
    as much of that as `spare_gb` holds, and at least one sequence. When the memory runs out, the youngest request is
    preempted; it is recomputed later, with the same tokens and random numbers. A fixed shape has fewer slots instead.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        slots: int,
        context: int,
        fixed_shape: bool = False,
        cache_gb: float | None = None,
        spare_gb: float | None = None,
        page_tokens: int | None = None,
    ) -> None:
        self.model = model
        self.slots = slots
        self.context = context
        self.fixed_shape = fixed_shape
        self.page_tokens = page_tokens or (context if fixed_shape else min(context, PAGE_TOKENS))
        self.preempted = 0
        self.prefilled = 0  # tokens that were computed but not sampled
        self.version: Version = 0
        self.device = next(model.module.parameters()).device
        self._shapes = kv_shapes(model.module)
        self._vocabulary = int(model.module.get_input_embeddings().weight.shape[0])
        self.page_count = self._count_pages(cache_gb, spare_gb)
        self._packs = PackedLinears(model.module, rows=self.slots)
        quicken_norms(model.module)
        self._kept: KVCache | None = self._new_cache()
        self._pages = self._new_pages()
        self._arrivals = itertools.count()
        self._renamed = False
        self._whole = True
        self._rows: list[Row | None] = []
        self._waiting: deque[Row] = deque()
        self._inbox: list[Row] = []
        self._aborts: set[str] = set()
        self._interrupted = False
        self._changes: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    # --- the contract, called from the event loop ---

    async def generate(self, request: Request) -> Completion:
        if len(request.tokens) >= self.context:
            return Completion(stop=StopReason.CONTEXT)
        if request.tokens and not 0 <= min(request.tokens) <= max(request.tokens) < self._vocabulary:
            unknown = next(t for t in request.tokens if not 0 <= t < self._vocabulary)
            raise IndexError(f"request {request.id}: the model has no token {unknown}; it has 0 to {self._vocabulary - 1}")
        row = Row(request, asyncio.get_running_loop().create_future())
        with self._wake:
            if self._closed:
                raise EngineLost("the engine is closed")
            self._inbox.append(row)
            self._rouse()
        try:
            return await row.future
        except asyncio.CancelledError:
            self.abort(request.id)
            raise

    def abort(self, request_id: str) -> None:
        with self._wake:
            self._aborts.add(request_id)
            self._rouse_if_needed()

    def interrupt(self) -> None:
        with self._wake:
            self._interrupted = bool(self._inbox or self._waiting or self._live())
            self._rouse_if_needed()

    def set_version(self, version: Version) -> None:
        with self._wake:
            self.version = version
            self._renamed = True

    def load(self, version: Version, weights: Named, *, recompute: bool) -> None:
        self._load(version, weights, self._parameters(), recompute)

    def _parameters(self) -> dict[str, Tensor]:
        return dict(as_in_files(self.model.module.named_parameters(), self.model.files or {}))

    def load_adapter(self, version: Version, adapter: Named, config: Mapping[str, Any], *, recompute: bool) -> None:
        self._load(version, adapter, adapter_parameters(self.model.module), recompute)

    def _load(self, version: Version, weights: Named, into: dict[str, Tensor], recompute: bool) -> None:
        """Let the thread take a stream of weights. If that fails, the engine waits for a whole version."""
        failures = list[Exception]()

        def switch() -> None:
            self._whole = False
            try:
                fill(into, weights)
                self._whole = True
            except Exception as error:
                failures.append(error)
            self._switched(version if self._whole else self.version, recompute)

        self._change(switch)
        if failures:
            raise failures[0]

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
            thread = self._thread
        if thread is not None:
            thread.join(timeout=10)

    def _rouse(self) -> None:
        """Wake the thread, or start one; the lock must be held. The thread ends when there is nothing to do."""
        if self._thread is not None:
            self._wake.notify()
            return
        self._thread = ComputingThread(self._run, "native-engine")
        self._thread.start()

    def _rouse_if_needed(self) -> None:
        """As `_rouse`, if there are requests; the thread of an idle engine ends though requests wait."""
        if not self._closed and (self._waiting or self._live()):
            self._rouse()

    def _change(self, work: Callable[[], None]) -> None:
        """Let the thread run `work` between two tokens.

        If it fails, the engine's state is inconsistent, so the engine is lost.
        """
        done: Future[None] = Future()
        with self._wake:
            if self._closed:
                raise EngineLost("the engine is closed")
            self._changes.append((work, done))
            self._rouse()
        done.result()

    # --- on the engine's thread ---

    @property
    def _cache(self) -> KVCache:
        assert self._kept is not None, "the engine sleeps"
        return self._kept

    def _new_cache(self) -> KVCache:
        return KVCache(self._shapes, self.page_count, self.page_tokens, self.model.module.dtype, self.device)

    def _new_pages(self) -> Pages:
        if self.fixed_shape:
            return FixedPages(self.slots, self.page_count // self.slots, self.page_tokens)
        return Pages(self.page_count, self.page_tokens)

    def _count_pages(self, cache_gb: float | None, spare_gb: float | None) -> int:
        """Return the number of pages that all slots can need, or that the memory limit allows. Lowers `slots` of a fixed shape."""
        full = -(-self.context // self.page_tokens)
        if self.fixed_shape:
            per_slot, least = full, full * self.slots
        else:
            per_slot = least = full + 2  # a sequence may branch off within a page, and so may the sequence it branches off from
        page_bytes = sum(2 * heads * dim * self.page_tokens * self.model.module.dtype.itemsize for heads, dim in self._shapes)
        if cache_gb is None:
            spare = per_slot * self.slots if spare_gb is None else int(spare_gb * 2**30 / page_bytes)
            if self.fixed_shape:
                self.slots = max(1, min(self.slots, spare // full))
            return min(max(spare, per_slot), per_slot * self.slots)
        granted = int(cache_gb * 2**30 / page_bytes)
        if granted < least:
            needs = (
                "deterministic mode needs all slots at full length" if self.fixed_shape else "one sequence of full length needs"
            )
            raise ConfigError(
                f"cache_gb={cache_gb} holds {granted * self.page_tokens} tokens, but {needs}: "
                f"{least * self.page_tokens} tokens or {least * page_bytes / 2**30:.4f} GB. Raise it, or lower slots or context."
            )
        return min(granted, per_slot * self.slots)

    def _run(self) -> None:
        try:
            with CORES.work():
                while self._collect():
                    try:
                        CORES.adjust()
                        if self._idle:
                            continue
                        self._packs.refresh()
                        with torch.inference_mode():
                            self._admit()
                            self._prefill()
                            self._decode()
                    except Exception as error:
                        self._fail_all(error)
        except BaseException as error:  # the thread dies, and its requests carry the reason to their callers
            self._lose_all(f"the engine died of {type(error).__name__}: {error}")
        else:
            if self._closed:
                self._lose_all("the engine was closed")

    def _lose_all(self, reason: str) -> None:
        with self._wake:
            self._closed = True
            self._waiting.extend(self._inbox)
            self._inbox.clear()
        for _, done in self._changes:
            done.set_exception(EngineLost(reason))
        self._fail_all(EngineLost(reason))

    def _collect(self) -> bool:
        """Take in new requests, aborts and new weights. Returns False if there is nothing to do or the engine is closed."""
        with self._wake:
            if not self._busy():
                with CORES.rest():
                    more = self._wake.wait_for(self._busy, LINGER)
                if not more:
                    self._thread = None
                    return False
            for row in self._inbox:
                row.arrival = next(self._arrivals)
            self._waiting.extend(self._inbox)
            self._inbox.clear()
            renamed, self._renamed = self._renamed, False
            aborts, self._aborts = self._aborts, set()
            interrupted, self._interrupted = self._interrupted, False
        if interrupted:
            aborts = {row.request.id for row in (*self._waiting, *self._rows) if row is not None}
        if aborts:
            self._abort_rows(aborts)
        if renamed:
            self._forget()
        while self._changes and not self._closed:
            work, done = self._changes.popleft()
            try:
                work()
            except BaseException as error:
                done.set_exception(EngineLost(f"the engine could not change its state: {type(error).__name__}: {error}"))
                raise
            done.set_result(None)
        return not self._closed

    def _switched(self, version: Version, recompute: bool) -> None:
        """Discard what the weights before have computed."""
        self.version = version
        self._forget()
        for row in self._rows if recompute else ():
            if row is not None:  # its keys and values are recomputed in the next step
                self._pages.release(row.chain)
                row.chain = Chain(row.chain.slot)

    def _fall_asleep(self) -> None:
        self._abort_rows({row.request.id for row in (*self._waiting, *self._rows) if row is not None})
        self._kept = None
        self._packs.release()
        empty_cache()

    def _wake_up(self) -> None:
        if self._kept is None:
            self._kept, self._pages = self._new_cache(), self._new_pages()

    def _forget(self) -> None:
        """Discard everything that was computed or packed with the old weights."""
        self._pages.forget()
        self._packs.release()

    def _busy(self) -> bool:
        """Return whether the thread has work. While the engine is idle, requests wait; they can only be aborted."""
        if self._inbox or self._changes or self._closed:
            return True
        return (bool(self._waiting) or self._live()) and (not self._idle or bool(self._aborts) or self._interrupted)

    @property
    def _idle(self) -> bool:
        """Whether it generates nothing: it sleeps, or new weights arrived in part."""
        return self._kept is None or not self._whole

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
        self._pages = self._new_pages()  # the old pages may list tokens that were never computed
        for row in rows:
            deliver(row.future, error)

    def _free_slots(self) -> list[int]:
        free = [i for i, row in enumerate(self._rows) if row is None]
        return free + list(range(len(self._rows), self.slots))

    def _admit(self) -> None:
        """Admit waiting requests while slots are free."""
        if self.fixed_shape:
            self._rows += [None] * (self.slots - len(self._rows))
        else:
            self._rows = [row for row in self._rows if row is not None]
        for slot, row in self._assignments():
            while len(self._rows) <= slot:
                self._rows.append(None)
            self._rows[slot] = row
            row.admitted, row.chain = True, Chain(slot)

    def _assignments(self) -> list[tuple[int, Row]]:
        """Assign waiting requests to free slots and remove them from the queue."""
        free, admitted = self._free_slots(), []
        if not self.fixed_shape:
            room = self._pages.available()
            for slot in free[: len(self._waiting)]:
                room -= self._waiting[0].length // self._pages.size + 1
                if room < 0 and (admitted or self._live()):
                    break
                admitted.append((slot, self._waiting.popleft()))
            return admitted
        open_slots = set(free)
        for row in self._waiting:
            slot = row.request.order % self.slots
            if slot in open_slots:
                open_slots.remove(slot)
                admitted.append((slot, row))
        gone = {id(row) for _, row in admitted}
        self._waiting = deque(row for row in self._waiting if id(row) not in gone)
        return admitted

    def _oldest_first(self) -> list[Row]:
        return sorted((row for row in self._rows if row is not None), key=lambda row: row.arrival)

    def _extend(self, row: Row, tokens: list[int]) -> tuple[list[int], list[int]] | None:
        """Reserve pages for a row's next tokens. If there is no room, preempt the youngest rows, but never an older one."""
        while (page_slots := self._pages.extend(row.chain, tokens)) is None:
            youngest = self._oldest_first()[-1]
            if youngest is row:
                return None
            self._pages.release(youngest.chain)
            youngest.admitted, youngest.chain = False, Chain()
            self._rows = [None if each is youngest else each for each in self._rows]
            self._waiting.appendleft(youngest)
            self.preempted += 1
        return page_slots

    def _prefill(self) -> None:
        """Compute rows that lack more than their last token: a bounded number of tokens, equal sequences only once."""
        budget = sys.maxsize if self.fixed_shape else PREFILL_TOKENS
        leaders: dict[tuple[int, ...], Row] = {}
        followers: dict[int, list[Row]] = {}
        chunks: list[Chunk] = []
        for row in self._oldest_first():
            if row.pending == 1 or not row.admitted:
                continue
            tokens = row.tokens()
            if (leader := leaders.setdefault(tuple(tokens), row)) is not row and row.chain.length == 0:
                followers.setdefault(leader.arrival, []).append(row)
                continue
            if budget > 0 and row.chain.length == 0:
                row.chain = self._pages.match(tokens, row.chain.slot)
            start, count = row.chain.length, min(row.pending, budget)
            if row.pending == 1 or count == 0 or (page_slots := self._extend(row, tokens[start : start + count])) is None:
                continue
            budget -= count
            chunks.append(Chunk(row, start, tokens[start : start + count], page_slots))
        for batch in [[c] for c in chunks] if self.fixed_shape else [chunks] if chunks else []:
            self._compute(batch, followers)

    def _compute(self, chunks: list[Chunk], followers: dict[int, list[Row]]) -> None:
        """Run one pass over chunks of several sequences.

        Sequences that are now complete get a token, and so do rows equal to them.
        """
        chunks = sorted(chunks, key=lambda chunk: chunk.start > 0)
        layout = Prefill(
            self._cache,
            self._page_slots([p for c in chunks for p in c.page_slots[0]], [o for c in chunks for o in c.page_slots[1]]),
            [len(c.tokens) for c in chunks if c.start == 0],
            [(len(c.tokens), self._page_slots(*c.row.chain.page_slots())) for c in chunks if c.start > 0],
        )
        tokens = [t for c in chunks for t in c.tokens]
        positions = np.concatenate([np.arange(c.start, c.start + len(c.tokens)) for c in chunks])
        self.prefilled += len(tokens)
        last = np.cumsum([len(c.tokens) for c in chunks]) - 1
        logits = self._forward(self._send(tokens), self._send(positions), layout, self._send(last))
        rows, source = [], []
        for i, chunk in enumerate(chunks):
            if chunk.row.pending == 0:
                equals = [row for row in followers.get(chunk.row.arrival, ()) if row.admitted]
                for row in equals:
                    self._follow(chunk.row, row)
                rows += [chunk.row, *equals]
                source += [i] * (1 + len(equals))
        if rows:
            self._append(rows, logits.index_select(0, self._send(source)))

    def _follow(self, leader: Row, row: Row) -> None:
        """Share the leader's keys and values with a row of equal tokens."""
        if not self.fixed_shape:
            row.chain = self._pages.share(leader.chain, row.chain.slot)
            return
        page_slots = self._pages.extend(row.chain, row.tokens())
        assert page_slots is not None
        self._cache.copy(self._page_slots(*leader.chain.page_slots()), self._page_slots(*page_slots))

    def _send(self, numbers: NDArray[np.int64] | list[int]) -> Tensor:
        return send(np.asarray(numbers, np.int64), self.device)

    def _page_slots(self, pages: list[int], offsets: list[int]) -> PageSlots:
        return PageSlots(pages, offsets, self.device)

    def _decode(self) -> None:
        """Decode one token for every row that lacks only its last."""
        ready: dict[int, tuple[int, int]] = {}
        for row in self._oldest_first():
            if row.pending == 1 and row.admitted and (page_slots := self._extend(row, [row.last_token])) is not None:
                ready[row.arrival] = (page_slots[0][0], page_slots[1][0])
        rows = [row for row in self._rows if row is not None and row.arrival in ready]
        if not rows:
            return
        slots: Sequence[Row | None] = self._rows if self.fixed_shape else rows
        live = [i for i, row in enumerate(slots) if row is not None]
        tokens, positions = np.zeros(len(slots), np.int64), np.zeros(len(slots), np.int64)
        unused = self._pages.per_slot if isinstance(self._pages, FixedPages) else 0
        at = [(i * unused, 0) for i in range(len(slots))]
        for i, row in zip(live, rows, strict=True):
            tokens[i], positions[i], at[i] = row.last_token, row.length - 1, ready[row.arrival]
        reads = _reads(live, [row.chain for row in rows])
        where = self._send(positions)
        layout = Decode(self._cache, self._page_slots(*map(list, zip(*at, strict=True))), where, reads, whole=self.fixed_shape)
        with rows_alone() if self.fixed_shape else nullcontext():
            logits = self._forward(self._send(tokens), where, layout, None)
        self._append(rows, logits if len(live) == len(slots) else logits.index_select(0, self._send(live)))

    def _forward(self, tokens: Tensor, positions: Tensor, layout: Prefill | Decode, keep: Tensor | None) -> Tensor:
        kept: dict[str, Any] = {} if keep is None else {"logits_to_keep": keep}
        out = self.model.module(input_ids=tokens[None], position_ids=positions[None], use_cache=False, layout=layout, **kept)
        return out.logits[0]

    def _append(self, rows: list[Row], logits: Tensor) -> None:
        """Sample each row's next token, and release the rows that end with it."""
        sampling = [row.request.sampling for row in rows]
        seeds = np.array([row.request.seed for row in rows], dtype=np.uint64)
        positions = np.array([row.length for row in rows], dtype=np.uint64)
        temperature = torch.tensor([s.temperature for s in sampling])
        uniform, restriction = torch.from_numpy(keyed_uniform(seeds, positions)), Restriction.of(sampling, self._vocabulary)
        tokens, logprobs = choose(logits, temperature, uniform, restriction)
        found = torch.stack((tokens.double(), logprobs.double())).cpu().tolist()  # both exact; the host waits here, once
        most = max(s.top_logprobs for s in sampling)
        listed = likeliest(logits, temperature, most) if most else None
        drawn = []
        for i, (row, number, logprob) in enumerate(zip(rows, *found, strict=True)):
            if not math.isfinite(logprob):
                self._release([row], _not_finite(row, logprob))
                continue
            row.completion.tokens.append(int(number))
            row.completion.logprobs.append(logprob)
            row.completion.versions.append(self.version)
            if listed is not None and (count := sampling[i].top_logprobs):
                row.completion.top.append(listed[i][:count])
            drawn.append(row)
        self._release([row for row in drawn if self._ended(row)])

    def _ended(self, row: Row) -> bool:
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

    def _stop_string(self, row: Row) -> bool:
        longest = max(len(s) for s in row.request.sampling.stop)
        tail = self.model.tokenizer.decode(row.completion.tokens[-(longest + 4) :])
        return any(s in tail for s in row.request.sampling.stop)

    def _release(self, ended: list[Row], error: Exception | None = None) -> None:
        """Free the rows and deliver their completions, or the error."""
        if not ended:
            return
        gone = {id(row) for row in ended}
        self._rows = [None if row is not None and id(row) in gone else row for row in self._rows]
        for row in ended:
            self._pages.release(row.chain)
            deliver(row.future, error or row.completion)


def _not_finite(row: Row, logprob: float) -> FloatingPointError:
    where = f"token {row.length} of request {row.request.id}"
    return FloatingPointError(
        f"{where} has the log-prob {logprob}, which is not a finite number at temperature {row.request.sampling.temperature:g}; "
        "raise the temperature, or look for infinite weights"
    )


def _reads(slots: list[int], chains: list[Chain]) -> Reads:
    def flat(parts: Iterable[list[int]]) -> NDArray[np.int64]:
        return np.fromiter(itertools.chain.from_iterable(parts), np.int64)

    rows = np.repeat(np.array(slots, np.int64), [len(chain.ids) for chain in chains])
    ids, counts, starts = (flat(getattr(chain, name) for chain in chains) for name in ("ids", "counts", "starts"))
    return Reads(ids, rows, counts, starts)


def _make(setup: EngineSetup) -> NativeEngine:
    role, model = setup.role, setup.load()
    spare = spare_gb(str(model.module.device), setup.neighbours, fixed=setup.deterministic)
    return NativeEngine(
        model,
        slots=role.slots,
        context=setup.context,
        fixed_shape=setup.deterministic,
        cache_gb=role.cache_gb,
        spare_gb=spare,
    )


BACKEND = EngineBackend(_make, ENGINES["native"])
