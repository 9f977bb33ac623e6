"""Slow references and small batches that the tests of algorithms share."""

import math

import torch
from test_batch import make_trace, random_groups

from drumroll.batch import pack
from drumroll.sample import Group, Owner, Prompt, Sample


def mean(values):
    return sum(values) / len(values)


def deviation(values):
    return math.sqrt(mean([(v - mean(values)) ** 2 for v in values]))


def sample_batch(seed=0):
    batch = pack(random_groups(seed=seed))
    noise = torch.Generator().manual_seed(seed)
    return batch.with_(
        behaviour=-torch.rand(len(batch.tokens), generator=noise) * 3 * batch.mask,
        values=torch.rand(len(batch.tokens), generator=noise) * batch.mask,
        greedy=torch.full((batch.num_samples,), 0.5),
    )


def written(*samples):
    """A batch of one-trace samples (group, reward, policy tokens), a prompt token before each."""
    prompt = [Prompt(str(g), f"d{g % 2}", "", (1,)) for g in range(9)]
    groups = []
    for index in sorted({g for g, _, _ in samples}):
        own = [(r, t) for g, r, t in samples if g == index]
        members = [
            Sample(prompt[index], index, i, traces=[make_trace([(Owner.POLICY, tokens)])], reward=r)
            for i, (r, tokens) in enumerate(own)
        ]
        groups.append(Group(prompt[index], index, members))
    return pack(groups)
