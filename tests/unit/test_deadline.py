"""Deadlines: what decides is what the process itself did, never how busy the machine is."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from drumroll.config.reward import RewardConfig
from drumroll.config.sandbox import SandboxConfig
from drumroll.processes.clock import RunTime, family
from drumroll.processes.deadline import CpuTimeExceeded, Deadline, MachineBusy, cpu_limit
from drumroll.processes.pool import KillablePool
from drumroll.rewards import Scorer
from drumroll.sample import Prompt, Sample
from drumroll.sandbox import Limits, Status, Stdio, open_sandbox

BURN = "import time\ndef f(seconds):\n    while time.process_time() - f.began < seconds: pass\n    return 'done'\nf.began = time.process_time()\n"


@contextmanager
def crowd(loops=4):
    """This process, and all that it starts, on one core among busy loops: every second of CPU time takes several of wall time."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(loops)]
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        for process in busy:
            process.kill()
            process.wait()


def called(path, arguments, seconds, cpu=False):
    """The result of a call or its exception, and its pool."""

    async def go():
        pool = KillablePool(1)
        try:
            return (await asyncio.gather(pool.call(path, arguments, seconds, cpu), return_exceptions=True))[0], pool
        finally:
            await pool.close()

    return asyncio.run(go())


# --- clocks ---


def test_run_time_leaves_out_waiting_for_a_core():
    with crowd():
        burning = subprocess.Popen([sys.executable, "-c", "import time\nwhile time.process_time() < 0.4: pass"])
        clock, began = RunTime(lambda: family(burning.pid)), time.monotonic()
        while burning.poll() is None:
            clock.look()
            time.sleep(0.02)
    assert clock.seconds < 0.6 * (time.monotonic() - began)


def test_run_time_counts_sleep():
    with crowd():
        sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        clock = RunTime(lambda: family(sleeping.pid))
        for _ in range(10):
            time.sleep(0.05)
            clock.look()
        sleeping.kill()
        sleeping.wait()
    assert clock.seconds > 0.3


def test_more_processes_than_cores_do_not_stop_the_clock():
    """Eight loops on one core wait for each other most of the time, which is their own doing."""
    loops = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    with crowd(0):
        forking = subprocess.Popen([sys.executable, "-c", loops], start_new_session=True)
        clock = RunTime(lambda: family(forking.pid))
        for _ in range(20):
            time.sleep(0.05)
            clock.look()
        ran = sum(ran for ran, _ in clock._seen.values())
        os.killpg(forking.pid, signal.SIGKILL)
        forking.wait()
    assert clock.seconds > 0.7 * ran > 0


def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_limits_of_cpu_time_nest():
    def nested():
        with cpu_limit(0.3):
            with pytest.raises(CpuTimeExceeded, match=r"0\.1 s of CPU time"), cpu_limit(0.1):
                burn(10)
            with cpu_limit(5):
                burn(0.1)
            burn(10)

    with pytest.raises(CpuTimeExceeded, match=r"0\.3 s of CPU time"):
        nested()
    with cpu_limit(0.1):
        time.sleep(0.3)
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


# --- the pool ---


@pytest.mark.parametrize("cpu", [False, True], ids=["run time", "cpu time"])
def test_a_busy_machine_takes_nothing_from_a_calls_time(mine, cpu):
    name = mine(BURN)
    with crowd():
        result, pool = called(f"{name}:f", {"seconds": 0.5}, 1.0, cpu)
    assert (result, pool.restarts, pool.struck) == ("done", 0, {})


def test_a_computation_that_uses_up_its_time_keeps_its_process():
    arguments = {"text": "a" * 40 + "!", "pattern": "(a+)+$", "full": False}
    result, pool = called("drumroll.rewards.patterns:matches", arguments, 0.3, cpu=True)
    assert isinstance(result, CpuTimeExceeded)
    assert (str(result), pool.restarts, pool.struck) == ("took longer than 0.3 s of CPU time", 0, {"cpu": 1})


def test_c_code_that_never_returns_is_ended(mine):
    name = mine("import collections, itertools\ndef f(): collections.deque(itertools.count(), maxlen=0)")
    result, pool = called(f"{name}:f", {}, 0.2, cpu=True)
    assert isinstance(result, CpuTimeExceeded)
    assert (pool.restarts, pool.struck) == (1, {"cpu": 1})


def test_a_limit_ends_with_its_call(mine):
    name = mine(
        "import time\ndef f(seconds):\n    until = time.process_time() + seconds\n    while time.process_time() < until: pass\n"
    )

    async def go():
        pool = KillablePool(1)
        await pool.call(f"{name}:f", {"seconds": 0.1}, 0.5, cpu=True)
        await pool.call(f"{name}:f", {"seconds": 3.5}, 60)
        await pool.close()
        return pool.restarts

    assert asyncio.run(go()) == 0


def test_a_machine_too_busy_to_tell_is_a_failure_to_be_tried_again(mine, monkeypatch):
    """Sleep stands for a core that never comes."""
    monkeypatch.setattr(Deadline, "wall", 0.3)
    name = mine("import time\ndef f(): time.sleep(100)")
    result, pool = called(f"{name}:f", {}, 0.3, cpu=True)
    assert type(result) is MachineBusy
    assert "the machine is too busy" in str(result)
    assert (pool.restarts, pool.struck) == (1, {"wall": 1})


def test_a_function_that_hangs_is_a_time_out(mine):
    name = mine("import time\ndef f(): time.sleep(100)")
    result, pool = called(f"{name}:f", {}, 0.3)
    assert type(result) is TimeoutError
    assert (str(result), pool.struck) == ("took longer than 0.3 s", {"wall": 1})


FORKS = """
import os, time
def f():
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        {child}
    with open({path!r}, "w") as file: file.write(str(pid))
    os.read(reader, 1)
    {parent}
"""


@pytest.mark.parametrize("leaves", ["", "os.setsid(); "], ids=["in the group", "out of it"])
@pytest.mark.parametrize("child", ["while True: pass", "time.sleep(1000)"])
@pytest.mark.parametrize("parent", ["return 1", "time.sleep(1000)", "os._exit(1)"])
def test_processes_that_a_function_forked_hold_up_nobody(mine, tmp_path, parent, child, leaves):
    path = str(tmp_path / "pid")
    child = f"{leaves}os.write(writer, b'x')\n        {child}"
    name = mine(FORKS.format(child=child, path=path, parent=parent))
    called(f"{name}:f", {}, 0.5)
    pid = int(Path(path).read_text())
    if leaves:
        os.kill(pid, signal.SIGKILL)
        return
    with suppress(OSError):
        for _ in range(3000):
            if " Z " in Path(f"/proc/{pid}/stat").read_text():
                return
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        pytest.fail("the forked process lives on")


# --- verdicts ---


def test_math_verify_has_the_time_it_needs():
    """On a machine so busy that one formula takes seconds of wall time to read."""
    code = """
import time
from math_verify import parser
quick = parser.extract_target_from_pred
pause = 2.2
def slow(*args, **kwargs):
    time.sleep(pause)
    return quick(*args, **kwargs)
parser.extract_target_from_pred = slow
from drumroll.rewards import symbolic
symbolic.SECONDS, pause = 0.5, 0.6
print(symbolic.equal_expressions("x+1", "1+x"))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "True\n"


@pytest.mark.parametrize(("cpu", "verdict"), [(True, 0.0), (False, None)], ids=["too long", "too busy"])
def test_only_cpu_time_makes_an_answer_wrong(monkeypatch, cpu, verdict):

    class Pool(KillablePool):
        async def call(self, path, arguments, seconds, cpu=False):
            raise CpuTimeExceeded("late") if limit else TimeoutError("late")

    limit = cpu
    sample = Sample(Prompt("p", "d", "", (1,), {"answer": "x+1"}), 0, 0, completion=r"\boxed{1+x}")
    asyncio.run(Scorer({"*": [RewardConfig(use="math")]}, 30.0, Pool(1)).score(sample))
    assert sample.reward == verdict
    assert (sample.failure is None) == cpu
    assert cpu or sample.failure.kind == "TimeoutError"


# --- programs ---


@pytest.fixture(params=["bwrap", "unsafe-subprocess"])
def boxes(request):
    if request.param == "bwrap" and not any(os.access(f"{folder}/bwrap", os.X_OK) for folder in os.get_exec_path()):
        pytest.skip("bubblewrap cannot be had here (make system installs it)")
    return SandboxConfig(backend=request.param, workers=1)


def ran(config, program, limits):
    async def go():
        sandbox = open_sandbox(config)
        try:
            return await sandbox.run(program, [Stdio("", "1\n")], limits), sandbox.struck
        finally:
            await sandbox.close()

    return asyncio.run(go())


def test_a_busy_machine_takes_nothing_from_a_programs_time(boxes):
    program = "import time\nbegan = time.process_time()\nwhile time.process_time() - began < 0.6: pass\nprint(1)"
    with crowd():
        outcome, struck = ran(boxes, program, Limits(seconds=1.2))
    assert outcome.status is Status.PASSED, outcome
    assert 0.3 < outcome.seconds < 1.2
    assert not struck["program"]


def test_time_of_all_processes_of_a_program_counts(boxes):
    """The child computes, the parent waits for it."""
    burn = "began = time.process_time()\nwhile time.process_time() - began < 0.6: pass"
    program = f"import os, time\nif os.fork():\n    os.wait()\n    print(1)\nelse:\n    exec({burn!r})\n    os._exit(0)"
    with crowd():
        outcome, _ = ran(boxes, program, Limits(seconds=1.2))
    assert outcome.status is Status.PASSED, outcome


@pytest.mark.parametrize(
    "body", ["import time; time.sleep(100)", "while True: pass", "import os\nos.fork(); os.fork()\nwhile True: pass"]
)
def test_a_program_that_exceeds_its_time_is_judged_by_it(boxes, body):
    outcome, struck = ran(boxes, body, Limits(seconds=0.5))
    assert outcome.status is Status.TIMEOUT, outcome
    assert struck["program"] == 1


def test_the_kernels_limit_of_cpu_time_says_what_it_is(boxes):
    """SIGXCPU, which is a time-out, comes before SIGKILL, which is a crash."""
    program = "import resource\nsoft, hard = resource.getrlimit(resource.RLIMIT_CPU)\nprint(int(0 < soft < hard))"
    outcome, _ = ran(boxes, program, Limits(seconds=60))
    assert outcome.status is Status.PASSED, outcome
