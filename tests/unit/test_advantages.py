"""Every advantage estimator equals a slow loop written from its formula, per sample, per token and per turn."""

import itertools
import math

import pytest
import torch
from algorithm_references import deviation, mean
from hypothesis import given
from hypothesis import strategies as st
from test_batch import make_trace

from drumroll.algorithms import Algorithm
from drumroll.algorithms.advantages import ESTIMATORS, Scores, TurnScores
from drumroll.batch import pack
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.sample import Group, Owner, Prompt, Sample, Turn


def slow_pass_at_k(rewards, k):
    """By enumeration: the mean over all k-subsets with and without each sample."""
    n, k = len(rewards), min(k, len(rewards))
    value = {c: float(any(rewards[i] > 0 for i in c)) for c in itertools.combinations(range(n), k)}
    centre, spread = mean(list(value.values())), deviation(list(value.values()))
    if spread < 1e-6:
        return [0.0] * n
    return [(mean([v for c, v in value.items() if i in c]) - centre) / spread for i in range(n)]


SLOW = {
    "grpo": lambda r, n: [(x - mean(r)) / (deviation(r) + 1e-6) if deviation(r) > 1e-6 else 0.0 for x in r],
    "dr_grpo": lambda r, n: [x - mean(r) for x in r],
    "rloo": lambda r, n: [r[i] - mean(r[:i] + r[i + 1 :]) if len(r) > 1 else 0.0 for i in range(len(r))],
    "opo": lambda r, n: [x - sum(a * b for a, b in zip(r, n, strict=True)) / max(1, sum(n)) for x in r],
    "pass_at_k": lambda r, n: slow_pass_at_k(r, 2),
    "positive": lambda r, n: [float(x > 0) for x in r],
    "remax": lambda r, n: [x - 0.25 for x in r],
}
PER_TOKEN = {"gae", "reinforce"}
PER_TURN = {"gigpo", "turns"}
reward = st.one_of(st.sampled_from([0.0, 1.0, -1.0]), st.floats(-5, 5))
member = st.tuples(reward, st.integers(1, 9))


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS.parts) - PER_TOKEN - PER_TURN))
@given(groups=st.lists(st.lists(member, min_size=1, max_size=6), min_size=1, max_size=4))
def test_estimators_equal_their_formulas(name, groups):
    rewards = torch.tensor([r for g in groups for r, _ in g], dtype=torch.float64)
    lengths = torch.tensor([n for g in groups for _, n in g])
    group_of = torch.tensor([i for i, g in enumerate(groups) for _ in g])
    greedy = torch.full_like(rewards, 0.25)
    got = ESTIMATORS.get(name)(Scores(rewards, group_of, lengths, AlgorithmConfig(pass_k=2), greedy))
    want = [a for g in groups for a in SLOW[name]([r for r, _ in g], [n for _, n in g])]
    assert got.tolist() == pytest.approx(want, abs=1e-6, rel=1e-6)
    assert torch.isfinite(got).all()


token = st.tuples(st.floats(-2, 2), st.floats(-2, 2))


@pytest.mark.parametrize("name", sorted(PER_TOKEN))
@given(st.lists(st.lists(token, min_size=1, max_size=7), min_size=1, max_size=4), st.floats(0, 1), st.floats(0, 1))
def test_token_estimators_equal_their_formulas(name, traces, discount, decay):
    rewards, values = (torch.tensor([t[i] for trace in traces for t in trace], dtype=torch.float64) for i in (0, 1))
    trace_of = torch.tensor([2 * i for i, trace in enumerate(traces) for _ in trace])  # traces without a token leave gaps
    config = AlgorithmConfig(discount=discount, gae_decay=decay)
    nothing = torch.zeros(1)
    got = ESTIMATORS.get(name)(Scores(nothing, nothing, nothing, config, None, rewards, values, trace_of))
    want = []
    for trace in traces:
        for t in range(len(trace)):
            if name == "reinforce":
                want.append(sum(discount ** (k - t) * trace[k][0] for k in range(t, len(trace))))
            else:
                ahead = [v for _, v in trace[1:]] + [0.0]
                surprise = [r + discount * n - v for (r, v), n in zip(trace, ahead, strict=True)]
                want.append(sum((discount * decay) ** (k - t) * surprise[k] for k in range(t, len(trace))))
    assert got.tolist() == pytest.approx(want, abs=1e-9)


turn = st.tuples(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-2, 2)), st.integers(-1, 2), st.integers(0, 3))
episode = st.lists(turn, min_size=1, max_size=4)


@pytest.mark.parametrize("name", sorted(PER_TURN))
@given(
    groups=st.lists(st.lists(episode, min_size=1, max_size=4), min_size=1, max_size=3),
    discount=st.floats(0, 1),
    weight=st.floats(0, 2),
)
def test_turn_estimators_equal_their_formulas(name, groups, discount, weight):
    """Turns are (reward, state or -1, tokens)."""
    samples = [(g, e) for g, group in enumerate(groups) for e in group]
    flat = [(i, g, t, reward, state, size) for i, (g, e) in enumerate(samples) for t, (reward, state, size) in enumerate(e)]
    turns = TurnScores(
        torch.tensor([i for i, *_ in flat]),
        torch.tensor([reward for *_, reward, _, _ in flat], dtype=torch.float64),
        torch.tensor([-1 if state < 0 else 3 * g + state for _, g, _, _, state, _ in flat]),
        torch.tensor([n for n, (*_, size) in enumerate(flat) for _ in range(size)], dtype=torch.int64),
    )
    totals = [sum(reward for reward, *_ in e) for _, e in samples]
    scores = Scores(
        torch.tensor(totals, dtype=torch.float64),
        torch.tensor([g for g, _ in samples]),
        torch.ones(len(samples)),
        AlgorithmConfig(turn_discount=discount, turn_weight=weight),
        turns=turns,
    )
    got = ESTIMATORS.get(name)(scores)

    def later(i, t):
        return sum(discount**k * reward for k, (reward, *_) in enumerate(samples[i][1][t:]))

    def normal(value, others):
        return (value - mean(others)) / (deviation(others) + 1e-6) if deviation(others) > 1e-6 else 0.0

    want = []
    for i, g, t, _, state, size in flat:
        if name == "turns":
            value = normal(later(i, t), [later(j, u) for j, h, u, *_ in flat if h == g])
        else:
            value = normal(totals[i], [total for total, (h, _) in zip(totals, samples, strict=True) if h == g])
            if state >= 0:
                same = [later(j, u) for j, h, u, _, s, _ in flat if (h, s) == (g, state)]
                value += weight * normal(later(i, t), same)
        want += [value] * size
    assert got.tolist() == pytest.approx(want, abs=1e-5, rel=1e-5)


episode_turn = st.tuples(st.floats(-2, 2, width=32), st.integers(0, 3))
"""A turn's reward and the number of its tokens."""
played_sample = st.tuples(
    st.lists(episode_turn, max_size=4),
    st.booleans(),
    st.floats(-1, 1, width=32),
    st.lists(st.booleans(), min_size=12, max_size=12),
)
"""Turns (none: a plain answer of two traces), whether each has a trace, the reward beyond them, which tokens are trained."""


def as_sample(prompt, number, turns, apart, extra):
    """The sample that an episode of these turns leaves behind."""
    if not turns:
        traces = [make_trace([(Owner.POLICY, [5, 6])]), make_trace([(Owner.POLICY, [7])])]
        return Sample(prompt, 0, number, traces=traces, reward=extra)
    traces, found = [make_trace([])], []
    for place, (reward, size) in enumerate(turns):
        if place:
            if apart:
                traces.append(make_trace([]))
            else:
                traces[-1].extend([9], Owner.ENVIRONMENT)
        start = len(traces[-1].tokens)
        traces[-1].extend([5] * size, Owner.POLICY, [-1.0] * size, [0] * size)
        found.append(Turn(len(traces) - 1, start, start + size, str(place), reward))
    return Sample(prompt, 0, number, traces=traces, reward=sum(r for r, _ in turns) + extra, turns=found)


@pytest.mark.parametrize("name", ["gae", "reinforce"])
@pytest.mark.parametrize(
    "shaped", [{}, {"reward_scale": 0.5, "reward_clip": 1.5}, {"reward_mean": "group", "reward_std": "batch"}]
)
@given(st.lists(played_sample, min_size=1, max_size=4), st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
def test_rewards_of_turns_are_credited_to_them_and_what_led_there(name, shaped, samples, discount, decay, seed):
    """A turn earns at its last token, in whatever trace; a plain answer at the end of each of its traces."""
    prompt = Prompt("p", "d", "", (1,))
    made = [as_sample(prompt, i, turns, apart, extra) for i, (turns, apart, extra, _) in enumerate(samples)]
    batch = pack([Group(prompt, 0, made)])
    noise = torch.rand(len(batch.tokens), generator=torch.Generator().manual_seed(seed))
    keep = [
        k
        for s, (_, _, _, kept) in zip(made, samples, strict=True)
        for n, t in enumerate(s.traces)
        for k in kept[n : n + len(t.tokens)]
    ]
    keep += [True] * (len(batch.tokens) - len(keep))
    batch = batch.with_(values=noise, mask=batch.mask & torch.tensor(keep[: len(batch.tokens)]))
    config = AlgorithmConfig(advantage=name, discount=discount, gae_decay=decay, **shaped)
    got = Algorithm(config, single_update=True).advantages(batch).advantages.tolist()

    limit, factor = config.reward_clip or math.inf, config.reward_scale

    def clipped(reward):
        return min(max(reward, -limit), limit) * factor

    totals = [clipped(float(r)) for r in batch.rewards]
    centre = mean(totals) if config.reward_mean == "group" else 0.0
    spread = deviation(totals) if config.reward_std == "batch" and deviation(totals) > 1e-6 else 1.0
    want, at = [0.0] * len(batch.tokens), 0
    trained, values = batch.mask.tolist(), noise.double().tolist()
    for sample, total in zip(made, totals, strict=True):
        chains, offset = [], at
        for number, trace in enumerate(sample.traces):
            own = [(offset + i, number, i) for i in range(len(trace.tokens)) if trained[offset + i]]
            offset += len(trace.tokens)
            if sample.turns and chains:
                chains[0] += own
            else:
                chains.append(own)
        for chain in chains:
            earned = [0.0] * len(chain)
            outcome = (total - centre) / spread
            pays = [clipped(turn.reward) / spread for turn in sample.turns[:-1]]
            pays.append(outcome - sum(pays))
            ends = [(turn.trace, turn.end) for turn in sample.turns] or [(10**6, 0)]
            for pay, end in zip(pays, ends, strict=True):
                before = [k for k, (_, trace, i) in enumerate(chain) if (trace, i) < end]
                if before:
                    earned[before[-1]] += pay
            later, ahead = 0.0, 0.0
            for k in reversed(range(len(chain))):
                token = chain[k][0]
                gain = earned[k] if name == "reinforce" else earned[k] + discount * ahead - values[token]
                later = gain + discount * (1.0 if name == "reinforce" else decay) * later
                ahead = values[token]
                want[token] = later
        at = offset
    assert got == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("apart", [False, True])
def test_a_turn_earns_what_came_of_it(apart):
    """Rewards 1 and 2: the first turn led to both, the second to its own."""
    prompt = Prompt("p", "d", "", (1,))
    batch = pack([Group(prompt, 0, [as_sample(prompt, 0, [(1.0, 2), (2.0, 1)], apart, 0.0)])])
    out = Algorithm(AlgorithmConfig(advantage="reinforce", discount=1.0), single_update=True).advantages(batch)
    assert out.advantages[batch.mask].tolist() == [3.0, 3.0, 2.0]


@pytest.mark.parametrize("name", ["gae", "reinforce"])
@pytest.mark.parametrize("reward_std", ["none", "batch"])
def test_an_episode_of_one_turn_is_an_answer(name, reward_std):
    """To the last bit."""
    prompt, noise = Prompt("p", "d", "", (1,)), torch.Generator().manual_seed(0)
    played = [as_sample(prompt, i, [(0.1 * i, 3)], False, 0.37 / (i + 1)) for i in range(5)]
    plain = [Sample(prompt, 0, i, traces=s.traces, reward=s.reward) for i, s in enumerate(played)]
    algorithm = Algorithm(AlgorithmConfig(advantage=name, discount=0.9, reward_std=reward_std), single_update=True)
    batches = [pack([Group(prompt, 0, samples)]) for samples in (played, plain)]
    values = torch.rand(len(batches[0].tokens), generator=noise)
    one, other = (algorithm.advantages(b.with_(values=values)).advantages for b in batches)
    assert torch.equal(one, other)


def test_turns_of_a_batch_sum_to_its_rewards_and_share_anchors_within_a_group():
    prompt = Prompt("p", "d", "", (1,))

    def played(states, extra=0.0):
        trace, turns = make_trace([]), []
        for n, state in enumerate(states):
            start = len(trace.tokens)
            trace.extend([5, 6], Owner.POLICY, [-1.0] * 2, [0] * 2)
            turns.append(Turn(0, start, start + 2, state, float(n)))
            trace.extend([7], Owner.ENVIRONMENT)
        return Sample(prompt, 0, 0, traces=[trace], reward=sum(t.reward for t in turns) + extra, turns=turns)

    plain = Sample(prompt, 0, 0, traces=[make_trace([(Owner.POLICY, [5, 6, 7])])], reward=2.0)
    batch = pack([Group(prompt, 0, [played("ab"), played("ba", 0.5)]), Group(prompt, 1, [played("a"), plain])])
    turns = batch.turns
    assert turns.rewards.tolist() == [0.0, 1.0, 0.0, 1.5, 0.0, 2.0]
    assert turns.anchor_of.tolist() == [0, 1, 1, 0, 2, -1]
    assert turns.sample_of.tolist() == [0, 0, 1, 1, 2, 3]
    assert turns.of_token.tolist() == [-1, 0, 0, -1, 1, 1, -1, -1, 2, 2, -1, 3, 3, -1, -1, 4, 4, -1, -1, 5, 5, 5]
    assert ((turns.of_token >= 0) == batch.mask).all()
    out = Algorithm(AlgorithmConfig(preset="gigpo"), single_update=True).advantages(batch)
    assert torch.isfinite(out.advantages).all()
    assert (out.advantages[~batch.mask] == 0).all()
