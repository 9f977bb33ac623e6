"""Threads that compute when the process ends."""

import subprocess
import sys

import pytest

LEAVES = """
import asyncio, sys, time
import torch
from drumroll.processes.threads import SerialExecutor, beside

def compute():
    a = torch.randn(64, 64)
    while True:
        (a @ a).sum().item()

async def main():
    if sys.argv[1] == "beside":
        asyncio.ensure_future(beside(compute))
    else:
        SerialExecutor("computes").submit(compute)
        SerialExecutor("idle").submit(int)
    await asyncio.sleep(0.2)
    sys.exit(3)

asyncio.run(main())
"""


@pytest.mark.parametrize("thread", ["executor", "beside"])
def test_a_process_ends_with_its_own_code_while_threads_compute(thread):
    """Not by SIGABRT, which is how C++ ends a process whose interpreter is gone."""
    done = subprocess.run([sys.executable, "-c", LEAVES, thread], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
