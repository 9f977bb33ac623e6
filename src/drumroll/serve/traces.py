"""The calls of one sample as a tree of tokens: what was seen and written, and the linear traces that it comes to.

A call that extends an earlier one stands on its tokens, exactly as they were sampled. A fork shares what came before;
a conversation that was rewritten begins anew. Plain data: nothing is rendered, tokenised or sent here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from drumroll.engines import Completion
from drumroll.sample import Owner, Trace, Turn


@dataclass(frozen=True, eq=False)
class Call:
    """One completion: the call it stands on, the tokens added since then, and what the model wrote."""

    number: int
    parent: Call | None
    added: tuple[int, ...]
    written: Completion

    def path(self) -> list[Call]:
        """The calls from the first to this one."""
        path: list[Call] = []
        call: Call | None = self
        while call is not None:
            path.append(call)
            call = call.parent
        return path[::-1]

    def seen(self) -> list[int]:
        """What the engine saw: all tokens before those it wrote."""
        return [*(() if self.parent is None else self.parent.after()), *self.added]

    def after(self) -> list[int]:
        """All tokens of the conversation up to and with this completion."""
        return [token for call in self.path() for token in (*call.added, *call.written.tokens)]


class Calls:
    """All calls of a sample, found again by the conversations that follow them.

    A conversation is named by the marks of its messages; marks are compared, never read.
    """

    def __init__(self) -> None:
        self.all: list[Call] = []
        self._by_conversation: dict[bytes, Call] = {}

    def find(self, marks: Sequence[str]) -> tuple[Call | None, int]:
        """The call that a conversation extends furthest, and how many of its marks that call covers."""
        names = _names(marks)
        for length in range(len(marks), 0, -1):
            if (call := self._by_conversation.get(names[length - 1])) is not None:
                return call, length
        return None, 0

    def add(self, parent: Call | None, added: Sequence[int], written: Completion, marks: Sequence[str]) -> Call:
        """Note a call; `marks` name the conversation with what was written at its end."""
        call = Call(len(self.all), parent, tuple(added), written)
        self.all.append(call)
        self._by_conversation[_names(marks)[-1]] = call
        return call

    def traces(self) -> tuple[list[Trace], list[Turn]]:
        """A trace for every call that nothing follows, and where each call stands in them.

        Every token that was written is the policy's in exactly one trace, so that it is trained on once. In the others
        it is part of the prompt, and so is everything else that a fork has in common with an earlier trace.
        """
        followed = {call.parent.number for call in self.all if call.parent is not None}
        traces: list[Trace] = []
        turns: dict[int, Turn] = {}
        for leaf in (call for call in self.all if call.number not in followed):
            trace = Trace()
            for call in leaf.path():
                old = call.number in turns
                first = call.parent is None or old
                trace.extend(list(call.added), Owner.PROMPT if first else Owner.ENVIRONMENT)
                if old:
                    trace.extend(list(call.written.tokens), Owner.PROMPT)
                    continue
                start, written = len(trace.tokens), call.written
                state = hashlib.sha256(repr(trace.tokens).encode()).hexdigest()[:16]
                trace.extend(list(written.tokens), Owner.POLICY, list(written.logprobs), list(written.versions))
                turns[call.number] = Turn(len(traces), start, len(trace.tokens), state)
            traces.append(trace)
        return traces, [turns[call.number] for call in self.all]


def _names(marks: Sequence[str]) -> list[bytes]:
    """A name for each beginning of a conversation."""
    names, running = [], hashlib.sha256()
    for mark in marks:
        running.update(hashlib.sha256(mark.encode()).digest())
        names.append(running.copy().digest())
    return names
