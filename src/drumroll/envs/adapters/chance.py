"""Gives each episode of third-party code its own random state, because such code often draws from the process-wide generators.

While the code runs, the process-wide generators hold the episode's state; afterwards they are restored. So episodes
that share a process do not disturb each other. Only for code that runs alone in its process, never in threads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

NUMPY_SEEDS = 2**32
"""numpy's process-wide generator, and many libraries, accept only seeds below this."""


class Chance:
    """An episode's state of `random` and `numpy.random`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._state: tuple[Any, Any] | None = None

    @contextmanager
    def own(self) -> Iterator[None]:
        """Make code inside the block draw from the episode's state."""
        before = random.getstate(), np.random.get_state()
        if self._state is None:
            random.seed(self.seed)
            np.random.seed(self.seed % NUMPY_SEEDS)
        else:
            random.setstate(self._state[0])
            np.random.set_state(self._state[1])
        try:
            yield
        finally:
            self._state = random.getstate(), np.random.get_state()
            random.setstate(before[0])
            np.random.set_state(before[1])
