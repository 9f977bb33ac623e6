"""SimPO (2405.14734)."""

from torch import Tensor

from drumroll.algorithms.preferences.parts import Pairs, smoothed
from drumroll.config.preferences import PREFERENCE_LOSSES, PreferenceTerms


@PREFERENCE_LOSSES.register("simpo", reference=False)
def simpo(pairs: Pairs, config: PreferenceTerms) -> Tensor:
    """Logistic loss on the difference of mean log-probs, less a margin; no reference (2405.14734)."""
    return smoothed(config.beta * (pairs.chosen.mean() - pairs.rejected.mean()) - config.gamma, config)
