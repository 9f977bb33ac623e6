"""Adapters in whole runs: recipes, verbs, and a real OpenEnv server."""

import asyncio
import subprocess
from pathlib import Path

import pytest

import drumroll as package
from drumroll.envs.check import examine
from drumroll.envs.host import Stage
from drumroll.sample import Owner

ROOT = Path(__file__).parent.parent.parent
OPENENV = ROOT / ".bench" / "openenv" / "bin" / "python"
SEEDS = "drumroll.data.seeds:seeds"


@pytest.fixture
def tool_recipe(small):
    """Sums, with `add` as a tool."""

    def make(**changes):
        recipe = small(
            rollout={"prompts": 4, "samples": 4, "max_tokens": 64, **changes.pop("rollout", {})},
            environment={"use": "tools:toy_tools:add", "args": {"teach": False}, "max_turns": 3},
            algorithm="starpo",
            reward={},
            **changes,
        )
        rows = {"source": "toy_tools:sums"}
        return recipe | {"data": {"train": {"sums": rows}}, "eval": {"sets": {"sums": {**rows, "limit": 32}}}}

    return make


def test_functions_as_tools_in_a_run(tool_recipe):
    """The shipped tiny model knows no tools: it answers at once, and is scored by the row's answer."""
    run = package.train(tool_recipe())
    last = run.metrics[-1]
    assert last["environment/sums/turns"] == 1
    assert last["train/mismatch"] < 1e-3
    trained = [s for s in run.samples if s["fate"] == "trained"]
    assert {s["stop"] for s in trained} == {"terminated"}
    assert {s["reward"] for s in trained} <= {0.0, 1.0}


def test_a_gymnasium_environment_is_trained_in(small):
    environment = {"use": "gymnasium:FrozenLake-v1", "args": {"actions": ["l", "d", "r", "u"]}, "max_turns": 3, "context": 600}
    recipe = small(environment=environment, reward={}, algorithm="starpo", steps=1, rollout={"prompts": 2, "max_tokens": 4})
    recipe |= {"data": {"train": {"lake": {"source": SEEDS}}}, "eval": {"sets": {}}}
    run = package.train(recipe)
    sample = next(s for s in run.samples if s["fate"] == "trained")
    assert Owner.ENVIRONMENT in sample["traces"][0]["owners"]
    assert run.metrics[-1]["environment/lake/turns"] == 3


def test_verbs(drumroll, monkeypatch):
    code, out, err = drumroll("check", "gymnasium:FrozenLake-v1", "actions=[left, down, right, up]")
    assert code == 0, err
    assert "go on differently" in out.replace("\n", " ")
    code, _, err = drumroll("check", "gymnasium:FrozenLake-v9")
    assert code == 2
    assert "answers" in err
    said = iter(["down", "down", "right", "down", "right", "right"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    code, out, _ = drumroll(
        "rollout", "gymnasium:FrozenLake-v1", "--human", "actions=[left, down, right, up]", "is_slippery=false"
    )
    assert code == 0
    assert "success True" in out


# --- OpenEnv ---

needs_server = pytest.mark.skipif(not OPENENV.exists(), reason="OpenEnv has an environment of its own: make bench-env")


@pytest.fixture(scope="module")
def servers():
    """Start the toy OpenEnv servers, with actions of one field and of two; gives their names."""
    command = [OPENENV, ROOT / "tests" / "unit" / "toy_openenv_server.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield [f"openenv:http://127.0.0.1:{int(process.stdout.readline())}" for _ in range(2)]
        finally:
            process.kill()


async def guess(use, texts, **args):
    stage = Stage(use, args)
    try:
        first = await stage.reset(7, {"top": 5, "odd": object()})
        steps = []
        for text in texts:
            steps.append(await stage.step(text))
            if steps[-1].terminated:
                break
        return first, steps
    finally:
        stage.close()
        await asyncio.sleep(0.1)


@needs_server
def test_openenv(servers):
    use, _ = servers
    first, steps = asyncio.run(guess(use, ["x", *(f"<answer>{n}</answer>" for n in range(1, 6))], rules="Guess!"))
    assert first.startswith("Guess!\n\nAnswer with guess (integer) in <answer>…</answer>.\n\nfrom 1 to 5; parity")
    assert steps[0].info["malformed"]
    assert (steps[-1].observation, steps[-1].reward, steps[-1].terminated, steps[-1].info["success"]) == (
        "right",
        1.0,
        True,
        True,
    )
    assert all(step.observation == "higher" for step in steps[1:-1])
    assert asyncio.run(guess(use, ["1", "2"])) == asyncio.run(guess(use, ["1", "2"]))
    with pytest.raises(RuntimeError, match=r"refused \(EXECUTION_ERROR\): the dice fell"):
        asyncio.run(guess(use, ["99"]))
    findings = asyncio.run(examine(use, {}))
    assert not [f for f in findings if f.passed is False], findings


@needs_server
def test_openenv_with_objects_as_actions(servers):
    _, use = servers
    first, steps = asyncio.run(guess(use, ['{"low": 1}', "3", '{"low": 1, "high": 2}'], show="hint"))
    assert 'Answer with a JSON object with "low" (integer), "high" (integer)' in first
    assert [s.info.get("malformed", False) for s in steps] == [True, True, False]
    assert "high: Field required" in steps[0].observation


@needs_server
def test_openenv_in_a_run(servers, small):
    environment = {"use": servers[0], "max_turns": 2, "context": 400}
    recipe = small(environment=environment, reward={}, algorithm="starpo", steps=1, rollout={"prompts": 2, "max_tokens": 3})
    recipe |= {"data": {"train": {"guess": {"source": SEEDS}}}, "eval": {"sets": {}}}
    run = package.train(recipe)
    assert run.metrics[-1]["environment/guess/turns"] > 1


def test_a_server_that_is_not_there_is_one_sentence():
    pytest.importorskip("websockets")
    with pytest.raises(ConnectionError, match=r"no OpenEnv server can be reached at http://127.0.0.1:9: .*; start it"):
        asyncio.run(guess("openenv:http://127.0.0.1:9", []))
