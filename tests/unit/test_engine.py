"""The native engine writes what the learner would predict, whatever else it is writing."""

import asyncio
import dataclasses
import random

import numpy as np
import pytest
import torch

from drumroll.batch import pack
from drumroll.config.optim import OptimConfig
from drumroll.config.roles import LoraConfig
from drumroll.engines import EngineLost, Request, Sampling
from drumroll.engines.native import NativeEngine
from drumroll.engines.sampler import Restriction, choose, keyed_uniform
from drumroll.learners.backends.torch import torch_learner
from drumroll.models.loading import end_tokens, load
from drumroll.models.lora import adapter_parameters, add_adapters
from drumroll.sample import Group, Owner, Prompt, Sample, StopReason, Trace
from drumroll.weights import WeightSyncError, WrongWeights


@pytest.fixture(scope="module")
def model():
    return load("tiny-random", seed=0)


def requests(count, *, seed=0, temperature=1.0, max_tokens=12):
    rng = random.Random(seed)
    prompts = [tuple(rng.randint(3, 60) for _ in range(rng.randint(1, 9))) for _ in range(count // 3 + 1)]
    return [
        Request(f"r{i}", rng.choice(prompts), Sampling(temperature, max_tokens), i * 31 + seed, order=i) for i in range(count)
    ]


def run(engine, wanted, *, stagger=False):
    async def go():
        async def one(request):
            if stagger:
                await asyncio.sleep(random.random() * 0.05)
            return await engine.generate(request)

        return await asyncio.gather(*(one(r) for r in wanted))

    return asyncio.run(go())


@pytest.fixture
def engine(model):
    made = NativeEngine(model, slots=8, context=32)
    yield made
    made.close()


@pytest.fixture
def fixed(model):
    made = NativeEngine(model, slots=8, context=32, fixed_shape=True)
    yield made
    made.close()


@pytest.mark.parametrize("which", ["engine", "fixed"])
def test_logprobs_equal_the_learners(which, model, request):
    engine = request.getfixturevalue(which)
    learner = torch_learner(model, OptimConfig(), total_steps=1)
    wanted = requests(30, temperature=0.7)
    groups = []
    for i, one in enumerate(wanted):
        prompt = Prompt(str(i), "d", "", one.tokens)
        sample = Sample(prompt, i, 0, reward=0.0)
        done = run(engine, [one])[0]
        trace = Trace()
        trace.extend(list(one.tokens), Owner.PROMPT)
        trace.extend(done.tokens, Owner.POLICY, done.logprobs, done.versions)
        sample.traces = [trace]
        groups.append(Group(prompt, i, [sample]))
    batch = pack(groups)
    gap = (learner.infer(batch, 0.7) - batch.behaviour)[batch.mask].abs().max()
    assert batch.mask.sum() > 100
    assert gap < 1e-4


def test_greedy_equals_transformers_generate(engine, model):
    wanted = requests(200, temperature=0.0, max_tokens=10)
    ours = run(engine, wanted)
    model.module.set_attn_implementation("eager")
    plain = {}
    try:
        for length in {len(r.tokens) for r in wanted}:
            prompts = sorted({r.tokens for r in wanted if len(r.tokens) == length})
            out = model.module.generate(
                torch.tensor(prompts), max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=list(model.eos)
            )
            plain |= dict(zip(prompts, out[:, length:].tolist(), strict=True))
    finally:
        model.module.set_attn_implementation("drumroll")
    for request, completion in zip(wanted, ours, strict=True):
        expected = plain[request.tokens]
        assert completion.tokens == expected[: len(completion.tokens)]
        assert not any(expected[len(completion.tokens) :])  # padding


def test_fixed_shape_is_bitwise_independent_of_company(fixed):
    """In deterministic mode neither arrival order nor neighbours change a sample, to the last bit."""
    wanted = requests(40)
    alone = [run(fixed, [r])[0] for r in wanted]
    together = run(fixed, wanted)
    shuffled = list(wanted)
    random.Random(1).shuffle(shuffled)
    again = dict(zip([r.id for r in shuffled], run(fixed, shuffled, stagger=True), strict=True))
    for request, a, b in zip(wanted, alone, together, strict=True):
        assert a.tokens == b.tokens == again[request.id].tokens
        assert a.logprobs == b.logprobs == again[request.id].logprobs


def test_more_requests_than_slots_all_end(engine):
    ended = run(engine, requests(100), stagger=True)
    assert len(ended) == 100
    assert all(0 < len(c.tokens) <= 12 and len(c.tokens) == len(c.logprobs) == len(c.versions) for c in ended)


def test_same_seed_same_tokens_other_seed_other_tokens(engine):
    first, second = run(engine, requests(20)), run(engine, requests(20))
    assert [c.tokens for c in first] == [c.tokens for c in second]
    other = [Request(r.id, r.tokens, r.sampling, r.seed + 1) for r in requests(20)]
    assert [c.tokens for c in first] != [c.tokens for c in run(engine, other)]


def endless(model, slots):
    """An engine whose requests never end by themselves within a test."""
    return NativeEngine(dataclasses.replace(model, eos=frozenset()), slots=slots, context=4000)


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def lengths(engine):
    return [len(row.completion.tokens) for row in engine._rows if row is not None]


def test_abort_returns_what_was_written(model):
    engine = endless(model, slots=1)

    async def go():
        running = asyncio.create_task(engine.generate(Request("running", (5, 6), Sampling(1.0, 3000), 1)))
        waiting = asyncio.create_task(engine.generate(Request("waiting", (5, 6), Sampling(1.0, 3000), 2)))
        await until(lambda: max(lengths(engine), default=0) > 3)
        engine.abort("waiting")
        engine.abort("unknown")
        second = await waiting
        engine.abort("running")
        return await running, second

    first, second = asyncio.run(go())
    engine.close()
    assert first.stop is second.stop is StopReason.ABORTED
    assert 3 < len(first.tokens) < 3000
    assert second.tokens == []


def test_cancelling_frees_the_slot(model):
    engine = endless(model, slots=2)

    async def go():
        tasks = [asyncio.create_task(engine.generate(Request(f"r{i}", (5,), Sampling(1.0, 3000), i))) for i in range(2)]
        await until(lambda: len(lengths(engine)) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await engine.generate(Request("next", (5,), Sampling(1.0, 2), 9))

    done = asyncio.run(go())
    engine.close()
    assert len(done.tokens) == 2


def test_stop_reasons(engine, model):
    too_long = Request("a", tuple(range(3, 35)), Sampling(), 0)
    assert run(engine, [too_long])[0].stop is StopReason.CONTEXT
    capped = run(engine, [Request("b", (5,), Sampling(1.0, 1), 0)])[0]
    assert len(capped.tokens) == 1
    text = model.tokenizer.decode(run(engine, [Request("c", (5,), Sampling(1.0, 8), 3)])[0].tokens)
    stopped = run(engine, [Request("d", (5,), Sampling(1.0, 8, (text[2:4],)), 3)])[0]
    assert stopped.stop is StopReason.STOP_STRING
    assert text[2:4] in model.tokenizer.decode(stopped.tokens)


def test_a_broken_model_fails_the_requests_not_the_engine(model):
    engine = NativeEngine(model, slots=4, context=16)
    bad = Request("bad", (10_000,), Sampling(), 0)
    with pytest.raises(IndexError):
        run(engine, [bad])
    assert run(engine, requests(4))[0].tokens
    engine.close()


@pytest.mark.parametrize("fixed_shape", [False, True])
@pytest.mark.parametrize("restricted", [False, True])
def test_a_request_that_cannot_be_computed_fails_alone(fixed_shape, restricted):
    """A temperature that overflows, numbers that a prompt drives to infinity, a token that the model does not have."""
    good = requests(4)
    if restricted:
        good = [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, top_p=0.9)) for r in good]
    model = load("tiny-random", seed=0)
    engine = NativeEngine(model, slots=8, context=32, fixed_shape=fixed_shape)
    alone = run(engine, good)
    used = {t for r, c in zip(good, alone, strict=True) for t in (*r.tokens, *c.tokens)}
    poison = next(t for t in range(3, 60) if t not in used)
    with torch.no_grad():
        embedding = model.module.get_input_embeddings()
        embedding.weight = torch.nn.Parameter(embedding.weight.clone())  # no longer the output layer's
        embedding.weight[poison] = torch.inf
    cold, endless = Sampling(1e-40), Sampling(max_tokens=1, top_k=10**30)
    one = good[0].tokens[0]
    hot = [((one, one), cold), ((one, poison), Sampling()), ((one, 10_000), Sampling()), ((one,), endless)]
    bad = [Request(f"bad{i}", tokens, how, 0, order=4 + i) for i, (tokens, how) in enumerate(hot)]

    async def go():
        return await asyncio.gather(*(engine.generate(r) for r in [*good, *bad]), return_exceptions=True)

    *beside, first, second, third, fourth = asyncio.run(go())
    assert [c.tokens for c in beside] == [c.tokens for c in alone]
    assert isinstance(first, FloatingPointError)
    assert "not a finite number at temperature 1e-40" in str(first)
    assert isinstance(second, FloatingPointError)
    assert isinstance(third, IndexError)
    assert "token 10000" in str(third)
    assert len(fourth.tokens) > 0  # more than there are is all of them
    for _ in range(3):  # also in the places that the others have left
        moved = [dataclasses.replace(r, order=r.order + 4) for r in good]
        assert [c.tokens for c in run(engine, [*moved, *good])] == 2 * [c.tokens for c in alone]
    engine.close()


# --- weights that change in flight ---


def perturbed(model):
    torch.manual_seed(3)
    return {n: p + 0.02 * torch.randn_like(p) for n, p in model.module.named_parameters()}


@pytest.mark.parametrize("recompute", [True, False])
def test_switching_weights_in_flight_loses_no_request(recompute):
    """Tokens before the switch are the old weights', tokens after it the new ones', each knowing its version."""
    model = load("tiny-random", seed=0)
    engine = NativeEngine(model, slots=4, context=200)
    new = perturbed(model)

    async def go():
        wanted = [Request(f"r{i}", (5, 6, 7 + i), Sampling(1.0, 150), i) for i in range(6)]
        tasks = [asyncio.create_task(engine.generate(r)) for r in wanted]
        await asyncio.sleep(0.1)
        await asyncio.to_thread(engine.load, 1, new.items(), recompute=recompute)
        return wanted, await asyncio.gather(*tasks)

    wanted, done = asyncio.run(go())
    engine.close()
    assert any({0, 1} <= set(c.versions) for c in done), "no sample spans the switch"
    assert all(c.versions == sorted(c.versions) for c in done)
    if recompute:  # then every later token is exactly what the new weights say, prefix included
        learner = torch_learner(model, OptimConfig(), total_steps=1)
        groups = []
        for i, (one, c) in enumerate(zip(wanted, done, strict=True)):
            trace = Trace()
            trace.extend(list(one.tokens), Owner.PROMPT)
            trace.extend(c.tokens, Owner.POLICY, c.logprobs, c.versions)
            prompt = Prompt(str(i), "d", "", one.tokens)
            groups.append(Group(prompt, i, [Sample(prompt, i, 0, traces=[trace], reward=0.0)]))
        batch = pack(groups)
        gap = (learner.infer(batch, 1.0) - batch.behaviour).abs()
        assert gap[batch.mask & (batch.versions == 1)].max() < 1e-4
        assert gap[batch.mask & (batch.versions == 0)].max() > 1e-3


def test_an_interrupted_request_goes_on_where_it_stopped(model):
    """Interrupted and resumed under the same weights, a sample is the same as never interrupted."""
    engine = endless(model, slots=2)
    whole = run(engine, [Request("w", (5, 6), Sampling(1.0, 300), 9)])[0]

    async def go():
        task = asyncio.create_task(engine.generate(Request("a", (5, 6), Sampling(1.0, 300), 9)))
        await until(lambda: max(lengths(engine), default=0) > 5)
        engine.interrupt()
        first = await task
        rest = await engine.generate(Request("b", (5, 6, *first.tokens), Sampling(1.0, 300 - len(first.tokens)), 9))
        return first, rest

    first, rest = asyncio.run(go())
    engine.close()
    assert first.stop is StopReason.ABORTED
    assert 5 < len(first.tokens) < 300
    assert first.tokens + rest.tokens == whole.tokens


def test_a_killed_engine_thread_loses_its_requests_and_says_so(model):
    engine = NativeEngine(model, slots=4, context=32)

    def die():
        raise SystemExit

    engine._decode = die
    with pytest.raises(EngineLost):
        run(engine, requests(2))
    with pytest.raises(EngineLost):
        run(engine, requests(2))


def broken(weights, count):
    """A stream that ends with an error after some of the weights."""
    yield from list(weights.items())[:count]
    raise WeightSyncError("the sender died")


def without_first(weights, count):
    """A stream that lacks one of the weights."""
    return list(weights.items())[1:]


@pytest.mark.parametrize(("stream", "error"), [(broken, WeightSyncError), (without_first, WrongWeights)])
def test_an_engine_whose_stream_broke_generates_nothing_until_it_holds_a_whole_version(stream, error):
    """Requests wait, can be aborted and interrupted, and go on under the next whole version."""
    model = load("tiny-random", seed=0)
    engine = endless(model, slots=2)
    new = perturbed(model)

    def one(name, tokens=3000):
        return asyncio.create_task(engine.generate(Request(name, (5, 6), Sampling(1.0, tokens), 1)))

    async def go():
        running, ended = one("running"), one("ended")
        await until(lambda: lengths(engine) and min(lengths(engine)) > 3)
        with pytest.raises(error):
            await asyncio.to_thread(engine.load, 1, stream(new, 5), recompute=True)
        written = lengths(engine)
        _, gone = one("first", 9), one("gone")
        await until(lambda: len(engine._waiting) == 2)
        await until(lambda: engine._thread is None)  # it has nothing to do
        engine.abort("gone")
        engine.abort("ended")
        assert (await gone).tokens == []
        first = await ended
        engine.set_version(7)
        await asyncio.to_thread(engine.sleep)
        interrupted = await running
        await asyncio.to_thread(engine.wake)
        assert [len(interrupted.tokens), len(first.tokens)] == written
        assert {*first.versions, *interrupted.versions} == {0}
        more = one("more")
        await until(lambda: len(engine._waiting) == 1)
        engine.interrupt()
        assert (await more).tokens == []
        late = one("late", 9)
        await asyncio.to_thread(engine.load, 2, new.items(), recompute=True)
        return await late

    late = asyncio.run(go())
    assert late.versions == [2] * 9
    assert all(torch.equal(value, new[name]) for name, value in model.module.named_parameters())
    whole = run(engine, [Request("late", (5, 6), Sampling(1.0, 9), 1)])[0]
    engine.close()
    assert late.tokens == whole.tokens
    assert late.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


def test_weights_of_another_model_are_refused_by_name_and_the_right_ones_are_taken():
    model = load("tiny-random", seed=0)
    engine, new = NativeEngine(model, slots=4, context=32), perturbed(model)
    first, second = list(new)[:2]
    for wrong, message in (
        ({**new, "other": torch.zeros(3)}, "'other' but the model has no such parameter"),
        ({first: torch.zeros(3, 5)}, f"'{first}' has the shape"),
        ({n: v for n, v in new.items() if n not in (first, second)}, f"lack 2 of the model's {len(new)} parameters"),
    ):
        with pytest.raises(WrongWeights, match=message):
            engine.load(1, wrong.items(), recompute=False)
        assert engine.version == 0
    engine.load(1, new.items(), recompute=False)
    assert {v for c in run(engine, requests(2)) for v in c.versions} == {1}
    engine.close()


def test_adapters_alone_are_a_whole_version():
    model = load("tiny-random", seed=0)
    add_adapters(model, LoraConfig())
    engine, adapters = NativeEngine(model, slots=4, context=32), adapter_parameters(model.module)
    assert 0 < len(adapters) < len(dict(model.module.named_parameters()))
    new = {name: value.detach() + 0.1 for name, value in adapters.items()}
    with pytest.raises(WrongWeights, match="lack 1 of"):
        engine.load_adapter(1, list(new.items())[1:], {}, recompute=False)
    with pytest.raises(WrongWeights, match="lack"):
        engine.load(1, new.items(), recompute=False)
    engine.load_adapter(1, new.items(), {}, recompute=False)
    assert {v for c in run(engine, requests(2)) for v in c.versions} == {1}
    assert all(torch.equal(value, new[name]) for name, value in adapters.items())
    engine.close()


def test_a_sleeping_engine_ends_what_runs_and_keeps_what_comes_until_it_wakes(model):
    engine = endless(model, slots=2)

    async def go():
        loop = asyncio.get_running_loop()
        running = [asyncio.create_task(engine.generate(Request(f"{i}", (5, 6), Sampling(1.0, 3000), i))) for i in range(3)]
        await until(lambda: len(lengths(engine)) == 2)
        await loop.run_in_executor(None, engine.sleep)
        assert engine._kept is None
        assert [(await task).stop for task in running] == [StopReason.ABORTED] * 3
        late, gone = (asyncio.create_task(engine.generate(Request(n, (5, 6), Sampling(1.0, 9), 0))) for n in ("late", "gone"))
        await until(lambda: len(engine._waiting) == 2)
        engine.abort("gone")
        assert (await gone).stop is StopReason.ABORTED
        assert not late.done()
        await loop.run_in_executor(None, engine.wake)
        return await late

    assert len(asyncio.run(go()).tokens) == 9
    engine.close()


@pytest.mark.parametrize("listed", [True, False], ids=["generation config", "model config only"])
def test_the_tokens_that_end_a_completion_are_known_without_the_weights(tmp_path, listed):
    model = load("tiny")
    model.module.generation_config.eos_token_id = [2, 7]
    model.module.config.eos_token_id = 5
    model.module.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    if not listed:
        (tmp_path / "generation_config.json").unlink()
    assert end_tokens(str(tmp_path)) == load(str(tmp_path)).eos == (frozenset({2, 7}) if listed else frozenset({2, 5}))
    assert end_tokens("tiny") == load("tiny").eos


# --- the sampler ---


def test_keyed_uniforms_are_uniform_and_keyed():
    seeds = np.arange(20_000, dtype=np.uint64)
    values = keyed_uniform(seeds, np.zeros_like(seeds))
    counts, _ = np.histogram(values, bins=50, range=(0, 1))
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < 94  # 49 degrees of freedom: p > 1e-4
    assert (keyed_uniform(seeds, np.zeros_like(seeds)) == values).all()
    assert abs(np.corrcoef(values, keyed_uniform(seeds, np.ones_like(seeds)))[0, 1]) < 0.03


def test_sampled_distribution_passes_chi_square():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -torch.inf, 0.5]).expand(40_000, -1)
    uniform = torch.from_numpy(keyed_uniform(np.arange(40_000, dtype=np.uint64), np.full(40_000, 7, dtype=np.uint64)))
    tokens, logprobs = choose(logits, torch.full((40_000,), 0.8), uniform)
    expected = torch.softmax(logits[0] / 0.8, 0) * 40_000
    counts = torch.bincount(tokens, minlength=6)
    assert counts[4] == 0
    live = expected > 0
    assert float(((counts[live] - expected[live]) ** 2 / expected[live]).sum()) < 23.5  # 4 degrees: p > 1e-4
    assert torch.allclose(logprobs, torch.log_softmax(logits[0] / 0.8, 0)[tokens])


def test_extreme_uniforms_stay_in_range():
    logits = torch.tensor([[0.0, -50.0, -torch.inf], [-torch.inf, 0.0, 0.0]])
    for u in (0.0, 1.0 - 2**-53):
        tokens, logprobs = choose(logits, torch.ones(2), torch.full((2,), u, dtype=torch.float64))
        assert torch.isfinite(logprobs).all(), (u, tokens)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("vocabulary", [3, 300])
@pytest.mark.parametrize("restricted", [False, True])
def test_a_row_that_is_not_finite_leaves_the_others_alone(bad, vocabulary, restricted):
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(0))
    uniform = torch.tensor([0.1, 0.5, 0.9, 0.99], dtype=torch.float64)
    ones, heat = torch.ones(4), torch.tensor([1.0, 0.0, 0.7, 1.0])
    limit = Restriction(ones * 0.9, torch.zeros(4, dtype=torch.int64), ones * 0) if restricted else None
    good = choose(logits, heat, uniform, limit)
    for row in range(4):
        broken = logits.clone()
        broken[row, 1] = bad
        tokens, logprobs = choose(broken, heat, uniform, limit)
        others = torch.arange(4) != row
        assert torch.equal(tokens[others], good[0][others])
        assert torch.equal(logprobs[others], good[1][others])
        assert not torch.isfinite(logprobs[row])


def test_top_k_top_p_and_min_p_restrict():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(2000, -1)
    uniform = torch.from_numpy(keyed_uniform(np.arange(2000, dtype=np.uint64), np.zeros(2000, dtype=np.uint64)))
    ones = torch.ones(2000)
    none = torch.zeros(2000, dtype=torch.int64)
    top2, _ = choose(logits, ones, uniform, Restriction(ones, none + 2, ones * 0))
    assert set(top2.tolist()) == {0, 1}
    nucleus, _ = choose(
        logits, ones, uniform, Restriction(ones * 0.7, none, ones * 0)
    )  # not 0.8: whether 0.5 + 0.3 reaches it is rounding
    assert set(nucleus.tolist()) == {0, 1}
    likely, _ = choose(logits, ones, uniform, Restriction(ones, none, ones * 0.2))
    assert set(likely.tolist()) == {0, 1, 2}


def test_a_large_vocabulary_passes_chi_square_and_draws_do_not_depend_on_the_batch():
    """More than one block, the last one not full; rows at other temperatures beside."""
    torch.manual_seed(0)
    draws = 20_000
    row = torch.randn(1000) * 2
    uniform = torch.from_numpy(keyed_uniform(np.arange(draws, dtype=np.uint64), np.full(draws, 3, dtype=np.uint64)))
    tokens, logprobs = choose(row.expand(draws, -1), torch.full((draws,), 1.3), uniform)
    probs = torch.softmax(row.double() / 1.3, 0)
    bins = (probs.sort(descending=True).indices.argsort() // 20).clamp_max(30)
    expected = torch.zeros(31, dtype=torch.float64).index_add_(0, bins, probs) * draws
    counts = torch.zeros(31, dtype=torch.float64).index_add_(0, bins[tokens], torch.ones(draws, dtype=torch.float64))
    assert float(((counts - expected) ** 2 / expected).sum()) < 67  # 30 degrees: p > 1e-4
    assert torch.allclose(logprobs, torch.log_softmax(row / 1.3, 0)[tokens], atol=1e-5)
    company = torch.cat([row.expand(5, -1), torch.randn(3, 1000)])
    heat = torch.tensor([1.3] * 5 + [0.0, 0.7, 1.0])
    beside, their = choose(company, heat, torch.cat([uniform[:5], uniform[:3]]))
    assert torch.equal(beside[:5], tokens[:5])
    assert torch.equal(their[:5], logprobs[:5])


def test_restrictions_on_a_large_vocabulary():
    """More entries reach the mass than are ranked at first; rows without a restriction are not disturbed."""
    logits = torch.zeros(3, 5000)
    logits[:, :4000] = 1.0
    limit = Restriction(torch.tensor([0.8, 1.0, 1.0]), torch.tensor([0, 0, 1]), torch.tensor([0.0, 0.0, 0.0]))
    logits[:, 17] = 1.5
    last = torch.full((3,), 1 - 2**-53, dtype=torch.float64)
    tokens, logprobs = choose(logits, torch.ones(3), last, limit)
    assert tokens.tolist() == [3999, 4999, 17]
    assert torch.allclose(logprobs, torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0])


def test_generation_follows_weights_that_a_learner_changes_in_place():
    """Neither packed copies of the old weights nor keys and values made with them are used."""
    model = load("tiny-random", seed=3)
    made = NativeEngine(model, slots=8, context=32)
    [one] = requests(1, temperature=0.0)
    before = run(made, [one])[0]
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=0.05, fused=True)
    for parameter in model.module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    made.set_version(1)
    after = run(made, [dataclasses.replace(one, id="again", tokens=(*one.tokens, *before.tokens[:1]))])[0]
    made.close()
    fresh = NativeEngine(model, slots=8, context=32)
    truth = run(fresh, [dataclasses.replace(one, id="again", tokens=(*one.tokens, *before.tokens[:1]))])[0]
    fresh.close()
    assert after.tokens == truth.tokens
    assert max(abs(a - b) for a, b in zip(after.logprobs, truth.logprobs, strict=True)) < 1e-5
    assert after.tokens != before.tokens[1:]
