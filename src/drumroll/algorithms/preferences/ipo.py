"""IPO (2310.12036)."""

from torch import Tensor

from drumroll.algorithms.preferences.parts import Pairs
from drumroll.config.preferences import PREFERENCE_LOSSES, PreferenceTerms


@PREFERENCE_LOSSES.register("ipo")
def ipo(pairs: Pairs, config: PreferenceTerms) -> Tensor:
    """Squared distance of the difference of log-ratios from 1 / (2 β) (2310.12036); log-ratios are averaged over tokens."""
    chosen, rejected = (side.ratio() / side.lengths.clamp_min(1) for side in (pairs.chosen, pairs.rejected))
    return (chosen - rejected - 1 / (2 * config.beta)) ** 2
