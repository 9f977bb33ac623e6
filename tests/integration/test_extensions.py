"""Parts written outside the package, in a module beside the recipe, take part in whole runs: each kind of part once."""

import sys
from pathlib import Path

import pytest
import yaml

import drumroll as package
from drumroll.config.engines import ENGINES
from drumroll.config.pipelines import CONFIGS
from drumroll.engines import find_backend
from drumroll.errors import ConfigError, DataError
from drumroll.learners.backend import BACKENDS
from drumroll.pipelines import find_pipeline

IMITATION = '''
"""Imitates answers, and measures how likely the first model finds them."""

from drumroll import stages
from drumroll.algorithms.aggregations import token_mean
from drumroll.algorithms.losses import SFTLoss
from drumroll.batch import pack
from drumroll.config import RunConfig
from drumroll.config.rollout import RolloutConfig
from drumroll.data.render import Renderer
from drumroll.data.source import PromptSource
from drumroll.learners import Update
from drumroll.pipelines import Pipeline
from drumroll.sample import Group, Owner, Sample, Trace


class ImitationConfig(RunConfig):
    """Imitation."""

    rows: int = 4
    """Rows of a step."""

    def rollout_section(self):
        return RolloutConfig(max_tokens=1)

    def needs(self):
        return {"reference": "imitation is compared with the first model"}

    def training_columns(self, dataset):
        return [(dataset.completion, "imitation")]

    def arithmetic(self):
        return [f"{self.steps} steps of {self.rows} rows"]


def open_rows(config, workers):
    return PromptSource(config.data, config.seed, Renderer(workers.tokenizer))


def draw(source, number):
    prompt, reader = source.draw_with_reader()
    trace, answer = Trace(), reader.answer(prompt)
    trace.extend(list(prompt.tokens), Owner.PROMPT)
    trace.extend(answer, Owner.POLICY, [0.0] * len(answer), [0] * len(answer))
    return Group(prompt, number, [Sample(prompt, number, 0, traces=[trace], reward=0.0)])


async def train(session, config, source):
    workers = session.workers
    session.watch(source=source)
    await session.start()
    while session.step < config.steps:
        async with session.stage("train"), workers.training():
            batch = pack([draw(source, number) for number in range(config.rows)])
            known = await stages.infer(workers, workers.actor.put(batch), 1.0)
            metrics = await stages.train(workers, workers.actor, workers.actor.put(Update(batch, SFTLoss(), token_mean)))
        if config.cluster.runtime == "local":
            metrics["imitation/first"] = -float(known.reference[batch.mask].mean())
        await stages.publish(workers, session.step + 1)
        await session.commit(metrics)
    await session.finish()


PIPELINE = Pipeline(ImitationConfig, open_rows, train)
'''

ENGINE = '''
"""The native engine with a copy of the weights, and a log of its calls."""

from drumroll.config.engines import EngineTraits
from drumroll.engines import EngineBackend
from drumroll.engines.native import NativeEngine

calls = []


class LoggingEngine(NativeEngine):
    async def generate(self, request):
        calls.append("generate")
        return await super().generate(request)

    def load(self, version, weights, *, recompute):
        calls.append(f"load {version}")
        super().load(version, weights, recompute=recompute)


def make(setup):
    return LoggingEngine(setup.load(), slots=setup.role.slots, context=setup.context, fixed_shape=setup.deterministic)


LOGGING = EngineBackend(make, EngineTraits("the logging engine", deterministic=True))
LOOSE = EngineBackend(make, EngineTraits("the loose engine", replayable=False))
LONELY = EngineBackend(make, EngineTraits("the lonely engine", own_process=True))
'''

DEMONSTRATIONS = {"source": "drumroll.data.problems:demonstrations", "args": {"task": "sums", "flawed": 0.0}}


@pytest.fixture
def beside(tmp_path, monkeypatch, small):
    """Write a module and a recipe beside it; returns the module's name and the recipe's path."""
    monkeypatch.setattr(sys, "path", sys.path.copy())

    def write(text, recipe):
        name = f"own_{len(list(tmp_path.glob('own_*.py')))}_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(text)
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe(name), sort_keys=False))
        return name, path

    return write


@pytest.fixture
def imitation(beside, small):
    """A recipe of one's own pipeline, with some changes."""

    def write(**changes):
        def recipe(name):
            data = {"train": {"sums": DEMONSTRATIONS, "reversal": DEMONSTRATIONS}}
            values = small(pipeline=f"{name}:PIPELINE", data=data, rows=4, **changes)
            return {key: value for key, value in values.items() if key != "rollout"}

        return beside(IMITATION, recipe)

    return write


def test_every_built_in_is_found_by_its_name():
    assert {name: find_pipeline(name).config for name in CONFIGS} == CONFIGS
    assert {name: find_backend(name).traits for name in ENGINES} == ENGINES


# --- pipeline ---


def test_a_pipeline_trains_as_the_built_in_that_it_repeats(imitation, small):
    _, path = imitation(deterministic=True)
    run = package.train(path)
    recipe = small(
        pipeline="sft",
        batch=4,
        eval_max_tokens=1,
        deterministic=True,
        name="built_in",
        data=yaml.safe_load(path.read_text())["data"],
    )
    del recipe["rollout"]
    built_in = package.train(recipe)
    for metric in ("train/loss", "train/grad_norm"):
        assert [m[metric] for m in run.metrics[1:]] == [m[metric] for m in built_in.metrics[1:]]
    first, second = run.metrics[1:]
    assert first["imitation/first"] == pytest.approx(first["train/loss"], rel=1e-5)  # it starts as the reference
    assert second["imitation/first"] != pytest.approx(second["train/loss"], rel=1e-5)
    evaluated = [sample for sample in run.samples if sample["kind"] == "eval"]
    assert evaluated
    assert all(sum(version >= 0 for version in s["traces"][0]["versions"]) == 1 for s in evaluated)  # of max_tokens=1


def test_a_pipeline_resumes_and_its_run_is_looked_at_without_its_code(imitation, drumroll, monkeypatch):
    name, path = imitation()
    run = package.train(path, ["steps=1"])
    monkeypatch.delitem(sys.modules, name)
    code, out, _ = drumroll("run", "status", str(run.path))
    assert (code, "finished, step 1 of 1" in out) == (0, True)
    assert drumroll("run", "report", str(run.path))[0] == 0
    assert name not in sys.modules
    resumed = package.train(resume=run.path, overrides=["steps=2"])
    assert [m["step"] for m in resumed.metrics] == [0, 1, 2]


def test_the_verbs_know_a_pipeline_by_its_config(imitation, drumroll):
    name, path = imitation()
    assert "Rows of a step" in drumroll("explain", "rows", str(path))[1]
    code, out, _ = drumroll("train", str(path), "--dry-run")
    assert (code, "# 2 steps of 4 rows" in out, "the first prompt of data.train.sums" in out) == (0, True, True)
    assert "the first prompt of data.train.sums" in drumroll("check", "recipe", str(path))[1]
    for verb in (["rollout"], ["plan", "--simulate"]):
        code, _, error = drumroll(*verb, str(path))
        assert (code, f"this recipe is pipeline: {name}:PIPELINE" in error) == (2, True), (verb, error)
    code, _, error = drumroll("train", str(path), "rowss=3")
    assert (code, "unknown key 'rowss'. Did you mean 'rows'?" in error) == (2, True), error


def test_a_pipelines_mistakes_leave_no_run(imitation, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    _, path = imitation()
    with pytest.raises(DataError, match=r"lacks the column 'completion', which imitation needs"):
        package.train(path, ["data.train={sums: {source: rows.jsonl}}"])
    assert not list(tmp_path.glob("runs/*/config.yaml"))


# --- engine ---


def test_an_engine_generates_and_gets_every_version(beside, small, untimed):
    same = {"deterministic": True, "algorithm": {"kl": 0.01}}
    name, path = beside(ENGINE, lambda name: small(roles={"rollout": {"backend": f"{name}:LOGGING"}}, **same))
    run = package.train(path)
    calls = sys.modules[name].calls
    assert calls.count("generate") == 2 * 8 + 2 * 16  # an evaluation before and after, two steps
    assert [call for call in calls if call != "generate"] == ["load 1", "load 2"]
    assert untimed(run) == untimed(package.train(small(name="native", **same)))


@pytest.mark.parametrize(
    ("backend", "changes", "sentence"),
    [
        ("LOOSE", ["deterministic=true"], "because the loose engine's batches decide its last digits"),
        ("LOOSE", [], "gives no log-probs that the learner can reproduce"),
        ("LONELY", [], "runs in processes of its own, so it needs cluster.runtime: ray"),
        ("LOGGING", ["roles.actor.lora={rank: 2}"], "roles.actor.lora needs an engine that takes adapters"),
        ("LOGGING", ["roles.rollout.options={x: 1}"], "roles.rollout.options are vLLM's"),
        ("calls", [], "is a list, not a drumroll.engines.EngineBackend"),
        ("LOGING", [], "has no 'LOGING'"),
    ],
)
def test_an_engines_traits_are_held(beside, small, tmp_path, backend, changes, sentence):
    _, path = beside(ENGINE, lambda name: small(roles={"rollout": {"backend": f"{name}:{backend}"}}))
    with pytest.raises(ConfigError) as error:
        package.train(path, changes)
    assert sentence in str(error.value)
    assert not list(tmp_path.glob("runs/*/config.yaml"))


def test_a_pipeline_and_an_engine_on_ray(imitation, tmp_path, ray_cluster):
    """Workers find both in the recipe's folder, which is not the current one."""
    cluster = {"runtime": "ray", "address": ray_cluster.address, "devices": 1, "kind": "cpu", "threads": 1}
    (tmp_path / "engine_of_mine.py").write_text(ENGINE)
    _, path = imitation(cluster=cluster, roles={"rollout": {"backend": "engine_of_mine:LOGGING"}})
    assert Path.cwd() != tmp_path
    run = package.train(path)
    assert run.summary["steps"] == 2
    assert all(m["train/loss"] > 0 for m in run.metrics[1:])


# --- reward, environment, loss ---


def test_a_reward(beside, small):
    text = "def short(completion): return 1 - len(completion) / 100\n"
    _, path = beside(text, lambda name: small(reward=f"{name}:short", steps=1, eval={"sets": {}}))
    samples = package.train(path).samples
    assert len(samples) == 16
    assert all(s["reward"] == pytest.approx(1 - len(s["completion"]) / 100) for s in samples)


def test_a_loss(beside, small):
    text = "def nothing(tokens, config): return 0 * tokens.logprobs\n"
    recipe = {"steps": 1, "eval": {"sets": {}}, "rollout": {"prompts": 8}}
    _, path = beside(text, lambda name: small(algorithm={"loss": f"{name}:nothing"}, **recipe))
    assert package.train(path).metrics[1]["train/grad_norm"] == 0
    assert package.train(small(name="ppo", **recipe)).metrics[1]["train/grad_norm"] > 0


EPISODE = """
from drumroll.envs import Step


class Echo:
    def reset(self, seed, **row):
        self.turns = 0
        return "1+1="

    def step(self, text):
        self.turns += 1
        return Step("2+2=", 0.25 * self.turns, self.turns == 2)

    def close(self):
        pass
"""


def test_an_environment(beside, small):
    recipe = {"steps": 1, "eval": {"sets": {}}, "data": {"train": {"sums": {"domain": "echo"}, "reversal": {"domain": "echo"}}}}
    _, path = beside(EPISODE, lambda name: small(environment={"use": f"{name}:Echo", "max_turns": 3}, reward={}, **recipe))
    samples = package.train(path).samples
    assert {(len(s["turns"]), s["reward"]) for s in samples} == {(2, 0.75)}


BACKEND = """
from drumroll.learners.backends.torch import TorchBackend, open_backend

STEPS = []


class Noting(TorchBackend):
    def step(self, rate):
        STEPS.append((self.ranks.mesh.rank, rate))
        super().step(rate)


def noting(spec):
    made = open_backend(spec)
    made.__class__ = Noting
    return made
"""


def test_a_learner_backend(beside, small, untimed):
    same = {"steps": 2, "deterministic": True, "threads": 1, "optim": {"lr": 1e-3, "minibatch": 8}}
    name, path = beside(BACKEND, lambda name: small(roles={"actor": {"backend": f"{name}:noting"}}, **same))
    run = package.train(path)
    assert [rate for _, rate in sys.modules[name].STEPS] == [1e-3] * 4
    assert untimed(run) == untimed(package.train(small(name="torch", **same)))
    with pytest.raises(ConfigError, match=r"roles.actor.backend.*'torch'.*, or your own backend as module:function.*torhc"):
        package.train(small(name="wrong", roles={"actor": {"backend": "torhc"}}))


ELSEWHERE = """
from drumroll.learners.backend import BACKENDS

@BACKENDS.register("elsewhere-NAME", shares_weights=SHARES, adapters=False)
def elsewhere(spec):
    return 1 / 0
"""


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, r"roles.actor.backend: own_.*:elsewhere keeps its weights where engines of this process cannot use them"),
        (
            {"lora": {"rank": 2}},
            r"roles.actor.lora needs a backend that trains adapters, which roles.actor.backend: own_.*:elsewhere does not",
        ),
    ],
)
def test_a_learner_backends_traits_are_held(beside, small, tmp_path, monkeypatch, changes, sentence):
    monkeypatch.setattr(BACKENDS, "parts", dict(BACKENDS.parts))
    text = ELSEWHERE.replace("SHARES", str("lora" in changes)).replace("NAME", tmp_path.name)
    _, path = beside(text, lambda name: small(roles={"actor": {"backend": f"{name}:elsewhere", **changes}}))
    with pytest.raises(ConfigError, match=sentence):
        package.train(path)
