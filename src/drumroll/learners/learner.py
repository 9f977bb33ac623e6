"""The update loop: minibatches, epochs, micro-batches by token budget, written once for every backend and head.

The gradient does not depend on how a batch is cut or spread over ranks, because every token has its share of the loss
before the batch is cut. Tokens that cannot change the gradient are left out; their shares still count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from drumroll.algorithms.losses import AnyLoss
from drumroll.batch import Batch
from drumroll.config.optim import OptimConfig
from drumroll.errors import AlgorithmError
from drumroll.learners.backend import Backend, Numbers
from drumroll.learners.checkpoint import Snapshot
from drumroll.learners.heads import Head, LogProbHead
from drumroll.learners.statistics import Statistics
from drumroll.processes.accelerator import send
from drumroll.processes.threads import beside

STATE = "learner.json"
Aggregation = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Update:
    """The work of one update: the batch, the loss on its tokens, and the share of each token in it."""

    batch: Batch
    loss: AnyLoss
    aggregate: Aggregation
    temperature: float = 1.0
    idle: bool = False  # count the update without training: the critic comes first


class Learner:
    """One rank of a training role. All ranks of a role get the same calls; each works on its share of the batch."""

    def __init__(
        self, backend: Backend, config: OptimConfig | None = None, head: Head | None = None, *, total_steps: int = 1
    ) -> None:
        self.backend = backend
        self.head = head or LogProbHead()
        self.config = config or OptimConfig()
        self.total_steps = total_steps
        self.teachers: tuple[Sequence[Backend], Callable[[str], int]] | None = None  # several, and the number of a domain's
        self.step = 0
        self._moved = False
        self._snapshot: tuple[int, Snapshot] | None = None

    # --- inference ---

    def infer(self, batch: Batch, temperature: float = 1.0) -> Tensor:
        """[tokens of this rank's share] the head's first number (log-prob, value) for trained tokens, 0 elsewhere."""
        with self.backend.ranks.agreed(self.backend.drop_gradients):
            batch = self._share(batch)
            result = torch.zeros(len(batch.tokens), *filter(None, [self.head.width]))
            works = [(self.backend, list(range(batch.num_traces)))] if self.teachers is None else self._by_teacher(batch)
            cuts = [_cuts(batch, traces, self.config.micro_tokens) for _, traces in works]
        for (backend, _), own in zip(works, cuts, strict=True):
            micro_batches = self._fit(batch, [batch.select(traces) for traces in own])
            found = backend.infer(micro_batches, self.head.inference(temperature))
            for traces, numbers in zip(own, found, strict=False):  # what follows was added to fit
                where = batch.places(traces)
                result[where[batch.mask[where]]] = numbers[0].float().cpu()
        return result

    def _by_teacher(self, batch: Batch) -> list[tuple[Backend, list[int]]]:
        """The traces of each teacher's domains."""
        assert self.teachers is not None
        backends, number = self.teachers
        numbers = [number(batch.domains[sample]) for sample in batch.sample_of.tolist()]
        return [(backend, [t for t, n in enumerate(numbers) if n == own]) for own, backend in enumerate(backends)]

    def infer_reference(self, batch: Batch, temperature: float) -> Tensor:
        """The same with the weights before training: a frozen role's own, or a LoRA model's without its adapters."""
        with self.backend.without_adapters():
            return self.infer(batch, temperature)

    # --- the update ---

    def update(self, work: Update) -> Statistics:
        """Train on a batch: an optimizer step for each minibatch of each epoch."""
        statistics, self._moved = Statistics(self.head.area), False
        with self.backend.ranks.agreed(self.backend.drop_gradients):
            minibatches = [] if work.idle else list(self._minibatches(work.batch))
        for mini in minibatches * self.config.epochs:
            self._minibatch(mini, work, statistics)
            self._moved = True
        self.step += 1
        return statistics

    def interrupt(self) -> None:
        """End a running update before its next micro-batch. Callable from any thread."""
        self.backend.stop.set()

    def _minibatch(self, mini: Batch, work: Update, statistics: Statistics) -> None:
        """Take one optimizer step with all ranks, or with none."""
        backend = self.backend
        with backend.ranks.agreed(backend.drop_gradients):
            micro_batches = self._micro_batches(mini, work)
        settings = self.head.settings(work.loss, work.temperature)
        statistics.extend(backend.train(self._fit(mini, micro_batches), settings, partial(self._loss, work)))
        with backend.ranks.agreed(backend.drop_gradients):
            norm = self._clip()
        backend.step(self.learning_rate())
        statistics.steps.append((norm, self.learning_rate()))

    def _minibatches(self, batch: Batch) -> Iterator[Batch]:
        size = self.config.minibatch or batch.num_samples
        yield from (batch.select(traces) for traces in batch.chunks(size))

    def _share(self, batch: Batch) -> Batch:
        mesh = self.backend.ranks.mesh
        return batch if mesh.shares == 1 else batch.select(batch.shares(mesh.shares)[mesh.share])

    def _micro_batches(self, mini: Batch, work: Update) -> list[Batch]:
        """This rank's share of a minibatch, cut. Shares of the loss are those of the whole minibatch."""
        own = self._share(mini.with_(weights=work.aggregate(mini)))
        needed = _needed(own) if getattr(work.loss, "skips_zero_advantage", False) else own
        return [needed.select(traces) for traces in needed.micro_batches(self.config.micro_tokens)]

    def _fit(self, batch: Batch, micro_batches: list[Batch]) -> list[Batch]:
        """As many micro-batches as the backend wants and the other ranks have; those added are empty."""
        count = self.backend.count.fit(self.backend.ranks.most(len(micro_batches)))
        return micro_batches + [batch.select([])] * (count - len(micro_batches))

    def _loss(self, work: Update, numbers: Numbers, micro: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, summed by the tokens' shares, and diagnostics."""
        assert micro.weights is not None
        weights = send(micro.weights[micro.mask], numbers[0].device)
        per_token, diagnostics = self.head.loss(work.loss, numbers, micro, moved=self._moved)
        loss = (per_token * weights).sum()
        if not torch.isfinite(loss):
            self._explain_loss(per_token, micro, work)
        return loss, diagnostics

    def _explain_loss(self, per_token: Tensor, micro: Batch, work: Update) -> None:
        """No NaN escapes: name the loss and the sample."""
        bad = int((~torch.isfinite(per_token.detach())).nonzero()[0, 0]) if not torch.isfinite(per_token).all() else 0
        sample = int(micro.sample_of_token()[micro.mask][bad])
        raise AlgorithmError(
            f"loss '{work.loss.name}' gave {per_token[bad].item()} for a token of sample {sample} of the batch "
            f"(domain '{micro.domains[sample]}') at step {self.step + 1}."
        )

    def _clip(self) -> float:
        """Clip the gradient; returns the norm before."""
        norm = self.backend.clip(self.config.grad_clip or math.inf)
        if not math.isfinite(norm):
            raise AlgorithmError(
                f"the gradient at step {self.step + 1} has norm {norm} though the loss is finite; the weights were left as they are."
            )
        return norm

    def learning_rate(self) -> float:
        """The rate of the current step: linear warm-up, then the schedule down to 0 at the last step."""
        config = self.config
        if self.step < config.warmup:
            return config.lr * (self.step + 1) / (config.warmup + 1)
        progress = (self.step - config.warmup) / max(1, self.total_steps - config.warmup)
        factor = {
            "constant": 1.0,
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1 + math.cos(math.pi * min(1.0, progress))),
        }[config.schedule]
        return config.lr * max(0.0, factor)

    # --- weights and state: calls to all ranks ---

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights, whole, one at a time; every rank takes them all. Each is valid until the next one is taken."""
        return self.backend.weights()

    def snapshot(self) -> None:
        """Copy everything that `load` needs to host memory, for `write`."""
        self._snapshot = (self.step, self.backend.snapshot())

    async def write(self, folder: Path) -> None:
        """Write the snapshot on a thread of its own and free it; a coroutine, so that other calls do not wait for it."""
        await beside(partial(self._write, folder))

    def save(self, folder: Path) -> None:
        """Take a snapshot and write it."""
        self.snapshot()
        self._write(folder)

    def _write(self, folder: Path) -> None:
        assert self._snapshot is not None, "write follows snapshot"
        (step, snapshot), self._snapshot = self._snapshot, None
        snapshot.write(folder)
        if self.backend.ranks.mesh.rank == 0:
            (folder / STATE).write_text(json.dumps({"step": step}))

    def load(self, folder: Path) -> None:
        """Return to a saved state."""
        self.backend.load(folder)
        self.step = json.loads((folder / STATE).read_text("utf-8"))["step"]

    def export(self, folder: Path) -> None:
        """Write a plain Hugging Face model directory."""
        self.backend.export(folder)

    def offload(self) -> None:
        """Give the device to other roles."""
        self.backend.offload()

    def reload(self) -> None:
        """Take the device again."""
        self.backend.reload()


def _cuts(batch: Batch, traces: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Some traces of a batch in micro-batches."""
    own = batch if len(traces) == batch.num_traces else batch.select(traces)
    return [[traces[t] for t in cut] for cut in own.micro_batches(max_tokens)]


def _needed(mini: Batch) -> Batch:
    """Without the traces whose advantage is zero throughout: they add nothing to the gradient.

    Their tokens still count in the weights, which were computed before, and the optimizer still steps.
    """
    assert mini.advantages is not None
    moved = torch.zeros(mini.num_traces).index_add_(0, mini.trace_of_token(), mini.advantages.abs())
    if mini.unit_of is not None:  # all of a unit, or nothing
        units = mini.unit_of[mini.sample_of]
        moved = torch.zeros(int(units.max()) + 1).index_add_(0, units, moved)[units]
    return mini.select(moved.nonzero()[:, 0].tolist())
