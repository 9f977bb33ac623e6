"""Bytes of tensors in one process: the peak of live ones, to compare with `placement/memory.py`, and a learner's state."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from drumroll.learners import Learner, Update
from drumroll.learners.backends.torch import TorchBackend


class LiveMemory(TorchDispatchMode):
    """Adds up the bytes of all storages that are alive after each operation, and keeps the largest sum as `peak`.

    `held` are tensors from before. Storages are counted once, with the bytes that they have now: FSDP resizes those of
    gathered weights. What one operation allocates and frees inside itself is not seen.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self.at = ""
        """The operation after which the peak was measured."""
        self._storages: dict[int, weakref.ref[Any]] = {}
        for tensor in held:
            self._note(tensor)
        self._measure("start")

    @property
    def live(self) -> int:
        """Bytes that are alive now."""
        found = [ref() for ref in list(self._storages.values())]  # storages may go while others are counted
        return sum(storage.nbytes() for storage in found if storage is not None)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operations come here one by one
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        self._measure(str(func))
        return out

    def _note(self, tensor: Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_meta:
            return
        storage = local.untyped_storage()
        key = id(storage)
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _, key=key: self._storages.pop(key, None))

    def _measure(self, at: str) -> None:
        if (live := self.live) > self.peak:
            self.peak, self.at = live, at


def held(learner: Learner) -> list[Tensor]:
    """The tensors that a learner keeps between updates."""
    backend = learner.backend
    assert isinstance(backend, TorchBackend)
    return [*backend.scorer.parameters(), *backend.scorer.buffers(), *backend.master, *_moments(backend)]


def _moments(backend: TorchBackend) -> list[Tensor]:
    assert backend.optimizer is not None
    return [value for state in backend.optimizer.state.values() for value in state.values()]


def activation_bytes(learner: Learner, work: Update) -> int:
    """The most bytes that an update holds beside the learner's state and gradients."""
    backend = learner.backend
    assert isinstance(backend, TorchBackend)
    trained = sum(master.nbytes for master in backend.master)
    with LiveMemory(held(learner)) as live:
        start = live.live
        learner.update(work)
    return live.peak - start - trained


def state_bytes(learner: Learner, work: Update) -> int:
    """The bytes of master weights, moments and gradients when an update clips the gradient."""
    backend, found = learner.backend, list[int]()
    assert isinstance(backend, TorchBackend)
    clip = backend.clip

    def spy(limit: float) -> float:
        gradients = [master.grad for master in backend.master if master.grad is not None]
        found.append(LiveMemory([*backend.master, *gradients, *_moments(backend)]).live)
        return clip(limit)

    backend.clip = spy
    try:
        learner.update(work)
    finally:
        backend.clip = clip
    return max(found)
