"""How much memory a role takes on one of its devices: arithmetic on plain numbers, in bytes, before anything starts.

It counts tensors. A CUDA context, the allocator's fragments and NCCL's buffers come on top. Every term says which code
allocates it; `tests/unit/test_memory.py` compares the sums with the peak of a real update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from drumroll.mesh import Mesh
from drumroll.models.shape import ModelShape

ROWS = 1024
"""Rows of logits at a time: `models.head.ROWS`, which a test compares."""
BUCKET = 32 * 2**20
"""Bytes of a transfer bucket, unless one tensor is larger: `weights.BUCKET`, which a test compares."""
JOINED = 2**24
"""Gradients that ranks sum at once, at least one tensor: `learners.ranks.BUCKET`, which a test compares."""
WIDTH = {"float32": 4, "bfloat16": 2, "float64": 8}
FLOAT32 = 4
MOMENTS = 8
"""AdamW's two moments in float32."""

Rows = dict[str, int]
"""Bytes by the name of what they hold."""
NAMES = (
    "weights",
    "master",
    "moments",
    "gradients",
    "gathered",
    "activations",
    "logits",
    "keys and values",
    "packed weights",
    "buckets",
)
"""The names of rows, in the order of tables."""


@dataclass(frozen=True, slots=True)
class Work:
    """The largest micro-batch of a pass."""

    tokens: int
    """Tokens to compute; a prompt that samples share counts once."""
    rows: int
    """Trained tokens: rows of logits."""
    keys: int = 0
    """Keys spread over the rows of attention: a shared prompt counts once for each sample. 0: as many as tokens."""
    masked: int = 0
    """Pairs of query and key in attention rows that need a mask, because their prompt is shared."""
    several: bool = True
    """More micro-batches follow before the optimizer's step, so gradients of earlier ones are there."""
    entropy_gradient: bool = False
    micro_batches: float = math.inf
    """The most micro-batches of a minibatch: so many can be on their way through a pipeline."""


@dataclass(frozen=True, slots=True)
class Training:
    """How a learner role holds its model."""

    dtype: str = "float32"
    mesh: Mesh = field(default_factory=Mesh)
    trained: bool = True
    adapters: int = 0
    """Parameters of LoRA adapters; if there are some, the rest is frozen."""
    values: bool = False
    """A head of one number, a value or a score, in place of the language-model head."""
    recompute: bool = False
    reshard: bool = True
    accumulate: Literal["sharded", "local"] = "sharded"
    sequence: bool = False
    """Megatron: tensor-parallel ranks divide the tokens of norms and of states between layers."""
    zero: int = 3
    """DeepSpeed: divide optimizer state and gradients (2), or weights too (3)."""
    offload: Literal["none", "optimizer", "all"] = "none"


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of a role on one device: those that stay, and those of its work at the worst moment, which has a name."""

    resident: Rows
    work: Rows
    moment: str = ""
    host: Rows = field(default_factory=dict)
    """What is in host memory for this device."""
    staying: Rows = field(default_factory=dict)
    """What stays on the device when the role moves to the host."""

    @property
    def peak(self) -> int:
        """Bytes at the worst moment."""
        return sum(self.resident.values()) + sum(self.work.values())

    def rows(self, *, working: bool = True) -> Rows:
        """Both together by name, in the order of tables."""
        work = self.work if working else {}
        return {name: total for name in NAMES if (total := self.resident.get(name, 0) + work.get(name, 0))}


class Learner:
    """The memory of one rank of a training role, by the torch backend; `backend_memory.py` has the others."""

    def __init__(self, shape: ModelShape, how: Training) -> None:
        self.shape, self.how = shape, how
        self.width = WIDTH[how.dtype]
        self.float = max(FLOAT32, self.width)
        self.parts, self.shards = how.mesh.tensor, how.mesh.shard
        self.spread = how.mesh.tensor if how.sequence else 1
        self.layers = shape.layers
        head = 0 if how.values else shape.head
        whole = shape.parameters - shape.head + head
        self.own = self._divided(whole, shape.replicated)
        self.layer = self._divided(shape.layer, shape.replicated // (shape.layers + 1))
        self.root = self.own - shape.layers * self.layer
        self.vocabulary = 0 if how.values else shape.vocabulary * shape.hidden // self.parts
        full = how.trained and not how.adapters
        self.trains_weights = full
        self.trained = self.own if full else how.adapters if how.trained else 0

    def _divided(self, count: int, replicated: int) -> int:
        return (count - replicated) // self.parts + replicated

    def usage(self, work: Work | None) -> Usage:
        """What the rank holds, and the worst moment of an update, or of a pass if it is frozen."""
        resident = self.resident()
        if work is None:
            return Usage(resident, {}, "", self.host(), self.staying())
        moments = self.training(work) if self.how.trained else self.inference(work)
        name, rows = max(moments.items(), key=lambda item: sum(item[1].values()))
        return Usage(resident, rows, name, self.host(), self.staying())

    def resident(self) -> Rows:
        """Weights, master weights and moments. Sharded trained weights are the float32 master alone."""
        frozen, trained, shards = self.own if not self.trains_weights else 0, self.trained, self.shards
        rows = {"weights": frozen * self.width // shards, "master": 0, "moments": MOMENTS * trained // shards}
        if shards > 1:
            rows["master"] = self.float * trained // shards
        else:
            rows["weights"] += self.width * trained
            rows["master"] = FLOAT32 * trained if self.width < FLOAT32 else 0
        return {name: size for name, size in rows.items() if size}

    def host(self) -> Rows:
        """What is always in host memory."""
        return {}

    def staying(self) -> Rows:
        """What stays on the device when the role moves to the host."""
        return {}

    def gathered(self, layers: int) -> int:
        """FSDP's gathered weights: the root group, and some layers."""
        if self.shards == 1:
            return 0
        return self.width * (self.root + min(layers, self.layers) * self.layer)

    def inference(self, work: Work) -> dict[str, Rows]:
        """The moments of a pass without gradients, which keeps one layer's activations."""
        one = self.layer_activations(work) + 2 * self._states(work)
        logits = self.logits(work)[0]
        return {
            "forward pass": {"gathered": self.gathered(2), "activations": one},
            "logits": {"gathered": self.gathered(2), "activations": self.outer_activations(work), "logits": logits},
        }

    def training(self, work: Work) -> dict[str, Rows]:
        """The moments of an update, each with what is alive then.

        Activations shrink and gradients grow from the last layer's backward pass to the first's, so one of both is worst;
        under FSDP the second, when the last layer's gradient is being reduced.
        """
        gathered = [self.gathered(layers if self.how.reshard else self.layers) for layers in (1, 2)]
        kept, each = self.kept_activations(work), self._kept_of_a_layer(work)
        summed, waiting = self.summed(), self._waiting(work.several)
        before = summed if work.several else 0
        forward, backward, product = self.logits(work)
        head = self.width * self.vocabulary if self.trains_weights else 0  # one gradient of the head's weight
        buffered = head if self._tokens(work.rows) > ROWS else 0  # of the chunks before, in autograd's buffer
        layer = self.layer_activations(work) + self.backward_activations(work)
        last = 0 if self.how.recompute else each  # among those that are kept
        tensor, reduced = self._added(work.several), self._reduced(self.layer, work.several)
        first = max(before, summed - self.float * (self.layer + self.shape.embedding // self.parts) * self.trains_weights)
        moments = {
            "logits": (before, gathered[0], kept, forward),
            "logits, backward": (before + buffered, gathered[0], kept, backward),
            "head, backward": (before + buffered + head, gathered[0], kept, product),
            "last layer, backward": (before + waiting + tensor, gathered[1], kept - last + layer, 0),
            "second last layer, backward": (before + waiting + reduced, gathered[1], kept - last - each + layer, 0),
            "first layer, backward": (first + self._waiting(several=True) + tensor + reduced, gathered[1], layer, 0),
            "embedding, backward": (summed + self._last(work.several), self.gathered(0), self._states(work), 0),
            "sum over ranks": (summed + self._joined(), 0, 0, 0),
        }
        names = ("gradients", "gathered", "activations", "logits")
        return {moment: dict(zip(names, sizes, strict=True)) for moment, sizes in moments.items()}

    def summed(self) -> int:
        """The gradients that micro-batches add up: float32, each rank its shard; whole with `accumulate: local`."""
        return self.float * self.trained // (1 if self.how.accumulate == "local" else self.shards)

    def _waiting(self, several: bool) -> int:
        """The head's gradient during the backward passes of the layers.

        A tied one waits for the embedding's, and FSDP's for the root group's reduce-scatter; any other is in the sum.
        """
        if not self.trains_weights:
            return 0
        if self.shape.tied or self.shards > 1:
            return self.width * self.vocabulary
        return 0 if several else self.float * self.vocabulary

    def _added(self, several: bool) -> int:
        """One tensor's gradient before it is added to the sum, without shards; a float32 one of the first becomes the sum."""
        if not self.trains_weights or self.shards > 1 or not (several or self.width < FLOAT32):
            return 0
        return self.width * self.shape.matrix // self.parts

    def _reduced(self, count: int, several: bool) -> int:
        """FSDP's float32 reduce-scatter of a group of weights: its input, and its output before that is added to the sum."""
        if not self.trains_weights or self.shards == 1 or self.how.accumulate == "local":
            return 0
        return FLOAT32 * count + (FLOAT32 * count // self.shards if several else 0)

    def _last(self, several: bool) -> int:
        """What the gradient of the root group takes beside the sum, when the embedding's comes last.

        A tied head's gradient waits in autograd's buffer for the embedding's, and their sum is a third tensor. The
        first micro-batch's becomes the sum's own where it is float32.
        """
        if not self.trains_weights:
            return 0
        if self.shards > 1:
            to_come = 0 if several or self.how.accumulate == "local" else self.float * self.root // self.shards
            return self.width * self.root + self._reduced(self.root, several) - to_come
        tensors = 3 if self.shape.tied and not self.how.values else 1
        taken = 0 if several or self.width < FLOAT32 else 1
        return (tensors - taken) * self.width * self.shape.embedding // self.parts

    def _joined(self) -> int:
        """A bucket of gradients end to end, where ranks that hold the same weights sum them after the last micro-batch."""
        mesh = self.how.mesh
        if mesh.context == 1 and (mesh.data == 1 or self.shards > 1):
            return 0
        return self.float * min(self.trained, self.parts * JOINED + self.shape.largest) // (self.shards * self.parts)

    # --- activations ---

    def layer_activations(self, work: Work) -> int:
        """What autograd keeps of one layer.

        Norms keep their input in float32 and the normalised states; linear layers their input; attention the spread
        queries, keys and values (repeated for all heads), its output and a float32 sum per head, and its mask in the
        working type; a gated MLP both projections, the activation and the product. Context-parallel ranks divide the
        tokens, and in attention the heads of all tokens, but not the mask.
        """
        shape, width, tokens = self.shape, self.width, self._tokens(work.tokens)
        queries = shape.heads * shape.head_dim // self.parts
        norms = shape.norms[0] // self.spread + shape.norms[1] // self.parts
        hidden = shape.hidden // self.spread
        per_token = norms * (self.float + width) + 2 * hidden * width  # norms, and the inputs of attention and MLP
        per_token += 3 * queries * width + shape.heads // self.parts * FLOAT32  # queries, output, input of the output layer
        per_token += (4 if shape.gated else 3) * (shape.mlp // self.parts) * width
        per_token += 2 * shape.visits * hidden * width  # an expert's input, and its output before it is weighed
        keys = self._tokens(work.keys or work.tokens)
        return tokens * per_token + 2 * keys * queries * width + work.masked * width

    def outer_activations(self, work: Work) -> int:
        """Outside the layers: the final norm, rotary tables, the hidden states of trained tokens, the masks as booleans."""
        shape = self.shape
        final = shape.hidden // self.spread * (self.float + 2 * self.width) + 2 * shape.head_dim * FLOAT32
        return self._tokens(work.tokens) * final + self._tokens(work.rows) * shape.hidden * self.width + work.masked

    def _tokens(self, tokens: int) -> int:
        """Of the tokens of a micro-batch those that one rank computes."""
        return -(-tokens // self.how.mesh.context)

    def kept_activations(self, work: Work) -> int:
        """What lives between forward and backward pass: all layers' activations, or only their inputs."""
        return self.layers * self._kept_of_a_layer(work) + self.outer_activations(work)

    def _kept_of_a_layer(self, work: Work) -> int:
        return self._states(work) if self.how.recompute else self.layer_activations(work)

    def _states(self, work: Work) -> int:
        """Hidden states of all tokens."""
        return self._tokens(work.tokens) * self.shape.hidden // self.spread * self.width

    def backward_activations(self, work: Work) -> int:
        """Beside a layer's activations in its backward pass: gradients of both factors of the MLP's product, and of two states."""
        return self._tokens(work.tokens) * self.width * (2 * self.shape.mlp // self.parts + 2 * self.shape.hidden)

    def logits(self, work: Work) -> tuple[int, int, int]:
        """The chunk of logits at its worst in the forward pass, in the backward pass, and at the product with the head.

        In both (`models/head.py`) the log-softmax in float32, and the logits or their gradient. Of tensor-parallel ranks, and
        with an entropy that has gradients, forward also the exponential of the log-softmax and their product, backward the
        gradient of the log-softmax; an entropy with gradients also keeps the exponential, and its gradient.
        """
        if self.how.values:
            return 0, 0, 0
        cells = min(self._tokens(work.rows), ROWS) * self.shape.vocabulary // self.parts
        if self.parts == 1 and not work.entropy_gradient:
            return cells * 2 * self.float, cells * 2 * self.float, cells * self.float
        backward = 3 + 2 * work.entropy_gradient
        return cells * (self.width + 3 * self.float), cells * backward * self.float, cells * self.float


def engine(
    shape: ModelShape,
    dtype: str,
    *,
    slots: int,
    context: int,
    cache_gb: float | None = None,
    packed: bool = False,
    fixed: bool = False,
) -> Usage:
    """The memory of a native engine: weights stay; keys and values, and packed copies on a CPU, go when it sleeps.

    Pages as `engines.native` counts them: 128 tokens each, two more for each slot than its context needs; with a
    `fixed` shape one for each slot.
    """
    width, page = WIDTH[dtype], context if fixed else min(context, 128)
    held = slots * (-(-context // page) + 2 * (not fixed)) * page * key_value_bytes(shape, dtype)
    work = {"keys and values": held if cache_gb is None else min(held, int(cache_gb * 2**30))}
    if packed:
        work["packed weights"] = width * (shape.parameters - shape.replicated)
    return Usage({"weights": width * shape.parameters}, work)


def vllm(shape: ModelShape, dtype: str, *, parts: int, context: int, memory: int | None, utilization: float) -> Usage:
    """The memory of a vLLM engine on each of its devices: its share of the device, which weights and then pages fill.

    It needs at least one sequence of full length. Without the device's memory, nothing more is counted.
    """
    weights, least = WIDTH[dtype] * shape.parameters // parts, context * key_value_bytes(shape, dtype) // parts
    held = max(least, int(utilization * memory) - weights) if memory else least
    return Usage({}, {"weights": weights, "keys and values": held})


def classifier(shape: ModelShape, dtype: str, tokens: int) -> Usage:
    """The memory of a reward model that scores so many tokens in one pass."""
    frozen = Learner(shape, Training(dtype, trained=False, values=True))
    return Usage(frozen.resident(), {"activations": frozen.layer_activations(Work(tokens, 0))})


def key_value_bytes(shape: ModelShape, dtype: str) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * WIDTH[dtype]


def buckets(shape: ModelShape, dtype: str) -> int:
    """Two transfer buckets; a tensor larger than a bucket is a bucket of its own."""
    return 2 * max(BUCKET, shape.largest * WIDTH[dtype])


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Parameters of LoRA adapters on all linear layers: rank × (inputs + outputs) of each."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = [(shape.hidden, queries), (shape.hidden, keys), (shape.hidden, keys), (queries, shape.hidden)]
    sizes += [(shape.hidden, shape.mlp)] * (3 if shape.gated else 2)
    return rank * shape.layers * sum(one + other for one, other in sizes)


def predicted_peak(shape: ModelShape, how: Training, work: Work) -> int:
    """The predicted peak of live tensor bytes of one rank in an update."""
    return Learner(shape, how).usage(work).peak
