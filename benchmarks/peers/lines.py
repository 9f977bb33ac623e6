"""A peer's side of benchmarks/contest.py: jobs come in, answers go out, a line of JSON each. Knows nothing of us."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from typing import Any


def jobs() -> Iterator[dict[str, Any]]:
    """One job after the other, until nobody asks any more."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(**facts: Any) -> None:
    """Answer the last job, or say that the peer is ready; always with the most memory it ever held."""
    print(json.dumps(facts | {"peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}), flush=True)
