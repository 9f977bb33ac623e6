"""Benchmarks count the arithmetic that is done, and fail when a figure cannot be true."""

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import collect  # noqa: E402
from arithmetic import Shape, generated, trained  # noqa: E402
from figures import LIMITS, fraction, limit_gflops  # noqa: E402

from drumroll.algorithms import Algorithm  # noqa: E402
from drumroll.batch import pack  # noqa: E402
from drumroll.config.algorithm import AlgorithmConfig  # noqa: E402
from drumroll.config.optim import OptimConfig  # noqa: E402
from drumroll.engines import Sampling  # noqa: E402
from drumroll.engines.continuation import Continuation  # noqa: E402
from drumroll.engines.native import NativeEngine  # noqa: E402
from drumroll.learners import Update  # noqa: E402
from drumroll.learners.backends.torch import torch_learner  # noqa: E402
from drumroll.models.loading import load  # noqa: E402
from drumroll.sample import Group, Owner, Prompt, Sample, Trace  # noqa: E402


def groups(prompts=(7, 12, 9), size=4):
    """Groups of completions of different lengths."""
    rng = random.Random(0)
    made = []
    for draw, length in enumerate(prompts):
        prompt = Prompt(str(draw), "d", "", tuple(rng.randrange(20) for _ in range(length)))
        samples = []
        for index in range(size):
            trace, count = Trace(), rng.randint(2, 9)
            trace.extend(list(prompt.tokens), Owner.PROMPT)
            trace.extend([rng.randrange(20) for _ in range(count)], Owner.POLICY, [-1.0] * count, [0] * count)
            samples.append(Sample(prompt, draw, index, traces=[trace], reward=float(index % 2)))
        made.append(Group(prompt, draw, samples))
    return made


def products(counter):
    """Operations in matrix products, without attention's own."""
    return sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))


@pytest.mark.parametrize("micro_tokens", [20, 10_000])
def test_the_operations_of_an_update_are_those_that_torch_counts(micro_tokens):
    model = load("tiny-random", seed=1)
    shape, made = Shape.of(model.module), groups()
    algorithm = Algorithm(AlgorithmConfig(preset="grpo"), single_update=True)
    batch = algorithm.advantages(pack(made))
    learner = torch_learner(model, OptimConfig(lr=0.0, micro_tokens=micro_tokens), total_steps=1)
    with FlopCounterMode(display=False) as counter:
        learner.update(Update(batch, algorithm.loss, algorithm.aggregate))
    done = trained(shape, batch, micro_tokens)
    without = trained(Shape(shape.body, shape.head, 0), batch, micro_tokens)
    assert without.operations == products(counter)
    assert without.operations < done.operations  # torch does not count attention on a CPU
    given = sum(len(t.tokens) for group in made for s in group.samples for t in s.traces)
    assert done.given == given
    once = given - sum((len(g.samples) - 1) * len(g.prompt.tokens) for g in made)
    assert done.computed == once if micro_tokens == 10_000 else done.computed > once
    assert 0 < done.saved < 1


def test_pairs_of_query_and_key_are_counted_token_by_token():
    batch = Algorithm(AlgorithmConfig(preset="grpo"), single_update=True).advantages(pack(groups()))
    pairs = 0
    for group in groups():
        shared = len(group.prompt.tokens)
        pairs += sum(position + 1 for position in range(shared))
        for sample in group.samples:
            pairs += sum(position + 1 for position in range(shared, len(sample.traces[0].tokens)))
    assert trained(Shape(0, 0, 1), batch, 10_000).operations == 3 * 2 * pairs


def test_the_operations_of_generation_are_those_of_transformers_forward_passes():
    module = AutoModelForCausalLM.from_config(load("tiny-random", seed=1).module.config, attn_implementation="sdpa")
    shape = Shape.of(module)
    prompt, lengths = 11, [5, 1, 3]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(torch.arange(prompt)[None] % 20, logits_to_keep=1)
        for length in lengths:
            for _ in range(length - 1):
                module(torch.tensor([[3]]))
    plain = Shape(shape.body, shape.head, 0)
    assert generated(plain, [prompt], [lengths]) == products(counter)
    seen = sum(range(1, prompt + 1)) + sum(prompt + i + 1 for length in lengths for i in range(length - 1))
    config = module.config
    width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    assert generated(shape, [prompt], [lengths]) - products(counter) == 4 * width * seen


def test_a_fraction_above_one_fails(capsys):
    fraction("train/x", 2e9, 4.0, 1.0, tokens=3)
    assert json.loads(capsys.readouterr().out)["value"] == 0.5
    with pytest.raises(SystemExit, match=r"train/x is 1\.82, above 1"):
        fraction("train/x", 1.82e9, 1.0, 1.0)
    assert json.loads(capsys.readouterr().out)["value"] == 1.82


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """A place for `collect.py` with one benchmark that claims more than the machine can do, and an honest one."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    head = f"import sys\nsys.path.insert(0, {str(ROOT / 'benchmarks')!r})\nfrom figures import *\n"
    for name, operations in (("boast.py", "3e9"), ("honest.py", "1e9")):
        (folder / name).write_text(f"{head}fraction('x', {operations}, 1.0, limit_gflops())\n")
    monkeypatch.setattr(collect, "ROOT", tmp_path)
    monkeypatch.setattr(collect, "PAGES", tmp_path)
    monkeypatch.setattr(collect, "BENCHMARKS", ("boast.py", "honest.py"))
    monkeypatch.setattr(sys, "argv", ["collect.py"])
    monkeypatch.setattr(collect, "natural_dtype", lambda: "float32")
    monkeypatch.setenv(LIMITS, '{"float32": 2.0}')
    return tmp_path


def test_collect_hands_one_limit_to_all_goes_on_and_fails_at_the_end(pages, capsys):
    with pytest.raises(SystemExit, match=r"boast\.py \(exit code 1\)"):
        collect.main()
    kept = [json.loads(line) for line in (pages / "figures.jsonl").read_text().splitlines()]
    assert [(f["benchmark"], f["value"], f["gemm_gflops"]) for f in kept] == [("honest.py", 0.5, 2.0)]
    assert "2 GFLOP/s in float32" in (pages / "performance.md").read_text()


def test_the_limit_is_measured_once(monkeypatch):
    asked = []

    def run(command, **options):
        asked.append((command[-1], "OMP_NUM_THREADS" in options["env"]))
        return subprocess.CompletedProcess(command, 0, "123.5\n")

    monkeypatch.setenv(LIMITS, "{}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(subprocess, "run", run)
    assert [limit_gflops("float32"), limit_gflops("float32")] == [123.5, 123.5]
    assert asked == [("float32", False)]


def test_our_player_writes_the_recorded_lengths(monkeypatch):
    """Whatever limit the scheduler has: it must not ask for what a recorded length leaves of it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
    import ours_step

    monkeypatch.setattr(NativeEngine, "generate", NativeEngine.generate)
    ours_step.record([3, 5])

    async def go():
        engine = NativeEngine(load("tiny"), slots=2, context=32)
        try:
            turns = [Continuation(str(n), (1, 2, 3), Sampling(max_tokens=8), n, str, n) for n in range(4)]
            return [len((await turn.run(engine.generate)).tokens) for turn in turns]
        finally:
            engine.close()

    assert asyncio.run(go()) == [3, 5, 3, 5]
