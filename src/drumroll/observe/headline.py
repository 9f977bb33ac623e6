"""The handful of numbers of a step that people look at: rewards, held-out scores, length, KL or mismatch, speed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Number:
    """A metric with the label and the format that it has in a line."""

    label: str
    metric: str
    value: float
    format: str

    @property
    def text(self) -> str:
        """The value, always of the same width for values of a usual size."""
        return self.format.format(self.value)


PATTERNS = (
    (r"reward/([^/]+)", "reward {}", "{:6.3f}"),
    (r"environment/([^/]+)/success", "success {}", "{:5.3f}"),
    (r"train/accuracy", "accuracy", "{:5.3f}"),
    (r"train/margin", "margin", "{:6.3f}"),
    (r"train/divergence", "divergence", "{:8.4f}"),
    (r"rollout/length", "length", "{:6.1f}"),
    (r"train/kl_reference", "KL to reference", "{:8.1e}"),
    (r"train/mismatch", "mismatch", "{:7.1e}"),
    (r"time/tokens_per_s", "tokens/s", "{:6.0f}"),
    (r"eval/([^/@]+)", "held-out {}", "{:6.3f}"),
    (r"eval/([^/@]+)/accuracy", "held-out accuracy of {}", "{:6.3f}"),
    (r"eval/([^/@]+)/loss", "held-out loss of {}", "{:7.4f}"),
)
LOSS = (r"train/loss", "loss", "{:8.4f}")
"""Shown where there is no reward: of a policy it says little."""
ORDER = {pattern: rank for rank, (pattern, _, _) in enumerate((LOSS, *PATTERNS))}


def headline(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the handful of numbers of a step as labels and texts."""
    return [(number.label, number.text.strip()) for number in numbers(metrics)]


def numbers(metrics: Mapping[str, float]) -> list[Number]:
    """Return the handful of numbers of a step, in the order of a line."""
    return list(_numbers(metrics))


def _numbers(metrics: Mapping[str, float]) -> Iterator[Number]:
    rewarded = any(re.fullmatch(PATTERNS[0][0], name) for name in metrics)
    for pattern, label, shape in PATTERNS if rewarded else (LOSS, *PATTERNS):
        if pattern == "train/mismatch" and "train/kl_reference" in metrics:
            continue
        for name, value in metrics.items():
            if found := re.fullmatch(pattern, name):
                yield Number(label.format(*found.groups()), name, value, shape)


def rank(number: Number) -> int:
    """The place of a number in a line."""
    return next((place for pattern, place in ORDER.items() if re.fullmatch(pattern, number.metric)), len(ORDER))
