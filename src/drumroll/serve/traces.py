"""The calls of one sample as a tree of tokens, and the linear traces made from it.

A call that extends an earlier one continues its tokens, exactly as they were sampled. A fork shares the tokens before
it, also where a chat template rewrites an earlier turn. Plain data: nothing is rendered, tokenised or sent here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from drumroll.data.controls import Controls
from drumroll.data.conversation import Part
from drumroll.engines import Completion
from drumroll.sample import Owner, StopReason, Trace, Turn


@dataclass(frozen=True, eq=False)
class Call:
    """One completion: the call it continues, the tokens added since then, and the tokens that the model wrote.

    `place` is the number of messages before the written one. `shown` is the text of the tokens added, escaped; `text` is
    the written message.
    """

    number: int
    parent: Call | None
    added: tuple[int, ...]
    written: Completion
    place: int = 0
    shown: str = ""
    text: str = ""

    def path(self) -> list[Call]:
        """Return the calls from the first to this one."""
        path: list[Call] = []
        call: Call | None = self
        while call is not None:
            path.append(call)
            call = call.parent
        return path[::-1]

    def parts(self, controls: Controls) -> list[Part]:
        """Return the parts of the trace up to and including this completion: two for each call."""
        found: list[Part] = []
        for call in self.path():
            tokens = call.written.tokens
            last = tokens[-1] if call.written.stop is StopReason.EOS else None
            found += [Part(call.shown, len(call.added)), Part(controls.escape(call.text), len(tokens), True, last)]
        return found

    def seen(self) -> list[int]:
        """Return the tokens that the engine read: all tokens before those it wrote."""
        return [*(() if self.parent is None else self.parent.after()), *self.added]

    def after(self) -> list[int]:
        """Return all tokens of the conversation up to and including this completion."""
        return [token for call in self.path() for token in (*call.added, *call.written.tokens)]


class Calls:
    """All calls of a sample, found by the conversations that continue them.

    The marks of its messages identify a conversation; marks are compared, never parsed.
    """

    def __init__(self) -> None:
        self.all: list[Call] = []
        self._by_conversation: dict[bytes, Call] = {}

    def along(self, marks: Sequence[str]) -> list[Call]:
        """Return the calls whose conversations are prefixes of this one, the longest last."""
        found = (self._by_conversation.get(name) for name in _names(marks))
        return [call for call in found if call is not None]

    def add(
        self,
        parent: Call | None,
        added: Sequence[int],
        written: Completion,
        marks: Sequence[str],
        shown: str = "",
        text: str = "",
    ) -> Call:
        """Record a call; `marks` identify the conversation including the written message."""
        call = Call(len(self.all), parent, tuple(added), written, len(marks) - 1, shown, text)
        self.all.append(call)
        self._by_conversation[_names(marks)[-1]] = call
        return call

    def traces(self) -> tuple[list[Trace], list[Turn]]:
        """Return a trace for every call that no other call continues, and the position of each call in them.

        Every token that the model wrote belongs to the policy in exactly one trace, so that it is trained on once. In
        other traces it is part of the prompt, as is everything else that a fork shares with an earlier trace.
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
                written.add_to(trace)
                turns[call.number] = Turn(len(traces), start, len(trace.tokens), state)
            traces.append(trace)
        return traces, [turns[call.number] for call in self.all]


def _names(marks: Sequence[str]) -> list[bytes]:
    """Return a hash for each prefix of a conversation."""
    names, running = [], hashlib.sha256()
    for mark in marks:
        running.update(hashlib.sha256(mark.encode()).digest())
        names.append(running.copy().digest())
    return names
