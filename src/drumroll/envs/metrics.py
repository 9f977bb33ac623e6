"""Metrics of episodes: success, effective actions, malformed turns, number of turns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from drumroll.sample import Sample

EPISODES = ("success", "effective", "malformed", "turns")
"""The metrics of episodes."""


def measures(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the share of samples that succeed, the shares of effective and of malformed turns, and the turns per episode.

    Returns nothing for single-turn prompts.
    """
    if not any(s.turns for s in samples):
        return {}
    turns = [t for s in samples for t in s.turns]
    acted = [t.effective for t in turns if t.effective is not None]
    found = {}
    # an episode that was cut short has no success value, and counts as no success
    if any(s.success is not None for s in samples):
        found["success"] = sum(s.success is True for s in samples) / len(samples)
    if acted:
        found["effective"] = sum(acted) / len(acted)
    return found | {"malformed": sum(t.malformed for t in turns) / len(turns), "turns": len(turns) / len(samples)}


def describe_episodes(samples: Iterable[Sample]) -> dict[str, float]:
    """`environment/<domain>/success` and the other measures, by domain."""
    by_domain: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.turns:
            by_domain.setdefault(sample.prompt.domain, []).append(sample)
    return {
        f"environment/{domain}/{kind}": value
        for domain, own in sorted(by_domain.items())
        for kind, value in measures(own).items()
    }
