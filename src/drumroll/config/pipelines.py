"""The config class of each pipeline: built-ins by name, a user's own by `module:NAME`."""

from __future__ import annotations

from collections.abc import Iterable

from drumroll.config.distill import DistillConfig
from drumroll.config.preferences import PreferenceConfig
from drumroll.config.reward_model import RewardModelConfig
from drumroll.config.rl import RLConfig
from drumroll.config.run import RunConfig
from drumroll.config.sft import SFTConfig
from drumroll.errors import ConfigError, did_you_mean
from drumroll.registry import import_path, search

DEFAULT = "rl"
CONFIGS: dict[str, type[RunConfig]] = {
    DEFAULT: RLConfig,
    "sft": SFTConfig,
    "dpo": PreferenceConfig,
    "reward_model": RewardModelConfig,
    "distill": DistillConfig,
}
"""The built-in pipelines; `pipelines/<name>.py` implements each. Their configs are here so that reading one needs no torch."""


def config_class(pipeline: object, import_from: Iterable[str] = (), key: str = "pipeline:") -> type[RunConfig]:
    """The config class of a built-in pipeline, or of the user's `module:NAME`, which is imported from these folders."""
    if isinstance(pipeline, str) and pipeline in CONFIGS:
        return CONFIGS[pipeline]
    if not isinstance(pipeline, str) or ":" not in pipeline:
        raise ConfigError(
            f"{key} '{pipeline}' is not known; choose one of {', '.join(CONFIGS)}.{did_you_mean(str(pipeline), CONFIGS)}"
        )
    search(import_from)
    found = import_path(pipeline, key.rstrip(":"))
    config = getattr(found, "config", None)
    if not isinstance(config, type) or not issubclass(config, RunConfig):
        raise ConfigError(f"{key} '{pipeline}' is a {type(found).__name__}, not a drumroll.pipelines.Pipeline.")
    return config
