"""Draws rows in order and makes groups of samples of them, for pipelines that train on given answers.

A row that cannot be used is dropped, counted by reason, and named once for each dataset and reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from drumroll.config.data import DataConfig
from drumroll.data.render import Renderer
from drumroll.data.rows import is_local, place
from drumroll.data.source import FIRST_ROWS, PromptSource, Reader
from drumroll.data.turns import Pieces
from drumroll.errors import BadRow, DataError
from drumroll.sample import Group, Owner, Prompt, Trace


class Dropped(Exception):
    """A row of which nothing can be learned; the argument is the reason's name."""


class GivenRows(ABC):
    """Draws batches of rows, each row once in an epoch."""

    reasons: Mapping[str, str]
    """Why a row may be dropped though nothing is wrong with it, by the reason's name."""

    def __init__(
        self,
        data: DataConfig,
        seed: int,
        batch: int,
        renderer: Renderer,
        notice: Callable[[str], None] = lambda text: None,
        *,
        answers: bool = False,
    ) -> None:
        """`answers`: a run gives its answers, not pairs of them."""
        self.source = PromptSource(data, seed, renderer, tolerant=True, unrendered=True, answers=answers)
        self.size = batch
        self.dropped: Counter[str] = Counter()
        self._notice = notice
        self._told: set[tuple[str, str]] = set()
        self._sound = False  # whether a row was usable
        self._refused: BadRow | None = None  # the first bad row, while none was usable
        self._first: dict[str, str] = {}  # place and cause of the first row dropped for each reason

    @abstractmethod
    def group(self, reader: Reader, prompt: Prompt, draw: int) -> Group:
        """The samples of a row; raises `Dropped` or `BadRow`."""

    def groups(self) -> list[Group]:
        """The rows of the next batch: fewer at the end of the last epoch, none after it. Refuses data without a usable row."""
        found: list[Group] = []
        useless, started = 0, not self.source.exhausted()
        while len(found) < self.size and not self.source.exhausted():
            group = self._draw(len(found))
            useless = 0 if group else useless + 1
            if group is not None:
                found.append(group)
            elif self._refused and useless >= FIRST_ROWS:
                raise self._refused
            elif useless >= 1000:
                raise DataError(f"1000 consecutive rows cannot be used; dropped so far: {self._causes()}.")
        if started and not self._sound:
            if self._refused and self.dropped.keys() == {"bad"}:
                raise self._refused
            raise DataError(f"no row of the training data can be used: {self._causes()}.")
        return found

    def _causes(self) -> str:
        """Why rows were dropped, with the first row of each reason."""
        return "; ".join(f"{self.dropped[reason]} as '{reason}' (first: {text})" for reason, text in self._first.items())

    def _draw(self, index: int) -> Group | None:
        drawn = self.source.draw_with_reader()
        assert drawn is not None, "the epochs are over"
        prompt, reader = drawn
        try:
            if prompt.defect:
                raise BadRow(prompt.defect)
            group = self.group(reader, prompt, index)
        except Dropped as dropped:
            return self._drop(reader, str(dropped), self.reasons[str(dropped)])
        except BadRow as error:
            if not self._sound and self._refused is None:
                self._refused = BadRow(f"{error} It is {where(reader)}.")
            return self._drop(reader, "bad", str(error).removeprefix(f"{reader.name}: ").rstrip("."))
        self._sound, self._refused = True, None
        return group

    def _drop(self, reader: Reader, reason: str, text: str) -> None:
        """Count a row; name the first of a dataset."""
        self.dropped[reason] += 1
        self._first.setdefault(reason, f"{where(reader)}: {text}")
        self.tell(reader, reason, f"is dropped, because {text}; data/dropped/{reason} counts them.")

    def tell(self, reader: Reader, reason: str, text: str) -> None:
        """Say something about the row that was read last, once for each dataset and reason."""
        if (reader.name, reason) not in self._told:
            self._told.add((reader.name, reason))
            self._notice(f"{reader.name}: {where(reader)} {text}")

    def exhausted(self) -> bool:
        """Whether the epochs are over."""
        return self.source.exhausted()

    def metrics(self) -> dict[str, float]:
        """Rows dropped so far by reason, and passes over the largest finite dataset."""
        epoch = {name: value for name, value in self.source.metrics().items() if name == "data/epoch"}
        return epoch | {f"data/dropped/{reason}": float(count) for reason, count in sorted(self.dropped.items())}

    def state(self) -> dict[str, Any]:
        """The place in the row order, and the rows dropped before it."""
        return {**self.source.state(), "dropped": dict(self.dropped)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to a place in the row order."""
        self.source.restore(state)
        self.dropped = Counter(state.get("dropped", {}))
        self._sound = True


@contextmanager
def rendering(reader: Reader) -> Generator[None]:
    """Blame the row for what a chat template cannot show."""
    try:
        yield
    except BadRow:
        raise
    except DataError as error:
        raise BadRow(f"{reader.name}: {error}") from error


def where(reader: Reader) -> str:
    """The place of the last row that was read."""
    return place(reader.name, reader.config, reader.at) if is_local(reader.config) else f"row {reader.at + 1}"


def fitted(tokens: list[int], data: DataConfig, reader: Reader) -> list[int]:
    """A prompt, as `data.overlong` treats one that is too long."""
    if len(tokens) <= data.max_prompt_tokens:
        return tokens
    if data.overlong == "fail":
        raise DataError(
            f"{reader.name}: {where(reader)} has a prompt of {len(tokens)} tokens, more than data.max_prompt_tokens="
            f"{data.max_prompt_tokens}; set data.overlong to drop or truncate."
        )
    if data.overlong == "drop":
        raise Dropped("long")
    return tokens[-data.max_prompt_tokens :]


def joined(prompt: list[int], pieces: Pieces, limit: int) -> Trace:
    """Prompt and answer, cut to `limit` tokens."""
    trace = Trace()
    trace.extend(prompt[:limit], Owner.PROMPT)
    for owner, piece in pieces:
        tokens = piece[: limit - len(trace.tokens)]
        if owner is Owner.POLICY:
            trace.extend(tokens, owner, [0.0] * len(tokens), [0] * len(tokens))
        else:
            trace.extend(tokens, owner)
    return trace
