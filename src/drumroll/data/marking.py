"""Tokens for people to read, with those that are trained in brackets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drumroll.sample import Owner, Trace


def marked(tokenizer: Any, trace: Trace) -> str:
    """The text of a trace; every trained token stands in brackets of its own."""
    pieces = [tokenizer.decode([token]) for token in trace.tokens]
    return "".join(f"[{p}]" if o is Owner.POLICY else p for p, o in zip(pieces, trace.owners, strict=True))


def shown(tokenizer: Any, trace: Trace, title: str) -> Iterator[str]:
    """A trace in lines, below a title that counts its tokens."""
    yield f"{title}: {len(trace.tokens)} tokens, {len(trace.policy_tokens())} of them trained (in brackets)"
    yield from (f"  {line}" for line in marked(tokenizer, trace).splitlines())
