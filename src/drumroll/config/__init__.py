"""The config: YAML or a mapping in, a frozen and fully checked object out."""

from drumroll.config.experiment import AnyConfig, RLConfig, SFTConfig
from drumroll.config.loading import Loaded, check, dump, load

__all__ = ["AnyConfig", "Loaded", "RLConfig", "SFTConfig", "check", "dump", "load"]
