"""The scheduler with real engines, real rewards and a real learner: equal to a plain loop, and unbroken by faults."""

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
from collections import Counter

import pytest
import yaml

import drumroll as package
from drumroll.algorithms import Algorithm
from drumroll.batch import pack
from drumroll.config import RLConfig, load
from drumroll.data.render import Renderer
from drumroll.data.source import PromptSource
from drumroll.engines import Engine, Request, Sampling
from drumroll.engines.native import NativeEngine
from drumroll.learners import Learner, Update
from drumroll.rewards import Scorer
from drumroll.runfiles.ledger_queries import LedgerReader
from drumroll.sample import Group, Owner, Sample, Trace, sample_seed
from drumroll.store.run import Run
from drumroll.workers.runtime import open_workers


async def barrier_loop(config: RLConfig):
    """An independent synchronous loop: draw a prompt, write its samples one by one, score, keep if useful; until enough."""
    workers = await open_workers(config)
    scorer = Scorer(config.rewards())
    source = PromptSource(config.data, config.seed, Renderer(workers.tokenizer), scorer.required_columns)
    algorithm = Algorithm(config.algorithm, single_update=True)
    sampling = Sampling(config.rollout.temperature, config.rollout.max_tokens)
    draw, batches, losses = 0, [], []
    try:
        for step in range(1, config.steps + 1):
            groups = []
            while len(groups) < config.rollout.prompts:
                prompt = source.draw()
                samples = []
                for index in range(config.rollout.samples):
                    place = draw * config.rollout.samples + index
                    request = Request(
                        f"{draw}.{index}", prompt.tokens, sampling, sample_seed(config.seed, "train", draw, index), place
                    )
                    done = await workers.rollout.call(0, Engine.generate, request)
                    trace = Trace()
                    trace.extend(list(prompt.tokens), Owner.PROMPT)
                    trace.extend(done.tokens, Owner.POLICY, done.logprobs, done.versions)
                    text = workers.tokenizer.decode(done.tokens, skip_special_tokens=True)
                    sample = Sample(prompt, draw, index, traces=[trace], completion=text)
                    await scorer.score(sample)
                    samples.append(sample)
                if len({s.reward for s in samples}) > 1:
                    groups.append(Group(prompt, draw, samples))
                draw += 1
            batch = algorithm.advantages(pack(groups))
            update = Update(batch, algorithm.loss, algorithm.aggregate)
            metrics = (await workers.actor.call(0, Learner.update, update)).metrics()
            await workers.publish(step)
            batches.append([(s.draw, s.index, s.traces[0].tokens, s.traces[0].logprobs) for g in groups for s in g.samples])
            losses.append((metrics["train/loss"], metrics["train/grad_norm"]))
    finally:
        await workers.close()
    return batches, losses


@pytest.mark.parametrize("oversample", [1, 2.5])
def test_staleness_zero_equals_a_plain_barrier_loop_bit_for_bit(small, oversample, monkeypatch):
    recipe = small(deterministic=True, steps=3, rollout={"filter": "zero_variance", "oversample": oversample})
    config = load(recipe).config
    assert isinstance(config, RLConfig)
    batches, losses = asyncio.run(barrier_loop(config))

    import drumroll.pipelines.rl as controller

    seen = []

    packed = controller.pack

    async def spy(workers, groups, **kwargs):
        seen.append([(s.draw, s.index, s.traces[0].tokens, s.traces[0].logprobs) for g in groups for s in g.samples])
        return await packed(workers, groups, **kwargs)

    monkeypatch.setattr(controller, "pack", spy)
    run = package.train(recipe)
    assert seen == batches
    assert [(m["train/loss"], m["train/grad_norm"]) for m in run.metrics[1:]] == losses


FAULTY = """
import time
def f(sample):
    kind = (sample.draw * 7 + sample.index * 3) % 10
    if kind < 3:
        raise ValueError("three in ten fail")
    if kind == 3:
        time.sleep(1000)
    return float(sample.index % 2)
"""


def test_failing_and_hanging_rewards_and_a_killed_engine(small, mine, monkeypatch):
    """30% of the rewards fail, 10% hang, one of two engine threads dies mid-step: every draw is accounted for."""
    decode, victims = NativeEngine._decode, []

    def dying(self):
        if not victims and self._live() and self.version == 1:
            victims.append(self)
            raise SystemExit("killed")
        decode(self)

    monkeypatch.setattr(NativeEngine, "_decode", dying)
    rollout = {"reward_timeout": 0.8, "retries": 1, "prompts": 5, "samples": 4}
    recipe = small(
        reward={"*": f"{mine(FAULTY)}:f"},
        steps=3,
        rollout=rollout,
        roles={"rollout": {"workers": 2, "slots": 8}},
        eval={"sets": {}},
    )
    run = package.train(recipe)
    assert len(victims) == 1
    assert not victims[0]._thread.is_alive()
    ledger = LedgerReader(run.path / "ledger.sqlite")
    assert ledger.problems() == []
    assert ledger.in_flight() == []
    fates = dict(ledger.fates())
    assert fates["trained"] == sum(s["fate"] == "trained" for s in run.samples)
    failures = Counter(json.loads(json.dumps([s["failure"].split(" ")[0] for s in run.samples if s["fate"] == "failed"])))
    assert failures["ValueError"] > 5
    assert failures["TimeoutError"] > 1
    assert run.metrics[2]["rollout/retried"] > 0
    draws = [d for (d,) in ledger.db.execute("SELECT DISTINCT draw FROM draws ORDER BY draw")]
    assert draws == list(range(len(draws)))


@pytest.mark.parametrize(
    "rollout",
    [
        {"max_staleness": 1},
        {"max_staleness": 1, "order": "arrival", "oversample": 2},
        {"max_staleness": 2, "partial": True},
        {"max_staleness": 1, "overage": "mask", "kv_at_switch": "recompute"},
        {"max_staleness": 0.5, "filter": "zero_variance"},
    ],
    ids=str,
)
def test_asynchronous_runs_keep_the_bound(small, rollout):
    run = package.train(small(steps=4, rollout=rollout, roles={"rollout": {"slots": 8}}))
    limit = -(-rollout["max_staleness"] // 1)
    trained = [s for s in run.samples if s["kind"] == "train" and s["fate"] == "trained"]
    assert len({s["step"] for s in trained}) == 4
    for sample in trained:
        versions = [v for t in sample["traces"] for v in t["versions"] if v >= 0]
        if rollout.get("overage") != "mask":
            assert sample["step"] - 1 - min(versions) <= limit
    assert any(m["rollout/staleness"] > 0 for m in run.metrics[1:])
    assert LedgerReader(run.path / "ledger.sqlite").problems() == []


def test_masked_tokens_are_not_trained(small):
    groups = []
    trace = Trace()
    trace.extend([1, 5], Owner.PROMPT)
    trace.extend([6, 7, 8], Owner.POLICY, [-1.0] * 3, [0, 1, 2])
    prompt = dataclasses.replace(_prompt())
    groups.append(Group(prompt, 0, [Sample(prompt, 0, 0, traces=[trace], reward=1.0)]))
    assert pack(groups, oldest=1).mask.tolist() == [False, False, False, True, True]


def _prompt():
    from drumroll.sample import Prompt

    return Prompt("p", "d", "", (1, 5))


def test_a_hopeless_step_ends_with_the_reason(small):
    from drumroll.errors import RolloutError

    rollout = {"filter": "mean_band", "filter_args": {"low": 2, "high": 3}, "max_draws_per_step": 12}
    with pytest.raises(RolloutError, match=r"0 of 4 groups after 12 prompts .*outside \(2, 3\)"):
        package.train(small(rollout=rollout))


def test_the_ledger_answers_through_a_resume(small, drumroll):
    recipe = small(steps=2, checkpoint={"every": 1}, rollout={"filter": "zero_variance"})
    run = package.train(recipe)
    package.train(resume=run.path, overrides=["steps=3"])
    ledger = LedgerReader(run.path / "ledger.sqlite")
    assert ledger.problems() == []
    assert ledger.one("SELECT MAX(life) FROM draws") == 2
    code, out, _ = drumroll("run", "ledger", str(run.path))
    assert code == 0
    assert "trained" in out
    assert "all rewards equal" in out
    prompt = ledger.one("SELECT prompt FROM draws WHERE fate = 'trained'")
    code, out, _ = drumroll("run", "ledger", str(run.path), "--prompt", prompt)
    assert "generating" in out
    assert "trained" in out
    code, out, _ = drumroll("run", "ledger", str(run.path), "--in-flight")
    assert "nothing is in flight" in out
    assert drumroll("run", "ledger", str(run.path), "--prompt", "nobody")[0] == 2


def test_a_killed_run_shows_what_was_in_flight_and_resumes_without_loss(small, tmp_path, drumroll, mine):
    """A real process killed by SIGKILL in the middle of a step."""
    reward = f"{mine('import time' + chr(10) + 'def f(completion): time.sleep(0.2); return len(completion)')}:f"
    path = tmp_path / "recipe.yaml"
    recipe = small(steps=10_000, checkpoint={"every": 1}, reward=reward, eval={}, import_from=[str(tmp_path)])
    path.write_text(yaml.safe_dump(recipe))
    process = subprocess.Popen([sys.executable, "-m", "drumroll", "train", str(path), "--quiet"], cwd=tmp_path)
    ledger_path, deadline = tmp_path / "runs/small/ledger.sqlite", time.monotonic() + 120

    def in_flight():
        if not ledger_path.exists() or not (tmp_path / "runs/small/checkpoints/step-000001").exists():
            return []
        return LedgerReader(ledger_path).in_flight()

    while not in_flight():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    code, out, _ = drumroll("run", "ledger", str(tmp_path / "runs/small"), "--in-flight")
    assert code == 0
    assert "scoring" in out
    run = Run.open(tmp_path / "runs/small")
    last = run.checkpoints.steps()[-1]
    package.train(resume=run.path, overrides=[f"steps={last + 1}"])
    ledger = LedgerReader(run.path / "ledger.sqlite")
    assert ledger.problems() == []
    assert ledger.in_flight() == []
    assert dict(ledger.fates())["superseded"] > 0
    trained = [d for (d,) in ledger.db.execute("SELECT draw FROM draws WHERE fate = 'trained' ORDER BY draw")]
    assert trained == list(range(4 * (last + 1)))
