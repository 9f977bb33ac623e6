"""Worker groups on a real Ray, with fake GPUs on two fake nodes: calls, order, errors, deaths, deadlines, placement."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from ray.util import list_named_actors, placement_group_table

from drumroll.errors import DataError
from drumroll.placement.devices import DeviceRequest, Kind, Pool, lay_out
from drumroll.workers.group import LocalGroup, Role
from drumroll.workers.ray_group import ClusterError, RayGroup, RayRuntime, pool_of_cluster
from drumroll.workers.server import RemoteTraceback, WorkerError, WorkerLost, WorkerTimeout

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")

POOL = Pool.of([{Kind.CUDA: 2}, {Kind.CUDA: 1, Kind.CPU: 1}], threads=2)


class OddError(Exception):
    """Its class is not importable in a worker, and it cannot be made from its message."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Worker:
    """A worker with all kinds of methods."""

    def __init__(self, rank=0, fails=None, closed=None):
        if fails is not None:
            raise fails
        self.rank = rank
        self.seen = []
        self.gate = asyncio.Event()
        self.stop = False
        self.closed = closed

    def close(self):
        if self.closed is not None:
            self.closed.touch()

    def who(self):
        return self.rank, os.getpid()

    def where(self):
        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["OMP_NUM_THREADS"]

    def note(self, value, pause=0.0):
        time.sleep(pause)
        self.seen.append(value)
        return list(self.seen)

    def add(self, value):
        return self.rank * 100 + value

    async def wait(self, value):
        await self.gate.wait()
        return value

    async def open(self):
        self.gate.set()

    async def cancelled(self):
        try:
            await asyncio.sleep(60)
        finally:
            self.seen.append("cancelled")

    def train(self):
        while not self.stop:
            time.sleep(0.01)
        return "interrupted"

    def interrupt(self):
        self.stop = True

    def fail(self, error):
        return self._deeper(error)

    def _deeper(self, error):
        raise error

    async def fail_later(self, error):
        await asyncio.sleep(0)
        raise error

    def fail_oddly(self):
        raise OddError("this", "that")

    def leave(self):
        sys.exit(3)

    def die(self, number):
        os.kill(os.getpid(), number)
        time.sleep(30)

    def exit(self, code):
        os._exit(code)

    def total(self, weights):
        return float(weights["w"].sum(dtype=weights["w"].float().dtype))

    def scaled(self, weights, *, factor):
        return {name: tensor * factor for name, tensor in weights.items()}

    def lock(self):
        return threading.Lock()  # cannot be pickled

    def flags(self, array):
        return array.sum(), array.flags.writeable


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield ray_cluster
    ray.shutdown()


@pytest.fixture(scope="module")
def play():
    """Run a coroutine on the module's one event loop."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def runtime(cluster, play):
    made = RayRuntime(POOL, name="tests", address=cluster.address)
    yield made
    play(made.close())


def start(runtime, size=1, devices=None, **options):
    options = {"urgent": ("interrupt",), "deadline": 60.0} | options
    places = None if devices is None else [(device,) for device in devices]
    return RayGroup(runtime, Role.ROLLOUT, [partial(Worker, rank) for rank in range(size)], places, **options)


@pytest.fixture(scope="module")
def group(runtime, play):
    """Three workers that live through all tests which do not kill them."""
    made = start(runtime, 3, POOL.devices[:3])
    play(made.ready())
    return made


# --- calls ---


def test_calls_broadcasts_and_scatters_equal_those_in_one_process(group, play):
    async def use(workers):
        kept = await workers.scatter(Worker.add, 3)
        return (
            await workers.call(1, Worker.add, 5),
            await workers.broadcast(Worker.add, 7),
            [await workers.call(2, Worker.add, value) for value in kept],
        )

    local = LocalGroup(Role.ROLLOUT, [Worker(rank) for rank in range(3)])
    assert play(use(group)) == play(use(local)) == (105, [7, 107, 207], [203, 303, 403])
    play(local.close())


def test_each_worker_is_its_own_process(group, play):
    pids = dict(play(group.broadcast(Worker.who)))
    assert len({*pids.values(), os.getpid()}) == 4
    for rank, pid in pids.items():  # `ps` and Ray's dashboard tell role and rank
        assert Path(f"/proc/{pid}/cmdline").read_text().startswith(f"ray::drumroll-{group.role}-{rank}")


def test_sync_methods_run_in_order_one_at_a_time(group, play):
    async def notes():
        return await asyncio.gather(*(group.call(0, Worker.note, i, 0.02 if i == 0 else 0.0) for i in range(100)))

    assert play(notes())[-1] == list(range(100))


def test_async_methods_run_at_once_and_urgent_ones_at_any_time(group, play):
    async def use():
        waiting = [asyncio.ensure_future(group.call(0, Worker.wait, i)) for i in range(50)]
        training = asyncio.ensure_future(group.call(0, Worker.train))
        await group.call(0, Worker.open)
        assert await asyncio.gather(*waiting) == list(range(50))
        assert not training.done()
        await group.call(0, Worker.interrupt)
        return await training

    assert play(use()) == "interrupted"


def test_large_values_move_as_references(group, play):
    async def use():
        ones = group.put({"w": torch.ones(1000, 1000, dtype=torch.bfloat16)})
        assert isinstance(ones, ray.ObjectRef)
        assert (await ones)["w"].data_ptr() == (await ones)["w"].data_ptr()  # views, not copies
        assert torch.equal((await ones)["w"], torch.ones(1000, 1000, dtype=torch.bfloat16))
        assert await group.call(0, Worker.total, ones) == 1e6
        doubled = await group.keep(0, Worker.scaled, ones, factor=2)  # from worker to worker, past the controller
        assert isinstance(doubled, ray.ObjectRef)
        assert await group.call(1, Worker.total, doubled) == 2e6
        with pytest.raises(TypeError, match="factor"):
            await group.keep(0, Worker.scaled, ones, factors=2)
        return await group.call(2, Worker.flags, np.ones(200_000))

    assert play(use()) == (200_000.0, False)


# --- exceptions ---


@pytest.mark.parametrize("method", [Worker.fail, Worker.fail_later])
@pytest.mark.parametrize(
    "error", [ValueError("no such token"), DataError("row 3 lacks 'answer'"), KeyError("x"), StopAsyncIteration()]
)
def test_a_workers_exception_is_raised_as_itself_with_the_workers_traceback(group, play, method, error):
    with pytest.raises(type(error)) as raised:
        play(group.call(1, method, error))
    assert type(raised.value) is type(error)
    assert raised.value.args == error.args
    assert isinstance(raised.value.__cause__, RemoteTraceback)
    shown = "".join(traceback.format_exception(raised.value))
    assert f"in rollout rank 1, {method.__name__}\nTraceback" in shown
    frames = re.findall(r'File ".*", line \d+, in (\w+)', str(raised.value.__cause__))
    assert frames == (["fail", "_deeper"] if method is Worker.fail else ["fail_later"])  # the worker's own, no runtime's


def test_an_exception_that_cannot_travel_keeps_its_text_and_traceback(group, play):
    with pytest.raises(WorkerError, match="rollout rank 2, fail_oddly: OddError: this and that") as raised:
        play(group.call(2, Worker.fail_oddly))
    assert 'raise OddError("this", "that")' in raised.value.remote


def test_sys_exit_in_a_worker_ends_neither_side(group, play):
    with pytest.raises(WorkerError, match="leave: SystemExit: 3"):
        play(group.call(0, Worker.leave))
    assert play(group.call(0, Worker.add, 1)) == 1


def test_a_method_that_is_missing_or_a_result_that_cannot_be_sent_is_an_error(group, play):
    with pytest.raises(AttributeError, match="no_such_method"):
        play(group._send(0, "no_such_method", (), {}))
    with pytest.raises(WorkerError, match="rollout rank 0, lock"):
        play(group.call(0, Worker.lock))


def test_a_factory_that_raises_is_raised_when_the_group_is_used(runtime, play):
    async def use():
        group = RayGroup(runtime, Role.ACTOR, [partial(Worker, fails=DataError("no weights here"))])
        try:
            for attempt in (group.ready(), group.call(0, Worker.who)):
                with pytest.raises(DataError, match="no weights here"):
                    await attempt
        finally:
            await group.close()

    play(use())


def test_closing_a_group_closes_its_workers_and_ends_their_processes(runtime, play, tmp_path):
    async def use():
        group = RayGroup(runtime, Role.ACTOR, [partial(Worker, closed=tmp_path / "closed")])
        _, pid = await group.call(0, Worker.who)
        await group.close()
        return pid

    pid = play(use())
    assert (tmp_path / "closed").exists()
    patience = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < patience
        time.sleep(0.05)


# --- deaths and deadlines ---


def test_deadlines_of_functions_are_told_apart_and_counted(runtime, play, mine):
    from drumroll.processes.deadline import CpuTimeExceeded
    from drumroll.workers.ray_rewards import RewardPool, RewardWorker

    name = mine("import time\ndef loop():\n    while True: pass\ndef sleep(): time.sleep(1000)\ndef f(): return 1\n")

    async def use():
        pool = RewardPool(1, lambda: RayGroup(runtime, Role.REWARD, [RewardWorker]), sys.path)
        with pytest.raises(CpuTimeExceeded, match=r"0\.3 s of CPU time"):
            await pool.call(f"{name}:loop", {}, 0.3, cpu=True)
        with pytest.raises(TimeoutError, match=r"^took longer than 0\.3 s$"):
            await pool.call(f"{name}:sleep", {}, 0.3)
        answer = await pool.call(f"{name}:f", {}, 30)
        await pool.close()
        return answer, pool.restarts, pool.struck

    assert play(use()) == (1, 1, {"cpu": 1, "wall": 1})


async def lose(group, rank, method, *args):
    with pytest.raises(WorkerLost) as lost:
        await group.call(rank, method, *args)
    assert (lost.value.role, lost.value.rank) == ("rollout", rank)
    return lost.value.why


def test_deaths_are_told_in_one_sentence_and_the_rank_can_be_replaced(runtime, play):
    silent = "its process ended without a word, by SIGKILL (as when memory runs out) or os._exit"

    async def use():
        group = start(runtime, 3, then="its requests go to the others")
        await group.ready()
        watch = asyncio.ensure_future(group.lost(0))
        assert await lose(group, 0, Worker.die, signal.SIGKILL) == silent
        assert str(await watch) == f"rollout rank 0 is gone: {silent}; its requests go to the others."
        assert await lose(group, 0, Worker.add, 1) == silent  # and stays gone
        assert await lose(group, 1, Worker.die, signal.SIGSEGV) == "its process got SIGSEGV"
        assert await group.call(2, Worker.add, 1) == 201  # the others live on
        await asyncio.gather(group.replace(0), group.replace(1, POOL.devices[2:3]))
        assert await group.call(0, Worker.add, 1) == 1
        assert (await group.call(1, Worker.where))[1] in {"0", "1"}  # on the other device now
        assert await lose(group, 2, Worker.exit, 3) == silent
        await group.close()

    play(use())


def test_no_call_outlives_its_deadline(group, play):
    async def use():
        group.deadline = 0.3
        try:
            with pytest.raises(WorkerTimeout, match=r"rollout rank 1 did not answer wait in 0.3 s\."):
                await group.call(1, Worker.wait, 0)
            with pytest.raises(WorkerTimeout, match=r"did not answer note"):
                await group.call(1, Worker.note, 0, 1.0)
            with pytest.raises(TimeoutError):  # behind the one that still runs
                await group.call(1, Worker.note, 1)
        finally:
            group.deadline = 60.0
        assert await group.call(1, Worker.note, 2) == [0, 2]

    play(use())


def test_a_cancelled_call_is_cancelled_in_the_worker(group, play):
    async def use():
        call = asyncio.ensure_future(group.call(2, Worker.cancelled))
        await group.call(2, Worker.add, 1)
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while (seen := await group.call(2, Worker.note, "after"))[0] != "cancelled":
            pass
        return seen

    assert "cancelled" in play(use())


# --- placement ---


def test_roles_on_one_device_share_its_gpu_and_others_do_not(runtime, group, play):
    layout = lay_out(POOL, [DeviceRequest("actor"), DeviceRequest("rollout", "0-1"), DeviceRequest("reference", "3")])
    assert group.device_sets == layout.replicas("actor")

    async def use():
        others = [start(runtime, len(devices), devices) for role, devices in layout.devices.items() if role != "actor"]
        places = await asyncio.gather(*(g.broadcast(Worker.where) for g in [group, *others]))
        for other in others:
            await other.close()
        return places

    actor, rollout, reference = play(use())
    assert actor[:2] == rollout
    assert len({place[:2] for place in actor}) == 3  # three GPUs of two nodes
    assert actor[0][0] == actor[1][0] != actor[2][0]  # neighbours in the pool are neighbours on a node
    assert {gpu for _, gpu, _ in actor} <= {"0", "1"}
    assert reference[0][1] == ""  # a CPU slot sees no GPU
    assert {threads for *_, threads in actor + reference} == {"2"}


def test_an_engine_over_several_gpus_sees_all_of_them(runtime, play):
    async def use():
        group = RayGroup(runtime, Role.ROLLOUT, [partial(Worker, 0)], [POOL.devices[:2]])
        alone = start(runtime, 2, POOL.devices[:2])
        places = (await group.call(0, Worker.where), *await alone.broadcast(Worker.where))
        await group.close()
        await alone.close()
        return places

    both, first, second = play(use())
    assert both[1] == f"{first[1]},{second[1]}"
    assert both[0] == first[0] == second[0]
    with pytest.raises(ClusterError, match=r"Devices 1-2 are to work as one engine, but lie on several machines"):
        RayGroup(runtime, Role.ROLLOUT, [partial(Worker, 0)], [POOL.devices[1:3]])


def test_two_runs_on_one_cluster_do_not_touch_each_other(runtime, group, play):
    async def use():
        other = RayRuntime(Pool.of([{Kind.CUDA: 1}]), name="tests")
        theirs = start(other, 1, other.pool.devices)
        mine = await group.broadcast(Worker.where)
        foreign = await theirs.broadcast(Worker.where)
        assert not {p[:2] for p in mine} & {p[:2] for p in foreign}
        with pytest.raises(ClusterError, match=r"in 0.5 s: it asks for 1 GPU \(it has 4, free 0\), 1 CPU"):
            RayRuntime(Pool.of([{Kind.CUDA: 1}]), seconds=0.5)
        await other.close()
        assert await group.call(0, Worker.add, 1) == 1
        return other.name

    name = play(use())
    assert name != runtime.name
    assert [g["state"] for g in placement_group_table().values() if g["name"] == name] == ["REMOVED"]
    assert list_named_actors(all_namespaces=True) == []


def test_a_cluster_that_is_not_there_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ClusterError, match=r"There is no Ray cluster at '127\.0\.0\.1:9'"):
        RayRuntime(address="127.0.0.1:9")


def test_a_ray_that_does_not_start_is_one_sentence():
    program = "from drumroll.workers.ray_group import RayRuntime; RayRuntime()"
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"RAY_TMPDIR": "/dev/null"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "ClusterError: Ray did not start on this machine: " in ended.stderr
    assert "cluster.address" in ended.stderr


def test_the_pool_can_be_read_from_the_cluster(runtime):
    assert [(d.kind, d.node) for d in pool_of_cluster().devices] == [(Kind.CUDA, 0)] * 2 + [(Kind.CUDA, 1)] * 2


@pytest.mark.parametrize(
    ("cores", "count", "threads", "expected"),
    [
        ([8, 2], 2, 0, [(0, 4), (0, 4)]),  # two slots of four on the large one beat one of two on each
        ([4, 2], 3, 0, [(0, 2), (0, 2), (1, 2)]),
        ([8, 2], None, 0, [(0, 2), (1, 2)]),  # a slot a machine
        ([3, 5], 4, 2, None),
        ([3, 5], 3, 2, [(0, 2), (1, 2), (1, 2)]),
    ],
)
def test_the_pool_of_machines_with_uneven_cores(monkeypatch, cores, count, threads, expected):
    monkeypatch.setattr("drumroll.workers.ray_group._nodes", lambda: [{"Resources": {"CPU": float(n)}} for n in cores])
    if expected is None:
        with pytest.raises(ClusterError, match=r"cluster.devices asks for 4 slots of 2 CPU threads, but the cluster has 3\."):
            pool_of_cluster("auto", count, threads)
        return
    assert [(d.node, d.threads) for d in pool_of_cluster("auto", count, threads).devices] == expected


def test_a_run_without_a_cluster_starts_one_that_only_this_machine_reaches_and_ends_it():
    script = """if True:
    import asyncio, os
    from drumroll.placement.devices import Kind, Pool
    from drumroll.workers.group import Role
    from drumroll.workers.ray_group import RayGroup, RayRuntime, ray

    async def main():
        runtime = RayRuntime(Pool.of([{Kind.CPU: 2}], threads=2))
        print({node["NodeManagerAddress"] for node in ray.nodes()})
        group = RayGroup(runtime, Role.ACTOR, [lambda: os], [runtime.pool.devices[:1]])
        print(await group._send(0, "getenv", ("OMP_NUM_THREADS",), {}))
        await runtime.close()
        print(ray.is_initialized())

    from ray._private.ray_logging import stdout_deduplicator
    said = ["A worker died or was killed while executing a task by an unexpected system error.", "something else"]
    asyncio.run(main())
    print(stdout_deduplicator.deduplicate({"pid": "raylet", "lines": said})[0]["lines"])
    """
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.splitlines() == ["{'127.0.0.1'}", "2", "False", "['something else']"], done.stderr
