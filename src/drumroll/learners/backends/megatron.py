"""The Megatron-Core backend: tensor, sequence, pipeline and expert parallelism, and an optimizer divided over `data`.

The schedule of the micro-batches is Megatron's (1F1B), so ranks vote before it and after it, not within it: an update that
is interrupted ends after its minibatch's last micro-batch. A loss that fails computes nothing more, and the vote tells.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drumroll.batch import Batch, Path
from drumroll.errors import ConfigError, Interrupted, MissingExtra
from drumroll.learners.backend import BACKENDS, Count, LearnerSpec, LossFunction, Numbers
from drumroll.learners.checkpoint import Snapshot
from drumroll.learners.checkpoint import load as load_checkpoint
from drumroll.learners.heads import ScoreHead, Settings, ValueHead
from drumroll.learners.megatron.names import Names, check_config, check_mesh
from drumroll.learners.pieces import Piece, cut
from drumroll.learners.statistics import Statistics
from drumroll.models.blocks import BlockSource
from drumroll.models.distillation import Target, TeacherPass
from drumroll.models.export import export_model
from drumroll.models.loading import DTYPES, LoadedModel, load_empty
from drumroll.models.prefix_tree import PrefixTree
from drumroll.models.score import SCORE, first_score
from drumroll.models.value import HEAD
from drumroll.processes import accelerator

HEADS = {"value": ValueHead, "score": ScoreHead}
"""Heads of one number, by what `Names` calls them."""


@BACKENDS.register("megatron")
def open_backend(spec: LearnerSpec) -> MegatronBackend:
    """Load this rank's part of a role's model."""
    _quiet()
    if spec.lora is not None:
        raise ConfigError("roles.actor.lora: backend: megatron trains no adapters; use backend: torch.")
    try:
        from drumroll.learners.megatron import groups
    except ImportError as error:
        if (error.name or "").split(".")[0] != "megatron":
            raise
        raise MissingExtra("backend: megatron", "megatron") from error
    device = accelerator.pick(spec.device)
    accelerator.select(device)
    try:
        here = torch.device(torch.cuda.current_device()).type
    except (RuntimeError, AssertionError) as error:
        raise ConfigError("backend: megatron needs CUDA, which torch does not find here; use backend: torch.") from error
    if here != device.type:
        raise ConfigError(f"devices: backend: megatron computes on {here}, not on {device.type}; use backend: torch.")
    source_model, source = load_empty(spec.name, dtype=spec.dtype, seed=spec.seed)
    config = source_model.module.config
    check_config(config)
    check_mesh(config, spec.ranks.mesh, sequence=spec.parallel.sequence)
    kind = next((kind for kind, head in HEADS.items() if isinstance(spec.head, head)), "vocabulary")
    names = Names(config, kind=kind, tensor=spec.ranks.mesh.tensor)
    names.check_files(source.names(), spec.name)
    groups.join(spec.ranks, spec.device)
    source_model = spec.head.attach(source_model) if kind == "score" else source_model
    return MegatronBackend(spec, source_model, source, names)


def _quiet() -> None:
    """Advice of libraries would tear the live terminal."""
    for module in (r"megatron\.", r"torch\.distributed\.c10d_logger"):
        warnings.filterwarnings("ignore", module=module)


@dataclass(frozen=True)
class Inputs:
    """The tokens of a micro-batch: their tree, the nodes before the trained ones, and those."""

    tokens: Tensor  # [1, nodes]
    layout: PrefixTree
    before: Tensor
    chosen: Tensor
    trained: int  # how many of them count
    asked: TeacherPass | Target | None = None


class MegatronBackend:
    """Implements `Backend`. Gradients add up in float32, in a buffer that ranks along `data` sum and divide."""

    count = Count(least=1)
    model: LoadedModel | None = None
    working: Sequence[Tensor] = ()

    def __init__(self, spec: LearnerSpec, source_model: LoadedModel, source: BlockSource, names: Names) -> None:
        from drumroll.learners.megatron import groups, model
        from drumroll.learners.megatron.optimizer import Optimizer
        from drumroll.learners.megatron.routers import RouterNotes

        self.ranks, self.names, self.source_model = spec.ranks, names, source_model
        self.stop = threading.Event()
        self.dtype = DTYPES[spec.dtype]
        self.multiple = spec.ranks.mesh.tensor if model.sequence_parallel(spec) else 1
        config = source_model.module.config
        rotary = source_model.module.base_model.rotary_emb
        self.stage: Any = model.build(spec, config, names, rotary.inv_freq)
        self.device = next(self.stage.parameters()).device
        self._routers = RouterNotes(self.stage, config.num_hidden_layers, names.experts, spec.ranks)
        place = groups.place(config.num_hidden_layers, names.experts)
        self.blocks = {name: names.blocks(name, place) for name, _ in self.stage.named_parameters()}
        self._fill(source)
        self.optimizer: Optimizer | None = None
        if spec.optim is None:
            self.stage.requires_grad_(False)
        else:
            blocks = {name: (own, self._first(name)) for name, own in self.blocks.items()}
            self.optimizer = Optimizer(self.stage, blocks, spec.optim, low=spec.dtype == "bfloat16")
        self._offloaded: list[tuple[Any, Any]] = []

    @torch.no_grad()
    def _fill(self, source: BlockSource) -> None:
        """Read this rank's block of every tensor; a value head starts from a score head or at 0, a new score head by the seed."""
        for piece in self._working():
            name = SCORE if piece.name == HEAD else self.names.file_name(piece.name)
            if name in source:
                piece.tensor.copy_(source.block(name, piece.shape, piece.offsets, tuple(piece.tensor.shape)))
            elif piece.name == SCORE:
                piece.tensor.copy_(first_score(self.source_model.module, piece.shape))

    def _first(self, parameter: str) -> bool:
        """Whether no rank before this one along `tensor` and `pipeline` holds the same elements of a parameter."""
        copy = parameter == "output_layer.weight" and self.names.tied  # of the first stage's embedding
        return not copy and (self.names.rule(parameter).divides != "nothing" or self.ranks.mesh.coordinates["tensor"] == 0)

    def _working(self) -> Iterator[Piece]:
        """The working weights as pieces, of which one rank is the first holder."""
        from drumroll.learners.megatron import groups

        for name, parameter in self.stage.named_parameters():
            first = self._first(name) and groups.is_first_replica(expert="local_experts" in name)
            yield from cut(self.blocks[name], 0, parameter.detach().view(-1), first=first)

    # --- passes ---

    def infer(self, micro_batches: Sequence[Batch], settings: Settings) -> list[Numbers]:
        def numbers(_: int, given: Inputs, states: Tensor) -> Numbers:
            return self._score(states, given, settings)

        inputs = self._begin(micro_batches, settings)
        width = settings.teaching.width if isinstance(settings.teaching, TeacherPass) else 0
        with self.ranks.failing_together(), torch.no_grad():
            found = self._schedule(inputs, numbers, train=False)
            return self._from_last_stage(micro_batches, found, width)

    def train(self, micro_batches: Sequence[Batch], settings: Settings, loss: LossFunction) -> Statistics:
        assert self.optimizer is not None, "a frozen role is not trained"
        statistics, failures = Statistics(), list[Exception]()

        def weigh(number: int, given: Inputs, states: Tensor) -> Tensor:
            numbers, micro = self._score(states, given, settings), micro_batches[number]
            nothing = torch.stack([n.sum() for n in numbers]).sum() * 0.0
            if failures or not micro.mask.any():
                return nothing
            try:
                total, diagnostics = loss(numbers, micro)
            except Exception as error:
                failures.append(error)
                return nothing
            statistics.add(total.detach(), int(micro.mask.sum()), diagnostics)
            return total

        inputs = self._begin(micro_batches, settings)
        with self.ranks.failing_together():
            self._schedule(inputs, weigh, train=True)
        with self.ranks.agreed(self.drop_gradients):
            if failures:
                raise failures[0]
            self._check_stop()
            statistics.settle()
        statistics = self._told_by_last_stage(statistics)
        self._routers.add_to(statistics)
        return statistics

    def _begin(self, micro_batches: Sequence[Batch], settings: Settings) -> list[Inputs]:
        """Prepare all micro-batches, and vote."""
        with self.ranks.agreed(self.drop_gradients):
            self._check_stop()
            return [self._inputs(micro, settings) for micro in micro_batches]

    def _inputs(self, micro: Batch, settings: Settings) -> Inputs:
        """Without a trained token one token of no weight is computed: ranks exchange tokens for their experts."""
        one = torch.zeros(1, dtype=torch.int64)
        tokens, paths, before, chosen = one, [Path(one)], one, one
        if micro.mask.any():
            tree = micro.tree()
            tokens, paths, chosen = tree.tokens, tree.paths, micro.tokens[micro.mask]
            before = settings.nodes(micro, tree)
        if more := -len(tokens) % self.multiple:  # a sequence that nobody reads
            paths = [*paths, Path(torch.arange(len(tokens), len(tokens) + more))]
            tokens = torch.cat([tokens, tokens.new_zeros(more)])
        sent = (accelerator.send(x, self.device) for x in (tokens[None], before, chosen))
        tokens, before, chosen = sent
        asked = settings.asked(micro, self.device)
        return Inputs(tokens, PrefixTree(paths, self.device), before, chosen, int(micro.mask.sum()), asked)

    def _score(self, states: Tensor, given: Inputs, settings: Settings) -> Numbers:
        return self.stage.score(states, given.before, given.chosen, settings, given.asked)

    def _schedule(self, inputs: Sequence[Inputs], last: Any, *, train: bool) -> list[Any]:
        """Run micro-batches through the pipeline; on its last stage `last` gets each one's number, inputs and states."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def step(iterator: Iterator[tuple[int, Inputs]], model: Any) -> tuple[Tensor, Any]:
            number, given = next(iterator)
            with self._routers.noting(given.before[: given.trained]) if train else nullcontext():
                states = model(
                    given.tokens, given.layout.positions(), None, extra_block_kwargs={"attention_bias": given.layout}
                )
            compute = partial(last, number, given)
            if not train:
                return states, lambda found, **_: compute(found)
            return states, lambda found: (compute(found), torch.ones((), dtype=torch.int), None)

        self.stage.train(train)  # dropout is 0; layers that recompute activations do so in training mode only
        run: Any = get_forward_backward_func()
        return run(
            forward_step_func=step,
            data_iterator=iter(enumerate(inputs)),
            model=self.stage if self.optimizer is None else self.optimizer.ddp,
            num_microbatches=len(inputs),
            seq_length=1,  # of no meaning: stages tell each other the shapes
            micro_batch_size=1,
            forward_only=not train,
            collect_non_loss_data=not train,
        )

    def _from_last_stage(self, micro_batches: Sequence[Batch], found: list[Numbers], width: int) -> list[Numbers]:
        """The numbers of all micro-batches on every stage; of a teacher's pass, rows of a width."""
        sizes = [max(1, int(micro.mask.sum())) for micro in micro_batches]
        columns = width or (2 if self.names.kind == "vocabulary" else 1)
        if self.ranks.mesh.pipeline > 1:
            every = torch.zeros(columns, sum(sizes), device=self.device)
            if found:
                parts = [torch.cat(column) for column in zip(*found, strict=True)]
                every = parts[0].T.float().contiguous() if width else torch.stack(parts)
            dist.broadcast(every, self._last_stage(), group=self.ranks.along["pipeline"])
            found = [(part.T,) if width else tuple(part) for part in every.split(sizes, dim=1)]
        return [n if micro.mask.any() else (torch.zeros(0),) for n, micro in zip(found, micro_batches, strict=True)]

    def _told_by_last_stage(self, statistics: Statistics) -> Statistics:
        if self.ranks.mesh.pipeline == 1:
            return statistics
        told: list[Any] = [statistics]
        with self.ranks.failing_together():
            dist.broadcast_object_list(told, self._last_stage(), group=self.ranks.along["pipeline"])
        return told[0]

    def _last_stage(self) -> int:
        """The rank of the last stage with this one's other coordinates."""
        mesh = self.ranks.mesh
        return next(group[-1] for group in mesh.along("pipeline") if mesh.rank in group)

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise Interrupted("the update was interrupted")

    def without_adapters(self) -> AbstractContextManager[None]:
        return nullcontext()  # it trains none: only frozen weights are asked for

    # --- the optimizer ---

    def clip(self, limit: float) -> float:
        assert self.optimizer is not None, "a frozen role has no gradient"
        with self.ranks.failing_together():
            squares = self.optimizer.squares(self.device)
            norm = (self.ranks.total(squares) if self.ranks.met else squares).sqrt().item()
        self.optimizer.scale(min(1.0, limit / (norm + 1e-6)))
        return norm

    def step(self, rate: float) -> None:
        assert self.optimizer is not None, "a frozen role takes no step"
        with self.ranks.failing_together():
            self.optimizer.step(rate)
            self.drop_gradients()

    def drop_gradients(self) -> None:
        self._routers.drop()
        if self.optimizer is not None:
            self.optimizer.drop_gradients()

    # --- weights and state ---

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each first holder gives its pieces, all others zeros; bytes are summed, which is exact."""
        own: dict[str, list[Piece]] = {}
        for piece in self._working():
            if piece.first:
                own.setdefault(piece.name, []).append(piece)
        for name, shape in self.names.shapes.items():
            with self.ranks.failing_together(), torch.no_grad():
                whole = torch.zeros(shape, dtype=self.dtype, device=self.device)
                for piece in own.get(name, ()):
                    ends = (begin + size for begin, size in zip(piece.offsets, piece.tensor.shape, strict=True))
                    whole[tuple(map(slice, piece.offsets, ends))] = piece.tensor
                if self.ranks.met:
                    self.ranks.total(whole.view(-1).view(torch.uint8))
            yield name, whole

    def pieces(self) -> list[Piece]:
        """The master weights as blocks of the whole tensors."""
        return list(self._working()) if self.optimizer is None else self.optimizer.masters()

    def gradient_pieces(self) -> list[Piece]:
        """The gradient as blocks of the whole tensors."""
        return [] if self.optimizer is None else self.optimizer.gradients()

    def snapshot(self) -> Snapshot:
        assert self.optimizer is not None, "a frozen role has no state"
        state, step = self.optimizer.state()
        return Snapshot.take(self.ranks.mesh.rank, state, step, self.names.shapes)

    def load(self, folder: FilePath) -> None:
        assert self.optimizer is not None, "a frozen role has no state"
        state, moments = self.optimizer.empty_state()
        with self.ranks.agreed(self.drop_gradients):
            step = load_checkpoint(folder, state, self.names.shapes)
        self.optimizer.set_state(moments, step)
        self._refresh_working()

    def _refresh_working(self) -> None:
        if self.optimizer is not None:
            with self.ranks.failing_together():
                self.optimizer.refresh_working()

    def export(self, folder: FilePath) -> None:
        target = folder if self.ranks.mesh.rank == 0 else None
        with self.ranks.failing_together():
            export_model(self.source_model, self.weights(), self.names.shapes, target, dtype=self.dtype)

    # --- sharing a device ---

    def offload(self) -> None:
        if self.device.type != "cpu" and not self._offloaded:
            self._offload()
            accelerator.empty_cache()

    def _offload(self) -> None:
        for storage in self._storages():
            kept = torch.UntypedStorage(storage.nbytes())
            kept.copy_(storage)
            storage.resize_(0)
            self._offloaded.append((storage, kept))

    def reload(self) -> None:
        for storage, kept in self._offloaded:
            storage.resize_(kept.nbytes())
            storage.copy_(kept)
        self._offloaded = []

    def _storages(self) -> list[Any]:
        """The memory of weights, gradients and moments; views of it stay valid when it moves."""
        tensors: list[Tensor] = list(self.stage.parameters())
        for run in self.optimizer.runs if self.optimizer else ():
            state = run.optimizer.state.get(run.master, {})
            tensors += [run.master, run.gradient, *(state[key] for key in state if key != "step")]
        found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        return list(found.values())
