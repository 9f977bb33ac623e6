"""Adapters in whole runs: recipes, verbs, and OpenEnv servers, recorded and real."""

import asyncio
import json
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import peers
import pytest
from websockets.asyncio.client import connect

import drumroll as package
from drumroll.envs.check import examine
from drumroll.envs.runner import Runner
from drumroll.sample import Owner

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

SAID = [
    {"type": "reset", "data": {"seed": 7, "top": 5, "extra": [1]}},
    *({"type": "step", "data": {"guess": guess}} for guess in (1, "1", True, 1.5, "x", None, [1], 99, 5, 3)),
    *({"type": "step", "data": data} for data in ({}, {"low": 1}, {"low": 4, "high": 5, "more": 6})),
    *({"type": "step", "data": {"low": low, "high": 5}} for low in (4, 3, 99)),
]
"""Messages to either server, right and wrong."""


async def talk(use):
    """A server's schema of actions and its answers, without the wording of errors."""
    base = use.removeprefix("openenv:")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{base}/schema") as answer:
        schema = json.load(answer)["action"]
    schema["properties"].pop("metadata", None)  # OpenEnv's own
    answers = []
    async with connect(f"ws{base.removeprefix('http')}/ws", proxy=None) as connection:
        for message in SAID:
            await connection.send(json.dumps(message))
            answers.append(json.loads(await connection.recv()))
    for error in (error for answer in answers for error in answer["data"].get("errors", ())):
        del error["url"], error["msg"], error["input"]
    return schema, answers


@contextmanager
def serving(source):
    """Run the toy OpenEnv servers, with actions of one field and of two; gives their names."""
    recording = peers.RECORDINGS / "openenv.json"
    python, of = (peers.python("openenv"), "live") if source == "live" else (sys.executable, recording)
    command = [python, peers.ROOT / "tests" / "unit" / "toy_openenv_server.py", of]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield [f"openenv:http://127.0.0.1:{int(process.stdout.readline())}" for _ in range(2)]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def live(request):
    """OpenEnv's own servers."""
    with serving("live") as names:
        if request.config.getoption("record"):
            schemas, answers = zip(*(asyncio.run(talk(use)) for use in names), strict=True)
            peers.write("openenv", schemas=schemas, said=SAID, answers=answers)
        yield names


@pytest.fixture(scope="module", params=peers.SOURCES)
def servers(request):
    """The servers' names: OpenEnv's own, or ours that speak as it was recorded."""
    if request.param == "live":
        yield request.getfixturevalue("live")
    else:
        peers.read("openenv", said=SAID)
        with serving("recorded") as names:
            yield names


@pytest.mark.parametrize("which", [0, 1], ids=["one field", "two fields"])
def test_the_servers_speak_as_recorded(servers, which):
    recorded = peers.read("openenv", said=SAID)
    schema, answers = asyncio.run(talk(servers[which]))
    assert schema == recorded["schemas"][which]
    assert answers == recorded["answers"][which]
    assert {answer["data"].get("code") for answer in answers} == {None, "VALIDATION_ERROR", "EXECUTION_ERROR"}


async def guess(use, texts, **args):
    runner = Runner(use, args)
    try:
        first = await runner.reset(7, {"top": 5, "odd": object()})
        steps = []
        for text in texts:
            steps.append(await runner.step(text))
            if steps[-1].terminated:
                break
        return first, steps
    finally:
        runner.close()
        await asyncio.sleep(0.1)


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


def test_openenv_with_objects_as_actions(servers):
    _, use = servers
    first, steps = asyncio.run(guess(use, ['{"low": 1}', "3", '{"low": 1, "high": 2}'], show="hint"))
    assert 'Answer with a JSON object with "low" (integer), "high" (integer)' in first
    assert [s.info.get("malformed", False) for s in steps] == [True, True, False]
    assert "high: Field required" in steps[0].observation


def test_openenv_in_a_run(servers, small):
    environment = {"use": servers[0], "max_turns": 2, "context": 400}
    recipe = small(environment=environment, reward={}, algorithm="starpo", steps=1, rollout={"prompts": 2, "max_tokens": 3})
    recipe |= {"data": {"train": {"guess": {"source": SEEDS}}}, "eval": {"sets": {}}}
    run = package.train(recipe)
    assert run.metrics[-1]["environment/guess/turns"] > 1


def test_a_server_that_is_not_there_is_one_sentence():
    with pytest.raises(ConnectionError, match=r"no OpenEnv server can be reached at http://127.0.0.1:9: .*; start it"):
        asyncio.run(guess("openenv:http://127.0.0.1:9", []))
