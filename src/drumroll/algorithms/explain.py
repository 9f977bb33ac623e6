"""What a named algorithm is made of, in words."""

from __future__ import annotations

from drumroll.algorithms import Algorithm
from drumroll.algorithms.advantages import ESTIMATORS
from drumroll.algorithms.aggregations import AGGREGATIONS
from drumroll.algorithms.losses import LOSSES
from drumroll.config.algorithm import RECIPES, AlgorithmConfig
from drumroll.errors import ConfigError, did_you_mean


def _first_line(part: object) -> str:
    return (part.__doc__ or "").strip().splitlines()[0]


def list_recipes() -> str:
    """All named algorithms, a line each."""
    lines = [f"  {name:<22}{_first_line(ESTIMATORS.get(parts['advantage']))}" for name, parts in RECIPES.items()]
    return "\n".join(["named algorithms (drumroll explain algorithm=NAME prints the parts of one):", *lines])


def explain_recipe(name: str) -> str:
    """The parts of one algorithm, what else it sets, and the passes it needs and why."""
    if name not in RECIPES:
        raise ConfigError(f"algorithm '{name}' is not known; choose one of {', '.join(RECIPES)}.{did_you_mean(name, RECIPES)}")
    config = AlgorithmConfig(recipe=name)
    parts = {
        "advantage": (config.advantage, _first_line(ESTIMATORS.get(config.advantage))),
        "loss": (config.loss, _first_line(LOSSES.get(config.loss))),
        "aggregation": (config.aggregation, _first_line(AGGREGATIONS[config.aggregation])),
    }
    lines = [f"{name}", *(f"  {kind:<12} {chosen:<16} {text}" for kind, (chosen, text) in parts.items())]
    others = {k: v for k, v in RECIPES[name].items() if k not in parts}
    lines += [f"  {key:<12} {value}" for key, value in others.items()]
    needs = Algorithm(config, single_update=False).needs
    lines.append("  passes besides the update:")
    lines.append(
        "    old log-probs: only with several minibatches or epochs; with one update the policy before it is the policy in it"
    )
    lines.append(f"    reference:     {'yes, for the KL term' if needs.reference else 'no, unless algorithm.kl is above 0'}")
    return "\n".join(lines)
