"""Learner and engine on a device that computes nothing: every tensor is where it belongs, and the host hardly ever waits."""

import asyncio
import collections
import re
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from dry_accelerator import Dry, put_on
from forked import run_ranks
from test_batch import random_groups

from drumroll.algorithms import Algorithm
from drumroll.algorithms.aggregations import Shares
from drumroll.algorithms.losses import SFTLoss
from drumroll.batch import pack
from drumroll.config.algorithm import AlgorithmConfig
from drumroll.config.optim import OptimConfig
from drumroll.config.roles import LoraConfig
from drumroll.engines import Request, Sampling, sampler
from drumroll.engines.native import NativeEngine
from drumroll.learners import Update
from drumroll.learners.backends.torch import torch_learner
from drumroll.learners.statistics import merge
from drumroll.models import attention, prefix_tree
from drumroll.models.loading import load
from drumroll.models.lora import add_adapters
from drumroll.models.value import value_model

DTYPES = ("float32", "bfloat16")
OPTIM = OptimConfig(lr=1e-3, micro_tokens=20, minibatch=8, grad_clip=1.0)


def in_a_process(function, *arguments):
    [found] = run_ranks(function, 1, *arguments)
    return found


def dry_model(dry, dtype, *, value=False, lora=False, recompute=False):
    model = load("tiny-random", dtype=dtype, recompute_activations=recompute)
    model.module.model.layers, model.module.config.num_hidden_layers = model.module.model.layers[:2], 2  # quicker
    if lora:
        add_adapters(model, LoraConfig(rank=2))
    model = value_model(model) if value else model
    put_on(model.module, dry)
    return model


def counts(waits):
    return dict(collections.Counter(waits))


# --- the learner ---


def update(dry, learner, work):
    """Update; returns the waits, and how many steps, minibatches with work and micro-batches there were."""
    backend, seen = learner.backend, collections.Counter()
    forward, train, step = backend._forward, backend.train, backend.step

    def counting(name, method):
        def counted(*args):
            seen[name] += name != "worked" or bool(args[0])
            return method(*args)

        return counted

    backend._forward, backend.train = counting("micro", forward), counting("worked", train)
    backend.step = counting("steps", step)
    with dry.counted() as waits:
        statistics = learner.update(work)
    backend._forward, backend.train, backend.step = forward, train, step
    assert all(column.device.type == "cpu" for parts in statistics.columns.values() for column in parts)
    assert merge([statistics])[f"{learner.head.area}/tokens"] > 0
    return counts(waits), dict(seen)


def keep_and_return(learner, dtype):
    """Save, load and hand out weights."""
    with tempfile.TemporaryDirectory() as folder:
        learner.save(Path(folder))
        learner.load(Path(folder))
    assert learner.step == 1
    given = dict(learner.weights())
    assert given
    assert all(tensor.device.type == "dry" for tensor in given.values())
    assert {tensor.dtype for tensor in given.values()} == {getattr(torch, dtype)}
    assert {p.device.type for p in learner.backend.master} == {"dry"}
    return len(given)


def train_policies(_, *case):
    return [train_policy(Dry(), dtype, *case) for dtype in DTYPES]


def train_policy(dry, dtype, preset, extra, model):
    with dry():
        learner = torch_learner(dry_model(dry, dtype, **model), OPTIM, total_steps=2)
        batch = pack(random_groups(4))
        with dry.counted() as waits:
            batch = batch.with_(old=learner.infer(batch))
        found = {"infer": counts(waits), "micro": len(batch.micro_batches(OPTIM.micro_tokens))}
        if extra.get("kl"):
            reference = learner if model.get("lora") else torch_learner(dry_model(dry, dtype))
            batch = batch.with_(reference=reference.infer_reference(batch, 1.0))
        if preset == "sft":
            work = Update(batch, SFTLoss(), Shares("token_mean"))
        else:
            algorithm = Algorithm(AlgorithmConfig(preset=preset, **extra), single_update=False, longest=16)
            critic = None
            if preset == "ppo":
                critic = torch_learner(dry_model(dry, dtype, value=True), OPTIM, total_steps=2)
                batch = batch.with_(values=critic.infer(batch))
            batch = algorithm.advantages(batch)
            work = Update(batch, algorithm.loss, algorithm.aggregate)
            if critic is not None:
                found["critic"] = update(dry, critic, Update(batch, algorithm.value_loss, algorithm.value_aggregate))
                keep_and_return(critic, dtype)
        found["update"] = update(dry, learner, work)
        found["weights"] = keep_and_return(learner, dtype)
    return found


CASES = {
    "grpo, which skips": ("grpo", {}, {}),
    "grpo with reference and recomputed activations": ("grpo", {"kl": 0.1}, {"recompute": True}),
    "ppo with critic": ("ppo", {"kl": 0.1, "entropy": 0.01}, {}),
    "sft": ("sft", {}, {}),
    "grpo with adapters": ("grpo", {"kl": 0.1}, {"lora": True}),
    "gspo": ("gspo", {"correction": "truncate_sequence"}, {}),
}
WAITS = {
    "learners/learner.py _loss: reads a number": "micro",
    "learners/statistics.py settle: copies from the device": "worked",
    "learners/statistics.py _to_host: copies from the device": "worked",
    "learners/backends/torch.py clip: reads a number": "steps",
}
"""Where the host waits in an update, and how often, as docs/accelerators.md tells."""


@pytest.mark.parametrize("case", CASES)
def test_the_learner_trains_on_a_dry_accelerator(case):
    """In float32 and bfloat16."""
    for found in in_a_process(train_policies, *CASES[case]):
        for part in {"update", "critic"} & set(found):
            waits, seen = found[part]
            assert seen["micro"] > seen["worked"] >= 1
            assert waits == {where: seen[often] for where, often in WAITS.items()}
        assert found["infer"] == {"learners/learner.py infer: copies from the device": found["micro"]}
        assert found["weights"] > 10


# --- the engine ---


class DryEngine(NativeEngine):
    """The engine with its own thread on the device."""

    def __init__(self, dry, *args, **kwargs):
        self.dry = dry
        super().__init__(*args, **kwargs)

    def _run(self):
        with self.dry():
            super()._run()

    def _compute(self, chunks, followers):
        self.continued += sum(chunk.start > 0 for chunk in chunks)
        super()._compute(chunks, followers)

    def _prefill(self):
        with self.dry.counted() as waits:
            super()._prefill()
        self.log.append(("prefill", counts(waits)))

    def _decode(self):
        with self.dry.counted() as waits:
            super()._decode()
        self.log.append(("decode", counts(waits)))


def open_engine(dry, dtype, **options):
    torch.inference_mode = lambda on=True: torch.no_grad() if on else nullcontext()  # inference mode goes past dispatch modes
    with dry():
        engine = DryEngine(dry, dry_model(dry, dtype), slots=4, context=64, **options)
    engine.log, engine.continued = [], 0
    return engine


SAMPLINGS = {
    "plain": Sampling(0.7, 4),
    "greedy": Sampling(0.0, 4),
    "top_k": Sampling(1.0, 4, top_k=5, min_p=0.01),
    "top_p": Sampling(1.0, 4, top_p=0.9),
}
ONE_COPY = {"engines/native.py _append: copies from the device": 1}
"""Where the host waits in a pass over prompts and in a decode step, as docs/accelerators.md tells."""
NUCLEUS = {"engines/sampler.py _restrict: reads a number": 1}


def generate(_, dtype, fixed):
    """With each sampling: fresh prompts, equal ones, one that continues a prefix, more than fit at once."""
    dry = Dry()
    sampler.RANKED = 8  # fewer than the small vocabulary has
    engine = open_engine(dry, dtype, fixed_shape=fixed, page_tokens=None if fixed else 8)
    prompts = [tuple(range(5, 30)), tuple(range(5, 30)), tuple(range(7, 12)), (*range(5, 22), 40, 41, 42), (9,), (8, 9)]

    async def ask(name):
        by = 7 * list(SAMPLINGS).index(name)  # no prompts of the sampling before
        own = [tuple(token + by for token in prompt) for prompt in prompts]
        requests = [Request(f"{name}/{i}", p, SAMPLINGS[name], seed=i, order=i) for i, p in enumerate(own)]
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    found = {}
    for name in SAMPLINGS:
        engine.log = []
        found[name] = [(c.tokens, c.logprobs, c.stop) for c in asyncio.run(ask(name))], engine.log
    engine.close()
    return found, engine.continued


@pytest.mark.parametrize(("dtype", "fixed"), [("float32", False), ("bfloat16", False), ("float32", True)])
def test_the_engine_generates_on_a_dry_accelerator(dtype, fixed):
    found, continued = in_a_process(generate, dtype, fixed)
    assert (continued == 0) is fixed
    for name, (completions, log) in found.items():
        assert completions == [([1] * 4, [1.0] * 4, "length")] * 6  # ones are what a dry accelerator answers
        expected = ONE_COPY | NUCLEUS if name == "top_p" else ONE_COPY
        decodes = [waits for kind, waits in log if kind == "decode" and waits]
        assert len(decodes) >= 6
        assert all(waits == expected for waits in decodes[1:])  # the first may be the last of the sampling before
        prefills = [waits for kind, waits in log if kind == "prefill" and waits]
        assert prefills
        passes = 4 if fixed else 1  # each prompt alone, or all together
        assert all(set(waits) == set(expected) and max(waits.values()) <= passes for waits in prefills)


def switch(_, dtype):
    """New weights between tokens, a nap, and generation after both."""
    dry = Dry()
    engine = open_engine(dry, dtype, page_tokens=8)
    own = {name: parameter.shape for name, parameter in engine.model.module.named_parameters()}

    async def ask(tokens):
        return await engine.generate(Request("a", tuple(range(5, 5 + tokens)), Sampling(1.0, 4), seed=1, order=0))

    first = asyncio.run(ask(20))
    with dry():
        on_device = {name: torch.empty(shape, device=dry.device) for name, shape in own.items()}
    engine.load(1, on_device.items(), recompute=False)
    second = asyncio.run(ask(20))
    engine.load(2, ((name, torch.zeros(shape)) for name, shape in own.items()), recompute=True)  # from the host
    engine.sleep()
    asleep = engine._kept
    engine.wake()
    third = asyncio.run(ask(20))
    devices = {p.device.type for p in engine.model.module.parameters()} | {k.device.type for k in engine._cache.keys}
    engine.close()
    return [c.versions for c in (first, second, third)], asleep, devices


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_engine_switches_weights_and_sleeps_on_a_dry_accelerator(dtype):
    versions, asleep, devices = in_a_process(switch, dtype)
    assert versions == [[0] * 4, [1] * 4, [2] * 4]
    assert asleep is None
    assert devices == {"dry"}


# --- what it finds ---


def plant_in_learner(_):
    """The tree's positions stay on the host."""
    dry = Dry()
    real = prefix_tree.PrefixTree.__init__

    def forgetful(self, paths, device):
        real(self, paths, device)
        self.position = torch.zeros(len(self.position), dtype=torch.int64)

    with dry():
        learner = torch_learner(dry_model(dry, "float32"), OPTIM)
        prefix_tree.PrefixTree.__init__ = forgetful
        try:
            learner.infer(pack(random_groups()))
        except Exception as error:
            return str(error)
    return ""


def plant_in_engine(_):
    """The temperatures stay on the host."""
    dry = Dry()
    engine = open_engine(dry, "float32")
    sampler.send = lambda data, device: data

    async def ask():
        return await engine.generate(Request("a", (5, 6, 7), Sampling(0.7, 4), seed=1, order=0))

    try:
        asyncio.run(ask())
    except Exception as error:
        return str(error)
    return ""


def plant_mask(_):
    """A mask where the host knows the indices: it waits in every layer."""
    dry = Dry()
    engine = open_engine(dry, "float32")

    def attend(self, layer, q, k, v, scale, window):
        return q[self.place >= 0]

    attention.Packed.attend = attend

    async def ask():
        return await engine.generate(Request("a", (5, 6, 7), Sampling(0.7, 4), seed=1, order=0))

    try:
        asyncio.run(ask())
    except Exception as error:
        return f"{type(error).__name__} {counts(dry.waits)} {engine.log}"
    return ""


def test_a_tensor_left_on_the_host_is_found():
    for plant in (plant_in_learner, plant_in_engine):
        said = in_a_process(plant)
        assert re.search("two.* devices.*(cpu.* dry:0|dry:0.* cpu)", said), said


def test_a_mask_is_found():
    assert "DynamicOutputShapeException" in in_a_process(plant_mask)


def wait_in_every_way(_):
    dry = Dry()
    with dry():
        x = torch.ones(4).to(dry.device, non_blocking=True)
        found = {}
        ways = {
            "item": lambda: x.sum().item(),
            "bool": lambda: bool((x > 0).all()),
            "tolist": lambda: x[:1].tolist(),
            "cpu": x.cpu,
            "to": lambda: torch.ones(3).to(dry.device),
            "tensor": lambda: torch.tensor([1, 2], device=dry.device),
            "copy_ from": lambda: torch.ones(4).copy_(x),
            "copy_ to": lambda: x.copy_(torch.ones(4)),
            "host indices": lambda: x[torch.tensor([0, 1])],
            "put": lambda: x.__setitem__(x > 0, 0.0),
        }
        for name, way in ways.items():
            with dry.counted() as waits:
                way()
            found[name] = len(waits)
        free = {
            "ahead": lambda: torch.ones(3).to(dry.device, non_blocking=True),
            "copy_ ahead": lambda: x.copy_(torch.ones(4), non_blocking=True),
            "index": lambda: x[torch.zeros(2, dtype=torch.int64, device=dry.device)],
            "zeros": lambda: torch.zeros(3, device=dry.device) + x[:3] * 2,
        }
        for way in free.values():
            with dry.counted() as waits:
                way()
            assert waits == []
    return found


def test_every_kind_of_wait_is_counted():
    found = in_a_process(wait_in_every_way)
    assert set(found.values()) == {1}, found
