"""Every estimator, loss, aggregation and correction equals a slow loop written from its formula, edges included."""

import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_batch import make_trace

from drumroll.algorithms import Algorithm
from drumroll.algorithms.advantages import ESTIMATORS, Scores, TurnScores
from drumroll.algorithms.aggregations import AGGREGATIONS
from drumroll.algorithms.corrections import behaviour_weights
from drumroll.algorithms.losses import LOSSES, PolicyLoss, Tokens, ValueLoss, ValueTokens, kl_divergence
from drumroll.algorithms.shaping import KLPenalty, Normaliser, repetition, shape
from drumroll.algorithms.statistics import whiten
from drumroll.batch import pack
from drumroll.config import load
from drumroll.config.algorithm import PRESETS, AlgorithmConfig
from drumroll.errors import AlgorithmError, ConfigError
from drumroll.sample import Group, Owner, Prompt, Sample, Turn

# --- estimators ---


def mean(values):
    return sum(values) / len(values)


def deviation(values):
    return math.sqrt(mean([(v - mean(values)) ** 2 for v in values]))


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


def test_what_the_config_knows_of_the_parts_is_what_they_declare():
    """The config is read without importing torch, so it keeps its own lists."""
    from drumroll.config.algorithm import GROUPED, WITH_CRITIC, WITH_GREEDY, WITHOUT_RATIO

    ours = [
        name for name, part in ESTIMATORS.parts.items() if part.__module__.startswith("drumroll.")
    ]  # other tests have theirs
    traits = {name: ESTIMATORS.traits(name) for name in ours}
    assert {n for n, t in traits.items() if t.get("grouped")} == GROUPED
    assert {n for n, t in traits.items() if "values" in t.get("needs", ())} == WITH_CRITIC
    assert {n for n, t in traits.items() if "greedy" in t.get("needs", ())} == WITH_GREEDY
    assert {n for n in LOSSES.parts if LOSSES.traits(n).get("ratio") is False} == WITHOUT_RATIO


# --- losses ---


def slow_loss(name, c, rows):
    """Per token, in plain Python; rows are (logprob, old, advantage, sequence)."""
    total = {s: sum(n - o for n, o, _, t in rows if t == s) for *_, s in rows}
    count = {s: sum(t == s for *_, t in rows) for *_, s in rows}

    def clip(x):
        return min(max(x, 1 - c.clip_low), 1 + c.clip_high)

    out = []
    for n, o, a, s in rows:
        ratio = math.exp(min(max(n - o, -20), 20))
        if name == "ppo":
            gain = min(ratio * a, clip(ratio) * a)
            gain = max(gain, c.dual_clip * a) if c.dual_clip and a < 0 else gain
            out.append(-gain)
        elif name == "pg":
            out.append(-a * n)
        elif name == "gspo":
            g = math.exp(min(max(total[s] / count[s], -20), 20))
            out.append(-min(g * a, clip(g) * a))
        elif name == "cispo":
            out.append(-clip(ratio) * a * n)
        elif name == "topr":
            out.append(-(1.0 if a >= 0 else min(1.0, math.exp(min(max(total[s], -20), 20)))) * a * n)
        elif name == "sapo":
            t = c.temperature_positive if a > 0 else c.temperature_negative
            out.append(-a * 4 / t / (1 + math.exp(-t * (ratio - 1))))
        elif name == "mirror":
            out.append(-a * n + 0.5 * c.mirror * min(max(n - o, -20), 20) ** 2)
    return out


logprob = st.floats(-30, 0)
row = st.tuples(logprob, logprob, st.floats(-3, 3), st.integers(0, 3))


def tokens_of(rows):
    n, o, a = (torch.tensor(c, dtype=torch.float64) for c in list(zip(*rows, strict=True))[:3])
    sequence = torch.tensor([r[3] for r in rows])
    return Tokens(n.requires_grad_(), torch.zeros_like(n), o, o, a, None, sequence)


@pytest.mark.parametrize("name", sorted(LOSSES.parts))
@given(rows=st.lists(row, min_size=1, max_size=8), dual=st.sampled_from([None, 3.0]))
def test_losses_equal_their_formulas(name, rows, dual):
    config = AlgorithmConfig(loss=name, clip_low=0.2, clip_high=0.3, dual_clip=dual)
    got = LOSSES.get(name)(tokens_of(rows), config)
    assert got.tolist() == pytest.approx(slow_loss(name, config, rows), rel=1e-6, abs=1e-6)
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("name", sorted(LOSSES.parts))
def test_at_the_old_policy_every_loss_has_the_policy_gradient(name):
    """Where nothing has moved, all of them push each token by its advantage; gspo spreads it over the sequence."""
    rows = [(-1.0, -1.0, 0.5, 0), (-2.0, -2.0, 0.5, 0), (-0.5, -0.5, -1.5, 1)]
    tokens = tokens_of(rows)
    LOSSES.get(name)(tokens, AlgorithmConfig(loss=name)).sum().backward()
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx([-0.5, -0.5, 1.5], abs=1e-9)


@pytest.mark.parametrize("name", sorted(LOSSES.parts))
@pytest.mark.parametrize(
    ("now", "old"), [(-1e4, 0.0), (0.0, -1e4), (-math.inf, -1.0), (-1.0, -math.inf), (-math.inf, -math.inf)]
)
def test_huge_ratios_and_impossible_tokens(name, now, old):
    """Far away is finite; where the log-prob itself is in the loss, -inf is caught by the learner's guard."""
    tokens = tokens_of([(now, old, 1.0, 0), (-1.0, -1.0, -1.0, 0)])
    loss = LOSSES.get(name)(tokens, AlgorithmConfig(loss=name))
    if math.isinf(now) and name in ("pg", "cispo", "topr", "mirror"):
        assert not torch.isfinite(loss).all()
        return
    assert torch.isfinite(loss).all()
    loss.sum().backward()
    assert tokens.logprobs.grad is not None
    assert torch.isfinite(tokens.logprobs.grad).all()


@given(st.lists(st.tuples(*[st.floats(-5, 5)] * 3), min_size=1, max_size=6), st.sampled_from([None, 0.2]))
def test_the_value_loss_equals_its_formula(rows, clip):
    value, old, returns = (torch.tensor(c, dtype=torch.float64) for c in zip(*rows, strict=True))
    got, _ = ValueLoss(AlgorithmConfig(value_clip=clip))(ValueTokens(value, old, returns))
    for loss, (v, o, r) in zip(got.tolist(), rows, strict=True):
        held = o + min(max(v - o, -clip), clip) if clip else v
        assert loss == pytest.approx(max((v - r) ** 2, (held - r) ** 2) / 2)


def test_the_imitation_term_acts_on_successes_only():
    tokens = tokens_of([(-1.0, -1.0, 0.0, 0), (-2.0, -2.0, 0.0, 1)])
    tokens.rewards = torch.tensor([1.0, 0.0])
    loss, _ = PolicyLoss(AlgorithmConfig(sft=0.5))(tokens)
    assert loss.tolist() == pytest.approx([0.5, 0.0])
    assert not PolicyLoss(AlgorithmConfig(sft=0.5)).skips_zero_advantage


def test_clipping_stops_the_gradient_and_cispo_does_not():
    rows = [(0.0, -2.0, 1.0, 0), (-4.0, -2.0, -1.0, 1)]  # far beyond the clip in the direction of the advantage
    for name, moves in (("ppo", False), ("cispo", True)):
        tokens = tokens_of(rows)
        LOSSES.get(name)(tokens, AlgorithmConfig(loss=name)).sum().backward()
        assert tokens.logprobs.grad is not None
        assert bool((tokens.logprobs.grad != 0).all()) is moves


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators(estimator):
    new, reference = torch.tensor([-1.0, -2.0, -40.0]), torch.tensor([-1.5, -2.0, 0.0])
    got = kl_divergence(new, reference, estimator).tolist()
    for value, n, r in zip(got, new.tolist(), reference.tolist(), strict=True):
        gap = min(max(r - n, -20), 20)
        want = {"k1": -gap, "k2": gap * gap / 2, "k3": math.exp(gap) - gap - 1}[estimator]
        assert value == pytest.approx(want, rel=1e-5)


# --- corrections ---


@pytest.mark.parametrize("kind", ["none", "truncate", "truncate_sequence", "band", "geometric"])
@given(rows=st.lists(st.tuples(logprob, logprob, st.integers(0, 2)), min_size=1, max_size=8))
def test_corrections_equal_their_formulas(kind, rows):
    config = AlgorithmConfig(correction=kind, correction_low=0.5, correction_high=2.0)
    old, behaviour = (torch.tensor(c, dtype=torch.float64) for c in list(zip(*rows, strict=True))[:2])
    got = behaviour_weights(old, behaviour, torch.tensor([r[2] for r in rows]), config).tolist()
    gaps = [min(max(o - b, -20), 20) for o, b, _ in rows]
    for value, gap, (*_, s) in zip(got, gaps, rows, strict=True):
        own = [g for g, (*_, t) in zip(gaps, rows, strict=True) if t == s]
        ratio, geometric = math.exp(gap), math.exp(mean(own))
        want = {
            "none": 1.0,
            "truncate": min(ratio, 2.0),
            "truncate_sequence": min(math.exp(min(max(sum(own), -20), 20)), 2.0),
            "band": ratio if 0.5 <= ratio <= 2 else 0.0,
            "geometric": float(0.5 <= geometric <= 2),
        }[kind]
        if min(abs(ratio - 0.5), abs(ratio - 2), abs(geometric - 0.5), abs(geometric - 2)) > 1e-9:
            assert value == pytest.approx(want, rel=1e-6)


# --- whole algorithms ---


def sample_batch(seed=0):
    from test_batch import random_groups

    batch = pack(random_groups(seed=seed))
    noise = torch.Generator().manual_seed(seed)
    return batch.with_(
        behaviour=-torch.rand(len(batch.tokens), generator=noise) * 3 * batch.mask,
        values=torch.rand(len(batch.tokens), generator=noise) * batch.mask,
        greedy=torch.full((batch.num_samples,), 0.5),
    )


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_aggregations_equal_their_formulas(name):
    batch = sample_batch()
    lengths, samples = batch.policy_lengths().tolist(), batch.num_samples
    shares = AGGREGATIONS[name](batch, 10).tolist()
    total = sum(lengths)
    for share, trained, sample in zip(shares, batch.mask.tolist(), batch.sample_of_token().tolist(), strict=True):
        want = {
            "token_mean": 1 / total,
            "sequence_mean": 1 / samples / lengths[sample],
            "sequence_sum": 1 / samples,
            "fixed_length": 1 / samples / 10,
        }[name]
        assert share == pytest.approx(want if trained else 0.0)


@pytest.mark.parametrize("recipe", sorted(PRESETS))
@pytest.mark.parametrize("correction", ["none", "truncate_sequence"])
def test_no_recipe_depends_on_how_a_batch_is_cut(recipe, correction):
    """The whole gradient in float64, off-policy, whole against cut into micro-batches and reversed."""
    from test_batch import gradient, relative

    config = AlgorithmConfig.model_validate({"preset": recipe, "correction": correction})
    algorithm = Algorithm(config, single_update=False, longest=10)
    batch = sample_batch()
    batch = algorithm.advantages(batch.with_(old=batch.behaviour * 0.9))
    whole = gradient(batch, algorithm.loss, algorithm.aggregate)
    assert whole.norm() > 1e-6
    assert relative(gradient(batch, algorithm.loss, algorithm.aggregate, micro_tokens=17), whole) < 1e-10
    backwards = batch.select(list(reversed(range(batch.num_traces))))
    assert relative(gradient(backwards, algorithm.loss, algorithm.aggregate), whole) < 1e-10


@pytest.mark.parametrize("recipe", sorted(PRESETS))
def test_skipping_zero_advantage_is_exact_for_every_recipe(recipe):
    from test_batch import gradient, relative

    algorithm = Algorithm(AlgorithmConfig.model_validate(recipe), single_update=True, longest=10)
    batch = algorithm.advantages(sample_batch())

    class Never(PolicyLoss):
        skips_zero_advantage = False

    full = gradient(batch, Never(algorithm.config), algorithm.aggregate)
    assert relative(gradient(batch, algorithm.loss, algorithm.aggregate), full) < 1e-10


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


def test_shaping():
    batch = written((0, 5.0, [3]), (0, -5.0, [3] * 6), (1, 1.0, [3] * 8), (1, 1.0, [3] * 10))
    config = AlgorithmConfig(reward_clip=2.0, reward_scale=0.5, overlong_buffer=0.4)
    assert shape(batch, config, 10).tolist() == pytest.approx([1.0, -1.0, 0.5 - 0.5, 0.5 - 1.0])
    assert shape(batch, AlgorithmConfig(length_penalty=2.0), 10).tolist() == pytest.approx([4.8, -6.2, -0.6, -1.0])
    cut = batch.with_(truncated=torch.tensor([True, False, False, True]))
    assert shape(cut, AlgorithmConfig(truncated_penalty=0.3), 10).tolist() == pytest.approx([4.7, -5.0, 1.0, 0.7])


@pytest.mark.parametrize("how", ["drop_truncated", "overage"])
def test_penalties_and_lengths_see_what_was_written_not_what_is_trained(how):
    """Tokens left out of the loss, of a truncated sample or of weights too old, were written all the same."""
    batch = written((0, 1.0, [3]), (0, 1.0, [3] * 8), (0, 0.0, [4] * 10))
    penalties = {"length_penalty": 0.5, "overlong_buffer": 0.4, "repetition_penalty": 0.1, "repetition_ngram": 2}
    whole = AlgorithmConfig(advantage="opo", **penalties)
    expected = shape(batch, whole, 10)
    scores = Algorithm(whole, single_update=True, longest=10)._scores(batch)
    if how == "overage":
        config, fewer = whole, batch.with_(mask=batch.mask & (batch.sample_of_token() != 2))
    else:
        config = AlgorithmConfig(advantage="opo", drop_truncated=True, **penalties)
        fewer = batch.with_(truncated=torch.tensor([False, False, True]))
    done = Algorithm(config, single_update=True, longest=10).advantages(fewer)
    assert done.trained_lengths().tolist() == [1, 8, 0]
    assert done.policy_lengths().tolist() == scores.lengths.tolist() == [1, 8, 10]
    assert shape(done, config, 10).tolist() == expected.tolist()
    own = ESTIMATORS.get("opo")(scores)
    assert done.advantages[done.mask].tolist() == pytest.approx([own[0].item(), *[own[1].item()] * 8])


def test_repetition():
    batch = written((0, 0.0, [3, 4, 3, 4, 3]), (0, 0.0, [3, 4, 5]), (1, 0.0, [7]))
    assert repetition(batch, 2).tolist() == pytest.approx([2 / 4, 0.0, 0.0])
    config = AlgorithmConfig(repetition_penalty=3.0, repetition_ngram=2)
    assert shape(batch, config, 10).tolist() == pytest.approx([-1.5, 0.0, 0.0])


STATISTICS = ["none", "group", "batch", "domain", "running"]
scored = st.lists(st.tuples(st.integers(0, 3), st.floats(-3, 3, width=32)), min_size=1, max_size=12)


@given(st.sampled_from(STATISTICS), st.sampled_from(STATISTICS), st.lists(scored, min_size=1, max_size=3))
def test_normalisation_equals_its_formula(centre, scale, batches):
    normalise = Normaliser(AlgorithmConfig(advantage="reinforce", reward_mean=centre, reward_std=scale))
    past = []
    for rows in batches:
        rows = sorted(rows, key=lambda r: r[0])
        batch = written(*[(g, r, [3]) for g, r in rows])
        past += [r for _, r in rows]

        def peers(kind, group, rows=rows, past=past):
            return {
                "group": [r for g, r in rows if g == group],
                "batch": [r for _, r in rows],
                "domain": [r for g, r in rows if g % 2 == group % 2],
                "running": past,
            }[kind]

        got = normalise(batch.rewards.double(), batch).tolist()
        for value, (g, r) in zip(got, rows, strict=True):
            want = r - mean(peers(centre, g)) if centre != "none" else r
            spread = deviation(peers(scale, g)) if scale != "none" else 0.0
            if not 1e-7 < spread < 1e-5:
                assert value == pytest.approx(want / spread if spread > 1e-6 else want, rel=1e-4, abs=1e-4)


def test_running_statistics_and_the_adaptive_coefficient_survive_a_resume():
    config = AlgorithmConfig(advantage="reinforce", reward_mean="running", reward_std="running", kl_reward=0.1, kl_target=1.0)
    batches = [sample_batch(seed).with_(reference=torch.full((len(sample_batch(seed).tokens),), -2.0)) for seed in range(3)]
    whole, first, second = (Algorithm(config, single_update=True) for _ in range(3))
    expected = [whole.advantages(b).advantages for b in batches][-1]
    for b in batches[:2]:
        first.advantages(b)
    second.restore(json.loads(json.dumps(first.state())))
    got = second.advantages(batches[2]).advantages
    assert torch.equal(got, expected)
    assert whole.penalty.coefficient != 0.1
    assert not torch.equal(Algorithm(config, single_update=True).advantages(batches[2]).advantages, expected)


@pytest.mark.parametrize("advantage", ["reinforce", "dr_grpo"])
def test_kl_in_the_reward(advantage):
    """Each token pays for itself; an estimator per sample sees the sum, one per token what is still to come."""
    batch = written((0, 1.0, [3, 4]), (0, 0.0, [5]))
    batch = batch.with_(reference=torch.where(batch.mask, -1.0, 0.0), behaviour=torch.tensor([0, -0.5, -2.0, 0, -1.0]))
    done = Algorithm(AlgorithmConfig(advantage=advantage, kl_reward=0.1), single_update=True).advantages(batch)
    costs = [0.05, -0.1, 0.0]  # 0.1 × (log-prob − reference log-prob)
    if advantage == "reinforce":
        want = [1 - costs[0] - costs[1], 1 - costs[1], 0.0]
    else:
        own = 1 - costs[0] - costs[1]
        want = [own / 2, own / 2, -own / 2]
    assert done.advantages[done.mask].tolist() == pytest.approx(want)


@pytest.mark.parametrize("advantage", ["positive", "pass_at_k"])
def test_a_success_is_one_whatever_the_reference_costs(advantage):
    """A KL cost above the reward makes no failure of a success, and a KL gain no success of a failure."""
    batch = written((0, 1.0, [3, 4]), (0, 0.0, [5]), (0, 0.0, [6]))
    reference = torch.where(batch.mask, torch.where(batch.sample_of_token() == 0, -50.0, -0.1), 0.0)
    batch = batch.with_(reference=reference, behaviour=torch.where(batch.mask, -1.0, 0.0))
    costly = Algorithm(AlgorithmConfig(advantage=advantage, kl_reward=1.0), single_update=True).advantages(batch)
    free = Algorithm(AlgorithmConfig(advantage=advantage), single_update=True).advantages(batch)
    assert costly.advantages.tolist() == free.advantages.tolist()
    assert free.advantages[batch.mask][0] > 0


def test_the_adaptive_coefficient_moves_towards_its_target():
    penalty = KLPenalty(AlgorithmConfig(kl_reward=0.1, kl_target=1.0, kl_horizon=10))
    penalty(torch.tensor([5.0]), torch.tensor([0]), 1)
    assert penalty.coefficient == pytest.approx(0.1 * (1 + 0.2 / 10))
    penalty(torch.tensor([0.95]), torch.tensor([0]), 1)
    assert penalty.coefficient == pytest.approx(0.1 * 1.02 * (1 - 0.05 / 10))


def test_masks_of_difficulty_and_zero_advantage():
    batch = written((0, 1.0, [3]), (0, 1.0, [4]), (1, 1.0, [5]), (1, 0.0, [6]), (2, 0.0, [7]), (2, 0.0, [8]))
    for config in (AlgorithmConfig(difficulty_band=(0.2, 0.8)), AlgorithmConfig(drop_zero_advantage=True)):
        done = Algorithm(config, single_update=True).advantages(batch)
        assert done.tokens[done.mask].tolist() == [5, 6]
        assert float(Algorithm(config, single_update=True).aggregate(done).sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("recipe", sorted(PRESETS))
def test_a_batch_without_a_trained_token(recipe):
    batch = sample_batch()
    algorithm = Algorithm(AlgorithmConfig.model_validate(recipe), single_update=True)
    done = algorithm.advantages(batch.with_(mask=torch.zeros_like(batch.mask)))
    assert not done.advantages.any()
    assert not algorithm.aggregate(done).any()


@given(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=20))
def test_whitening(rows):
    values, mask = torch.tensor([v for v, _ in rows], dtype=torch.float64), torch.tensor([m for _, m in rows])
    out = whiten(values, mask)
    assert torch.isfinite(out).all()
    assert out[~mask].eq(0).all()
    if mask.any() and values[mask].std(correction=0) > 1e-6:
        assert float(out[mask].mean()) == pytest.approx(0, abs=1e-6)
        assert float(out[mask].std(correction=0)) == pytest.approx(1, abs=1e-6)


def test_truncated_samples_and_domains():
    batch = sample_batch()
    batch = batch.with_(truncated=torch.arange(batch.num_samples) < 3)
    config = AlgorithmConfig(drop_truncated=True, domain_weights={"d": 0.25})
    algorithm = Algorithm(config, single_update=True)
    done = algorithm.advantages(batch)
    assert not done.mask[done.sample_of_token() < 3].any()
    assert float(algorithm.aggregate(done).sum()) == pytest.approx(0.25)


def test_an_estimator_of_ones_own_and_a_guard_against_nan(mine):
    name = mine(
        "from drumroll.algorithms.advantages import ESTIMATORS\n"
        "def halves(scores): return scores.rewards / 2\n"
        "def broken(scores): return scores.rewards / 0 * 0\n"
    )
    batch = sample_batch()
    done = Algorithm(AlgorithmConfig(advantage=f"{name}:halves"), single_update=True).advantages(batch)
    assert done.advantages is not None
    assert done.advantages[done.mask].max() == 0.5
    with pytest.raises(AlgorithmError, match=rf"algorithm.advantage '{name}:broken' gave nan for sample 0 .*domain 'd'"):
        Algorithm(AlgorithmConfig(advantage=f"{name}:broken"), single_update=True).advantages(batch)


def test_a_finite_loss_with_a_broken_gradient_leaves_the_weights(mine):
    from drumroll.config.optim import OptimConfig
    from drumroll.learners import Update
    from drumroll.learners.backends.torch import torch_learner
    from drumroll.models.loading import load as load_model

    name = mine("def broken(tokens, config): return (tokens.logprobs * 0).sqrt()")
    algorithm = Algorithm(AlgorithmConfig(loss=f"{name}:broken"), single_update=True)
    learner = torch_learner(load_model("tiny-random"), OptimConfig(lr=1.0), total_steps=1)
    before = {n: w.clone() for n, w in learner.weights()}
    with pytest.raises(AlgorithmError, match=r"the gradient at step 1 has norm nan though the loss is finite"):
        learner.update(Update(algorithm.advantages(sample_batch()), algorithm.loss, algorithm.aggregate))
    assert all(torch.equal(before[n], w) for n, w in learner.weights())


def test_a_critic_of_ones_own_estimator_is_asked_for_by_its_traits(mine, small):
    from drumroll.placement.layout import requests
    from drumroll.workers.runtime import open_algorithm

    text = "from drumroll.algorithms.advantages import ESTIMATORS\n{}def mine(scores): return scores.rewards\n"
    name = mine(text.format("@ESTIMATORS.register('with_critic', needs=('values',))\n"))
    config = load(small(algorithm={"advantage": f"{name}:mine", "critic_first": 1})).config
    assert "critic" in [r.role for r in requests(config, open_algorithm(config).needs)]
    plain = load(small(algorithm={"advantage": f"{mine(text.format(''))}:mine"})).config
    assert "critic" not in [r.role for r in requests(plain, open_algorithm(plain).needs)]
    with pytest.raises(ConfigError, match=r"critic_first: 1 needs a critic, but algorithm.advantage: .*:mine asks for none"):
        Algorithm(plain.algorithm.model_copy(update={"critic_first": 1}), single_update=True)


def test_what_a_critic_explains_of_equal_returns_is_nothing():
    batch = written((0, 1.0, [3, 4]), (0, 1.0, [5]))
    algorithm = Algorithm(AlgorithmConfig(preset="ppo", gae_decay=1.0), single_update=True)
    algorithm.advantages(batch.with_(values=torch.where(batch.mask, torch.tensor([0.0, 0.3, 0.9, 0.0, -2.0]), 0.0)))
    assert algorithm.metrics["critic/explained"] == 0.0


def test_a_loss_that_is_not_a_number_names_itself_and_the_sample(mine):
    from test_batch import gradient

    name = mine("def broken(tokens, config): return tokens.logprobs * float('nan')")
    algorithm = Algorithm(AlgorithmConfig(loss=f"{name}:broken"), single_update=True)
    with pytest.raises(AlgorithmError, match=rf"loss '{name}:broken' gave nan for a token of sample \d+"):
        gradient(algorithm.advantages(sample_batch()), algorithm.loss, algorithm.aggregate)


def test_recipes_by_name(small):
    config = load(small(algorithm="dapo")).config
    assert (config.algorithm.clip_high, config.algorithm.overlong_buffer) == (0.28, 0.25)
    assert load(small(algorithm={"preset": "dapo", "clip_high": 0.4})).config.algorithm.clip_high == 0.4
    with pytest.raises(ConfigError, match=r"algorithm.preset 'dappo' is not known.*Did you mean 'dapo'"):
        load(small(algorithm="dappo"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"algorithm": "rloo", "rollout": {"max_staleness": 1}}, "has no ratio that would notice; set algorithm.correction"),
        ({"algorithm": "rloo", "rollout": {"samples": 1}}, "compares the samples of a group"),
        ({"algorithm": "lite_ppo", "rollout": {"samples": 1}}, "compare the samples of a group"),
        ({"algorithm": "rloo", "optim": {"epochs": 2}}, "has no ratio that would notice; set another loss"),
        ({"algorithm": {"preset": "remax", "reward_std": "batch"}}, "takes the greedy answer's reward for its baseline"),
        ({"algorithm": {"kl_target": 1.0}}, "adapts algorithm.kl_reward, which is 0"),
        ({"algorithm": {"critic_first": 3}}, "needs a critic, but algorithm.advantage: grpo has none"),
        ({"algorithm": {"advantage": "pass_at_k", "pass_k": 9}}, "cannot be drawn from rollout.samples: 4"),
        ({"algorithm": {"difficulty_band": [0.8, 0.2]}}, "needs low < high"),
        ({"rollout": {"partial": True}}, "needs rollout.max_staleness of at least 1, got 0"),
        ({"rollout": {"oversample": 0.5}}, "greater than or equal to 1, got 0.5"),
        ({"rollout": {"max_staleness": -1}}, "greater than or equal to 0, got -1"),
        ({"deterministic": True, "rollout": {"max_staleness": 1}}, "deterministic: true needs rollout.order: draw"),
    ],
)
def test_unsound_combinations_are_refused(small, changes, reason):
    with pytest.raises(ConfigError) as caught:
        load(small(**changes))
    assert reason in str(caught.value)
