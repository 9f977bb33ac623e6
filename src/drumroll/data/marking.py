"""Tokens for people to read, with those that are trained in brackets."""

from __future__ import annotations

from typing import Any

from drumroll.sample import Owner, Trace


def marked(tokenizer: Any, trace: Trace) -> str:
    """The text of a trace; every trained token stands in brackets of its own."""
    pieces = [tokenizer.decode([token]) for token in trace.tokens]
    return "".join(f"[{p}]" if o is Owner.POLICY else p for p, o in zip(pieces, trace.owners, strict=True))
