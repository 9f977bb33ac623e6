"""Engines rest and come back; requests on a resting engine are interrupted and served elsewhere."""

import asyncio

from drumroll.engines import Completion, Request, Sampling
from drumroll.engines.router import Router
from drumroll.sample import StopReason


class Engine:
    """Answers when told to; an interrupt ends what runs."""

    def __init__(self):
        self.running = {}

    async def generate(self, request):
        self.running[request.id] = asyncio.get_running_loop().create_future()
        return await self.running[request.id]

    def interrupt(self):
        for future in self.running.values():
            if not future.done():
                future.set_result(Completion(stop=StopReason.ABORTED))

    def finish(self):
        for future in self.running.values():
            if not future.done():
                future.set_result(Completion([1], [0.0], [0], StopReason.EOS))


async def ticks(count=5):
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_resting_engine_gets_nothing_until_it_is_back():
    async def main():
        router, one, other = Router(), Engine(), Engine()
        router.join("one", one.generate, 1, one.interrupt)

        def ask(name):
            request = Request(name, (1,), Sampling(), 0)
            return asyncio.ensure_future(router.generate(request, name, 0, 60.0, lambda: None))

        first = ask("a")
        await ticks()
        router.rest("one")
        assert (await first).stop is StopReason.ABORTED
        second = ask("b")
        await ticks()
        assert "b" not in one.running
        assert router.hopeless is None
        router.join("other", other.generate, 1, other.interrupt)
        await ticks()
        assert "b" in other.running
        third = ask("c")
        await ticks()
        router.back("one")
        await ticks()
        assert "c" in one.running
        one.finish()
        other.finish()
        assert [(await t).stop for t in (second, third)] == [StopReason.EOS] * 2
        assert router.busy() == 0
        router.rest("nobody")
        router.back("nobody")

    asyncio.run(main())


def test_nobody_gives_up_while_an_engine_is_being_started():
    async def main():
        router, one = Router(0.05), Engine()
        router.join("one", one.generate, 1, one.interrupt)
        router.expect("one")
        router.leave("one")
        await asyncio.sleep(0.2)
        assert router.hopeless is None
        router.expect("one", False)
        await asyncio.sleep(0.2)
        assert router.hopeless is not None
        router.join("one", one.generate, 1, one.interrupt)
        assert router.hopeless is None

    asyncio.run(main())
