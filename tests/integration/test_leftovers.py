"""A controller that is killed leaves nothing behind: no process, no named shared memory, no listening socket."""

import asyncio
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest
import yaml

from drumroll.config.sandbox import SandboxConfig
from drumroll.sandbox import Stdio, open_sandbox

PATIENCE = 120.0
"""Seconds after which something that should happen will not; a busy machine may need many."""
MARK = "DRUMROLL_TEST_MARK"


def until(condition, process=None):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        assert process is None or process.poll() is None, "the run ended"
        time.sleep(0.05)


def until_gone(remaining):
    """Wait until nothing remains, and name what does."""
    deadline = time.monotonic() + PATIENCE
    while found := remaining():
        assert time.monotonic() < deadline, f"still there: {found}"
        time.sleep(0.05)


def running(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def lines(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def marked(mark):
    """Processes that have the mark in their environment or command line, whoever their parent is now."""
    found = set()
    for process in psutil.process_iter():
        try:
            if (process.environ().get(MARK) == mark or mark in lines(process)) and running(process):
                found.add(process)
        except (psutil.Error, OSError):
            continue
    return found


def held(processes):
    """Files in shared memory that these processes have open or mapped, and sockets on which they listen."""
    files, inodes = set(), set()
    for process in processes:
        base = Path(f"/proc/{process.pid}")
        try:
            maps = {line.split(maxsplit=5)[-1] for line in (base / "maps").read_text().splitlines()}
            links = {os.readlink(fd) for fd in (base / "fd").iterdir()}
        except OSError:
            continue
        files |= {name for name in maps | links if name.startswith("/dev/shm/") and not name.endswith("(deleted)")}
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    return files, inodes & sockets()


def sockets():
    """Inodes of all sockets that somebody listens on."""
    tcp = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {words[9] for words in tcp if words[3] == "0A"} | {words[6] for words in unix if words[3] == "00010000"}


@pytest.fixture
def killed(tmp_path, small):
    """Start a run, wait until it has started what it should, kill it, and name what is still there after a while."""
    started = []

    def go(module, wanted, **changes):
        mark = uuid.uuid4().hex
        (tmp_path / "mine.py").write_text(f"BEGAN = {str(tmp_path / 'began')!r}\n{module.replace('MARK', mark)}")
        recipe = small(eval={"sets": {}}, import_from=[str(tmp_path)], threads=1, **changes)
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe).replace("MARK", mark))
        command = [sys.executable, "-m", "drumroll", "train", str(tmp_path / "recipe.yaml"), "--quiet"]
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {MARK: mark}
        run = subprocess.Popen(command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL)
        controller = psutil.Process(run.pid)
        started.append((run, mark, everything := set()))
        until((tmp_path / "began").exists if wanted is None else lambda: wanted(controller, mark), run)
        everything |= {*controller.children(recursive=True), *marked(mark)} - {controller}
        files, listening = held(everything | {controller})
        run.kill()
        run.wait()
        until_gone(lambda: [lines(one) for one in {*filter(running, everything), *marked(mark)}])
        until_gone(lambda: listening & sockets())  # the last of them may still be closing
        assert not [name for name in files if Path(name).exists()]
        return everything

    yield go
    for run, mark, everything in started:
        run.kill()
        run.wait()
        for process in filter(running, everything | marked(mark)):
            process.kill()


def descendant(text):
    """A descendant of the controller has this in its command line, with the mark."""
    return lambda controller, mark: any(
        text in (line := lines(child)) and mark in line for child in controller.children(recursive=True)
    )


REWARDS = {
    "looping": "while True: pass",
    "deaf": "max(iter(int, 1))",  # one call in C, in which no other thread and no signal handler runs
    "sleeping": "time.sleep(3600)",
    "starting": "os.fork(); subprocess.run(['sleep', '3600'])",
}
REWARD = f"""
import os, pathlib, subprocess, time

def reward(completion):
    for kind, code in {REWARDS!r}.items():
        try:
            pathlib.Path(BEGAN, kind).touch(exist_ok=False)
        except FileExistsError:
            continue
        exec(code)
"""


def test_rewards(killed, tmp_path):
    """One of each kind, in as many processes: a reward that has never returned is called for four samples at once."""
    (tmp_path / "began").mkdir()
    found = killed(
        REWARD,
        lambda *_: len(list((tmp_path / "began").iterdir())) == len(REWARDS),
        reward="mine:reward",
        rollout={"reward_timeout": 3600, "reward_workers": len(REWARDS)},
    )
    assert len(found) > len(REWARDS)


ENVIRONMENT = """
import pathlib, subprocess

class Environment:
    def reset(self, seed):
        self.server = subprocess.Popen(["sleep", "3600"])
        return "1+1="

    def step(self, text):
        pathlib.Path(BEGAN).touch()
        while True: pass

    def close(self): pass
"""
EPISODES = {"data": {"train": {"seeds": {"source": "drumroll.data.seeds:seeds"}}}, "reward": {}}


def test_an_environment_in_a_process(killed):
    """It has started a program, and loops."""
    use = {"use": "mine:Environment", "max_turns": 3, "step_timeout": 3600, "workers": 2}
    killed(ENVIRONMENT, None, environment=use, **EPISODES)


def test_an_mcp_server(killed, tmp_path):
    """It ignores the end of its input, as one that is busy does."""
    server = tmp_path / "server.py"
    server.write_text("import time\ntime.sleep(3600)\n")
    killed("", descendant("server.py"), environment={"use": f"mcp:python {server} MARK", "max_turns": 3}, **EPISODES)


PROGRAM = """
import os, subprocess
subprocess.Popen(["/usr/bin/python3", "-c", "while True: pass", "child", "MARK"])
os.execv("/usr/bin/python3", ["python3", "-c", "while True: pass", "program", "MARK"])
"""
SANDBOX = f"""
from drumroll.sandbox import Stdio

async def reward(completion, sandbox):
    await sandbox.run({PROGRAM!r}, [Stdio("", "")])
"""


@pytest.mark.parametrize("backend", ["bwrap", "unsafe-subprocess"])
def test_a_program_in_a_sandbox(killed, backend):
    def both(*state):
        return descendant("program")(*state) and descendant("child")(*state)

    killed(SANDBOX, both, reward="mine:reward", sandbox={"backend": backend, "seconds": 3600})


@pytest.mark.parametrize("backend", ["bwrap", "unsafe-subprocess"])
def test_a_program_that_is_given_up(backend):
    """As a sample that is aborted gives it up; its processes end with it, also those it has started."""
    mark, here = uuid.uuid4().hex, psutil.Process()

    async def go():
        sandbox = open_sandbox(SandboxConfig(backend=backend, seconds=3600))
        run = asyncio.create_task(sandbox.run(PROGRAM.replace("MARK", mark), [Stdio("", "")]))
        while not (descendant("program")(here, mark) and descendant("child")(here, mark)):
            await asyncio.sleep(0.05)
        mine = {child for child in here.children(recursive=True) if mark in lines(child)}
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await sandbox.close()
        return mine

    mine = asyncio.run(go())
    assert len(mine) == 2
    until_gone(lambda: [lines(one) for one in filter(running, mine)])


RAY = {"runtime": "ray", "devices": 1, "kind": "cpu", "threads": 1}


@pytest.mark.xdist_group("ray")
def test_a_local_ray_with_a_judge(killed, tmp_path):
    """Ray's own processes, our workers in them, and the processes of rewards below those."""
    (tmp_path / "began").mkdir()
    everything = killed(
        REWARD,
        lambda *_: len(list((tmp_path / "began").iterdir())) == 2,
        cluster=RAY,
        roles={"judge": {"model": "tiny", "max_prompt_tokens": 128}},
        reward=["mine:reward", {"use": "judge", "weight": 0.1}],
        rollout={"reward_timeout": 3600, "reward_workers": 2},
    )
    assert len(everything) > 10


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_vllm(killed):
    module = "import pathlib, time\ndef reward(completion):\n    pathlib.Path(BEGAN).touch()\n    time.sleep(3600)\n"
    roles = {"rollout": {"backend": "vllm"}}
    everything = killed(module, None, cluster=RAY, reward="mine:reward", roles=roles, rollout={"reward_timeout": 3600})
    assert len(everything) > 10
