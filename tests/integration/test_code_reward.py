"""The reward `code`: from a completion and a row's tests to a number, on every backend."""

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import drumroll
from drumroll.config.reward import RewardConfig
from drumroll.config.sandbox import SandboxConfig
from drumroll.errors import ConfigError
from drumroll.rewards import Scorer
from drumroll.sample import Prompt, Sample

BWRAP = pytest.param(
    "bwrap",
    marks=pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap cannot be had here (make system installs it)"),
)
SQUARE = "Let me think.\n```python\nprint(0)\n```\nNo, rather:\n```python\nprint(int(input()) ** 2)\n```\nThat is it."
FUNCTION = "```\ndef f(x):\n    return x * x\n```"


class Fusion(BaseHTTPRequestHandler):
    """SandboxFusion's /run_code for Python, as its documentation has it."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/run_code"
        assert asked["language"] == "python"
        with tempfile.TemporaryDirectory() as folder:
            for name, data in asked.get("files", {}).items():
                (Path(folder) / name).write_bytes(b64decode(data))
            (Path(folder) / "main.py").write_text(asked["code"])
            try:
                done = subprocess.run(
                    [sys.executable, "main.py"],
                    cwd=folder, input=asked.get("stdin") or "", capture_output=True, text=True, timeout=asked["run_timeout"], check=False,
                )  # fmt: skip
                result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
            except subprocess.TimeoutExpired:
                result = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
        fine = result["return_code"] == 0
        answer = {
            "status": "Success" if fine else "Failed",
            "message": "",
            "compile_result": None,
            "run_result": result,
            "files": {},
        }
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *args): ...


@pytest.fixture(scope="module")
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fusion)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(params=[BWRAP, "unsafe-subprocess", "http"])
def config(request, url):
    return SandboxConfig(backend=request.param, url=url if request.param == "http" else None, seconds=30, workers=2)


def scored(config, pairs, **args):
    """Rewards (or failures) of completions with their tests."""

    async def go():
        scorer = Scorer({"*": [RewardConfig(use="code", args=args)]}, sandbox=config)
        samples = [Sample(Prompt("p", "d", "q", (1,), {"tests": t}), 0, i, completion=c) for i, (c, t) in enumerate(pairs)]
        try:
            await asyncio.gather(*(scorer.score(s) for s in samples))
        finally:
            await scorer.close()
        return [s.failure or s.reward for s in samples]

    return asyncio.run(go())


def test_all_shapes_of_tests(config):
    shapes = [
        (SQUARE, [{"input": "3", "output": "9"}, {"input": "4\n", "output": "16\n"}]),
        (SQUARE, json.dumps({"inputs": ["3"], "outputs": ["9"]})),
        (SQUARE, [{"input": "3", "output": "8"}]),
        ("print(int(input()) ** 2)", [{"input": "3", "output": "9", "assert": None}]),
        (FUNCTION, [{"call": {"function": "f", "args": [3], "expected": 9}}, {"assert": "assert f(2) == 4"}]),
        (FUNCTION, {"inputs": ["3", "[1]"], "outputs": ["9", "1"], "fn_name": "f"}),
        (FUNCTION, {"inputs": [[3], [-1]], "outputs": [9, 1], "fn_name": "f"}),
        (FUNCTION, ["assert f(1) == 1", "assert f(3) == 9"]),
        (FUNCTION, "from solution import f\n\ndef test_f():\n    assert f(3) == 9\n"),
        (FUNCTION, [{"pytest": "from solution import f\ndef test_f(): assert f(3) == 8"}]),
        ("```python\ndef f(x): return x * x", ["assert f(2) == 4"]),  # cut off
        ("", [{"input": "", "output": "1"}]),
        ("I do not know.", ["assert f(2) == 4"]),
    ]
    assert scored(config, shapes) == [1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0]


def test_partial_reward_and_limits(config):
    tests = [{"call": {"function": "f", "args": [n], "expected": n**2 if n < 3 else 0}} for n in range(4)]
    assert scored(config, [(FUNCTION, tests)]) == [0.0]
    assert scored(config, [(FUNCTION, tests)], partial=True) == [0.75]
    loop = ("while True: pass", [{"input": "", "output": ""}])
    hog = ("x = bytearray(1 << 30)\nprint(1)", [{"input": "", "output": "1"}])
    assert scored(config, [loop, hog], seconds=1) == [0.0, 0.0]


def test_bad_tests_are_the_samples_failure():
    config = SandboxConfig(backend="unsafe-subprocess")
    empty, odd, number = scored(config, [(FUNCTION, []), (FUNCTION, [{"in": 1}]), (FUNCTION, 3)])
    assert "not empty; got []" in str(empty)
    assert 'A test must be {"input", "output"}' in str(odd)
    assert "got 3" in str(number)


def test_a_sandbox_for_rewards_of_ones_own(mine):
    name = mine(
        "from drumroll.sandbox import Stdio\nasync def own(completion, sandbox):\n"
        "    return (await sandbox.run(completion, [Stdio('', '7')])).passed\ndef sync(completion, sandbox): ..."
    )
    config = SandboxConfig(backend="unsafe-subprocess", seconds=30)

    async def go():
        scorer = Scorer({"*": [RewardConfig(use=f"{name}:own")]}, sandbox=config)
        sample = Sample(Prompt("p", "d", "q", (1,)), 0, 0, completion="print(7)")
        await scorer.score(sample)
        await scorer.close()
        return sample.reward

    assert asyncio.run(go()) == 1
    with pytest.raises(ConfigError, match=r"asks for 'sandbox', so it must be a coroutine: async def sync"):
        Scorer({"*": [RewardConfig(use=f"{name}:sync")]}, sandbox=config)


@pytest.mark.parametrize("backend", [BWRAP, "unsafe-subprocess"])
def test_a_run_with_programs_as_answers(small, mine, backend):
    """The tiny model answers sums with digits, and a number is a program that prints nothing."""
    rows = "from drumroll.data.problems import sums\ndef rows(split, seed):\n    for row in sums(split=split, seed=seed):\n"
    name = mine(rows + "        yield {**row, 'tests': [{'input': '', 'output': ''}]}")
    dataset = {"source": f"{name}:rows"}
    config = small(reward="code", sandbox={"backend": backend, "seconds": 30}, steps=1)
    config["data"]["train"] = {"numbers": dataset}
    config["eval"]["sets"] = {"held": {**dataset, "limit": 4}}
    run = drumroll.train(config)
    assert run.metrics[1]["rollout/failed"] == 0
    assert run.metrics[1]["reward/numbers"] > 0.5


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"backend": "http"}, "needs sandbox.url"),
        ({"python": "/nowhere/python"}, "there is no interpreter '/nowhere/python'"),
        ({}, r"bubblewrap, which is not installed: install it \(apt-get install bubblewrap.*unsafe-subprocess"),
    ],
)
def test_what_cannot_work_is_said_at_once(monkeypatch, config, sentence):
    if not config:
        monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=sentence):
        Scorer({"*": [RewardConfig(use="code")]}, sandbox=SandboxConfig(**config))


def test_a_server_that_is_not_there():
    failed = scored(SandboxConfig(backend="http", url="http://127.0.0.1:9"), [(SQUARE, [{"input": "3", "output": "9"}])])
    assert "did not run a program in 3 tries: ConnectError" in str(failed[0])
