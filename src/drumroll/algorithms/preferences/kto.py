"""KTO (2402.01306)."""

import torch
from torch import Tensor

from drumroll.algorithms.preferences.parts import Rated
from drumroll.config.preferences import PREFERENCE_LOSSES, PreferenceTerms


@PREFERENCE_LOSSES.register("kto", pairs=False)
def kto(rated: Rated, config: PreferenceTerms) -> Tensor:
    """One minus the value of an answer: how far its log-ratio is above the KL if it is good, below if it is bad (2402.01306)."""
    gain = config.beta * (rated.answers.ratio() - rated.kl)
    weight = torch.where(rated.good, config.desirable_weight, config.undesirable_weight)
    return weight * (1 - torch.sigmoid(torch.where(rated.good, gain, -gain)))
