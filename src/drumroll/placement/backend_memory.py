"""The memory of one rank of a training role on Megatron-Core and on DeepSpeed: what differs from the torch backend."""

from __future__ import annotations

from typing_extensions import override

from drumroll.models.shape import ModelShape
from drumroll.placement.memory import FLOAT32, MOMENTS, Learner, Rows, Training, Work

REDUCED = 2**24
"""Elements of DeepSpeed's buffer of gradients on their way: `learners.ranks.BUCKET`, which a test compares."""


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

    Both divide masters, moments and the float32 sum of gradients, to which a bucket is added as soon as it is full. ZeRO-2
    keeps whole weights. ZeRO-3 gathers those of one linear layer at a time, and the head's from the first to the last use.
    Offloaded state is in host memory.
    """

    @override
    def resident(self) -> Rows:
        rows = {"weights": self._weights()} if self.how.offload != "all" else {}
        rows |= self._state() if self.how.offload == "none" else {}
        if self.trained and self.how.zero == 3:
            rows["gradients"] = rows.get("gradients", 0) + self._bucket()
        return rows

    @override
    def summed(self) -> int:
        """ZeRO-2 allocates sum and bucket in every update; those of ZeRO-3 stay."""
        on_device = FLOAT32 * self.trained // self.shards if self.how.offload == "none" else 0
        return on_device + self._bucket() if self.how.zero == 2 else 0

    @override
    def staying(self) -> Rows:
        return {name: size for name, size in self.resident().items() if name in ("weights", "gradients")}

    @override
    def host(self) -> Rows:
        rows = self._state() if self.how.offload != "none" else {}
        return rows | ({"weights": self._weights()} if self.how.offload == "all" else {})

    def _weights(self) -> int:
        return self.width * self.own // (self.shards if self.how.zero == 3 else 1)

    def _bucket(self) -> int:
        return FLOAT32 * min(REDUCED, self.trained)

    def _state(self) -> Rows:
        """Masters, moments and ZeRO-3's float32 sum of gradients; float32 weights that ZeRO-3 has on the device are the master."""
        shared = self.width == FLOAT32 and self.how.zero == 3 and self.how.offload == "none"
        summed = self.how.zero == 3 or self.how.offload != "none"
        each = {"master": 0 if shared else FLOAT32, "moments": MOMENTS, "gradients": FLOAT32 if summed else 0}
        return {name: size * self.trained // self.shards for name, size in each.items() if size * self.trained}

    @override
    def gathered(self, layers: int) -> int:
        return self.width * (self.vocabulary + self.shape.matrix) if self.how.zero == 3 and self.shards > 1 else 0

    @override
    def training(self, work: Work) -> dict[str, Rows]:
        """The moments of an update; in some of them a bucket is full and on its way to the sum."""
        moments = super().training(work)
        if self.trains_weights:
            filled = {"head, backward": 0, "last layer, backward": 1, "second last layer, backward": 2}
            full = [moment for moment, layers in filled.items() if self.vocabulary + layers * self.layer >= REDUCED]
            for moment in (*full, "first layer, backward"):
                moments[moment]["gradients"] += self._on_its_way(
                    self.vocabulary if moment == "head, backward" else self.shape.matrix
                )
        return moments

    @override
    def _waiting(self, several: bool) -> int:
        return self.width * self.vocabulary if self.trains_weights and self.shape.tied else 0

    @override
    def _added(self, several: bool) -> int:
        return self.width * self.shape.matrix if self.trains_weights else 0

    @override
    def _reduced(self, count: int, several: bool) -> int:
        return 0

    def _on_its_way(self, count: int) -> int:
        """Copies of a full bucket, or of a larger tensor, while it is reduced: one end to end, under ZeRO-3 one by ranks too."""
        return (self.how.zero - 1) * FLOAT32 * max(count, min(REDUCED, self.trained))

    @override
    def _last(self, several: bool) -> int:
        if not self.trains_weights:
            return 0
        tensors = 3 if self.shape.tied and not self.how.values else 1
        return tensors * self.width * self.shape.embedding + self._on_its_way(self.shape.embedding)
