"""Groups of samples become packed tensors, and packed tensors become micro-batches.

Traces stand end to end without padding. Everything per token is aligned with the token it speaks of: the
log-prob at index i is that of token i, predicted from token i - 1. The first token of a trace is never trained.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drumroll.sample import Group, Owner, Sample, StopReason, Version


@dataclass(frozen=True)
class Turns:
    """The turns of all samples, in order; those of a plain answer are one."""

    sample_of: Tensor  # [turns] int64
    rewards: Tensor  # [turns] float32: they sum to the sample's reward
    anchor_of: Tensor  # [turns] int64: turns of a group that began in the same state have the same; -1 where none is known
    of_token: Tensor  # [tokens] int64: the turn that wrote a token, -1 where none did


@dataclass(frozen=True)
class Family:
    """Traces that all start with the same `prefix` tokens, which none of them trains; a lone trace shares none."""

    traces: list[int]
    prefix: int

    def cost(self, lengths: Sequence[int]) -> int:
        """Tokens to compute, the prefix once."""
        return self.prefix + sum(lengths[trace] - self.prefix for trace in self.traces)


@dataclass(frozen=True)
class Path:
    """The nodes of one sequence, of which those from `start` on are computed here."""

    nodes: Tensor  # [length] int64
    start: int = 0

    @property
    def size(self) -> tuple[int, int]:
        """Queries and keys."""
        return len(self.nodes) - self.start, len(self.nodes)


@dataclass(frozen=True)
class Tree:
    """What is computed for a batch: its tokens without those that a family shares more than once."""

    tokens: Tensor  # [nodes] int64
    node_of: Tensor  # [tokens of the batch] int64: where each is computed
    paths: list[Path]


@dataclass
class Batch:
    """`traces` rows of `tokens` in all; per-sample facts are indexed through `sample_of`."""

    tokens: Tensor  # [tokens] int64
    lengths: Tensor  # [traces] int64
    owned: Tensor  # [tokens] bool: written by the policy
    mask: Tensor  # [tokens] bool: trained; those owned, less what is too old or left out of the loss
    behaviour: Tensor  # [tokens] float32: log-prob when sampled
    versions: Tensor  # [tokens] int64: weights that sampled it, -1 where nobody did
    sample_of: Tensor  # [traces] int64: which sample a trace belongs to
    group_of: Tensor  # [samples] int64: which group a sample belongs to
    rewards: Tensor  # [samples] float32
    truncated: Tensor  # [samples] bool: ran out of tokens
    domains: tuple[str, ...]  # [samples]
    greedy: Tensor | None = None  # [samples] reward of the group's greedy sample, which is not in the batch
    turns: Turns | None = None  # of the whole batch; None when no sample was played in an environment
    sample_weights: Tensor | None = None  # [samples] factor on the loss
    old: Tensor | None = None  # [tokens] log-prob under the policy before this update
    reference: Tensor | None = None  # [tokens] log-prob under the reference policy
    teacher: Tensor | None = None  # [tokens] log-prob under the teacher, or [tokens, width] rows to compare with
    values: Tensor | None = None  # [tokens] the critic's expectation before the token
    returns: Tensor | None = None  # [tokens] what the critic should have expected
    advantages: Tensor | None = None  # [tokens]
    weights: Tensor | None = None  # [tokens] share of each token in the loss; sums to 1 over a minibatch
    unit_of: Tensor | None = None  # [samples] samples of one unit (a pair) are never separated; None: each by itself
    margins: Tensor | None = None  # [samples] by how much the pair's chosen answer should score higher; None: not said
    given: Tensor | None = None  # [samples] bool: demonstrations beside the policy's own samples; None: there are none

    @property
    def num_traces(self) -> int:
        return len(self.lengths)

    @property
    def num_samples(self) -> int:
        return len(self.group_of)

    def trace_of_token(self) -> Tensor:
        """[tokens] the trace that each token belongs to."""
        return torch.repeat_interleave(torch.arange(self.num_traces), self.lengths)

    def sample_of_token(self) -> Tensor:
        """[tokens] the sample that each token belongs to."""
        return self.sample_of[self.trace_of_token()]

    def unit_of_token(self) -> tuple[Tensor, int]:
        """[tokens] the unit that each token belongs to, numbered within this batch, and the number of units."""
        units = self.sample_of if self.unit_of is None else self.unit_of[self.sample_of]
        found, of_trace = units.unique(return_inverse=True)
        return of_trace[self.trace_of_token()], len(found)

    def given_tokens(self) -> Tensor | None:
        """[tokens] bool: those of demonstrations."""
        return None if self.given is None else self.given[self.sample_of_token()]

    def policy_lengths(self) -> Tensor:
        """[samples] number of tokens that the policy wrote, trained or not: what a length penalty speaks of."""
        return self._count(self.owned)

    def trained_lengths(self) -> Tensor:
        """[samples] number of trained tokens."""
        return self._count(self.mask)

    def _count(self, tokens: Tensor) -> Tensor:
        counts = torch.zeros(self.num_samples, dtype=torch.int64)
        return counts.index_add_(0, self.sample_of_token(), tokens.to(torch.int64))

    def with_(self, **changes: Tensor | None) -> Batch:
        """A copy with some columns replaced."""
        return dataclasses.replace(self, **changes)

    def places(self, traces: Sequence[int]) -> Tensor:
        """The indices of the tokens of some traces."""
        starts = torch.cumsum(self.lengths, 0) - self.lengths
        spans = [torch.arange(int(starts[t]), int(starts[t] + self.lengths[t])) for t in traces]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)

    def select(self, traces: Sequence[int]) -> Batch:
        """The given traces, in the given order. Per-sample columns stay whole, so indices remain valid."""
        index = self.places(traces)
        per_token = {name: value[index] for name in PER_TOKEN if (value := getattr(self, name)) is not None}
        rows = torch.tensor(list(traces), dtype=torch.int64)
        return self.with_(lengths=self.lengths[rows], sample_of=self.sample_of[rows], **per_token)

    def families(self) -> list[Family]:
        """Every trace in one family: traces of a group that start with the same tokens, none of them trained."""
        ends = torch.cumsum(self.lengths, 0).tolist()
        tokens, trained = self.tokens.tolist(), self.mask.tolist()
        leads: list[list[int]] = []
        for end, length in zip(ends, self.lengths.tolist(), strict=True):
            own = trained[end - length : end]
            leads.append(tokens[end - length : end - length + (own.index(True) if True in own else length)])
        groups: dict[int, list[int]] = {}
        for trace, group in enumerate(self.group_of[self.sample_of].tolist()):
            groups.setdefault(group, []).append(trace)
        found: list[Family] = []
        for traces in groups.values():
            own_families: list[Family] = []
            for trace in sorted(traces, key=lambda t: len(leads[t])):
                _join(own_families, trace, leads)
            found += own_families
        return [family if len(family.traces) > 1 else Family(family.traces, 0) for family in found]

    def tree(self) -> Tree:
        """The batch with each family's prefix once."""
        starts = (torch.cumsum(self.lengths, 0) - self.lengths).tolist()
        each = torch.arange(len(self.tokens))
        source = each.clone()
        families = self.families()
        for family in families:
            first = starts[family.traces[0]]
            for trace in family.traces[1:]:
                source[starts[trace] : starts[trace] + family.prefix] = each[first : first + family.prefix]
        kept = source == each
        node_of = (torch.cumsum(kept, 0) - 1)[source]
        nodes = node_of.split(self.lengths.tolist())
        paths = [Path(nodes[f.traces[0]][: f.prefix]) for f in families if f.prefix]
        paths += [Path(nodes[trace], f.prefix) for f in families for trace in f.traces]
        return Tree(self.tokens[kept], node_of, paths)

    def units(self) -> list[Family]:
        """Traces by unit, in order, with the prefix that all of them share; only with `unit_of`."""
        assert self.unit_of is not None
        prefixes = {frozenset(family.traces): family.prefix for family in self.families()}
        found: dict[int, list[int]] = {}
        for trace, unit in enumerate(self.unit_of[self.sample_of].tolist()):
            found.setdefault(unit, []).append(trace)
        return [Family(traces, prefixes.get(frozenset(traces), 0)) for traces in found.values()]

    def chunks(self, size: int) -> list[list[int]]:
        """Trace indices in minibatches of `size` samples, in order. A unit goes where its first sample goes.

        Demonstrations come last in a batch and are spread over the minibatches of the policy's own samples.
        """
        owner, first = self.sample_of.tolist(), dict[int, int]()
        unit = list(range(self.num_samples)) if self.unit_of is None else self.unit_of.tolist()
        more = 0 if self.given is None else int(self.given.sum())
        sampled = self.num_samples - more
        chunks: list[list[int]] = [[] for _ in range(math.ceil(sampled / size))]
        for trace, sample in enumerate(owner):
            place = first.setdefault(unit[sample], sample)
            chunks[place // size if place < sampled else (place - sampled) * len(chunks) // more].append(trace)
        return [traces for traces in chunks if traces]

    def shares(self, count: int) -> list[list[int]]:
        """Trace indices in `count` shares, balanced by tokens: the longest first, each to the least loaded.

        Families stay together unless the largest share is smaller without; units always do.
        """
        if count == 1:
            return [list(range(self.num_traces))]
        if self.unit_of is not None:
            return _deal(self.units(), count, self.lengths.tolist())
        families = self.families()
        lone = [Family([trace], 0) for trace in range(self.num_traces)]
        ways = [_deal(dealt, count, self.lengths.tolist()) for dealt in (families, lone)]
        return min(ways, key=lambda way: max(self.computed(families, share) for share in way))

    def computed(self, families: Sequence[Family], traces: Sequence[int]) -> int:
        """Tokens computed for some of the traces, a prefix of a family once."""
        chosen, lengths = set(traces), self.lengths.tolist()
        parts = [Family([t for t in family.traces if t in chosen], family.prefix) for family in families]
        return sum(part.cost(lengths) for part in parts if part.traces)

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """[tokens] a column whose parts were computed for each of the `shares`, put back in this batch's order."""
        if len(parts) == 1:
            return parts[0]
        column = parts[0].new_zeros(len(self.tokens), *parts[0].shape[1:])
        for traces, part in zip(self.shares(len(parts)), parts, strict=True):
            column[self.places(traces)] = part
        return column

    def micro_batches(self, max_tokens: int) -> list[list[int]]:
        """Trace indices in chunks of at most `max_tokens` tokens (a longer trace goes alone), longest first.

        A prefix counts once in a chunk, and a family is cut only where no chunk holds it; a unit never is.
        """
        lengths = self.lengths.tolist()
        chunks: list[list[int]] = []
        room = 0
        if self.unit_of is not None:
            for unit in sorted(self.units(), key=lambda unit: -unit.cost(lengths)):
                if (cost := unit.cost(lengths)) > room:
                    chunks.append([])
                    room = max_tokens
                chunks[-1] += unit.traces
                room -= cost
            return chunks
        for family in sorted(self.families(), key=lambda f: -max(lengths[t] for t in f.traces)):
            cost, paid = family.cost(lengths), False
            if room < cost <= max_tokens:
                room = 0
            for trace in sorted(family.traces, key=lambda t: -lengths[t]):
                need = lengths[trace] - (family.prefix if paid else 0)
                if need > room:
                    chunks.append([])
                    room, need = max_tokens, lengths[trace]
                chunks[-1].append(trace)
                room, paid = room - need, True
        return chunks


def _join(families: list[Family], trace: int, leads: Sequence[list[int]]) -> None:
    """Put a trace into the first family that keeps at least half of its prefix, else into a new one.

    Half, because a family that shrinks to a few tokens all prompts start with would be shared for nothing.
    """
    for place, family in enumerate(families):
        common = _common(leads[family.traces[0]][: family.prefix], leads[trace])
        if common and 2 * common >= family.prefix:
            families[place] = Family([*family.traces, trace], common)
            return
    families.append(Family([trace], len(leads[trace])))


def _common(a: list[int], b: list[int]) -> int:
    """How many tokens two sequences start with alike."""
    shorter = min(len(a), len(b))
    return shorter if a[:shorter] == b[:shorter] else next(i for i in range(shorter) if a[i] != b[i])


def _deal(families: Sequence[Family], count: int, lengths: Sequence[int]) -> list[list[int]]:
    """The traces of whole families in `count` shares: the longest first, each to the least loaded."""
    shares: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for family in sorted(families, key=lambda f: -f.cost(lengths)):
        least = load.index(min(load))
        shares[least] += family.traces
        load[least] += family.cost(lengths)
    return shares


PER_TOKEN = (
    *("tokens", "owned", "mask", "behaviour", "versions"),
    *("old", "reference", "teacher", "values", "returns", "advantages", "weights"),
)


def join(own: Batch, given: Batch) -> Batch:
    """A batch and demonstrations after it: columns that they lack are 0, and their samples are told apart by `given`."""
    columns: dict[str, Tensor] = {}
    for name in PER_TOKEN:
        column, other = getattr(own, name), getattr(given, name)
        if column is not None:
            other = column.new_zeros(len(given.tokens), *column.shape[1:]) if other is None else other
            columns[name] = torch.cat([column, other])
    for name in ("rewards", "truncated"):
        columns[name] = torch.cat([getattr(own, name), getattr(given, name)])
    if own.sample_weights is not None:
        columns["sample_weights"] = torch.cat([own.sample_weights, own.sample_weights.new_ones(given.num_samples)])
    return dataclasses.replace(
        own,
        lengths=torch.cat([own.lengths, given.lengths]),
        sample_of=torch.cat([own.sample_of, given.sample_of + own.num_samples]),
        group_of=torch.cat([own.group_of, given.group_of + int(own.group_of.max()) + 1]),
        domains=(*own.domains, *given.domains),
        given=torch.arange(own.num_samples + given.num_samples) >= own.num_samples,
        greedy=None,
        turns=None,
        **columns,
    )


def pack(groups: Sequence[Group], oldest: Version = 0) -> Batch:
    """Pack the scored samples of groups, in the order given. Tokens of versions before `oldest` are not trained on."""
    samples = [(g, s) for g, group in enumerate(groups) for s in group.samples if s.reward is not None]
    greedy = [groups[g].greedy for g, _ in samples]
    assert samples, "pack needs at least one scored sample"
    traces = [(i, trace) for i, (_, sample) in enumerate(samples) for trace in sample.traces]
    assert all(trace.owners[0] is not Owner.POLICY for _, trace in traces), "a trace starts with a prompt token"
    versions = torch.tensor([v for _, trace in traces for v in trace.versions], dtype=torch.int64)
    owned = torch.tensor([o is Owner.POLICY for _, trace in traces for o in trace.owners], dtype=torch.bool)
    return Batch(
        tokens=torch.tensor([t for _, trace in traces for t in trace.tokens], dtype=torch.int64),
        lengths=torch.tensor([len(trace.tokens) for _, trace in traces], dtype=torch.int64),
        owned=owned,
        mask=owned & (versions >= oldest),
        behaviour=torch.tensor([p for _, trace in traces for p in trace.logprobs], dtype=torch.float32),
        versions=versions,
        sample_of=torch.tensor([i for i, _ in traces], dtype=torch.int64),
        group_of=torch.tensor([g for g, _ in samples], dtype=torch.int64),
        rewards=torch.tensor([s.reward for _, s in samples], dtype=torch.float32),
        truncated=torch.tensor([s.stop in (StopReason.LENGTH, StopReason.CONTEXT) for _, s in samples], dtype=torch.bool),
        domains=tuple(s.prompt.domain for _, s in samples),
        greedy=torch.tensor([s.reward for s in greedy if s is not None]) if all(greedy) else None,
        turns=_turns([s for _, s in samples], [g for g, _ in samples]) if any(s.turns for _, s in samples) else None,
    )


def _turns(samples: Sequence[Sample], groups: Sequence[int]) -> Turns:
    """All turns. What a sample earned beyond its turns' rewards counts at its last turn."""
    owner, rewards, anchors, of_token = [], [], [], []
    known: dict[tuple[int, str], int] = {}
    for i, (sample, group) in enumerate(zip(samples, groups, strict=True)):
        columns = [[-1] * len(trace.tokens) for trace in sample.traces]
        for turn in sample.turns:
            columns[turn.trace][turn.start : turn.end] = [len(owner)] * (turn.end - turn.start)
            owner.append(i)
            rewards.append(turn.reward)
            anchors.append(known.setdefault((group, turn.state), len(known)))
        if not sample.turns:
            columns = [[len(owner) if o is Owner.POLICY else -1 for o in trace.owners] for trace in sample.traces]
            owner.append(i)
            rewards.append(0.0)
            anchors.append(-1)
        assert sample.reward is not None
        rewards[-1] += sample.reward - sum(turn.reward for turn in sample.turns)
        of_token += [turn for column in columns for turn in column]
    return Turns(
        torch.tensor(owner, dtype=torch.int64),
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(anchors, dtype=torch.int64),
        torch.tensor(of_token, dtype=torch.int64),
    )
