"""A peer's side of benchmarks/contest.py: jobs come in, answers go out, a line of JSON each. Knows nothing of us."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what a library prints is no answer


def jobs() -> Iterator[dict[str, Any]]:
    """One job after the other, until nobody asks any more."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(**facts: Any) -> None:
    """Answer the last job, or say that the peer is ready; always with the most memory it ever held.

    What is free goes back to the machine, for the others whose turn comes.
    """
    ctypes.CDLL(None).malloc_trim(0)
    print(json.dumps(facts | {"peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}), file=ANSWERS, flush=True)
