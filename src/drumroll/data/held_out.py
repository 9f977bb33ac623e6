"""Held-out sets of rows with answers: each row once, in its order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from drumroll.config.eval import HeldOutConfig
from drumroll.data.drawing import Dropped, where
from drumroll.data.render import Renderer
from drumroll.data.rows import read
from drumroll.data.source import Reader, no_columns
from drumroll.errors import BadRow, DataError
from drumroll.sample import Group, Prompt

Make = Callable[[Reader, Prompt, int], Group]
"""Makes the samples of a row, as in training; raises `Dropped` or `BadRow`."""


@dataclass
class HeldOut:
    """The usable rows of a held-out set, and what was dropped in words."""

    groups: list[Group]
    note: str = ""


def read_held_out(
    sets: Mapping[str, HeldOutConfig], renderer: Renderer, make: Make, reasons: Mapping[str, str], *, answers: bool = False
) -> dict[str, HeldOut]:
    """The sets by name. A row that nothing can be measured on is dropped and told; a bad row, or a set without a usable one, is refused."""
    return {
        name: _read(Reader(f"held_out.{name}", each, renderer, no_columns, unrendered=True), make, reasons, answers=answers)
        for name, each in sets.items()
    }


def _read(own: Reader, make: Make, reasons: Mapping[str, str], *, answers: bool) -> HeldOut:
    found, first, count = HeldOut([]), "", 0
    for number, row in enumerate(read(own.name, own.config, seed=0, answers=answers)):
        try:
            found.groups.append(make(own, own.prompt(row, number), number))
        except Dropped as dropped:
            first, count = first or f"{where(own)}, because {reasons[str(dropped)]}", count + 1
        except BadRow as error:
            raise BadRow(f"{error} It is {where(own)}.") from error
    if not found.groups:
        raise DataError(f"{own.name} has no row that can be used" + (f"; the first is dropped: {first}." if first else "."))
    if count:
        found.note = f"{own.name}: {count} rows are dropped, the first of them {first}."
    return found
