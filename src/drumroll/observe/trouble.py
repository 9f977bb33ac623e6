"""What went wrong with samples, by cause: for the terminal while it runs, for the report afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drumroll.sample import Failure, Sample

ENDLESS = "Endless"


@dataclass(frozen=True)
class Trouble:
    """A cause, how many samples it struck, and the first of them with what was said."""

    cause: str
    count: int
    first: str
    text: str


def by_cause(found: Iterable[tuple[str, str]]) -> list[Trouble]:
    """Texts of failures and oddities, each with its sample's id, put together; the most frequent cause first."""
    causes: dict[str, list[tuple[str, str]]] = {}
    for sample, text in found:
        causes.setdefault(text.partition(": ")[0], []).append((sample, text))
    troubles = [Trouble(cause, len(all_), *all_[0]) for cause, all_ in causes.items()]
    return sorted(troubles, key=lambda trouble: -trouble.count)


def complaints(samples: Sequence[Sample], told: set[str], most: int = 3) -> list[str]:
    """Lines for the terminal: of failures always, of oddities once in a run (`told` remembers them)."""
    failed = by_cause((s.id, str(s.failure)) for s in samples if s.failure is not None)
    lines = [f"{t.count} of {len(samples)} samples failed; the first is {t.first}: {t.text}" for t in failed[:most]]
    for trouble in by_cause((s.id, str(note)) for s in samples for note in s.notes if _matters(note, samples)):
        if trouble.cause not in told:
            told.add(trouble.cause)
            lines.append(f"{trouble.count} of {len(samples)} samples, the first is {trouble.first}: {trouble.text}")
    return lines


def _matters(note: Failure, samples: Sequence[Sample]) -> bool:
    """That an episode reaches the limit of turns is odd only if all of its environment do."""
    if note.kind != ENDLESS:
        return True
    same = [s for s in samples if s.turns and s.prompt.scene is not None and f"'{s.prompt.scene.use}'" in note.boundary]
    return all(any(n.kind == ENDLESS for n in s.notes) for s in same)
