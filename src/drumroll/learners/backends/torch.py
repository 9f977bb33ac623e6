"""The plain PyTorch backend: a whole replica of the model on each rank, or a part of one (`division.py`).

It does only needed work: packed tokens without padding, a prompt that samples share once, logits only where a token is
trained and in chunks. Dropout stays off in updates too: the log-probs trained on must be those of the policy that sampled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from drumroll.batch import Batch, Path, Tree
from drumroll.config.optim import OptimConfig
from drumroll.config.roles import ParallelConfig
from drumroll.errors import Interrupted
from drumroll.learners.backend import BACKENDS, Count, LearnerSpec, LossFunction, Numbers
from drumroll.learners.backends.division import Division, drop_accumulated, open_divided
from drumroll.learners.checkpoint import MASTER, MOMENTS, Snapshot, State, adamw_state, set_adamw_state
from drumroll.learners.checkpoint import load as load_checkpoint
from drumroll.learners.heads import Head, LogProbHead, Settings, ValueHead
from drumroll.learners.learner import Learner
from drumroll.learners.pieces import Piece, in_files, shapes_in_files
from drumroll.learners.ranks import ALONE, Ranks
from drumroll.learners.statistics import Statistics
from drumroll.models.blocks import local_tensor
from drumroll.models.context_parallel import ContextLayout
from drumroll.models.distillation import Target
from drumroll.models.experts import Routed, Routers
from drumroll.models.export import export_model
from drumroll.models.file_names import as_in_files
from drumroll.models.loading import LoadedModel, load
from drumroll.models.lora import add_adapters, without_adapters
from drumroll.models.prefix_tree import PrefixTree
from drumroll.models.value import ValueModel
from drumroll.processes import accelerator


@BACKENDS.register("torch")
def open_backend(spec: LearnerSpec) -> TorchBackend:
    """Load the model of a role, with its adapters, value head or score head."""
    if spec.ranks.divided:
        model, scorer, division = open_divided(spec)
        return TorchBackend(model, spec.head, spec.optim, spec.ranks, Divided(scorer, division, spec.parallel))
    model = load(
        spec.name, dtype=spec.dtype, device=spec.device, seed=spec.seed, recompute_activations=spec.recompute_activations
    )
    if spec.lora is not None:
        add_adapters(model, spec.lora)
    return TorchBackend(spec.head.attach(model), spec.head, spec.optim, spec.ranks)


@dataclass(frozen=True)
class Divided:
    """A model that ranks divide: body and head as one module, how its parameters lie in the whole ones, and the choices."""

    scorer: nn.Module
    division: Division
    parallel: ParallelConfig


class TorchBackend:
    """Implements `Backend`. Working weights may be bfloat16; gradients add up in float32, and the optimizer works in it."""

    count = Count()

    def __init__(
        self,
        model: LoadedModel,
        head: Head,
        config: OptimConfig | None = None,
        ranks: Ranks = ALONE,
        divided: Divided | None = None,
    ) -> None:
        self._model = model
        self.files = model.files or {}
        self.ranks = ranks
        self.divided = divided
        self.stop = threading.Event()
        self.device = next(model.module.parameters()).device
        self.scorer = head.scorer(model) if divided is None else divided.scorer
        self._routers = Routers(self.scorer)
        model.module.eval()
        if config is None:
            model.module.requires_grad_(False)
        chosen = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
        self.names, self.parameters = [n for n, _ in chosen], [p for _, p in chosen]
        self.master = [_master(p) for p in self.parameters]
        for master, parameter in self._rounded():
            parameter.register_post_accumulate_grad_hook(partial(_accumulate, master))
        self.optimizer: torch.optim.Optimizer | None = None
        if config is not None:
            groups = self._groups(config.weight_decay)
            self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)

    @property
    def model(self) -> LoadedModel | None:
        return self._model if self.divided is None else None

    @property
    def working(self) -> Sequence[Tensor]:
        return self.parameters if self.divided is None else ()

    def _rounded(self) -> list[tuple[Tensor, Tensor]]:
        """Master weights and the parameters that are copies of them in another type."""
        pairs = zip(self.master, self.parameters, strict=True)
        return [(m, p) for m, p in pairs if m is not p and not isinstance(p, DTensor)]

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
                with self.ranks.agreed(self.drop_gradients):
                    self._check_stop()
                    inputs = self._inputs(micro, settings)
                numbers = None if inputs is None else self._forward(inputs)
                found.append(numbers if numbers is not None and micro.mask.any() else (torch.zeros(0),))
        self._release_gathered()
        return found

    @property
    def _together(self) -> bool:
        """Whether ranks compute every micro-batch together."""
        return self.ranks.mesh.shard > 1

    def _inputs(self, micro: Batch, settings: Settings) -> tuple[Any, ...] | None:
        """What the model is called with for a micro-batch; None where nothing is to be computed.

        Ranks along `shard` gather weights together, so one without trained tokens computes a token of no weight.
        """
        if not micro.mask.any():
            if not self._together:
                return None
            before = chosen = one = torch.zeros(1, dtype=torch.int64)
            tree = Tree(one, one, [Path(one)])
        else:
            tree, chosen = micro.tree(), micro.tokens[micro.mask]
            before = settings.nodes(micro, tree)
        if self.ranks.mesh.context == 1:
            tokens, layout = tree.tokens, PrefixTree(tree.paths, self.device)
        else:
            layout = ContextLayout(len(tree.tokens), tree.paths, before, self.ranks.along["context"], self.device)
            tokens, before, chosen = layout.own(tree.tokens, chosen)
        tokens, before, chosen = (accelerator.send(x, self.device) for x in (tokens, before, chosen))
        asked = settings.asked(micro, self.device)
        if isinstance(asked, Target) and isinstance(layout, ContextLayout):
            asked = asked.of(layout.rows)
        more = () if asked is None else (asked,)
        return tokens, layout, before, chosen, settings.temperature, settings.entropy_gradient, *more

    def _forward(self, inputs: tuple[Any, ...]) -> Numbers:
        """The head's numbers at the trained tokens of a micro-batch."""
        layout = inputs[1]
        with self.ranks.computing():
            numbers = self.scorer(*inputs)
            return layout.joined(numbers) if isinstance(layout, ContextLayout) else numbers

    def without_adapters(self) -> AbstractContextManager[None]:
        return without_adapters(self._model.module)

    def train(self, micro_batches: Sequence[Batch], settings: Settings, loss: LossFunction) -> Statistics:
        """Ranks vote before each micro-batch, after each loss and after each backward pass, so all go on or none does."""
        statistics, agreed = Statistics(), partial(self.ranks.agreed, self.drop_gradients)
        self._recomputing(True)
        try:
            for number, micro in enumerate(micro_batches, start=1):
                with agreed():
                    self._check_stop()
                    inputs = self._inputs(micro, settings)
                    self._sum_gradients(number == len(micro_batches))
                with agreed():
                    total = None if inputs is None else self._add_loss(inputs, micro, loss, statistics)
                with agreed(), self.ranks.computing():
                    if total is not None:
                        total.backward()
        finally:
            self._recomputing(False)
        with agreed():
            self._check_stop()
            self._collect_gradients()
        gradients = [master.grad for master in self.master if master.grad is not None]
        self.ranks.add(gradients, "context")
        if self.ranks.mesh.shard == 1:
            self.ranks.add(gradients)
        if self.divided is not None:
            pairs = zip(self.names, self.master, strict=True)
            partial_ = [m.grad for n, m in pairs if m.grad is not None and self.divided.division.is_partial(n)]
            self.ranks.add(partial_, "tensor")
        return statistics

    def _add_loss(self, inputs: tuple[Any, ...], micro: Batch, loss: LossFunction, statistics: Statistics) -> Tensor:
        with self._routers.noting():
            numbers = self._forward(inputs)
        routed = self._routed(inputs)
        if not micro.mask.any():
            return torch.stack([number.sum() for number in numbers]).sum() * 0.0
        total, diagnostics = loss(numbers, micro)
        statistics.add(total.detach(), int(micro.mask.sum()), diagnostics, routed)
        return total

    def _routed(self, inputs: tuple[Any, ...]) -> Routed | None:
        """What the routers chose for the trained tokens; ranks along `context` tell each other theirs."""
        routed, layout = self._routers.take(inputs[2]), inputs[1]
        if routed is None or not isinstance(layout, ContextLayout):
            return routed
        with self.ranks.computing():
            (entropy,) = layout.joined([routed.entropy])
            return Routed(entropy, {layer: layout.total(counts) for layer, counts in routed.visits.items()})

    def _sum_gradients(self, last: bool) -> None:
        """Whether the coming backward pass sums gradients over ranks, where ranks divide the rows of parameters."""
        if self.divided is not None and isinstance(self.scorer, FSDPModule):
            self.scorer.set_requires_gradient_sync(last or self.divided.parallel.accumulate == "sharded")

    def _collect_gradients(self) -> None:
        """Every master weight gets its gradient: zeros where no token reached it."""
        for master, parameter in zip(self.master, self.parameters, strict=True):
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                master.grad = local_tensor(parameter.grad)
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    def _release_gathered(self) -> None:
        """Drop whole parameters that FSDP keeps after a forward pass: without a backward pass they take memory, and grow stale."""
        for part in self.scorer.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def _recomputing(self, on: bool) -> None:
        """Layers that recompute activations do so in training mode only; all others, dropout among them, never leave eval."""
        for layer in self._model.module.modules():
            if getattr(layer, "gradient_checkpointing", False):
                layer.training = on

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise Interrupted("the update was interrupted")

    # --- the optimizer ---

    def clip(self, limit: float) -> float:
        if self.divided is None:
            return float(torch.nn.utils.clip_grad_norm_(self.master, limit))
        division, squares = self.divided.division, torch.zeros(1, dtype=torch.float64)
        with self.ranks.computing():
            for name, master in zip(self.names, self.master, strict=True):
                assert master.grad is not None
                squares += float(master.grad.norm()) ** 2 / division.copies(name)
            norm = self.ranks.total(squares.to(self.device)).sqrt().item()
        for master in self.master:
            assert master.grad is not None
            master.grad.mul_(min(1.0, limit / (norm + 1e-6)))
        return norm

    def step(self, rate: float) -> None:
        assert self.optimizer is not None, "a frozen role takes no step"
        with self.ranks.failing_together():
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.drop_gradients()
            self._refresh_working()

    def drop_gradients(self) -> None:
        for tensor in (*self.master, *self.parameters):
            tensor.grad = None
        drop_accumulated(self.scorer)

    def _refresh_working(self) -> None:
        with torch.no_grad():
            for master, parameter in self._rounded():
                parameter.copy_(master)

    # --- weights and state ---

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The working weights themselves, not copies, where this rank has them whole."""
        return as_in_files(self._whole(), self.files)

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if self.divided is None:
                yield name, parameter.detach()
                continue
            division = self.divided.division
            with self.ranks.failing_together(), torch.no_grad():
                whole = division.whole(name, local_tensor(parameter).to(division.dtype))
            yield name, whole

    def pieces(self) -> list[Piece]:
        """The master weights as blocks of the whole tensors."""
        return self._pieces(self.master)

    def gradient_pieces(self) -> list[Piece]:
        """The gradient in the same way."""
        return self._pieces([master.grad for master in self.master if master.grad is not None])

    def _pieces(self, tensors: Sequence[Tensor]) -> list[Piece]:
        """Tensors like the master weights, in their order, as blocks of the tensors that files hold."""
        named = zip(self.names, tensors, strict=True)
        return [part for name, tensor in named for part in in_files(self._piece(name, tensor.detach()), self.files)]

    def _piece(self, name: str, tensor: Tensor) -> Piece:
        if self.divided is not None:
            return self.divided.division.piece(name, tensor)
        return Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor, self.ranks.mesh.rank == 0)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors in files, also those of which this rank holds nothing."""
        whole = {name: self._piece(name, master.detach()).shape for name, master in zip(self.names, self.master, strict=True)}
        return shapes_in_files(whole, self.files)

    def snapshot(self) -> Snapshot:
        assert self.optimizer is not None, "a frozen role has no state"
        moments, step = adamw_state(self.optimizer, self.master)
        return Snapshot.take(self.ranks.mesh.rank, self._state(moments), step, self._shapes())

    def load(self, folder: FilePath) -> None:
        assert self.optimizer is not None, "a frozen role has no state"
        moments = {key: [torch.zeros_like(master) for master in self.master] for key in MOMENTS}
        step = load_checkpoint(folder, self._state(moments), self._shapes())
        set_adamw_state(self.optimizer, self.master, moments, step)
        self._release_gathered()
        self._refresh_working()

    def _state(self, moments: Mapping[str, Sequence[Tensor]]) -> State:
        """Master weights and moments as pieces."""
        return {MASTER: self.pieces(), **{key: self._pieces(of) for key, of in moments.items()}}

    def export(self, folder: FilePath) -> None:
        shapes, target = self._shapes(), folder if self.ranks.mesh.rank == 0 else None
        if self.divided is None:
            export_model(self._model, self.weights(), shapes, target)
            return
        division = self.divided.division
        with self.ranks.failing_together(), torch.no_grad():
            export_model(self._model, self.weights(), shapes, target, whole=division.whole, dtype=division.dtype)

    # --- sharing a device ---

    def offload(self) -> None:
        self._move(torch.device("cpu"))
        accelerator.empty_cache()

    def reload(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        """Parameters keep their identity, so that optimizer and engine still hold the same ones."""
        if self.device.type == "cpu":
            return
        if self.divided is None:
            for tensor in [*self._model.module.parameters(), *self._model.module.buffers(), *self.master]:
                tensor.data = tensor.data.to(device)
        else:
            self.scorer.to(device)
            for master, parameter in zip(self.master, self.parameters, strict=True):
                master.data = local_tensor(parameter) if isinstance(parameter, DTensor) else master.data.to(device)
        for state in self.optimizer.state.values() if self.optimizer else ():
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step":
                    state[key] = value.to(device)


def torch_learner(
    model: LoadedModel, config: OptimConfig | None = None, *, total_steps: int = 1, ranks: Ranks = ALONE
) -> Learner:
    """A learner over a loaded model, with the head that the model has."""
    head = ValueHead() if isinstance(model.module, ValueModel) else LogProbHead()
    return Learner(TorchBackend(model, head, config, ranks), config, head, total_steps=total_steps)


def _master(parameter: Tensor) -> Tensor:
    """What the optimizer steps: the parameter's own memory on this rank, or a float32 copy of it."""
    if isinstance(parameter, DTensor):
        return local_tensor(parameter)
    return parameter if parameter.dtype in (torch.float32, torch.float64) else parameter.detach().float()


def _accumulate(master: Tensor, working: Tensor) -> None:
    """Add a working weight's new gradient to its master's in float32, and free it."""
    assert working.grad is not None
    if master.grad is None:
        master.grad = working.grad.float()
    else:
        master.grad.add_(working.grad)
    working.grad = None
