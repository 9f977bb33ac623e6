"""Agents as episodes: a user's function that calls the model by the `openai` package, trained as it is."""

import asyncio
import threading
from pathlib import Path

import openai
import pytest

import drumroll
from drumroll.errors import ConfigError, RolloutError
from drumroll.processes.loops import Loop

ROOT = Path(__file__).parents[2]

ODD = """
import asyncio, itertools, time
count = itertools.count()

async def odd(client, prompt, model):
    number = next(count) % 8
    if number == 1:
        raise ValueError("no idea")
    if number == 3:
        return "lots"
    if number == 4:
        await asyncio.sleep(1000)
    if number == 5:
        return 1.0  # without a call
    if number == 6:
        raise asyncio.CancelledError
    messages = [{"role": "user", "content": prompt}]
    for _ in range(9 if number == 2 else 1):
        reply = await client.chat.completions.create(model=model, messages=messages)
    return float(number % 2)
"""

REVERSAL = {"train": {"reversal": {"source": "drumroll.data.problems:reversal"}}}


def recipe(small, use, **changes):
    base = {"data": REVERSAL, "reward": {}, "environment": {"use": f"agent:{use}", "max_turns": 2}, "eval": {"sets": {}}}
    made = small(**base)
    made["data"]["train"] = dict(REVERSAL["train"])
    for key, value in changes.items():
        made[key] = {**made[key], **value} if isinstance(value, dict) and isinstance(made.get(key), dict) else value
    return made


def example(tmp_path, *overrides):
    return drumroll.train(ROOT / "examples" / "agent" / "recipe.yaml", [f"output={tmp_path}", *overrides])


def test_an_agent_is_trained_without_changing_it(tmp_path):
    """The token record is what the engine saw: the learner's log-probs of it agree with the engine's."""
    run = example(tmp_path, "steps=3", "rollout.prompts=8", "eval.sets={}")
    lines = run.metrics[1:]
    assert max(line["train/mismatch"] for line in lines) < 1e-4
    assert min(line["train/grad_norm"] for line in lines) > 0
    assert all(1.0 <= line["environment/reversal/turns"] <= 2.0 for line in lines)
    assert {s["stop"] for s in run.samples} == {"terminated"}
    owners = {tuple(trace["owners"]) for s in run.samples for trace in s["traces"] if len(s["turns"]) == 2}
    assert owners
    assert all({0, 1, 2} == set(each) for each in owners)  # one trace: prompt, policy, environment, policy


@pytest.mark.slow
def test_the_example_learns(tmp_path):
    summary = example(tmp_path).summary
    assert summary["after"]["reversal"] > summary["before"]["reversal"] + 0.2


def test_an_agents_calls_go_on_under_new_weights(tmp_path):
    stale = ["rollout.max_staleness=1", "rollout.partial=true", "rollout.order=arrival", "algorithm.correction=truncate"]
    run = example(tmp_path, "steps=3", "rollout.prompts=4", "eval.sets={}", *stale)
    assert [line["step"] for line in run.metrics] == [0, 1, 2, 3]
    assert not [s["failure"] for s in run.samples if s["failure"]]
    traces = [trace for s in run.samples for trace in s["traces"]]
    assert {v for trace in traces for v in trace["versions"]} > {-1, 0}


def test_whatever_an_agent_does_wrong_is_its_samples_failure(small, mine):
    config = recipe(
        small,
        f"{mine(ODD)}:odd",
        steps=1,
        environment={"max_turns": 3, "step_timeout": 10.0},
        rollout={"prompts": 4, "samples": 8},
    )
    run = drumroll.train(config)
    failures = {s["failure"] for s in run.samples if s["failure"]}
    for text in (
        "ValueError",
        "no idea",
        ".py, line 8)",
        "CancelledError in agent",
        "returned 'lots'",
        "took longer than 10 s between two calls",
        "without a completion",
    ):
        assert any(text in failure for failure in failures), (text, failures)
    cut = [s for s in run.samples if s["stop"] == "turns"]
    assert cut
    assert {s["reward"] for s in cut} == {0.0}


def test_a_plain_function_with_its_own_client_and_rewards_by_the_recipe(small):
    def plain(task, base_url, api_key, seed, extra):
        assert extra == 5
        assert isinstance(seed, int)
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        messages = [{"role": "user", "content": task["prompt"]}]
        stream = client.chat.completions.create(model="gpt", messages=messages, max_tokens=3, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert len(text) <= 3
        client.close()

    environment = {"use": plain, "args": {"extra": 5}, "max_turns": 1}
    evaluation = {"sets": {"held": {"source": "drumroll.data.problems:reversal", "limit": 4}}}
    run = drumroll.train(recipe(small, "plain", steps=1, reward="exact", environment=environment, eval=evaluation))
    assert "eval/held" in run.metrics[-1]
    trained = [s for s in run.samples if s["kind"] == "train"]
    assert all(set(s["rewards"]) == {"exact"} and s["failure"] is None for s in trained)
    assert run.settings["environment"]["use"] == "agent:python:plain"
    without = recipe(small, "plain", name="without", steps=1, environment=environment)
    with pytest.raises(ConfigError, match="no reward for domain 'reversal'"):
        drumroll.train(without)


def test_an_agent_that_cannot_be_found_or_called_is_told_before_or_named(small, mine):
    name = mine("async def agent(client, nothing): ...")
    with pytest.raises(ConfigError, match="there is no module 'no_such_module'"):
        drumroll.train(recipe(small, "no_such_module:agent"))
    with pytest.raises(RolloutError, match="asks for 'nothing'; there is answer, api_key, base_url, client"):
        drumroll.train(recipe(small, f"{name}:agent"))


def test_a_loop_that_an_agent_blocks_is_left_behind(monkeypatch):
    monkeypatch.setattr("drumroll.processes.loops.PATIENCE", 0.2)
    entered, release = threading.Event(), threading.Event()

    async def block():
        entered.set()
        release.wait(300)

    async def scene():
        loop = Loop("agents")
        stuck = asyncio.ensure_future(loop.run(block))
        await asyncio.to_thread(entered.wait, 300)
        await loop.check()
        await loop.run(lambda: asyncio.sleep(0))
        assert not stuck.done()
        release.set()
        await stuck
        await loop.close()

    asyncio.run(scene())
