"""A seeded world around the real scheduler and the real ledger: everything that can go wrong, on virtual time.

One integer decides everything: the config, the lengths, the faults and when they strike. `play(seed)` runs it and checks
the invariants after every event; a failing seed is a bug report.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from drumroll.config.rollout import RolloutConfig
from drumroll.engines import Completion, EngineLost
from drumroll.engines.router import Router
from drumroll.errors import RolloutError
from drumroll.lifecycle import DrawEvent, Event, SampleFailed
from drumroll.rewards.group_calls import GroupCalls
from drumroll.rewards.signatures import BadReward, Outcome
from drumroll.rollout.scheduler import Rollouts
from drumroll.rollout.simulation import SimEngine, SimScorer, SimSource, Workload
from drumroll.rollout.virtual import run
from drumroll.runfiles.ledger_queries import LedgerReader
from drumroll.sample import GREEDY, Failure, Fate, Owner, Sample, State, Trace
from drumroll.store.ledger import Ledger

STEPS = 3
SAMPLES = 200
FAULTS = 3
LIMIT = 3000.0


class Killed(Exception):
    """The controller's process dies here."""


@dataclass
class Report:
    """What a play looked like."""

    seed: int
    samples: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    lives: int = 1
    ended: str = "completed"
    log: str = ""


class FaultyEngine(SimEngine):
    """Crashes; loses, delays and repeats answers; can be cut off the network."""

    def __init__(self, name: str, slots: int, work: Workload, world: World) -> None:
        super().__init__(name, slots, work)
        self.world = world
        self.cut_until = 0.0
        self.alive = True

    def replies(self, call):
        (due,) = super().replies(call)
        rng, now = self.world.rng, asyncio.get_running_loop().time()
        kind = rng.random()
        if kind < self.world.lost:
            self.world.faults["lost reply"] += 1
            return []
        if kind < self.world.lost + self.world.delayed:
            self.world.faults["delayed reply"] += 1
            due += rng.uniform(0, 3 * self.world.config.generation_timeout)
        if now + due < self.cut_until:
            self.world.faults["cut reply"] += 1
            due = self.cut_until - now + rng.random()
        if rng.random() < self.world.repeated:
            self.world.faults["duplicated reply"] += 1
            return [due, due + rng.random()]
        return [due]

    async def generate(self, request) -> Completion:
        if asyncio.get_running_loop().time() < self.cut_until and self.world.rng.random() < 0.3:
            self.world.faults["unreachable"] += 1
            raise EngineLost(f"{self.name} cannot be reached")
        if not self.alive:
            raise EngineLost(f"{self.name} is gone")
        return await super().generate(request)

    def crash(self) -> None:
        """Lose all requests."""
        self.alive = False
        for call in list(self.calls.values()):
            if not call.reply.done():
                call.reply.set_exception(EngineLost(f"{self.name} crashed"))


def failed(kind: str, text: str) -> Failure:
    """A failure as a real scorer reports it."""
    return Failure(kind, "reward 'simulated'", text, passing=kind == TimeoutError.__name__)


class FaultyScorer(SimScorer):
    """Fails, hangs, and is slow; keeps its own deadline as the real one does."""

    def __init__(self, work: Workload, world: World) -> None:
        super().__init__(work)
        self.world = world

    async def score(self, sample: Sample, group: GroupCalls | None = None) -> None:
        if self.world.grouped:
            await self._in_group(sample, group)
            return
        rng = self.world.rng
        kind = rng.random()
        if kind < self.world.reward_fails:
            self.world.faults["reward failure"] += 1
            sample.failure = failed("ValueError", "simulated")
            return
        if kind < self.world.reward_fails + self.world.reward_hangs:
            self.world.faults["reward hang"] += 1
            await asyncio.sleep(self.world.config.reward_timeout)
            sample.failure = failed("TimeoutError", "simulated")
            return
        await super().score(sample)

    async def _in_group(self, sample: Sample, group: GroupCalls) -> None:
        try:
            sample.reward = (await group.score(0, sample, self._together)).value
        except (ValueError, TimeoutError) as error:
            sample.failure = failed(type(error).__name__, "simulated")

    async def _together(self, samples: list[Sample]) -> list[Outcome | BadReward]:
        """Score a group; fail, hang, or return a bad value for some. Nobody of the group may be on the way here."""
        world, first = self.world, samples[0]
        flight = world.rollouts._flights[first.draw]
        assert flight.group.attempt == first.attempt
        assert [s.index for s in samples if s is not flight.group.greedy] == sorted({s.index for s in samples} - {GREEDY})
        on_the_way = {
            s.id: s.state for s in flight.group.everyone() if s.state in (State.QUEUED, State.GENERATING, State.ACTING)
        }
        assert not on_the_way, f"{first.draw} was scored while {on_the_way} were on the way"
        expected = [s.id for s in flight.group.everyone() if s.state in (State.SCORING, State.SCORED)]
        assert [s.id for s in samples] == expected, f"scored {[s.id for s in samples]} of {expected}"
        world.group_calls += 1
        kind = world.rng.random()
        await asyncio.sleep(self.work.reward_time)
        if kind < world.reward_fails:
            world.faults["group reward failure"] += 1
            raise ValueError("simulated")
        if kind < world.reward_fails + world.reward_hangs:
            world.faults["group reward hang"] += 1
            raise TimeoutError("simulated")
        found: list[Outcome | BadReward] = [Outcome(self.work.reward(s.draw, s.index)) for s in samples]
        if world.rng.random() < world.reward_fails:
            world.faults["bad value"] += 1
            found[world.rng.randrange(len(found))] = BadReward("simulated")
        return found


class FaultyEpisode:
    """An environment of some turns that is slow, hangs until its deadline, or crashes; in one trace, or in one a turn."""

    def __init__(self, sample: Sample, world: World) -> None:
        self.sample = sample
        self.world = world
        self.turn = 0
        world.episodes += 1

    async def begin(self) -> bool:
        self.sample.traces = []
        await self.act()
        self.show()
        full = random.Random(f"full/{self.world.report.seed}/{self.sample.draw}").random() < 0.05
        return not full  # then the first observation leaves the policy no room

    async def answer(self) -> bool:
        self.turn += 1
        assert self.sample.traces[-1].owners[-1] is Owner.POLICY, "the environment was asked before the policy had its turn"
        await self.act()
        if self.turn >= self.world.turns:
            return False
        if self.world.stepwise:
            self.show()
        else:
            self.sample.traces[-1].extend([2, 3], Owner.ENVIRONMENT)
        return True

    async def act(self) -> None:
        rng, kind = self.world.rng, self.world.rng.random()
        if kind < 0.01:
            self.world.faults["environment hang"] += 1
            await asyncio.sleep(4.0)
            raise SampleFailed(Failure("TimeoutError", "environment 'simulated', step", "took longer than 4 s"))
        if kind < 0.02:
            self.world.faults["environment crash"] += 1
            raise RuntimeError("simulated")
        await asyncio.sleep(rng.choice([0.0, 0.1, 3.0]))

    def show(self) -> None:
        trace = Trace()
        trace.extend(list(self.sample.prompt.tokens), Owner.PROMPT)
        self.sample.traces.append(trace)

    def close(self) -> None:
        self.world.episodes -= 1


class World:
    """The config, the faults and the parts of one seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = rng = random.Random(seed)
        self.report = Report(seed)
        self.faults = self.report.faults
        staleness = rng.choice([0, 0, 0.5, 1, 1.5, 2])
        self.config = RolloutConfig(
            prompts=rng.randint(4, 10),
            samples=rng.randint(2, 6),
            oversample=rng.choice([1, 1.3, 2]),
            filter=rng.choice([None, "zero_variance"]),
            order=rng.choice(["draw", "arrival"]),
            max_staleness=staleness,
            overage=rng.choice(["drop", "drop", "mask"]),
            partial=staleness >= 1 and rng.random() < 0.5,
            retries=rng.randint(0, 3),
            on_failure=rng.choice(["drop", "replace", "give_up"]),
            generation_timeout=rng.choice([12.0, 20.0]),
            reward_timeout=5.0,
            engine_timeout=15.0,
            max_draws_per_step=400,
            max_tokens=1000,
        )
        self.work = Workload(
            engines=rng.randint(2, 5),
            slots=rng.randint(4, 16),
            reward_time=rng.choice([0.0, 0.3, 1.0]),
            train_time=rng.choice([0.0, 2.0]),
            filtered=rng.choice([0.0, 0.3, 0.5]),
            median_tokens=6,
            seed=seed,
        )
        self.lost, self.delayed, self.repeated = (rng.choice([0.0, 0.02]) for _ in range(3))
        self.reward_fails, self.reward_hangs = rng.choice([0.0, 0.05]), rng.choice([0.0, 0.03])
        self.turns, self.stepwise, self.episodes = rng.choice([0, 1, 2, 3]), rng.random() < 0.5, 0
        self.kill_at = rng.uniform(3, 40) if rng.random() < 0.5 else None
        self.greedy = rng.random() < 0.3
        first = rng.choice([None, None, 0.5, 0.3, 0.85])
        self.shares = None if first is None else {"a": first, "b": 1 - first}
        self.grouped, self.group_calls = random.Random(f"group/{seed}").random() < 0.3, 0
        self.folder = folder
        self.fates: dict[tuple[int, str], Fate] = {}
        self.begun: dict[tuple[int, int, int], Fate | None] = {}
        self.trained: Counter[int] = Counter()
        self.committed: Counter[int] = Counter()
        self.digest = hashlib.sha256()
        self.life = 0
        self.rollouts: Rollouts | None = None
        self.router: Router | None = None
        self.engines: dict[str, FaultyEngine] = {}
        self.step = 0
        self.state: dict | None = None

    # --- invariants, after every event ---

    def check(self, event: Event | DrawEvent) -> None:
        if isinstance(event, Event):
            self.digest.update(f"{event.time:.6f} {event.sample.id} {event.after};".encode())
            key = (self.life, event.sample.id)
            assert key not in self.fates, f"{key} already ended as {self.fates[key]}, now {event.after}"
            if isinstance(event.after, Fate):
                self.fates[key] = event.after
            elif event.before is State.QUEUED and event.after is State.QUEUED:
                self.report.samples += 1
        else:
            group = event.group
            key = (self.life, group.draw, group.attempt)
            if event.fate is None:
                assert key not in self.begun, f"draw {key} began twice"
                self.begun[key] = None
            else:
                assert self.begun[key] is None, f"draw {key} ended twice"
                self.begun[key] = event.fate
                unfinished = [s.id for s in group.everyone() if not isinstance(s.state, Fate)]
                assert not unfinished, f"draw {group.draw} ended as {event.fate}, but {unfinished} have no fate"
                if event.fate is Fate.TRAINED:
                    self.trained[group.draw] += 1
                    assert self.trained[group.draw] == 1, f"draw {group.draw} was trained twice"
        rollouts, router = self.rollouts, self.router
        if rollouts is not None and router is not None:
            assert rollouts._admission.taken <= self.config.capacity, "more groups on their way than the capacity"
            for route in router.routes.values():
                assert 0 <= route.running <= route.capacity
            for engine in self.engines.values():
                assert len(engine.calls) <= engine.slots

    # --- parts ---

    def open(self, sample: Sample) -> FaultyEpisode | None:
        return FaultyEpisode(sample, self) if self.turns else None

    def join(self, name: str) -> None:
        assert self.router is not None
        engine = FaultyEngine(name, self.work.slots, self.work, self)
        engine.switches = [(-1e9, self.rollouts.version if self.rollouts else 0)]
        self.engines[name] = engine
        self.router.join(name, engine.generate, engine.slots, engine.interrupt)

    def rejoin(self) -> None:
        """Engines that were unreachable and are back."""
        for engine in self.engines.values():
            if engine.alive and engine.name not in self.router.routes and engine.cut_until < asyncio.get_running_loop().time():
                self.router.join(engine.name, engine.generate, engine.slots - len(engine.calls), engine.interrupt)

    async def chaos(self) -> None:
        """Engines crash, are cut off, leave, and come back; one stays alive unless the world is a doomed one."""
        doomed = self.rng.random() < 0.05
        number = 0
        while True:
            await asyncio.sleep(self.rng.expovariate(0.3))
            if doomed and self.report.samples < SAMPLES:
                continue
            self.rejoin()
            alive = [e for e in self.engines.values() if e.alive]
            kind = self.rng.choice(["crash", "cut", "leave", "join", "rest"])
            if kind == "join" or (len(alive) < 2 and not doomed):
                if doomed and not alive:
                    continue
                number += 1
                self.faults["join"] += 1
                self.join(f"late{self.life}.{number}")
            elif not alive:
                continue
            elif kind == "crash":
                self.faults["crash"] += 1
                self.rng.choice(alive).crash()
            elif kind == "rest":
                self.faults["rest"] += 1
                router, name = self.router, self.rng.choice(alive).name
                router.rest(name)
                asyncio.get_running_loop().call_later(self.rng.uniform(1, 10), router.back, name)
            elif kind == "cut":
                self.faults["network cut"] += 1
                self.rng.choice(alive).cut_until = asyncio.get_running_loop().time() + self.rng.uniform(1, 10)
            else:
                self.faults["leave"] += 1
                victim = self.rng.choice(alive)
                self.router.leave(victim.name)
                del self.engines[victim.name]

    async def train(self) -> None:
        """One life of the controller: from the last commit to the last step, or to its death."""
        loop = asyncio.get_running_loop()
        ledger = Ledger(self.folder / "ledger.sqlite")
        ledger.resume(self.step)
        self.report.ended = "completed"
        self.router = router = Router(self.config.engine_timeout)
        self.rollouts = rollouts = Rollouts(
            self.config, self.report.seed, SimSource(shares=self.shares), router, FaultyScorer(self.work, self), lambda tokens: "",
            episodes=self.open, greedy=self.greedy, listeners=[ledger, self.check], clock=loop.time,
        )  # fmt: skip
        self.engines = {}
        if self.state is not None:
            rollouts.restore(self.state)
        for i in range(self.work.engines):
            self.join(f"e{self.life}.{i}")
        chaos = asyncio.ensure_future(self.chaos())
        try:
            while self.step < STEPS or self.report.samples < SAMPLES or self.faults.total() < FAULTS:
                groups = await rollouts.take(self.config.prompts)
                assert len(groups) == self.config.prompts
                if self.config.order == "draw":
                    assert [g.draw for g in groups] == sorted(g.draw for g in groups)
                for domain, share in (self.shares or {}).items():
                    count = sum(g.prompt.domain == domain for g in groups)
                    assert abs(count - share * len(groups)) <= 1, (
                        f"{count} of {len(groups)} groups are of '{domain}', not {share}"
                    )
                if self.config.overage == "drop":
                    for sample in (s for g in groups for s in g.samples):
                        oldest = sample.oldest_version()
                        lag = 0 if oldest is None else rollouts.version - oldest
                        assert lag <= self.config.lag_limit, f"{sample.id} lags by {lag}"
                await asyncio.sleep(self.work.train_time)
                version = self.step + 1
                for engine in self.engines.values():
                    engine.switch(version)
                rollouts.publish(version)
                rollouts.trained(groups)
                state = rollouts.state()
                ledger.next_step()
                await asyncio.sleep(self.work.train_time)  # evaluation and checkpoint: rollouts go on meanwhile
                ledger.commit(version)
                self.step, self.state = version, state
                self.committed.update(g.draw for g in groups)
        except RolloutError as error:
            self.report.ended = type(error).__name__
        finally:
            chaos.cancel()
        await rollouts.close()
        await asyncio.sleep(0)
        assert router.busy() == 0, f"{router.busy()} slots leaked"
        assert not any(e.calls for e in self.engines.values()), "an engine still works on a request"
        assert not rollouts._flights
        assert self.episodes == 0, f"{self.episodes} episodes were left open"
        ledger.close()

    async def main(self) -> Report:
        while True:
            life = asyncio.ensure_future(self.train())
            if self.kill_at is not None:
                done, _ = await asyncio.wait([life], timeout=self.kill_at)
                if not done:
                    self.faults["controller killed"] += 1
                    await self._die(life)
                    continue
            done, _ = await asyncio.wait([life], timeout=LIMIT)
            assert done, f"step {self.step + 1} did not end in {LIMIT} units of time though engines live"
            await life
            if self.report.ended == "completed" or self.report.samples >= SAMPLES:
                break
            self._next_life()  # a typed error: somebody starts it again
        self._check_ledger()
        self.report.log = self.digest.hexdigest()
        return self.report

    async def _die(self, life: asyncio.Future) -> None:
        """The process is gone: nothing is flushed, nobody is told, only files remain."""
        self.rollouts.listeners.clear()
        for task in [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]:
            task.cancel()
        await asyncio.gather(life, return_exceptions=True)
        await asyncio.sleep(0)
        self.kill_at = None if self.report.lives > 2 else self.rng.uniform(3, 40)
        self._next_life()

    def _next_life(self) -> None:
        self.life += 1
        self.report.lives += 1
        self.report.ended = "completed"
        self.trained = Counter(self.committed)
        self.rollouts = self.router = None

    def _check_ledger(self) -> None:
        """The ledger at the end: every sample has one fate, nothing was trained twice, nothing was passed over."""
        ledger = LedgerReader(self.folder / "ledger.sqlite")
        assert ledger.problems() == []
        assert ledger.in_flight() == []
        trained = {d for (d,) in ledger.db.execute("SELECT draw FROM draws WHERE fate = 'trained'")}
        assert trained == set(self.committed), "the ledger and the learner disagree on what was trained"
        if self.report.ended == "completed":
            assert len(trained) == self.step * self.config.prompts
        accounted = {d for (d,) in ledger.db.execute("SELECT draw FROM draws WHERE fate != 'superseded'")}
        if self.state is not None:
            settled = {*range(self.state["draw"]), *self.state["settled"]}
            assert settled <= accounted, f"draws {sorted(settled - accounted)} were passed over"
        ledger.db.close()


def play(seed: int) -> Report:
    """Run one world; an error names the seed that replays it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        try:
            return run(World(seed, Path(folder)).main())
        except BaseException as error:
            error.add_note(f"replay with: python tests/simulation/world.py {seed}")
            raise


if __name__ == "__main__":
    import sys

    for text in sys.argv[1:]:
        print(play(int(text)))
