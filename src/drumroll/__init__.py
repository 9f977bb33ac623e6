"""Reinforcement learning of language models, from a laptop without a GPU to a cluster."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drumroll.api import evaluate, load, rescore, rollout, train
    from drumroll.envs import Step
    from drumroll.errors import DrumrollError
    from drumroll.runfiles.frames import Frame, SampleRow
    from drumroll.store.run import Run

__version__ = "0.1.0"
__all__ = [
    "DrumrollError",
    "Frame",
    "Run",
    "SampleRow",
    "Step",
    "__version__",
    "evaluate",
    "load",
    "rescore",
    "rollout",
    "train",
]
_HOMES = {
    **dict.fromkeys(("evaluate", "load", "rescore", "rollout", "train"), ".api"),
    **dict.fromkeys(("Frame", "SampleRow"), ".runfiles.frames"),
    "DrumrollError": ".errors",
    "Run": ".store.run",
    "Step": ".envs",
}


def __getattr__(name: str) -> Any:
    """Import the heavy parts when they are first asked for, so that the command line answers at once."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module 'drumroll' has no attribute '{name}'")


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)


class _Package(ModuleType):
    """This package, whose `rollout` is always the function: an import of `drumroll.rollout.*` would make it the subpackage."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name, as cloudpickle does with plain modules: functions of users mention this one."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
