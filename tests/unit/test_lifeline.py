"""Processes end with the one that started them, whatever they do and however it ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from drumroll.processes import lifeline

OWNER = """
import subprocess, sys, time
from drumroll.processes import lifeline
lifeline.__file__ = {file!r}
{start}
print(one.pid, flush=True)
time.sleep(3600)
"""
GUARDED = """
one = subprocess.Popen(["sh", "-c", "sleep 3600 & echo $! && wait"], start_new_session=True)
lifeline.guard(one.pid)
"""
WRAPPED = """
command = lifeline.guarded(["sh", "-c", "trap : TERM; sleep 3600 & echo $! && wait"])
one = subprocess.Popen(command, start_new_session=True)
"""


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("handles", [True, False], ids=["pidfd", "pipe"])
@pytest.mark.parametrize("start", [GUARDED, WRAPPED], ids=["guarded", "wrapped"])
def test_a_killed_owner_takes_a_group_along(tmp_path, start, handles):
    """Also without a report of a process's end from the system."""
    file = tmp_path / "lifeline.py"
    text = Path(lifeline.__file__).read_text()
    file.write_text(text if handles else text.replace("import os\n", "import os\ndel os.pidfd_open\n", 1))
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(file=str(file), start=start)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pids = [int(owner.stdout.readline()) for _ in range(2)]
    assert all(map(runs, pids))
    owner.kill()
    owner.wait()
    until(lambda: not any(map(runs, pids)))


def start():
    process = subprocess.Popen(["sh", "-c", "sleep 3600 & echo $! && wait"], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    lifeline.guard(process.pid)
    return process, int(process.stdout.readline())


def test_a_group_ends_with_its_leader():
    leader, child = start()
    leader.kill()
    leader.wait()
    until(lambda: not runs(child))


def test_a_process_outlives_the_thread_that_started_it():
    found = []
    thread = threading.Thread(target=lambda: found.append(start()))
    thread.start()
    thread.join()
    [(leader, child)] = found
    time.sleep(0.2)  # a signal at the thread's end would be there by now
    assert leader.poll() is None
    assert runs(child)
    leader.kill()
    leader.wait()


def test_a_killed_guardian_is_replaced():
    first, _ = start()
    guardians = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if f"{lifeline.__file__}\0{os.getpid()}\0" in path.read_text(errors="replace")
    ]
    for pid in guardians:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(runs, guardians)))
    second, child = start()
    second.kill()
    second.wait()
    until(lambda: not runs(child))
    os.killpg(first.pid, signal.SIGKILL)  # its guardian is gone
    first.wait()


def test_a_wrapped_program_keeps_its_streams_and_its_exit_code():
    command = lifeline.guarded([sys.executable, "-c", "import sys; print(input()); sys.exit(3)"])
    done = subprocess.run(command, input="hello\n", capture_output=True, text=True, start_new_session=True)
    assert (done.stdout, done.returncode) == ("hello\n", 3)
    done = subprocess.run(lifeline.guarded(["no-such-program"]), capture_output=True, text=True, start_new_session=True)
    assert (done.returncode, done.stderr) == (127, "no-such-program: No such file or directory\n")
