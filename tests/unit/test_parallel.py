"""Every layout of ranks trains as one process does: gradients, parameters, log-probs and metrics of real updates.

`make test` compares each strategy once, `make test-slow` all layouts with all models and roles.
`python tests/unit/test_parallel.py` does the latter and writes the table of docs/parallelism.md anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import tempfile
import zlib
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from types import SimpleNamespace

import megatron_on_cpu
import pytest
import torch
import torch.distributed as dist
import transformers as hf
from forked import RankPool
from test_batch import exact, random_groups, relative
from torch.distributed import distributed_c10d

from drumroll.algorithms import Algorithm
from drumroll.algorithms.aggregations import Shares
from drumroll.algorithms.losses import PolicyLoss, ValueLoss
from drumroll.batch import pack
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.config.learners import AXES
from drumroll.config.optim import OptimConfig
from drumroll.config.roles import LoraConfig, ParallelConfig
from drumroll.learners import Learner, Update
from drumroll.learners.backend import LearnerSpec
from drumroll.learners.backends import find_backend
from drumroll.learners.heads import LogProbHead, ValueHead
from drumroll.learners.pieces import Piece
from drumroll.learners.ranks import Ranks
from drumroll.learners.statistics import merge
from drumroll.mesh import Mesh
from drumroll.models import tiny
from drumroll.processes.rendezvous import Rendezvous

DOCS = Path(__file__).parents[2] / "docs" / "parallelism.md"
BEGIN, END = "<!-- table: tests/unit/test_parallel.py -->\n", "<!-- end of table -->\n"

LAYOUTS = {
    "data 2": {"data": 2},
    "data 4": {"data": 4},
    "shard 2": {"shard": 2},
    "shard 4": {"shard": 4},
    "data 2 × shard 2": {"data": 2, "shard": 2},
    "tensor 2": {"tensor": 2},
    "tensor 2 × shard 2": {"tensor": 2, "shard": 2},
    "context 2": {"context": 2},
    "shard 2 × context 2": {"shard": 2, "context": 2},
}
EVERYWHERE = [
    ("shard 2", {"backend": "deepspeed", "zero": 3}),
    ("tensor 2", {"backend": "megatron", "sequence": False}),
    *((layout, {}) for layout in LAYOUTS),
]
"""One layout of each other backend, and all of ours."""
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "Llama": hf.LlamaConfig(**SIZES, vocab_size=97, tie_word_embeddings=True),  # 2 does not divide the vocabulary
    "Qwen2": hf.Qwen2Config(**SIZES, vocab_size=96, tie_word_embeddings=False),
    "Qwen3": hf.Qwen3Config(**SIZES, vocab_size=96, tie_word_embeddings=False),
    "Gemma 3": hf.Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 3},
        vocab_size=98,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
ROLES = {
    "actor": (LogProbHead(), None),
    "critic": (ValueHead(), None),
    "LoRA": (LogProbHead(), LoraConfig(rank=4, alpha=8)),
}
ONCE = [
    ("data 2", "Llama", "actor"),
    ("shard 2", "Qwen2", "LoRA"),
    ("data 2 × shard 2", "Gemma 3", "critic"),
    ("tensor 2", "Llama", "actor"),
    ("tensor 2", "Qwen3", "critic"),
]
"""Cases of `make test`."""
TEMPERATURE = 0.8
OPTIM = OptimConfig(lr=3e-4, weight_decay=0.1, grad_clip=0.05, minibatch=12, micro_tokens=30)
"""Minibatches of 12, 12 and 1 samples: in the last all shares but one are empty. The gradient is clipped in most steps."""
PPO = AlgorithmConfig(loss="ppo", kl=0.1, entropy=0.01, correction="truncate")
SKIPPING = AlgorithmConfig(loss="ppo")
"""Without a KL term and an entropy bonus traces without advantage are skipped."""


@dataclass(frozen=True)
class Errors:
    """How far ranks are from one process: relative L2 norms, the largest difference of a log-prob, of a metric relative."""

    first: float  # gradient of the first minibatch, before clipping
    later: float  # gradients of the other minibatches
    change: float  # of the parameters, over all optimizer steps
    logprobs: float
    metrics: float

    def worst(self, other: Errors) -> Errors:
        return Errors(*map(max, dataclasses.astuple(self), dataclasses.astuple(other)))

    def times(self, factor: float) -> Errors:
        return Errors(*(factor * number for number in dataclasses.astuple(self)))

    def within(self, limits: Errors) -> bool:
        return all(mine <= limit for mine, limit in zip(dataclasses.astuple(self), dataclasses.astuple(limits), strict=True))


LIMITS = {
    "float32": Errors(first=1e-5, later=1e-4, change=1e-3, logprobs=1e-5, metrics=1e-5),
    "float64": Errors(first=1e-10, later=1e-10, change=1e-9, logprobs=1e-6, metrics=1e-6),
}


def roles_of(layout):
    divides = {"shard", "context"} & LAYOUTS[layout].keys()
    return ("actor", "critic", "LoRA") if divides and "tensor" not in LAYOUTS[layout] else ("actor", "critic")


# --- what every rank does ---

RANKS: list[Ranks] = []
"""Of a rank's process: itself on its mesh."""


def meet(rank, layout, port):
    mesh = Mesh(**layout, rank=rank)
    RANKS.append(Ranks.meet(mesh, Rendezvous("127.0.0.1", port, ("127.0.0.1",) * mesh.size), device="cpu", seconds=60))


def open_learner(ranks, folder, role, dtype, recompute=False, backend="torch", **options):
    """A learner whose new parameters (adapters, a value or score head) depend on their names only, and are nowhere zero."""
    head, lora = ROLES[role]
    parallel = ParallelConfig(**{axis: getattr(ranks.mesh, axis) for axis in AXES}, **options)
    spec = LearnerSpec(folder, head, ranks, OPTIM, dtype, lora=lora, parallel=parallel, recompute_activations=recompute)
    if backend == "megatron":
        megatron_on_cpu.install()
    backend = find_backend(backend)(spec)
    if dtype == "float64":
        exact(SimpleNamespace(module=backend.scorer))
    for piece in pieces(backend):
        if "lora_" in piece.name or piece.name.startswith(("head.", "score.")):
            whole = torch.randn(piece.shape, generator=torch.Generator().manual_seed(zlib.crc32(piece.name.encode()))) * 0.1
            piece.tensor.copy_(whole[where(piece)])
    if hasattr(backend, "_refresh_working"):
        backend._refresh_working()
    return Learner(backend, OPTIM, head)


@torch.no_grad()
def pieces(backend):
    """This rank's part of every trained parameter."""
    if hasattr(backend, "pieces"):
        return list(backend.pieces())
    return [Piece(n, tuple(p.shape), (0,) * p.dim(), p.detach()) for n, p in zip(backend.names, backend.master, strict=True)]


def gradients(backend):
    """This rank's part of the gradient of every trained parameter."""
    if hasattr(backend, "gradient_pieces"):
        return copied(backend.gradient_pieces())
    found = []
    for piece, master in zip(pieces(backend), backend.master, strict=True):
        grad = master.grad.to_local() if hasattr(master.grad, "to_local") else master.grad
        found.append(dataclasses.replace(piece, tensor=grad.detach().clone()))
    return found


def where(piece):
    return tuple(slice(begin, begin + size) for begin, size in zip(piece.offsets, piece.tensor.shape, strict=True))


def copied(found):
    return [dataclasses.replace(piece, tensor=piece.tensor.detach().clone()) for piece in found]


def infer(rank, folder, role, batches):
    learner = open_learner(RANKS[-1], folder, role, "float32")
    return [learner.infer(batch, TEMPERATURE) for batch in batches]


def train(rank, folder, role, dtype, works, mistake=None, options=None):
    """Two updates with all that they compute on the way."""
    learner = open_learner(RANKS[-1], folder, role, dtype, **(options or {}))
    backend, grads = learner.backend, []
    clip = backend.clip

    def spy(limit):
        grads.append(gradients(backend))
        return clip(limit)

    backend.clip = spy
    before = copied(pieces(backend))
    logprobs = [learner.infer(work.batch, TEMPERATURE) for work in works]
    with MISTAKES[mistake](backend) if mistake else contextlib.nullcontext():
        statistics = [learner.update(work) for work in works]
    after = copied(pieces(backend))
    return {"grads": grads, "before": before, "after": after, "logprobs": logprobs, "statistics": statistics}


# --- planted errors ---


class Spoiled:
    """A gloo group whose sums go wrong: each is what `spoil` makes of the sum and of this rank's own part.

    The collective still runs, so ranks stay in step. Votes are of integers, and are left alone.
    """

    def __init__(self, gloo, spoil):
        self.gloo, self.spoil = gloo, spoil

    def __getattr__(self, name):
        return getattr(self.gloo, name)

    def allreduce(self, tensors, *options):
        if not tensors[0].is_floating_point():
            return self.gloo.allreduce(tensors, *options)
        totals = [tensor.clone() for tensor in tensors]
        return self.written(self.gloo.allreduce(totals, *options), tensors, totals, tensors)

    def _reduce_scatter_base(self, output, given, *options):
        total, own = torch.empty_like(output), given.chunk(self.gloo.size())[self.gloo.rank()]
        return self.written(self.gloo._reduce_scatter_base(total, given, *options), [output], [total], [own])

    def written(self, done, results, totals, own):
        """Totals are other tensors than results, because gloo may write them again whenever someone waits."""
        done.wait()
        for result, total, part in zip(results, totals, own, strict=True):
            result.copy_(self.spoil(total, part))
        return done


@contextlib.contextmanager
def spoiled(backend, spoil):
    with pytest.MonkeyPatch.context() as patch:
        for group in distributed_c10d._world.pg_map:
            patch.setattr(group, "_gloo", Spoiled(group.gloo, spoil))
        yield


def left_out(backend):
    return spoiled(backend, lambda total, own: own)


def halved(backend):
    return spoiled(backend, lambda total, own: total / 2)


@contextlib.contextmanager
def own_norm(backend):
    """Every rank clips by the norm of its own part."""
    plain = backend.clip

    def clip(limit):
        with left_out(backend):
            return plain(limit)

    backend.clip = clip
    yield


@contextlib.contextmanager
def wrong_share(backend):
    """The first share is trained by two ranks, the last by none."""
    plain = Mesh.share.fget
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mesh, "share", property(lambda mesh: max(0, plain(mesh) - 1)))
        yield


MISTAKES = {"left out": left_out, "halved": halved, "own norm": own_norm, "wrong share": wrong_share}
PLANTED = [
    *(("data 2", mistake) for mistake in ("left out", "halved", "wrong share")),
    *(("shard 2", mistake) for mistake in ("left out", "halved", "own norm", "wrong share")),
    *(("tensor 2", mistake) for mistake in ("left out", "halved", "own norm")),
]


# --- the comparison ---


class ReplicasDifferError(AssertionError):
    """Two ranks hold the same block with different numbers."""


def whole(ranks):
    """All parameters as one vector, from the pieces of all ranks: no gap, and replicas are equal."""
    found = {}
    for piece in itertools.chain(*ranks):
        full = found.setdefault(piece.name, torch.full(piece.shape, torch.nan, dtype=piece.tensor.dtype))
        known = full[where(piece)]
        if not (torch.isnan(known) | (known == piece.tensor)).all():
            raise ReplicasDifferError(f"{piece.name} at {piece.offsets}: by {(known - piece.tensor).abs().max()}")
        full[where(piece)] = piece.tensor
    gaps = [name for name, full in found.items() if torch.isnan(full).any()]
    assert not gaps, f"no rank holds all of {gaps}"
    return torch.cat([found[name].flatten() for name in sorted(found)])


def distance(found, truth):
    """Relative; from zero nothing but zero is near."""
    return relative(found, truth) if truth.any() else float("inf") if found.any() else 0.0


def largest_part(parts):
    """The largest part of all parameters that a rank holds."""
    held = [sum(piece.tensor.numel() for piece in part["after"]) for part in parts]
    sizes = {piece.name: math.prod(piece.shape) for part in parts for piece in part["after"]}
    return max(held) / sum(sizes.values())


def metrics_error(some, others):
    """Relative; of metrics below 0.1 the difference counts as if they were 0.1."""
    assert some.keys() == others.keys()
    return max(abs(some[name] - value) / max(abs(value), 0.1) for name, value in others.items())


def errors(parts, alone, works, mesh):
    """The errors of ranks against one process."""
    (alone,) = alone
    held, due = largest_part(parts), 1 / (mesh.shard * mesh.tensor * mesh.pipeline)
    assert held <= 1.1 * due, f"a rank holds {held:.2f} of the parameters, not {due:.2f}"  # norms are whole along `tensor`
    leaders = [parts[rank] for rank in mesh.leaders()]
    grads = [
        distance(whole([part["grads"][step] for part in parts]), whole([grad])) for step, grad in enumerate(alone["grads"])
    ]
    assert all(len(part["grads"]) == len(grads) for part in parts)
    start, end = whole([alone["before"]]), whole([alone["after"]])
    assert torch.equal(whole([part["before"] for part in parts]), start)
    logprobs = [
        (work.batch.gather([part["logprobs"][i] for part in leaders]) - alone["logprobs"][i]).abs().max().item()
        for i, work in enumerate(works)
    ]
    metrics = [
        metrics_error(merge([part["statistics"][i] for part in leaders]), merge([alone["statistics"][i]])) for i in (0, 1)
    ]
    change = distance(whole([part["after"] for part in parts]) - start, end - start)
    return Errors(grads[0], max(grads[1:]), change, max(logprobs), max(metrics))


KEPT_POOLS = 3


class Matrix:
    """Compares layouts with one process; ranks of a layout stay alive from case to case."""

    def __init__(self, folder, families=FAMILIES):
        self.folder, self.families = folder, families
        self.pools, self.models, self.known = {}, {}, {}

    def close(self):
        for pool, _ in self.pools.values():
            pool.close()

    def pool(self, layout):
        """The ranks of a layout; {} is one process. The oldest make room for new ones, but for the one process."""
        key = tuple(layout.items())
        if key not in self.pools:
            if len(self.pools) > KEPT_POOLS:
                self.pools.pop(next(filter(None, self.pools)))[0].close()
            size = Mesh(**layout).size
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.pools[key] = RankPool(size), store
            self.pools[key][0].run(meet, layout, store.port)
        return self.pools[key][0]

    def run(self, layout, *job):
        try:
            return self.pool(layout).run(*job)
        except BaseException:
            self.pools.pop(tuple(layout.items()), None)
            raise

    def config(self, family):
        return self.families[family]

    def model(self, family):
        """A directory with a random model of a family, no parameter of which is 0 or 1."""
        if family not in self.models:
            path = self.folder / family.replace(" ", "-")
            with torch.random.fork_rng():
                torch.manual_seed(1)
                module = hf.AutoModelForCausalLM.from_config(self.config(family))
                for parameter in module.parameters():
                    parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
            module.save_pretrained(path)
            tiny.tokenizer().save_pretrained(path)
            self.models[family] = str(path)
        return self.models[family]

    def works(self, family, role):
        """Two updates with different data, from what one process computes before training."""
        key = (family, role)
        if key not in self.known:
            batches = [pack(random_groups(5, 5, seed=seed)) for seed in (0, 1)]
            (columns,) = self.run({}, infer, self.model(family), role, batches)
            self.known[key] = [work(role, *each) for each in zip(batches, columns, (PPO, SKIPPING), strict=True)]
        return self.known[key]

    def alone(self, family, role, dtype):
        """What one process computes."""
        key = (family, role, dtype)
        if key not in self.known:
            self.known[key] = self.run({}, train, self.model(family), role, dtype, self.works(family, role))
        return self.known[key]

    def compare(self, layout, family, role, dtype, mistake=None, **options):
        works, alone = self.works(family, role), self.alone(family, role, dtype)
        parts = self.run(LAYOUTS[layout], train, self.model(family), role, dtype, works, mistake, options)
        return errors(parts, alone, works, Mesh(**LAYOUTS[layout]))


def work(role, batch, column, config):
    """An update of a role on a batch whose log-probs or values one process has computed."""
    noise = partial(torch.randn, len(batch.tokens), generator=torch.Generator().manual_seed(7))
    if role == "critic":
        config = AlgorithmConfig(preset="ppo")
        batch = batch.with_(behaviour=noise() - 3, values=torch.where(batch.mask, column + 0.1 * noise(), 0.0))
        done = Algorithm(config, single_update=True).advantages(batch)
        return Update(done, ValueLoss(config), Shares("token_mean"))
    near = {name: torch.where(batch.mask, column + 0.05 * noise(), 0.0) for name in ("behaviour", "old", "reference")}
    done = Algorithm(config, single_update=True).advantages(batch.with_(**near))
    return Update(done, PolicyLoss(config), Shares("sequence_mean"), TEMPERATURE)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    made = Matrix(tmp_path_factory.mktemp("models"))
    yield made
    made.close()


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("layout", "family", "role"), ONCE)
def test_each_strategy_trains_as_one_process(matrix, layout, family, role, dtype):
    found = matrix.compare(layout, family, role, dtype)
    assert found.within(LIMITS[dtype]), found


@pytest.mark.parametrize(("layout", "mistake"), PLANTED)
def test_a_planted_error_is_found(matrix, layout, mistake):
    """By a number far beyond its limit, or because replicas differ."""
    try:
        found = matrix.compare(layout, "Llama", "actor", "float32", mistake)
    except ReplicasDifferError:
        return
    assert not found.within(LIMITS["float32"].times(100)), found


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_every_model_as_one_process(matrix, layout, family):
    for dtype, limits in LIMITS.items():
        for role in roles_of(layout):
            found = matrix.compare(layout, family, role, dtype)
            assert found.within(limits), (role, dtype, found)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"reshard": False}, {"accumulate": "local"}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("layout", ["shard 2", "data 2 × shard 2", "tensor 2 × shard 2"])
def test_options_change_nothing(matrix, layout, options):
    for dtype, limits in LIMITS.items():
        found = matrix.compare(layout, "Gemma 3", "actor", dtype, **options)
        assert found.within(limits), (dtype, found)


def test_the_updates_are_as_hard_as_they_should_be(matrix):
    """Prefix trees, several micro-batches, skipped traces, clipped gradients, ranks without work."""
    works, (alone,) = matrix.works("Llama", "actor"), matrix.alone("Llama", "actor", "float32")
    minibatches = [[work.batch.select(traces) for traces in work.batch.chunks(OPTIM.minibatch)] for work in works]
    assert [mini.num_traces for mini in minibatches[0]] == [12, 12, 1]
    assert all(len(mini.tree().tokens) < len(mini.tokens) for mini in minibatches[0][:2])
    assert all(len(mini.micro_batches(OPTIM.micro_tokens)) > 2 for mini in minibatches[0][:2])
    for count in (2, 4):
        assert [] in minibatches[0][2].shares(count)
        loads = [sum(int(minibatches[0][0].lengths[t]) for t in share) for share in minibatches[0][0].shares(count)]
        assert len(set(loads)) > 1
    assert [getattr(work.loss, "skips_zero_advantage", False) for work in works] == [False, True]
    idle = works[1].batch.advantages.eq(0) & works[1].batch.mask
    assert 0 < idle.sum() < works[1].batch.mask.sum()
    norms = [norm for part in alone["statistics"] for norm, _ in part.steps]
    assert len(norms) == 6
    assert all(norm > 2 * OPTIM.grad_clip for norm in norms[:5])


# --- the table ---


def rows(matrix):
    """Of the table: layout, model, roles, and the largest errors of all roles."""
    for layout, family in itertools.product(LAYOUTS, FAMILIES):
        found = {
            dtype: reduce(Errors.worst, [matrix.compare(layout, family, role, dtype) for role in roles_of(layout)])
            for dtype in LIMITS
        }
        yield "| " + " | ".join([*heading(layout, family), *cells(found)]) + " |\n"


def heading(layout, family):
    return [layout, family, ", ".join(roles_of(layout))]


def cells(found):
    """The documented numbers: all of float32, gradients and change of float64."""
    exact = found["float64"]
    numbers = [*dataclasses.astuple(found["float32"]), max(exact.first, exact.later), exact.change]
    return [f"{number:.0e}" for number in numbers]


def table(matrix):
    head = "| layout | model | roles | first gradient | later gradients | change | log-probs | metrics | gradients, float64 | change, float64 |\n"
    limits = ["limit", "", "", *cells(LIMITS)]
    return BEGIN + head + "|---" * 10 + "|\n" + "| " + " | ".join(limits) + " |\n" + "".join(rows(matrix)) + END


def test_the_table_of_the_docs_has_every_layout_within_the_limits():
    text = DOCS.read_text("utf-8")
    lines = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].splitlines()[2:]
    limit, *found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    again = "write it anew: python tests/unit/test_parallel.py"
    assert limit == ["limit", "", "", *cells(LIMITS)], again
    assert [row[:3] for row in found] == [heading(*both) for both in itertools.product(LAYOUTS, FAMILIES)], again
    for row in found:
        assert all(float(number) <= float(bound) for number, bound in zip(row[3:], limit[3:], strict=True)), (row, again)


if __name__ == "__main__":
    text = DOCS.read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Matrix(Path(folder))) as made:
        DOCS.write_text(text[: text.index(BEGIN)] + table(made) + text[text.index(END) + len(END) :], "utf-8")
