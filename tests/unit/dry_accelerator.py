"""A dry accelerator: a device that computes nothing, knows where every tensor lives, and counts when the host waits for it.

Tensors on the device are fake (shape, type, device); those on the host are real. An operation on tensors of two devices
raises, as on a GPU. What the host reads from the device is ones. `Dry.waits` lists where the host would wait: it reads
a number, copies to or from the device without saying that it need not wait, or asks for something whose shape only the
device knows. Registering the device changes torch for the whole process, so tests run it in a forked one
(`forked.run_ranks`). Modes hold for one thread: enter `dry` in each thread that computes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAME = "dry"
aten: Any = torch.ops.aten
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


def register() -> torch.device:
    """Make torch know the device, once per process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME)
        module: Any = torch.get_device_module(NAME)
        module.get_rng_state = lambda *_, **__: torch.zeros(1, dtype=torch.uint8)  # asked for by recomputed activations
        module.set_rng_state = lambda *_, **__: None
        module.get_amp_supported_dtype = lambda: [torch.bfloat16]
        module.device_count = lambda: 1
    return torch.device(NAME, 0)


class _Factories(TorchFunctionMode):
    """`torch.tensor(data, device=...)` does not reach a dispatch mode: it is made on the host and copied, which waits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).type == NAME:
            kwargs.pop("device")
            return func(*args, **kwargs).to(torch.device(NAME, 0))
        return func(*args, **kwargs)


class _Dispatch(TorchDispatchMode):
    def __init__(self, dry: Dry) -> None:
        super().__init__()
        self.dry = dry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dry.compute(func, args, kwargs or {})


class Dry:
    """The device's memory and its record. All threads share one."""

    def __init__(self) -> None:
        self.device = register()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.waits: list[str] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """In this thread, tensors may be on the device."""
        with _Dispatch(self), _Factories():
            yield

    @contextmanager
    def counted(self) -> Iterator[list[str]]:
        """The waits within the block."""
        kept, self.waits = self.waits, []
        found = self.waits
        try:
            yield found
        finally:
            self.waits = kept

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        op, dry = func.overloadpacket, [x for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        to = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if not dry and to != NAME:
            return func(*args, **kwargs)
        if op is aten._local_scalar_dense:
            self._wait("reads a number")
            return 1.0 if args[0].dtype.is_floating_point else 1
        if op in (aten._to_copy, aten.copy_):
            return self._copy(func, args, kwargs)
        if op in INDEXING:
            self._check_indices(args)
        try:
            with self.fake:
                return func(*args, **kwargs)
        except DynamicOutputShapeException:
            self._wait(f"asks for the shape of {op.__name__}")
            raise

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Between devices. A copy from the device waits, and so does one to it that does not say `non_blocking`."""
        if func.overloadpacket is aten.copy_:
            target, source = args[:2]
            ahead = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self._note(source, target.device.type, ahead)
            return target if isinstance(target, FakeTensor) else target.fill_(1)
        source, to = args[0], torch.device(kwargs.get("device") or args[0].device)
        self._note(source, to.type, kwargs.get("non_blocking", False))
        kind = kwargs.get("dtype") or source.dtype
        if to.type == "cpu":
            return torch.ones(source.shape, dtype=kind)
        with self.fake:
            if isinstance(source, FakeTensor):
                return func(*args, **kwargs)
            return torch.empty_strided(source.shape, source.stride(), dtype=kind, device=self.device)

    def _note(self, source: Tensor, to: str, ahead: bool) -> None:
        if isinstance(source, FakeTensor) and to == "cpu":
            self._wait("copies from the device")
        elif not isinstance(source, FakeTensor) and to == NAME and not ahead:
            self._wait("waits for a copy to the device")

    def _check_indices(self, args: Any) -> None:
        """A mask's shape is the device's to tell, and indices of the host are copied first. Fake tensors let both pass."""
        indices = [x for x in args[1] if x is not None]
        if isinstance(args[0], FakeTensor) and any(not isinstance(x, FakeTensor) for x in indices):
            self._wait("waits for a copy to the device")
        if any(isinstance(x, FakeTensor) and x.dtype in (torch.bool, torch.uint8) for x in indices):
            self._wait("asks for the shape of a mask")

    def _wait(self, why: str) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and "/drumroll/" not in frame.f_code.co_filename:
            frame = frame.f_back
        where = frame.f_code.co_filename.rpartition("/drumroll/")[2]
        self.waits.append(f"{where} {frame.f_code.co_name}: {why}")


def put_on(module: nn.Module, dry: Dry) -> None:
    """Replace parameters and buffers by dry ones; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in list(table.items()):
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=dry.device)
                    made[id(tensor)] = (
                        nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
                    )
                table[name] = made[id(tensor)]  # type: ignore[assignment]
