"""What episodes look like, by domain: success, effective actions, turns."""

from __future__ import annotations

from collections.abc import Iterable

from drumroll.sample import Sample


def describe_episodes(samples: Iterable[Sample]) -> dict[str, float]:
    """`environment/<domain>/success`, `/effective` (share of turns that did something), `/turns`; nothing for plain prompts."""
    by_domain: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.turns:
            by_domain.setdefault(sample.prompt.domain, []).append(sample)
    metrics: dict[str, float] = {}
    for domain, own in sorted(by_domain.items()):
        acted = [t.effective for s in own for t in s.turns if t.effective is not None]
        if any(s.success is not None for s in own):  # an episode that was cut short of its end has none, and did not succeed
            metrics[f"environment/{domain}/success"] = sum(s.success is True for s in own) / len(own)
        if acted:
            metrics[f"environment/{domain}/effective"] = sum(acted) / len(acted)
        metrics[f"environment/{domain}/turns"] = sum(len(s.turns) for s in own) / len(own)
    return metrics
