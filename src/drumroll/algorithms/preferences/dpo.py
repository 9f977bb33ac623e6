"""DPO (2305.18290), with label smoothing."""

from torch import Tensor

from drumroll.algorithms.preferences.parts import Pairs, smoothed
from drumroll.config.preferences import PREFERENCE_LOSSES, PreferenceTerms


@PREFERENCE_LOSSES.register("dpo")
def dpo(pairs: Pairs, config: PreferenceTerms) -> Tensor:
    """Logistic loss on the difference of the log-ratios, summed over tokens (2305.18290)."""
    return smoothed(config.beta * (pairs.chosen.ratio() - pairs.rejected.ratio()), config)
