"""A real chat model through our attention and our engine. Brings the model (93 MB) on first use."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import drumroll as package
from drumroll.data.render import Renderer
from drumroll.engines import Request, Sampling
from drumroll.engines.native import NativeEngine
from drumroll.models import smollm2
from drumroll.models.attention import Packed
from drumroll.models.loading import load
from drumroll.sample import StopReason

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"
QUESTIONS = ("What is 7+5?", "Name three colours of the rainbow, in one short sentence.")


@pytest.fixture(scope="module")
def folder():
    return smollm2.fetch()


@pytest.fixture(scope="module")
def model(folder):
    return load(str(folder))


def test_the_directory_is_an_ordinary_chat_model(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template
    assert tokenizer.eos_token == "<|im_end|>"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_a_second_fetch_changes_nothing(folder):
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert smollm2.fetch() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


@torch.no_grad()
def test_packed_prompts_have_the_logits_of_plain_transformers(folder, model):
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = [torch.tensor(Renderer(model.tokenizer).prompt(question)) for question in QUESTIONS]
    layout = Packed([len(prompt) for prompt in prompts])
    packed = model.module(
        input_ids=torch.cat(prompts)[None], position_ids=layout.positions(), use_cache=False, layout=layout
    ).logits[0]
    alone = torch.cat([plain(input_ids=prompt[None]).logits[0] for prompt in prompts])
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-3)


def test_the_native_engine_answers_in_chat(model):
    engine = NativeEngine(model, slots=1, context=128)
    try:
        prompt = Renderer(model.tokenizer).prompt(QUESTIONS[0])
        request = Request("sum", prompt, Sampling(temperature=0, max_tokens=32), seed=0)
        completion = asyncio.run(engine.generate(request))
    finally:
        engine.close()
    assert "12" in model.tokenizer.decode(completion.tokens)
    assert completion.stop is StopReason.EOS


def test_greedy_is_that_of_transformers_on_200_prompts(folder, model):
    """Token for token, where transformers itself sees no tie: two tokens within 1e-5 of each other are counted, and few."""
    renderer = Renderer(model.tokenizer)
    prompts = [renderer.prompt(f"What is {a} {'+' if a % 2 else '-'} {b}?") for a in range(10) for b in range(20)]
    engine = NativeEngine(model, slots=50, context=128)

    async def go():
        wanted = [Request(str(i), p, Sampling(0.0, 12), i) for i, p in enumerate(prompts)]
        return await asyncio.gather(*(engine.generate(r) for r in wanted))

    ours = asyncio.run(go())
    engine.close()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    ties = 0
    for prompt, done in zip(prompts, ours, strict=True):
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([[*prompt, *done.tokens]])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        for i, token in enumerate(done.tokens):
            if best.values[i, 0] - best.values[i, 1] < 1e-5:
                ties += 1
                break  # from here on the two may go apart
            assert token == best.indices[i, 0], (prompt, i)
    assert ties <= 5


def test_two_shards_load_with_far_less_memory_than_one_process(folder, monkeypatch):
    """Anonymous memory at its peak, above that after the imports."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import parallel

    assert parallel.load_peak({"shard": 2}, str(folder)) <= 0.75 * parallel.load_peak({}, str(folder))


def test_dpo_on_its_own_best_and_worst_answers_improves_arithmetic(folder, tmp_path, monkeypatch):
    """The recipe smollm2-dpo as its README says."""
    monkeypatch.chdir(tmp_path)
    model = [f"model={folder}"]
    package.rollout(RECIPES / "smollm2-arithmetic/recipe.yaml", model, batches=20)
    run = package.train(RECIPES / "smollm2-dpo/recipe.yaml", model)
    before, after = run.metrics[0], run.metrics[-1]
    assert after["eval/arithmetic"] > before["eval/arithmetic"] + 0.1
    assert after["eval/arithmetic/sampled"] > before["eval/arithmetic/sampled"] + 0.2
