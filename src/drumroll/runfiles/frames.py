"""Rows of a run directory as Python sees them: typed rows, and lists of rows that become frames of pandas and polars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from typing_extensions import override

from drumroll.errors import MissingExtra

if TYPE_CHECKING:
    import pandas
    import polars

ROWS_SHOWN, TEXT_SHOWN = 10, 160
R = TypeVar("R", bound=Mapping[str, Any])


class TraceRow(TypedDict):
    """A token sequence: per token its owner (0 prompt, 1 policy, 2 environment), log-prob and policy version."""

    tokens: list[int]
    owners: list[int]
    logprobs: list[float]
    versions: list[int]


class TurnRow(TypedDict):
    """A turn of the policy in an episode: the position of its tokens, and its reward."""

    trace: int
    start: int
    end: int
    state: str
    reward: float
    effective: bool | None
    malformed: bool


class SampleRow(TypedDict):
    """A recorded sample. `prompt` is a text, or a conversation as JSON; `columns` are those of the dataset's row."""

    step: int
    kind: str
    id: str
    prompt_id: str
    domain: str
    prompt: str
    completion: str
    columns: dict[str, Any]
    stop: str | None
    fate: str | None
    reward: float | None
    rewards: dict[str, float]
    failure: str | None
    traceback: str | None
    history: list[tuple[str, float]]
    traces: list[TraceRow]
    turns: list[TurnRow]
    success: bool | None
    notes: list[str]
    extra: dict[str, Any]


class Frame(list[R]):
    """A list of rows, each a dict, that pandas and polars take as a frame and notebooks show as a table."""

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a pandas frame; nested columns hold Python objects."""
        try:
            import pandas as pd
        except ModuleNotFoundError:
            raise MissingExtra("to_pandas", "pandas") from None
        return pd.DataFrame(list(self))

    def to_polars(self) -> polars.DataFrame:
        """Return the rows as a polars frame; nested columns are structs, and types that cannot meet become text."""
        try:
            import polars as pl
        except ModuleNotFoundError:
            raise MissingExtra("to_polars", "polars") from None
        return pl.DataFrame(list(self), infer_schema_length=None, strict=False)

    @property
    def columns(self) -> list[str]:
        """The names of all columns, in the order in which rows first have them."""
        return list(dict.fromkeys(name for row in self for name in row))

    @override
    def __repr__(self) -> str:
        return f"<Frame: {len(self):,} rows of {', '.join(self.columns) or 'no columns'}>"

    def _repr_html_(self) -> str:
        """The first rows as a table, without columns of lists."""
        shown = self[:ROWS_SHOWN]
        names = [name for name in self.columns if not any(isinstance(row.get(name), list) for row in shown)]
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = "".join(f"<tr>{''.join(f'<td>{_cell(row.get(name))}</td>' for name in names)}</tr>" for row in shown)
        rest = f"<div>… {len(self) - len(shown):,} more rows</div>" if len(self) > len(shown) else ""
        return f'<div style="overflow-x:auto"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{rest}'


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return escape(text if len(text) <= TEXT_SHOWN else f"{text[: TEXT_SHOWN - 1]}…")
