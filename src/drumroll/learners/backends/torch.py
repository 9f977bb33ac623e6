"""The plain PyTorch backend: a whole replica of the model on each rank, CPU or CUDA by the same code, data-parallel.

It does only needed work: packed tokens without padding, a prompt that samples share once, logits only where a token is
trained and in chunks. Dropout stays off in updates too: the log-probs trained on must be those of the policy that sampled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drumroll.batch import Batch
from drumroll.config.optim import OptimConfig
from drumroll.errors import Interrupted
from drumroll.learners.backend import BACKENDS, Count, LearnerSpec, LossFunction, Numbers
from drumroll.learners.checkpoint import Snapshot
from drumroll.learners.checkpoint import load as load_checkpoint
from drumroll.learners.heads import Head, LogProbHead, Settings, ValueHead
from drumroll.learners.learner import Learner
from drumroll.learners.pieces import Piece
from drumroll.learners.ranks import ALONE, Ranks
from drumroll.learners.statistics import Statistics
from drumroll.models.export import export_model
from drumroll.models.loading import LoadedModel, load
from drumroll.models.lora import add_adapters, without_adapters
from drumroll.models.prefix_tree import PrefixTree
from drumroll.models.value import ValueModel


@BACKENDS.register("torch", shares_weights=True, adapters=True)
def open_backend(spec: LearnerSpec) -> TorchBackend:
    """Load the model of a role, with its adapters or value head."""
    model = load(
        spec.name, dtype=spec.dtype, device=spec.device, seed=spec.seed, recompute_activations=spec.recompute_activations
    )
    if spec.lora is not None:
        add_adapters(model, spec.lora)
    return TorchBackend(spec.head.attach(model), spec.head, spec.optim, spec.ranks)


class TorchBackend:
    """Implements `Backend`. Working weights may be bfloat16; gradients add up in float32, and the optimizer works in it."""

    count = Count()

    def __init__(self, model: LoadedModel, head: Head, config: OptimConfig | None = None, ranks: Ranks = ALONE) -> None:
        self.model = model
        self.ranks = ranks
        self.stop = threading.Event()
        self.device = next(model.module.parameters()).device
        self.scorer = head.scorer(model)
        model.module.eval()
        if config is None:
            model.module.requires_grad_(False)
        chosen = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
        self.names, self.working = [n for n, _ in chosen], [p for _, p in chosen]
        self.master = [p if p.dtype in (torch.float32, torch.float64) else p.detach().float() for p in self.working]
        for master, working in zip(self.master, self.working, strict=True):
            if master is not working:
                working.register_post_accumulate_grad_hook(partial(_accumulate, master))
        self.optimizer: torch.optim.Optimizer | None = None
        if config is not None:
            groups = self._groups(config.weight_decay)
            self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)

    def _groups(self, decay: float) -> list[dict[str, Any]]:
        """The optimizer's parameter groups: weight decay spares norms and biases."""
        spared = [p.dim() < 2 or name.endswith("bias") for name, p in zip(self.names, self.master, strict=True)]
        return [
            {"params": [p for p, spare in zip(self.master, spared, strict=True) if spare is kind], "weight_decay": of_kind}
            for kind, of_kind in ((False, decay), (True, 0.0))
        ]

    # --- passes ---

    def infer(self, micro_batches: Sequence[Batch], settings: Settings) -> list[Numbers]:
        found: list[Numbers] = []
        with torch.no_grad():
            for micro in micro_batches:
                self._check_stop()
                found.append(self._forward(micro, settings) if micro.num_traces else (torch.zeros(0),))
        return found

    def _forward(self, micro: Batch, settings: Settings) -> Numbers:
        """The head's numbers at the trained tokens of a micro-batch."""
        tree = micro.tree()
        before = tree.node_of[micro.mask.nonzero()[:, 0] - 1].to(self.device)
        tokens, chosen = tree.tokens.to(self.device), micro.tokens[micro.mask].to(self.device)
        layout = PrefixTree(tree.paths, self.device)
        return self.scorer(tokens, layout, before, chosen, settings.temperature, settings.entropy_gradient)

    def without_adapters(self) -> AbstractContextManager[None]:
        return without_adapters(self.model.module)

    def train(self, micro_batches: Sequence[Batch], settings: Settings, loss: LossFunction) -> Statistics:
        """Ranks vote after each loss and after each backward pass, so all go on or none does."""
        statistics, agreed = Statistics(), partial(self.ranks.agreed, self.drop_gradients)
        self._recomputing(True)
        try:
            for micro in micro_batches:
                with agreed():
                    total = self._add_loss(micro, settings, loss, statistics)
                with agreed():
                    if total is not None:
                        total.backward()
        finally:
            self._recomputing(False)
        with agreed():
            self._check_stop()
            for master in self.master:
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
        self.ranks.add([master.grad for master in self.master if master.grad is not None])
        return statistics

    def _add_loss(self, micro: Batch, settings: Settings, loss: LossFunction, statistics: Statistics) -> Tensor | None:
        self._check_stop()
        if not micro.mask.any():
            return None
        total, diagnostics = loss(self._forward(micro, settings), micro)
        statistics.add(total.detach(), int(micro.mask.sum()), diagnostics)
        return total

    def _recomputing(self, on: bool) -> None:
        """Layers that recompute activations do so in training mode only; all others, dropout among them, never leave eval."""
        for layer in self.model.module.modules():
            if getattr(layer, "gradient_checkpointing", False):
                layer.training = on

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise Interrupted("the update was interrupted")

    # --- the optimizer ---

    def clip(self, limit: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.master, limit))

    def step(self, rate: float) -> None:
        assert self.optimizer is not None, "a frozen role takes no step"
        with self.ranks.failing_together():
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.drop_gradients()
            self._refresh_working()

    def drop_gradients(self) -> None:
        for master in self.master:
            master.grad = None

    def _refresh_working(self) -> None:
        with torch.no_grad():
            for master, working in zip(self.master, self.working, strict=True):
                if master is not working:
                    working.copy_(master)

    # --- weights and state ---

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The working weights themselves, not copies."""
        for name, parameter in zip(self.names, self.working, strict=True):
            yield name, parameter.detach()

    def pieces(self) -> list[Piece]:
        """The master weights as this rank holds them: whole, the same on all ranks."""
        first = self.ranks.mesh.rank == 0
        return [
            Piece(name, tuple(master.shape), (0,) * master.dim(), master.detach(), first)
            for name, master in zip(self.names, self.master, strict=True)
        ]

    def snapshot(self) -> Snapshot:
        assert self.optimizer is not None, "a frozen role has no state"
        return Snapshot.take(self.ranks.mesh.rank, self.pieces(), self.master, self.optimizer)

    def load(self, folder: Path) -> None:
        assert self.optimizer is not None, "a frozen role has no state"
        load_checkpoint(folder, self.pieces(), self.master, self.optimizer)
        self._refresh_working()

    def export(self, folder: Path) -> None:
        shapes = {piece.name: piece.shape for piece in self.pieces()}
        export_model(self.model, self.weights(), shapes, folder if self.ranks.mesh.rank == 0 else None)

    # --- sharing a device ---

    def offload(self) -> None:
        self._move(torch.device("cpu"))

    def reload(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        """Parameters keep their identity, so that optimizer and engine still hold the same ones."""
        if self.device.type == "cpu":
            return
        for tensor in [*self.model.module.parameters(), *self.model.module.buffers(), *self.master]:
            tensor.data = tensor.data.to(device)
        for state in self.optimizer.state.values() if self.optimizer else ():
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step":
                    state[key] = value.to(device)
        torch.cuda.empty_cache()


def torch_learner(
    model: LoadedModel, config: OptimConfig | None = None, *, total_steps: int = 1, ranks: Ranks = ALONE
) -> Learner:
    """A learner over a loaded model, with the head that the model has."""
    head = ValueHead() if isinstance(model.module, ValueModel) else LogProbHead()
    return Learner(TorchBackend(model, head, config, ranks), config, head, total_steps=total_steps)


def _accumulate(master: Tensor, working: Tensor) -> None:
    """Add a working weight's new gradient to its master's in float32, and free it."""
    assert working.grad is not None
    if master.grad is None:
        master.grad = working.grad.float()
    else:
        master.grad.add_(working.grad)
    working.grad = None
