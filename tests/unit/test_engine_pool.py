"""Engines that die are replaced, in their turn and with the present weights; those on devices that train rest."""

import asyncio
import dataclasses

import pytest
from typing_extensions import override

from drumroll.engines import Completion, Request, Sampling
from drumroll.engines.native import NativeEngine
from drumroll.engines.router import Router
from drumroll.models.loading import load
from drumroll.placement.devices import Kind, Pool
from drumroll.sample import StopReason
from drumroll.workers.engine_pool import EnginePool
from drumroll.workers.group import LocalGroup, ReplaceableGroup, Role
from drumroll.workers.server import WorkerLost

DEVICES = Pool.of([{Kind.CPU: 3}]).devices


class Mortals(LocalGroup, ReplaceableGroup):
    """Real engines in this process; `die` is what the system does to a process."""

    def __init__(self, device_sets):
        self.model = dataclasses.replace(load("tiny-random"), eos=frozenset())  # answers end by their length only
        super().__init__(Role.ROLLOUT, [self.make() for _ in device_sets])
        self.device_sets = list(device_sets)
        self.deaths = [asyncio.Event() for _ in device_sets]
        self.dead = [""] * len(device_sets)
        self.gate = asyncio.Event()  # a new process takes its time
        self.gate.set()
        self.made = 0

    def make(self):
        return NativeEngine(self.model, slots=2, context=1000)

    def die(self, rank, why="its process got SIGSEGV"):
        self.dead[rank] = why
        self.deaths[rank].set()
        self.workers[rank].close()

    @override
    async def _send(self, rank, method, args, kwargs):
        if self.dead[rank]:
            raise WorkerLost(self.role, rank, self.dead[rank], "what then")
        return await super()._send(rank, method, args, kwargs)

    @override
    async def lost(self, rank):
        await self.deaths[rank].wait()
        return WorkerLost(self.role, rank, self.dead[rank], "what then")

    @override
    async def replace(self, rank, devices=None):
        await self.gate.wait()
        self.made += 1
        self.device_sets[rank] = devices or self.device_sets[rank]
        self.workers[rank], self.dead[rank] = self.make(), ""
        self.deaths[rank].clear()

    @override
    def kill(self, rank):
        self.die(rank, "it was ended by ray.kill")


class World:
    """An engine pool, and what was heard of it."""

    def __init__(self, device_sets, timeout=60.0, **options):
        self.group, self.router, self.lock, self.heard, self.prepared = (
            Mortals(device_sets),
            Router(timeout),
            asyncio.Lock(),
            [],
            0,
        )
        self.pool = EnginePool(self.group, self.router, self.lock, prepare=self.prepare, notify=self.heard.append, **options)

    async def prepare(self):
        assert self.lock.locked()
        assert not self.router.routes.keys() & {f"rollout-{rank}" for rank in self.pool.lost}
        self.prepared += 1

    def ask(self, tokens=4):
        request = Request("r", (5, 6), Sampling(1.0, tokens), 0)
        return asyncio.ensure_future(self.router.generate(request, "k", 0, 60.0, lambda: None))


def play(device_sets, story, **options):
    async def main():
        world = World(device_sets, **options)
        await world.pool.start()
        try:
            async with asyncio.timeout(60):
                await story(world)
        finally:
            world.pool.close()
            await world.group.close()

    asyncio.run(main())


async def until(true):
    while not true():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("shares", [True, False], ids=["shared device", "own device"])
def test_an_engine_that_dies_while_its_device_trains_comes_back_after_the_update(shares):
    async def story(world):
        async with world.lock:  # training
            await world.pool.rest()
            world.group.die(0)
            waiting = world.ask()
            await until(lambda: world.heard)
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert world.group.made == (0 if shares else 1)  # on a device that trains it is not even loaded
            assert not world.router.routes
            assert world.prepared == 0
            assert world.pool.sharing() == ([0] if shares else [])
            await world.pool.back()
            assert not world.router.routes
        assert isinstance(await waiting, Completion)
        assert world.prepared == 1
        assert world.heard == ["rollout rank 0 is gone: its process got SIGSEGV; what then."]

    play([DEVICES[:1]], story, trained={0} if shares else {1})


def test_an_engine_on_a_device_that_trains_rests_and_others_go_on():
    async def story(world):
        running = [world.ask(900) for _ in range(4)]
        await until(lambda: world.router.busy() == 4)
        async with world.lock:
            await world.pool.rest()
            ended = [task for task in running if task.done() or (await asyncio.wait([task], timeout=0.5))[0]]
            assert len([t for t in ended if (await t).stop is StopReason.ABORTED]) == 2
            assert [route.resting for route in world.router.routes.values()] == [True, False]
            await world.pool.back()
        assert not any(route.resting for route in world.router.routes.values())
        assert (await world.ask()).tokens

    play([DEVICES[:1], DEVICES[1:2]], story, trained={0})


def test_what_rests_is_decided_by_where_engines_are_now():
    async def story(world):
        world.group.die(0)
        await until(lambda: "rollout-0" in world.router.routes and world.heard)
        assert world.pool.sharing() == [0]

    play([DEVICES[:1]], story, trained={2}, elsewhere=lambda devices: DEVICES[2:3])


def test_an_engine_that_is_lost_in_a_living_process_is_replaced_and_its_reason_told():
    async def story(world):
        task = world.ask(900)
        await until(lambda: world.router.busy() == 1)
        world.group.workers[0].close()  # its core, not its process
        with pytest.raises(Exception, match="the engine was closed"):
            await task
        await until(lambda: world.prepared)
        assert (await world.ask()).tokens
        assert world.heard == ["rollout rank 0 is gone: the engine was closed; what then."]

    play([DEVICES[:1]], story)


def test_time_to_start_a_new_engine_is_not_time_without_engines():
    async def story(world):
        world.group.gate.clear()
        world.group.die(0)
        waiting = world.ask()
        await asyncio.sleep(0.3)
        assert world.router.hopeless is None
        world.group.gate.set()
        assert (await waiting).tokens

    play([DEVICES[:1]], story, timeout=0.05)


def test_without_replacement_the_time_counts():
    async def story(world):
        world.group.die(0)
        with pytest.raises(Exception, match=r"no engine has been alive for 0.05 s"):
            await world.ask()
        assert world.group.made == 0
        assert not world.pool.coming()

    play([DEVICES[:1]], story, timeout=0.05, replaces=False)


def test_between_the_loss_of_all_engines_and_their_return_one_is_coming():
    """So a publication waits for none: an engine receives the weights when it is prepared. One that dies then is not waited for."""

    async def story(world):
        world.group.gate.clear()
        world.group.die(0)
        world.pool.lost.add(0)  # as a publication notes it, before the pool's own watch
        assert world.pool.coming()
        await until(lambda: world.heard)
        assert not world.pool.living()
        assert world.pool.coming()

        async def die_again():
            world.group.die(0)
            world.pool.lost.add(0)
            assert not world.pool.coming()
            raise RuntimeError("There is no engine left")

        world.pool.prepare = die_again
        world.group.gate.set()
        await until(lambda: len(world.heard) == 2)
        assert "could not be started again" in world.heard[1]
        assert not world.pool.coming()

    play([DEVICES[:1]], story)


def test_an_engine_that_cannot_be_started_again_is_told_and_waited_for_no_longer():
    async def story(world):
        async def fail(rank, devices=None):
            raise RuntimeError("no memory left")

        world.group.replace = fail
        world.group.die(0)
        with pytest.raises(Exception, match=r"no engine has been alive"):
            await world.ask()
        assert world.heard[-1] == "rollout rank 0 could not be started again: no memory left"

    play([DEVICES[:1]], story, timeout=0.05)
