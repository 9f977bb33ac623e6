"""Groups failures of samples by cause, for the terminal and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from drumroll.sample import Failure, Fate, Sample

ENDLESS = "Endless"


@dataclass(frozen=True)
class FailureCause:
    """A cause, the number of samples that failed by it, and the first of them with its text and the frames of the user's code."""

    cause: str
    count: int
    first: str
    text: str
    traceback: str

    def describe(self) -> str:
        """Return the text with the traceback."""
        return f"{self.text}\n{self.traceback}" if self.traceback else self.text


def by_cause(found: Iterable[tuple[str, str, str]]) -> list[FailureCause]:
    """Group failures and notes (sample, text, traceback) by kind and traceback; the most frequent first."""
    causes: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for sample, text, traceback in found:
        causes.setdefault((text.partition(": ")[0], traceback), []).append((sample, text, traceback))
    failures = [FailureCause(cause, len(all_), *all_[0]) for (cause, _), all_ in causes.items()]
    return sorted(failures, key=lambda failure: -failure.count)


def complaints(samples: Sequence[Sample], reported: set[str], most: int = 3) -> list[str]:
    """Return lines for the terminal: failures always, their tracebacks and notes once in a run (`reported` holds them)."""
    failed = by_cause((s.id, str(s.failure), s.failure.traceback) for s in samples if s.failure is not None)
    lines = []
    for failure in failed[:most]:
        shown = failure.text if failure.traceback in reported else failure.describe()
        reported.add(failure.traceback)
        lines.append(f"{failure.count} of {len(samples)} samples failed; the first is {failure.first}: {shown}")
    for failure in by_cause((s.id, str(note), "") for s in samples for note in s.notes if _matters(note, samples)):
        if failure.cause not in reported:
            reported.add(failure.cause)
            lines.append(f"{failure.count} of {len(samples)} samples, the first is {failure.first}: {failure.text}")
    return lines


def without_gradient(metrics: Mapping[str, float], samples: Sequence[Sample]) -> str | None:
    """Explain in a sentence why a step had no gradient; return None if it had one."""
    if metrics.get("train/grad_norm") != 0.0:
        return None
    if not any(sample.policy_length() for sample in samples):
        return "no gradient: the policy wrote no token in any sample; the prompts or first observations fill the context."
    groups: dict[int, list[float]] = {}
    for sample in samples:
        if sample.state is Fate.TRAINED and sample.reward is not None:
            groups.setdefault(sample.draw, []).append(sample.reward)
    if not groups or any(len(set(rewards)) > 1 for rewards in groups.values()) or max(map(len, groups.values())) < 2:
        return "no gradient: every token had the advantage 0, so there was nothing to learn from."
    counts = Counter(rewards[0] for rewards in groups.values()).most_common(3)
    values = f"{counts[0][0]:g}" if len(counts) == 1 else ", ".join(f"{value:g} in {n}" for value, n in counts)
    return (
        f"no gradient: in all {len(groups)} groups every sample got the same reward ({values}), so there was nothing "
        "to learn from. `drumroll check` tells whether the rewards and the data fit the model."
    )


def _matters(note: Failure, samples: Sequence[Sample]) -> bool:
    """Whether to show a note: reaching the limit of turns matters only if all episodes of the environment do."""
    if note.kind != ENDLESS:
        return True
    same = [s for s in samples if s.turns and s.prompt.scene is not None and f"'{s.prompt.scene.use}'" in note.boundary]
    return all(any(n.kind == ENDLESS for n in s.notes) for s in same)
