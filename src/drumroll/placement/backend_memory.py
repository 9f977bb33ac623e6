"""The memory of one rank of a training role on Megatron-Core and on DeepSpeed: what differs from the torch backend."""

from __future__ import annotations

from typing_extensions import override

from drumroll.models.shape import ModelShape
from drumroll.placement.memory import FLOAT32, MOMENTS, Learner, Rows, Training, Work

REDUCED = 50_000_000
"""Elements of DeepSpeed's buffer of gradients on their way: `reduce_bucket_size`."""


class MegatronLearner(Learner):
    """One pipeline stage, divided by `tensor` and, for its experts, by `expert`.

    Weights and the float32 buffer of gradients are whole on every rank that holds them. The distributed optimizer divides
    masters and moments over the ranks with the same weights: `data` of them for dense weights, data × tensor / expert for
    experts, which `tensor` cuts only without `expert`. 1F1B keeps activations of as many micro-batches as there are stages from this
    one on.
    """

    def __init__(self, shape: ModelShape, how: Training) -> None:
        super().__init__(shape, how)
        mesh, stage = how.mesh, how.mesh.coordinates["pipeline"]
        self.first, self.last, self.ahead = stage == 0, stage == mesh.pipeline - 1, mesh.pipeline - stage
        self.layers = shape.layers // mesh.pipeline
        self.layer = self._divided(shape.layer - shape.routed_layer, shape.replicated // (shape.layers + 1))
        self.spreads = mesh.expert if mesh.expert > 1 else mesh.tensor
        self.experts = self.layers * shape.routed_layer // self.spreads
        self.vocabulary = self.vocabulary if self.last else 0
        self.ties = shape.tied and self.first and self.last and not how.values
        self.root = (
            self.first * shape.embedding // self.parts + self.last * shape.hidden + (0 if self.ties else self.vocabulary)
        )
        self.dense = self.layers * self.layer + self.root
        self.own = self.trained = self.dense + self.experts

    @override
    def resident(self) -> Rows:
        mesh = self.how.mesh
        rows = {"weights": self.width * self.own}
        if self.how.trained:
            divided = self.dense // mesh.data + self.experts // (mesh.data * mesh.tensor // self.spreads)
            rows["master"] = FLOAT32 * divided if self.width < FLOAT32 else 0
            rows["moments"] = MOMENTS * divided
            rows["gradients"] = FLOAT32 * self.own
        return {name: size for name, size in rows.items() if size}

    @override
    def summed(self) -> int:
        return 0  # the buffer stays

    @override
    def _waiting(self, several: bool) -> int:
        return self.width * self.vocabulary if self.ties else 0

    @override
    def _added(self, several: bool) -> int:
        """One tensor's gradient before it is added to the buffer."""
        return self.width * self.shape.matrix // (self.shape.experts or self.parts)

    @override
    def _last(self, several: bool) -> int:
        return self.first * (3 if self.ties else 1) * self.width * self.shape.embedding // self.parts

    @override
    def kept_activations(self, work: Work) -> int:
        each = self.layers * self._kept_of_a_layer(work) + work.tokens * 2 * self.shape.head_dim * FLOAT32 + work.masked
        return int(min(self.ahead, work.micro_batches)) * each + self.outer_activations(work)

    @override
    def outer_activations(self, work: Work) -> int:
        """After the last layer: the final norm and the hidden states of trained tokens."""
        if not self.last:
            return 0
        norm = work.tokens * self.shape.hidden // self.spread * (self.float + 2 * self.width)
        return norm + work.rows * self.shape.hidden * self.width

    @override
    def logits(self, work: Work) -> tuple[int, int, int]:
        return super().logits(work) if self.last else (0, 0, 0)


class DeepSpeedLearner(Learner):
    """ZeRO-2 or ZeRO-3 over all ranks of the role.

    ZeRO-2 keeps whole weights, and whole gradients in the working type until the last micro-batch of a minibatch: ranks
    may have different micro-batches, so only then do they sum. ZeRO-3 divides both. Offloaded state is in host memory.
    """

    @override
    def resident(self) -> Rows:
        state, weights = self._state(), self._weights()
        rows = {"weights": 0 if self.how.offload == "all" else weights}
        rows |= state if self.how.offload == "none" else {}
        if self.how.trained:
            rows["gradients"] = rows.get("gradients", 0) + self.width * min(REDUCED, self.trained)
        return {name: size for name, size in rows.items() if size}

    @override
    def host(self) -> Rows:
        rows = {} if self.how.offload == "none" else self._state()
        return rows | ({"weights": self._weights()} if self.how.offload == "all" else {})

    def _weights(self) -> int:
        return self.width * self.own // (self.shards if self.how.zero == 3 else 1)

    def _state(self) -> Rows:
        """Masters (also of float32 weights), moments and the float32 sum of gradients."""
        names = {"master": FLOAT32, "moments": MOMENTS, "gradients": FLOAT32}
        return {name: each * self.trained // self.shards for name, each in names.items() if self.trained}

    @override
    def gathered(self, layers: int) -> int:
        return super().gathered(layers) if self.how.zero == 3 else 0

    @override
    def summed(self) -> int:
        return self.width * self.trained if self.how.zero == 2 else 0

    @override
    def _reduced(self, count: int, several: bool) -> int:
        """One group's gradient in the working type, before its part is added to the sum."""
        return self.width * count if self.how.zero == 3 and self.trains_weights else 0
