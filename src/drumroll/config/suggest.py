"""What to write in place of a key that does not exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from drumroll.config.keys import all_keys, section_at
from drumroll.config.peers import translation
from drumroll.errors import did_you_mean

MOST = 4
"""Keys of another library's section that one sentence translates."""


def suggestion(top: type[BaseModel], path: Sequence[str], word: str, value: Any = None, *, whole: bool = False) -> str:
    """A sentence to append to "unknown key": our name for a peer's key, a similar key here, the same key elsewhere, or all keys here.

    `whole` names similar keys with their section.
    """
    section, known = section_at(top, path), [key for key, _ in all_keys(top)]
    if said := _of_a_peer([*path, word], value, top.model_fields["pipeline"].default, known):
        return f" {said}"
    here = list(section.model_fields) if section else []
    elsewhere = [key for key in known if key.rpartition(".")[2] == word]
    prefix = "".join(f"{part}." for part in path) if whole else ""
    if similar := did_you_mean(prefix + word, [prefix + name for name in here], 0.8 if elsewhere else 0.6):
        return similar
    if elsewhere:
        return f" Did you mean '{min(elsewhere, key=lambda key: key.count('.'))}'?"
    if (not here or not path) and (named := did_you_mean(".".join([*path, word]), known)):
        return named
    place = f"of {'.'.join(path)}" if path else "at the top"
    return f" Keys {place}: {', '.join(here)}." if here else " `drumroll explain` lists all keys."


def _of_a_peer(path: Sequence[str], value: Any, pipeline: str, keys: Sequence[str]) -> str:
    own = {key.rpartition(".")[2] for key in keys}
    if not isinstance(value, dict) or not value:
        return translation(".".join(path), own, pipeline, keys)
    said = [found for key in _leaves(value) if (found := translation(".".join((*path, key)), own, pipeline, keys))]
    more = " docs/coming-from.md has the others." if len(said) > MOST else ""
    return " ".join(said[:MOST]) + more


def _leaves(value: dict[Any, Any]) -> list[str]:
    found: list[str] = []
    for key, inner in value.items():
        found += [f"{key}.{below}" for below in _leaves(inner)] if isinstance(inner, dict) and inner else [str(key)]
    return found
