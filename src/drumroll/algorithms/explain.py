"""What a named algorithm is made of, in words."""

from __future__ import annotations

from drumroll.algorithms import GREEDY, OLD, REFERENCE, TEACHER, VALUES, Algorithm
from drumroll.algorithms.advantages import ESTIMATORS
from drumroll.algorithms.aggregations import AGGREGATIONS
from drumroll.algorithms.losses import LOSSES
from drumroll.config.algorithm import PRESETS, WITH_CRITIC, WITH_GREEDY, AlgorithmConfig
from drumroll.errors import ConfigError, did_you_mean


def _first_line(part: object) -> str:
    return (part.__doc__ or "").strip().splitlines()[0]


def list_presets() -> str:
    """All named algorithms, a line each."""
    lines = [f"  {name:<22}{_first_line(ESTIMATORS.get(parts['advantage']))}" for name, parts in PRESETS.items()]
    return "\n".join(["named algorithms (drumroll explain algorithm=NAME prints the parts of one):", *lines])


def explain_preset(name: str) -> str:
    """The parts of one algorithm, what else it sets, and the passes it needs and why."""
    if name not in PRESETS:
        raise ConfigError(f"algorithm '{name}' is not known; choose one of {', '.join(PRESETS)}.{did_you_mean(name, PRESETS)}")
    config = AlgorithmConfig(preset=name)
    parts = {
        "advantage": (config.advantage, _first_line(ESTIMATORS.get(config.advantage))),
        "loss": (config.loss, _first_line(LOSSES.get(config.loss))),
        "aggregation": (config.aggregation, _first_line(AGGREGATIONS[config.aggregation])),
    }
    lines = [f"{name}", *(f"  {kind:<12} {chosen:<16} {text}" for kind, (chosen, text) in parts.items())]
    others = {k: v for k, v in PRESETS[name].items() if k not in parts}
    lines += [f"  {key:<12} {value}" for key, value in others.items()]
    return "\n".join([*lines, "  passes and samples besides the update:", *_needs(config)])


def _needs(config: AlgorithmConfig) -> list[str]:
    """What is run and why, and what would be run under which setting."""
    needs = Algorithm(config, single_update=True).needs
    unneeded = {
        OLD: "with one update the policy before it is the policy in it; run with optim.minibatch or optim.epochs above 1",
        REFERENCE: "no term compares with it; run with algorithm.kl or algorithm.kl_reward above 0",
        TEACHER: "no term compares with it; run with algorithm.teacher above 0",
        VALUES: f"only for algorithm.advantage: {', '.join(sorted(WITH_CRITIC))}",
        GREEDY: f"only for algorithm.advantage: {', '.join(sorted(WITH_GREEDY))}",
    }
    return [f"    {what:<14} {'yes' if what in needs else 'no':<4} {needs.get(what, why)}" for what, why in unneeded.items()]
