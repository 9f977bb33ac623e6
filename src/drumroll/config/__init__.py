"""The config: YAML or a mapping in, a frozen and fully checked object out."""

from drumroll.config.distill import DistillConfig
from drumroll.config.loading import Loaded, check, dump, load
from drumroll.config.preferences import PreferenceConfig
from drumroll.config.reward_model import RewardModelConfig
from drumroll.config.rl import RLConfig
from drumroll.config.run import RunConfig
from drumroll.config.sft import SFTConfig

__all__ = [
    "DistillConfig",
    "Loaded",
    "PreferenceConfig",
    "RLConfig",
    "RewardModelConfig",
    "RunConfig",
    "SFTConfig",
    "check",
    "dump",
    "load",
]
