"""Training backends, a file each: each registers a function that opens it from a `LearnerSpec`."""

from collections.abc import Callable

from drumroll.learners.backend import BACKENDS, Backend, LearnerSpec
from drumroll.learners.backends import deepspeed, megatron, torch

BUILT_IN = (deepspeed, megatron, torch)
"""Imported, so that they register."""


def find_backend(name: str) -> Callable[[LearnerSpec], Backend]:
    """The function that opens a built-in backend, or the user's `module:function`."""
    return BACKENDS.get(name)
