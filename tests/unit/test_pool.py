"""The pool's manners: imports are not billed, calls wait their turn, what dies is replaced."""

import asyncio
import os
import signal

import pytest

from drumroll.processes.pool import KillablePool, RemoteError


def with_pool(go, size=2):
    async def run():
        pool = KillablePool(size)
        try:
            return await go(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def test_importing_is_not_billed_to_the_call(mine):
    name = mine("import time\ntime.sleep(3)\ndef f(n): return n\n")

    async def go(pool):
        return [await pool.call(f"{name}:f", {"n": n}, 1.5) for n in range(3)], pool.restarts

    assert with_pool(go) == ([0, 1, 2], 0)


def test_a_module_that_cannot_be_imported_costs_no_process(mine):
    broken, good = mine("raise OSError('no disk')"), mine("def f(): return 1")

    async def go(pool):
        for _ in range(3):
            with pytest.raises(RemoteError, match="no disk") as caught:
                await pool.call(f"{broken}:f", {}, 30)
            assert caught.value.kind == "ConfigError"
        return await pool.call(f"{good}:f", {}, 30), pool.restarts, len(pool._idle)

    assert with_pool(go) == (1, 0, 1)


def test_functions_run_on_the_main_thread_where_signals_work(mine):
    name = mine("import signal\ndef f():\n    signal.signal(signal.SIGALRM, signal.SIG_IGN)\n    return signal.alarm(0)\n")
    assert with_pool(lambda pool: pool.call(f"{name}:f", {}, 30)) == 0


def test_no_more_processes_and_calls_in_flight_than_asked_for(mine, tmp_path):
    """Five hundred calls on two processes: at most two run at a time, and all are answered in order."""
    name = mine(
        "import os\n"
        f"def f(n, folder={str(tmp_path)!r}):\n"
        "    mine = os.path.join(folder, f'running-{os.getpid()}')\n"
        "    open(mine, 'w').close()\n"
        "    count = sum(f.startswith('running-') for f in os.listdir(folder))\n"
        "    os.remove(mine)\n"
        "    return n, count, os.getpid()\n"
    )

    async def go(pool):
        return await asyncio.gather(*(pool.call(f"{name}:f", {"n": n}, 60) for n in range(500)))

    answers = with_pool(go)
    assert [n for n, _, _ in answers] == list(range(500))
    assert max(count for _, count, _ in answers) <= 2
    assert len({pid for _, _, pid in answers}) <= 2


def test_a_worker_that_died_while_idle_is_replaced(mine):
    name = mine("import os\ndef f(): return os.getpid()\n")

    async def go(pool):
        first = await pool.call(f"{name}:f", {}, 30)
        os.kill(first, signal.SIGKILL)
        await pool._idle[0].process.wait()
        return first, await pool.call(f"{name}:f", {}, 30)

    first, second = with_pool(go)
    assert first != second


def test_a_call_goes_to_a_worker_that_knows_its_function(mine):
    one, two = mine("import os\ndef f(): return os.getpid()\n"), mine("import os\ndef f(): return os.getpid()\n")

    async def go(pool):
        both = await asyncio.gather(pool.call(f"{one}:f", {}, 60), pool.call(f"{two}:f", {}, 60))
        again = [(await pool.call(f"{one}:f", {}, 60), await pool.call(f"{two}:f", {}, 60)) for _ in range(5)]
        return both, again

    both, again = with_pool(go)
    assert set(again) == {tuple(both)}


def test_a_remote_error_survives_the_way_between_machines():
    import pickle

    error = pickle.loads(pickle.dumps(RemoteError("KeyError", "'x'")))
    assert (error.kind, str(error)) == ("KeyError", "'x'")
