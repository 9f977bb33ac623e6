"""vLLM behind our contract: what it writes is what the learner would predict, before, during and after new weights.

Needs vLLM (`make vllm`). An engine takes half a minute to start, so tests of one model share it.
"""

import asyncio
import os
import random
import signal
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from drumroll.batch import pack
from drumroll.config.optim import OptimConfig
from drumroll.engines import EngineLost, Request, Sampling
from drumroll.engines.continuation import Continuation, closing_tag
from drumroll.engines.native import NativeEngine
from drumroll.engines.vllm import VllmEngine
from drumroll.errors import ConfigError
from drumroll.learners.backends.torch import torch_learner
from drumroll.models import tiny
from drumroll.models.loading import load
from drumroll.sample import Group, Owner, Prompt, Sample, StopReason, Trace
from drumroll.weights import WrongWeights

pytestmark = pytest.mark.slow

EXACT = 1e-4
SLOTS, CONTEXT = 8, 256
TARGETS = ("q_proj", "v_proj", "down_proj")


def serve(model, eos, **options):
    return VllmEngine(model, slots=SLOTS, context=CONTEXT, eos=eos, options={"dtype": "float32", **options})


@pytest.fixture(scope="module")
def shipped():
    """The shipped model, whose output layer is tied to its embedding, and the engine that serves it."""
    model = load("tiny")
    engine = serve("tiny", model.eos)
    yield model, engine
    engine.close()


@pytest.fixture
def engine(shipped):
    return shipped[1]


@pytest.fixture
def endless(engine, monkeypatch):
    """The engine, with requests that do not end by themselves."""
    monkeypatch.setattr(engine, "eos", [])
    return engine


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """A model with an output layer of its own, served with LoRA switched on."""
    folder = tmp_path_factory.mktemp("untied")
    module = tiny.random_model(0)
    module.lm_head.weight = torch.nn.Parameter(torch.randn_like(module.lm_head.weight) * 0.1)
    module.config.tie_word_embeddings = False
    module.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    model = load(str(folder))
    assert "lm_head.weight" in dict(model.module.named_parameters())
    engine = serve(str(folder), frozenset(), enable_lora=True, max_lora_rank=8)
    yield folder, model, engine
    engine.close()


def requests(count, *, temperature=1.0, max_tokens=24, tag="r"):
    rng = random.Random(0)
    prompts = [tuple(rng.randint(3, 60) for _ in range(rng.randint(1, 40))) for _ in range(count)]
    return [Request(f"{tag}{i}", p, Sampling(temperature, max_tokens), i * 31) for i, p in enumerate(prompts)]


def run(engine, wanted):
    async def go():
        return await asyncio.gather(*(engine.generate(r) for r in wanted))

    return asyncio.run(go())


def gaps(model, wanted, done, temperature=1.0):
    """Per token: how far its log-prob is from the learner's, and its version."""
    groups = []
    for i, (request, completion) in enumerate(zip(wanted, done, strict=True)):
        trace = Trace()
        trace.extend(list(request.tokens), Owner.PROMPT)
        completion.add_to(trace)
        prompt = Prompt(str(i), "d", "", request.tokens)
        groups.append(Group(prompt, i, [Sample(prompt, i, 0, traces=[trace], reward=0.0)]))
    batch = pack(groups)
    gap = (torch_learner(model, OptimConfig(), total_steps=1).infer(batch, temperature) - batch.behaviour).abs()
    return gap[batch.mask], batch.versions[batch.mask]


def perturb(model, seed):
    """Change the model; returns its new weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.module.parameters():
            p.add_(0.03 * torch.randn(p.shape, generator=generator))
    return {n: p.detach() for n, p in model.module.named_parameters()}


# --- what it writes ---


def test_a_thought_ends_at_its_limit_and_the_answer_follows(shipped, endless):
    model, closing, limit = shipped[0], closing_tag(shipped[0].tokenizer), 5
    wanted = [
        Request(str(i), tuple(model.tokenizer.encode(f"{i}+1=<think>")), Sampling(1.0, 24, (), max_thinking=limit), i)
        for i in range(4)
    ]

    async def write(request):
        turn = Continuation(request.id, request.tokens, request.sampling, request.seed, model.tokenizer.decode, closing=closing)
        return await turn.run(endless.generate)

    async def together():
        return await asyncio.gather(*(write(request) for request in wanted))

    done = asyncio.run(together())
    for completion in done:
        end = limit + len(closing)
        assert tuple(completion.tokens[limit:end]) == closing
        assert [version < 0 for version in completion.versions] == [limit <= i < end for i in range(24)]
    assert gaps(model, wanted, done)[0].max() < EXACT


def test_greedy_equals_the_native_engine(shipped):
    model, engine = shipped
    native = NativeEngine(model, slots=SLOTS, context=CONTEXT)
    plain = requests(20, temperature=0.0)
    wanted = [replace(r, sampling=replace(r.sampling, top_logprobs=i % 4)) for i, r in enumerate(plain)]
    ours, theirs = run(engine, wanted), run(native, wanted)
    native.close()
    assert [c.tokens for c in ours] == [c.tokens for c in theirs]
    assert [c.stop for c in ours] == [c.stop for c in theirs]
    assert any(c.stop is StopReason.EOS and c.tokens[-1] in model.eos for c in ours)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert [len(top) for top in a.top] == [len(top) for top in b.top] == [i % 4] * len(a.tokens) * bool(i % 4)
        listed = ([value for top in each.top for _, value in top] for each in (a, b))
        assert next(listed) == pytest.approx(next(listed), abs=EXACT)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_are_the_learners_at_the_temperature(shipped, temperature):
    model, engine = shipped
    wanted = requests(30, temperature=temperature)
    done = run(engine, wanted)
    gap, _ = gaps(model, wanted, done, temperature)
    assert len(gap) > 200
    assert gap.max() < EXACT
    assert gaps(model, wanted, done, temperature + 0.5)[0].max() > 0.01


def test_greedy_among_sampled_keeps_its_plain_logprobs(shipped):
    model, engine = shipped
    greedy, sampled = requests(6, temperature=0.0, tag="g"), requests(6, temperature=0.7, tag="s")
    done = run(engine, [*greedy, *sampled])
    assert gaps(model, greedy, done[:6])[0].max() < EXACT
    assert gaps(model, sampled, done[6:], 0.7)[0].max() < EXACT


def test_same_seed_same_tokens_other_seed_other_tokens(endless):
    wanted = requests(8, temperature=1.5)
    first, second = run(endless, wanted), run(endless, wanted)
    assert [c.tokens for c in first] == [c.tokens for c in second]
    other = [Request(r.id, r.tokens, r.sampling, r.seed + 1) for r in wanted]
    assert [c.tokens for c in first] != [c.tokens for c in run(endless, other)]


def test_stop_reasons(shipped, endless):
    tokenizer = shipped[0].tokenizer
    assert run(endless, [Request("a", (5,) * CONTEXT, Sampling(), 0)])[0].stop is StopReason.CONTEXT
    full = run(endless, [Request("b", (5,) * (CONTEXT - 3), Sampling(1.0, 9), 0)])[0]
    assert (full.stop, len(full.tokens)) == (StopReason.CONTEXT, 3)
    whole = run(endless, [Request("c", (5, 9, 7), Sampling(2.0, 9), 3)])[0]
    assert (whole.stop, len(whole.tokens)) == (StopReason.LENGTH, 9)
    stop = tokenizer.decode(whole.tokens)[2:4]
    stopped = run(endless, [Request("d", (5, 9, 7), Sampling(2.0, 9, (stop,)), 3)])[0]
    assert stopped.stop is StopReason.STOP_STRING
    assert stopped.tokens == whole.tokens[: len(stopped.tokens)]
    assert tokenizer.decode(stopped.tokens).endswith(stop)


# --- requests that are ended ---


async def begun(engine, wanted, tokens=4):
    """Send requests and wait until each has written some tokens; returns their tasks."""
    tasks = [asyncio.create_task(engine.generate(r)) for r in wanted]
    states = engine._llm.output_processor.request_states
    async with asyncio.timeout(60):
        while len(states) < len(wanted) or any(s.detokenizer.num_output_tokens() < tokens for s in list(states.values())):
            await asyncio.sleep(0.005)
    return tasks


def test_abort_returns_what_was_written(endless):
    async def go():
        kept, aborted = requests(2, max_tokens=200)
        running = await begun(endless, [kept, aborted])
        endless.abort(aborted.id)
        endless.abort("unknown")
        at_once = asyncio.create_task(endless.generate(Request("new", (5,), Sampling(1.0, 200), 0)))
        await asyncio.sleep(0)
        endless.abort("new")
        return await running[1], await running[0], await at_once

    aborted, kept, at_once = asyncio.run(go())
    assert aborted.stop is at_once.stop is StopReason.ABORTED
    assert 4 <= len(aborted.tokens) < 200
    assert len(kept.tokens) == 200


def test_cancelling_ends_the_request(endless):
    async def go():
        (task,) = await begun(endless, requests(1, max_tokens=200))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(5):
            while endless._llm.output_processor.request_states:
                await asyncio.sleep(0.005)

    asyncio.run(go())


def test_interrupted_requests_go_on_where_they_stopped(endless):
    wanted = requests(4, temperature=0.0, max_tokens=120)
    whole = run(endless, wanted)

    async def go():
        tasks = await begun(endless, wanted)
        endless.interrupt()
        return await asyncio.gather(*tasks)

    first = asyncio.run(go())
    assert all(c.stop is StopReason.ABORTED and 4 <= len(c.tokens) < 120 for c in first)
    rest = [
        Request(f"{r.id}+", (*r.tokens, *c.tokens), Sampling(0.0, 120 - len(c.tokens)), r.seed)
        for r, c in zip(wanted, first, strict=True)
    ]
    assert [a.tokens + b.tokens for a, b in zip(first, run(endless, rest), strict=True)] == [c.tokens for c in whole]


# --- weights that change ---


def test_new_weights_are_exact_with_a_tied_output_layer(shipped):
    model, engine = shipped
    wanted = requests(20)
    before = run(engine, wanted)
    assert "lm_head.weight" not in dict(model.module.named_parameters())
    new = perturb(model, 1)
    assert gaps(model, wanted, run(engine, wanted))[0].max() > 0.1, "the change would not be seen"
    engine.load(1, new.items(), recompute=False)
    done = run(engine, wanted)
    gap, versions = gaps(model, wanted, done)
    assert gap.max() < EXACT
    assert set(versions.tolist()) == {1}
    assert {v for c in before for v in c.versions} == {0}


def test_new_weights_are_exact_with_an_untied_output_layer(untied):
    _, model, engine = untied
    wanted = requests(20)
    new = perturb(model, 2)
    assert gaps(model, wanted, run(engine, wanted))[0].max() > 0.1, "the change would not be seen"
    engine.load(1, new.items(), recompute=True)
    assert gaps(model, wanted, run(engine, wanted))[0].max() < EXACT


def test_every_worker_of_a_tensor_parallel_engine_receives_and_takes_its_part(tmp_path):
    module = tiny.random_model(0, hidden=128, heads=4)  # heads that divide by 2
    module.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    model = load(str(tmp_path))
    engine = serve(str(tmp_path), frozenset(), tensor_parallel_size=2, distributed_executor_backend="mp")
    try:
        assert engine.receivers() == 2
        wanted, new = requests(6), perturb(model, 6)
        assert gaps(model, wanted, run(engine, wanted))[0].max() > 0.01, "the change would not be seen"
        engine.load(1, new.items(), recompute=False)
        gap, versions = gaps(model, wanted, run(engine, wanted))
        assert gap.max() < EXACT
        assert set(versions.tolist()) == {1}
        with pytest.raises(WrongWeights, match="lack parameters of vLLM's model"):
            engine.load(2, list(new.items())[1:], recompute=False)
        engine.sleep()
        with pytest.raises(EngineLost, match="before it held a whole version"):  # waking would resume it
            engine.wake()
    finally:
        engine.close()


def test_an_engine_whose_stream_broke_generates_nothing_until_it_holds_a_whole_version(shipped):
    """Its requests wait, and are the new weights' when those have come."""
    model, engine = shipped
    engine.set_version(5)
    wanted, new = requests(4), perturb(model, 5)

    def broken():
        yield from list(new.items())[: len(new) // 2]
        raise ZeroDivisionError("no more")

    async def go():
        for stream, error in ((broken(), ZeroDivisionError), (list(new.items())[:-1], WrongWeights)):
            with pytest.raises(error):
                await asyncio.to_thread(engine.load, 6, stream, recompute=True)
        tasks = [asyncio.create_task(engine.generate(r)) for r in wanted]
        done, _ = await asyncio.wait(tasks, timeout=3.0)
        assert not done
        await asyncio.to_thread(engine.load, 7, new.items(), recompute=True)
        return await asyncio.gather(*tasks)

    gap, versions = gaps(model, wanted, asyncio.run(go()))
    assert set(versions.tolist()) == {7}
    assert gap.max() < EXACT
    assert gaps(model, wanted, run(engine, wanted))[0].max() < EXACT


def switched(engine, wanted, version, new, recompute):
    """Completions of requests during which the weights change."""

    async def go():
        tasks = await begun(engine, wanted, tokens=10)
        await asyncio.to_thread(engine.load, version, new.items(), recompute=recompute)
        return await asyncio.gather(*tasks)

    done = asyncio.run(go())
    assert all(set(c.versions) == {version - 1, version} and c.versions == sorted(c.versions) for c in done)
    assert all(len(c.tokens) == wanted[0].sampling.max_tokens for c in done)
    return done


def test_switching_in_flight_with_keys_and_values_computed_anew(shipped, endless):
    """Each token is exactly what the weights of its version say."""
    model, _ = shipped
    endless.set_version(10)
    wanted = requests(6, max_tokens=200)
    old = {n: p.clone() for n, p in model.module.named_parameters()}
    done = switched(endless, wanted, 11, perturb(model, 3), recompute=True)
    gap, versions = gaps(model, wanted, done)
    assert gap[versions == 11].max() < EXACT
    assert gap[versions == 10].max() > 0.1
    model.module.load_state_dict(old, strict=False)
    assert gaps(model, wanted, done)[0][versions == 10].max() < EXACT
    endless.load(12, old.items(), recompute=False)


@torch.no_grad()
def test_switching_in_flight_with_keys_and_values_kept(shipped, endless):
    """Tokens after the switch are the new weights' over the old weights' keys and values; new requests see none of those."""
    model, _ = shipped
    endless.set_version(20)
    wanted = [Request(f"k{i}", tuple(range(3, 90)), Sampling(1.0, 150), i) for i in range(4)]
    plain = AutoModelForCausalLM.from_pretrained(tiny.SHIPPED["tiny"], dtype=torch.float32).eval()
    old = {n: p.clone() for n, p in model.module.named_parameters()}
    new = perturb(model, 4)

    async def go():
        tasks = await begun(endless, wanted, tokens=10)
        await asyncio.to_thread(endless.load, 21, new.items(), recompute=False)
        fresh = await endless.generate(Request("fresh", wanted[0].tokens, Sampling(1.0, 10), 7))
        return await asyncio.gather(*tasks), fresh

    done, fresh = asyncio.run(go())
    assert gaps(model, wanted[:1], [fresh])[0].max() < EXACT
    for request, c in zip(wanted, done, strict=True):
        assert set(c.versions) == {20, 21}
        tokens = torch.tensor([[*request.tokens, *c.tokens]])
        seen = len(request.tokens) + c.versions.count(20) - 1  # the last old token was read by the new weights
        plain.load_state_dict(old, strict=False)
        head = plain(tokens[:, :seen], use_cache=True)
        plain.load_state_dict(new, strict=False)
        tail = plain(tokens[:, seen:], past_key_values=head.past_key_values, use_cache=True)
        logprobs = torch.cat([head.logits[0], tail.logits[0]]).log_softmax(-1)[len(request.tokens) - 1 : -1]
        there = logprobs.gather(1, torch.tensor(c.tokens)[:, None])[:, 0]
        assert (there - torch.tensor(c.logprobs)).abs().max() < EXACT


# --- adapters ---


def adapter(model, seed, prefix="", rank=4):
    """A LoRA adapter with PEFT's names, and the model with it merged in."""
    generator = torch.Generator().manual_seed(seed)
    tensors, merged = {}, {n: p.detach().clone() for n, p in model.module.named_parameters()}
    for name, weight in merged.items():
        if name.split(".")[-2] in TARGETS:
            a = torch.randn(rank, weight.shape[1], generator=generator) * 0.1
            b = torch.randn(weight.shape[0], rank, generator=generator) * 0.1
            stem = f"{prefix}{name.removesuffix('.weight')}"
            tensors |= {f"{stem}.lora_A.default.weight": a, f"{stem}.lora_B.default.weight": b}
            weight += 2.0 * b @ a
    return tensors, merged, {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(TARGETS)}


def test_adapters_are_served_and_replaced_in_flight(untied):
    folder, model, engine = untied
    engine.set_version(30)
    merged_model = load(str(folder))
    wanted = requests(6, max_tokens=150)
    assert gaps(model, wanted, run(engine, wanted))[0].max() < EXACT, "no adapter yet"
    for version, prefix in ((31, ""), (32, "base_model.model.")):  # by transformers, by peft
        tensors, merged, config = adapter(model, version, prefix)
        merged_model.module.load_state_dict(merged)

        async def go(version=version, tensors=tensors, config=config):
            tasks = await begun(engine, wanted, tokens=10)
            await asyncio.to_thread(engine.load_adapter, version, tensors.items(), config, recompute=True)
            return await asyncio.gather(*tasks)

        done = asyncio.run(go())
        gap, versions = gaps(merged_model, wanted, done)
        assert set(versions.tolist()) == {version - 1, version}
        assert gap[versions == version - 1].max() > 0.1
        assert gap[versions == version].max() < EXACT
        assert gaps(merged_model, wanted, run(engine, wanted))[0].max() < EXACT


def test_sleeping_and_waking(shipped):
    model, engine = shipped
    engine.sleep()
    engine.wake()
    wanted = requests(4)
    assert gaps(model, wanted, run(engine, wanted))[0].max() < EXACT


# --- what goes wrong ---


def test_options_that_vllm_does_not_have(engine):
    assert engine.capacity() == SLOTS
    with pytest.raises(ConfigError, match=r"tensor_paralel_size.*Did you mean 'tensor_parallel_size'"):
        serve("tiny", frozenset(), tensor_paralel_size=2)
    with pytest.raises(ConfigError, match="logprobs_mode"):
        serve("tiny", frozenset(), logprobs_mode="raw_logprobs")
    with pytest.raises(ConfigError, match="enable_lora"):
        engine.load_adapter(1, (), {})


def test_without_vllm_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match="make vllm"):
        VllmEngine("tiny", slots=1, context=8, eos=frozenset())


def test_a_killed_core_loses_its_requests_and_says_so(untied):
    """The last test of this engine."""
    engine = untied[2]

    async def go():
        tasks = await begun(engine, requests(3, max_tokens=200))
        for process in engine._llm.engine_core.resources.engine_manager.processes:
            os.kill(process.pid, signal.SIGKILL)
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(outcome, EngineLost) for outcome in asyncio.run(go()))
    with pytest.raises(EngineLost):
        engine.set_version(99)
    with pytest.raises(EngineLost):
        run(engine, requests(1))


def test_weights_that_do_not_fit_lose_the_engine(engine):
    """The last test of all: it closes the engine."""

    async def go():
        tasks = await begun(engine, requests(2, max_tokens=200))
        with pytest.raises(EngineLost, match="could not take version 50"):
            await asyncio.to_thread(engine.load, 50, [("nonsense.weight", torch.zeros(3))], recompute=False)
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(outcome, EngineLost) for outcome in asyncio.run(go()))
    with pytest.raises(EngineLost):
        run(engine, requests(1))
