"""What is common is kept once, memory is bounded, and neither changes what is written."""

import asyncio
import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumroll.engines import Request, Sampling
from drumroll.engines.native import PREFILL_TOKENS, NativeEngine
from drumroll.engines.pages import Pages
from drumroll.errors import ConfigError
from drumroll.models.loading import load
from drumroll.sample import StopReason

token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@given(st.lists(st.tuples(token_lists, st.booleans()), max_size=40), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_a_chain_reads_its_own_tokens_for_as_long_as_it_is_held(wanted, size):
    """Against a plain memory of what was written where; pages are taken, shared, evicted, forgotten at will."""
    pages, memory, held = Pages(24, size), {}, []

    def check():
        for tokens, chain in held:
            assert [memory[slot] for slot in zip(*chain.page_slots(), strict=True)] == tokens[: chain.length]

    for tokens, keep in wanted:
        chain = pages.match(tokens, 0)
        assert chain.length < len(tokens)
        assert len(chain.pages) <= -(-chain.length // size) + 1
        page_slots = pages.extend(chain, tokens[chain.length :])
        if page_slots is None:
            pages.release(chain)
            if held:
                pages.release(held.pop(random.Random(len(tokens)).randrange(len(held)))[1])
            else:
                pages.forget()
            continue
        memory.update(zip(zip(*page_slots, strict=True), tokens[-len(page_slots[0]) :], strict=True))
        held.append((tokens, chain))
        check()
        if not keep:
            pages.release(held.pop()[1])
    check()
    for _, chain in held:
        pages.release(chain)
    assert pages.available() == 24


def test_what_was_released_is_found_again_and_what_was_forgotten_is_not():
    pages = Pages(8, 4)
    chain = pages.match([1, 2, 3, 4, 5, 6], 0)
    pages.extend(chain, [1, 2, 3, 4, 5, 6])
    pages.release(chain)
    assert pages.match([1, 2, 3, 4, 5, 6, 7, 8], 0).length == 6
    assert pages.match([1, 2, 3, 9], 0).length == 3
    assert pages.match([1, 2, 3, 4, 5, 6], 0).length == 5, "the last token must be computed for its logits"
    pages.forget()
    assert pages.match([1, 2, 3, 4, 5, 6, 7], 0).length == 0


# --- the engine on top ---


@pytest.fixture(scope="module")
def model():
    return dataclasses.replace(load("tiny-random", seed=0), eos=frozenset())


def run(engine, wanted):
    async def go():
        with engine._wake:  # all come at once: the engine sees none before the last is there
            coming = [asyncio.ensure_future(engine.generate(r)) for r in wanted]
            await asyncio.sleep(0)
        return await asyncio.gather(*coming)

    return asyncio.run(go())


def computed(engine, wanted):
    """Completions, and how many tokens the model was run on for them."""
    counts, forward = [], engine._forward

    def counting(tokens, *rest):
        counts.append(len(tokens))
        return forward(tokens, *rest)

    engine._forward = counting
    try:
        return run(engine, wanted), counts
    finally:
        engine._forward = forward


def equal(one, other):
    assert [c.tokens for c in one] == [c.tokens for c in other]
    for a, b in zip(one, other, strict=True):
        assert torch.allclose(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-4)


def mixed(count, longest=40):
    rng = random.Random(4)
    prompts = [tuple(rng.randint(3, 60) for _ in range(rng.randint(1, longest))) for _ in range(count // 4)]
    return [Request(f"m{i}", prompts[i // 4 % len(prompts)], Sampling(1.0, rng.randint(1, 30)), i) for i in range(count)]


def test_a_groups_prompt_is_computed_and_kept_once(model):
    engine = NativeEngine(model, slots=8, context=128, page_tokens=8)
    prompt = tuple(range(3, 53))
    done, counts = computed(engine, [Request(f"r{i}", prompt, Sampling(1.0, 4), i) for i in range(8)])
    assert sum(counts) == 50 + 8 * 3
    assert engine.page_count - len(engine._pages._free) == 7 + 7  # 50 tokens in 7 pages; one went on there, seven branched
    engine.close()
    assert len({tuple(c.tokens) for c in done}) > 1


def test_the_earlier_turns_of_an_episode_are_not_computed_again(model):
    engine, plain = (NativeEngine(model, slots=4, context=128, page_tokens=8) for _ in range(2))
    [first] = run(engine, [Request("a", tuple(range(3, 23)), Sampling(1.0, 10), 1)])
    turn = (*range(3, 23), *first.tokens, 7, 8, 9)
    again, counts = computed(engine, [Request("b", turn, Sampling(1.0, 5), 2)])
    assert counts[0] == 4  # the last token written, which was never fed, and the three new ones
    equal(again, run(plain, [Request("b", turn, Sampling(1.0, 5), 2)]))
    engine.set_version(1)
    _, counts = computed(engine, [Request("c", turn, Sampling(1.0, 5), 2)])
    assert counts[0] == len(turn), "keys and values of old weights were used"
    engine.close()
    plain.close()


def test_a_long_prompt_does_not_hold_up_the_others(model):
    engine, plain = (NativeEngine(model, slots=4, context=2000) for _ in range(2))
    rng = random.Random(0)
    long = Request("long", tuple(rng.randint(3, 60) for _ in range(3 * PREFILL_TOKENS + 5)), Sampling(1.0, 4), 1)
    short = Request("short", (5, 6, 7), Sampling(1.0, 20), 2)
    done, counts = computed(engine, [short, long])
    assert max(counts) <= PREFILL_TOKENS
    assert counts[:4] == [PREFILL_TOKENS, 1, PREFILL_TOKENS, 1], "the short one waited"
    equal(done, [run(plain, [r])[0] for r in (short, long)])
    engine.close()
    plain.close()


def test_without_room_the_youngest_makes_way_and_nothing_changes(model):
    wanted = mixed(32)
    roomy = NativeEngine(model, slots=16, context=80, page_tokens=4)
    page_gb = roomy._cache.nbytes() / roomy.page_count / 2**30
    tight = NativeEngine(model, slots=16, context=80, page_tokens=4, cache_gb=30.5 * page_gb)
    assert tight.page_count == 30
    plenty, little = run(roomy, wanted), run(tight, wanted)
    assert tight.preempted > 0
    assert roomy.preempted == 0
    equal(plenty, little)
    assert tight._pages.available() == 30
    roomy.close()
    tight.close()
    assert all(c.stop is StopReason.LENGTH for c in little)


@pytest.mark.parametrize("fixed", [True, False])
def test_too_little_memory_is_refused(model, fixed):
    with pytest.raises(ConfigError, match="cache_gb"):
        NativeEngine(model, slots=4, context=4000, cache_gb=1e-5, fixed_shape=fixed)
