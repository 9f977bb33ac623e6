"""Statistics between two batches: starts, retries, failures, dropped groups by domain, length bias."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from drumroll.sample import Fate, Group, Sample


@dataclass
class StepStats:
    """Counts between one batch and the next."""

    started: int = 0
    retried: int = 0
    failed: list[Sample] = field(default_factory=list)
    dropped: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # (domain, fate, reason) → groups
    length_bias: float = 0.0

    def drop(self, group: Group, fate: Fate, reason: str) -> None:
        """Count a group that is not trained on."""
        self.dropped[(group.prompt.domain, fate.value, reason)] += 1

    def metrics(self, *, stable: bool = False) -> dict[str, float]:
        """Return the counts of samples and groups by fate, in total and by domain.

        `stable` leaves out counts that depend on timing: work that was started beyond the batch when it was complete.
        """
        metrics = {
            "rollout/started": float(self.started),
            "rollout/retried": float(self.retried),
            "rollout/failed": float(len(self.failed)),
            "rollout/length_bias": self.length_bias,
        }
        if stable:
            metrics.clear()
        for (domain, fate, _), count in sorted(self.dropped.items()):
            if stable and fate == Fate.ABORTED:
                continue
            for name in (f"rollout/groups_{fate}", f"rollout/groups_{fate}/{domain}"):
                metrics[name] = metrics.get(name, 0.0) + count
        return metrics


class LengthBias:
    """The mean length of accepted samples relative to all samples that finished, over the run so far.

    In arrival order short samples finish first and are accepted more often. 0 is unbiased; -0.1 means that accepted
    samples are 10% shorter.
    """

    def __init__(self) -> None:
        self.all = [0, 0]
        self.kept = [0, 0]

    def finished(self, sample: Sample) -> None:
        """Count a sample that ran to its end."""
        self.all[0] += sample.policy_length()
        self.all[1] += 1

    def accepted(self, groups: Sequence[Group], stats: StepStats) -> None:
        """Count the samples of a batch, and record the bias in `stats`."""
        for group in groups:
            self.kept[0] += sum(s.policy_length() for s in group.samples)
            self.kept[1] += len(group.samples)
        if self.kept[1] and self.all[0]:
            stats.length_bias = (self.kept[0] / self.kept[1]) / (self.all[0] / self.all[1]) - 1.0


class RunningStats:
    """The counts of the step under way, and the lengths of the run so far."""

    def __init__(self) -> None:
        self.step = StepStats()
        self.lengths = LengthBias()

    def end_step(self, groups: Sequence[Group]) -> StepStats:
        """Return the counts of the step that ends with this batch, and count the next from zero."""
        done, self.step = self.step, StepStats()
        self.lengths.accepted(groups, done)
        return done
