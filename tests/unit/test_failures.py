"""What user code does wrong is its sample's failure, told with file and line; it never hangs a step or ends a run."""

import asyncio
import pickle
from collections import Counter
from dataclasses import replace

import pytest

import drumroll.errors
from drumroll.config.environment import EnvironmentConfig
from drumroll.config.reward import RewardConfig
from drumroll.config.rollout import RolloutConfig
from drumroll.data.render import Renderer
from drumroll.engines import Completion
from drumroll.engines.router import Router
from drumroll.envs.episodes import Episodes
from drumroll.errors import ConfigError, RolloutError, user_frames
from drumroll.models import tiny
from drumroll.processes.deadline import CpuTimeExceeded, MachineBusy
from drumroll.processes.pool import KillablePool, RemoteError
from drumroll.rewards import TRIALS, Reward, Scorer
from drumroll.rollout import virtual
from drumroll.rollout.scheduler import Rollouts
from drumroll.sample import FRAME, Failure, Fate, Prompt, Sample, Scene, StopReason
from drumroll.workers import server as host

PLAIN = Renderer(tiny.tokenizer())


class Source:
    """Prompts without end, played in a scene if there is one."""

    shares = {"": 1.0}

    def __init__(self, scene=None):
        self.scene = scene

    def draw(self):
        return Prompt("p", "d", "", (1,), scene=self.scene)

    def exhausted(self):
        return False

    def state(self):
        return {}


async def generate(request):
    """An engine that writes one token, under the weights that its request's seed does not know."""
    return Completion([5], [-1.0], [0], StopReason.EOS)


def rollouts_of(scorer, config=None, episodes=None, scene=None):
    router = Router()
    router.join("engine", generate, 8)
    config = config or RolloutConfig(prompts=1, samples=2)
    opened = {"episodes": episodes.open} if episodes else {}
    return Rollouts(config, 0, Source(scene), router, scorer, PLAIN.tokenizer.decode, **opened)


def taken(use, **settings):
    """What `take` says when all samples are scored by a reward, and the samples that failed."""

    async def main():
        scorer = Scorer({"*": [RewardConfig(use=use)]})
        rollouts = rollouts_of(scorer, RolloutConfig(prompts=1, samples=2, **settings))
        try:
            with pytest.raises(RolloutError) as caught:
                await asyncio.wait_for(rollouts.take(1), 60)
            return str(caught.value), rollouts.failed
        finally:
            await rollouts.close()
            await scorer.close()

    return asyncio.run(main())


# --- cancellation ---


@pytest.mark.parametrize(
    "body",
    ["raise asyncio.CancelledError", "t = asyncio.ensure_future(asyncio.sleep(9)); t.cancel(); await t", "raise SystemExit(3)"],
)
def test_a_reward_that_raises_cancelled_error_fails_its_sample(mine, body):
    kind = "SystemExit" if "Exit" in body else "CancelledError"
    text, failed = taken(f"{mine(f'import asyncio{chr(10)}async def f(completion): {body}')}:f")
    assert f"{kind} in reward 'f'" in text
    assert {s.state for s in failed} == {Fate.FAILED}


CANCELLING = """
import asyncio
class Env:
    def __init__(self, how): self.how = how
    async def reset(self, seed):
        if self.how == "reset": raise asyncio.CancelledError
        if self.how == "exit": raise SystemExit(3)
        return "?"
    async def step(self, text): raise asyncio.CancelledError
    def close(self): pass
"""


@pytest.mark.parametrize("how", ["reset", "step", "exit"])
def test_an_environment_that_raises_cancelled_error_fails_its_sample(mine, how):
    async def main():
        scene = Scene(f"{mine(CANCELLING)}:Env", {"how": how})
        episodes = Episodes(EnvironmentConfig(), 0, PLAIN, PLAIN.tokenizer.decode, 50, KillablePool)
        rollouts = rollouts_of(Scorer({}), episodes=episodes, scene=scene)
        try:
            kind, deed = ("SystemExit", "reset") if how == "exit" else ("CancelledError", how)
            with pytest.raises(RolloutError, match=f"{kind} in environment '.*:Env', {deed}"):
                await asyncio.wait_for(rollouts.take(1), 60)
        finally:
            await rollouts.close()
            await episodes.close()

    asyncio.run(main())


class Stubborn:
    """A reward that does not let itself be cancelled."""

    def __init__(self, how):
        self.how = how

    async def score(self, sample, group=None):
        try:
            if sample.draw > 1:
                await asyncio.sleep(1000)
        except asyncio.CancelledError:
            if self.how == "fail":
                sample.failure = Failure("ValueError", "reward", "")
        sample.reward = 1.0


@pytest.mark.parametrize("how", ["fail", "return"])
def test_a_sample_that_is_given_up_stays_so_whatever_its_reward_does(how):
    async def main():
        rollouts = rollouts_of(Stubborn(how), RolloutConfig(prompts=2, samples=2, oversample=2))
        groups = await rollouts.take(2)
        await asyncio.sleep(0)
        assert [g.draw for g in groups] == [0, 1]
        rollouts.trained(groups)
        assert rollouts._broken is None
        await rollouts.close()

    virtual.run(main())


def test_a_task_that_is_cancelled_from_outside_ends_the_step():
    class Outside:
        async def score(self, sample, group=None):
            asyncio.current_task().cancel()
            await asyncio.sleep(1)

    async def main():
        rollouts = rollouts_of(Outside())
        with pytest.raises(RolloutError, match="the task of sample 0\\.0 was cancelled"):
            await rollouts.take(1)
        await rollouts.close()

    virtual.run(main())


# --- samples without a token of the policy ---


class Full:
    """An environment whose first observation leaves the policy no room."""

    def __init__(self, sample):
        self.sample = sample

    async def begin(self):
        self.sample.traces, self.sample.rewards = [], {"environment": 0.0}
        return False

    def close(self):
        pass


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("order", ["draw", "arrival"])
def test_a_group_in_which_the_policy_wrote_nothing_is_not_over_age(staleness, order):
    async def main():
        router = Router()
        router.join("engine", generate, 8)
        config = RolloutConfig(prompts=2, samples=2, max_staleness=staleness, order=order)
        scorer = Scorer({})
        rollouts = Rollouts(config, 0, Source(), router, scorer, str, episodes=Full)
        for version in range(1, 5):
            groups = await rollouts.take(2)
            assert len(groups) == 2
            rollouts.publish(version)
            rollouts.trained(groups)
        await rollouts.close()
        await scorer.close()

    virtual.run(main())


# --- where it was raised ---

RAISING = """
import asyncio, json

def inner(text):
    return {}[text]

def plain(completion):
    return inner("x")

async def later(completion):
    return inner("x")

def foreign(completion):
    return json.loads("{")

def deep(completion):
    return deep(completion)

async def hangs(completion):
    await asyncio.sleep(1000)

class Env:
    def reset(self, seed): return "?"
    def step(self, text): return inner("x")
    def close(self): pass

class AsyncEnv(Env):
    async def step(self, text): return inner("x")
"""


def scored(scorer):
    sample = Sample(Prompt("p", "d", "", (1,)), 0, 0, completion="7")

    async def main():
        try:
            await scorer.score(sample)
        finally:
            await scorer.close()

    asyncio.run(main())
    assert sample.failure is not None
    return sample.failure


@pytest.mark.parametrize(
    ("function", "lines"),
    [("plain", [8, 5]), ("later", [11, 5]), ("foreign", [14]), ("hangs", [20])],
)
def test_an_exception_in_a_reward_is_shown_with_the_users_frames(mine, function, lines):
    name = mine(RAISING)
    failure = scored(Scorer({"*": [RewardConfig(use=f"{name}:{function}")]}, 0.1 if function == "hangs" else 30.0))
    assert [int(line) for _, line in FRAME.findall(failure.traceback)] == lines
    assert {file for file, _ in FRAME.findall(failure.traceback)} == {f"{name}.py"}
    assert str(failure).endswith(f" ({name}.py, line {lines[-1]})")
    assert "drumroll" not in failure.traceback


def test_a_traceback_is_short(mine):
    failure = scored(Scorer({"*": [RewardConfig(use=f"{mine(RAISING)}:deep")]}))
    assert failure.kind == "RecursionError"
    assert len(failure.traceback.splitlines()) < 30


@pytest.mark.parametrize("use", ["Env", "AsyncEnv"])
def test_an_exception_in_an_environment_is_shown_with_the_users_frames(mine, use):
    name = mine(RAISING)

    async def main():
        episodes = Episodes(EnvironmentConfig(), 0, PLAIN, PLAIN.tokenizer.decode, 50, KillablePool)
        rollouts = rollouts_of(Scorer({}), episodes=episodes, scene=Scene(f"{name}:{use}"))
        try:
            with pytest.raises(RolloutError) as caught:
                await rollouts.take(1)
            return str(caught.value)
        finally:
            await rollouts.close()
            await episodes.close()

    text = asyncio.run(main())
    assert f"({name}.py, line 5)" in text
    assert text.endswith("    return {}[text]\n           ~~^^^^^^")  # the step ends with the traceback of the first failure


def test_a_module_that_cannot_be_imported_is_shown_with_the_users_frames(mine):
    name = mine("def f(completion): ...\n\nlimit = 1 / 0\n")
    with pytest.raises(ConfigError, match=rf"(?s)ZeroDivisionError: .*{name}.py\", line 3, in <module>"):
        Scorer({"*": [RewardConfig(use=f"{name}:f")]})


def test_installed_packages_are_shown_only_where_nothing_else_is():
    def raised(*files):
        program = "raise ValueError"
        for file in reversed(files):
            program = f"exec(compile({program!r}, {file!r}, 'exec'))"
        try:
            exec(program)
        except ValueError as error:
            return [file for file, _ in FRAME.findall(user_frames(error.with_traceback(error.__traceback__.tb_next)))]

    theirs = "/venv/lib/site-packages/theirs/reward.py"
    assert raised(theirs, drumroll.errors.__file__, asyncio.__file__) == ["reward.py"]
    assert raised("/home/mine.py", theirs) == ["mine.py"]
    assert raised(drumroll.errors.__file__) == []


def test_frames_travel_between_processes():
    """Also through a worker of the Ray runtime, which sends exceptions as values."""
    sent = pickle.loads(pickle.dumps(host.Failure.of(RemoteError("KeyError", "'x'", '  File "a.py", line 3'))))
    with pytest.raises(RemoteError) as caught:
        sent.throw("reward rank 0")
    error = caught.value
    assert (error.kind, str(error), user_frames(error)) == ("KeyError", "'x'", '  File "a.py", line 3')


# --- deadlines ---

SLOW = """
import asyncio, time, pathlib
here = pathlib.Path(__file__).with_suffix(".calls")
def note():
    with here.open("a") as file: file.write("x")
def plain(completion):
    note()
    time.sleep(1000)
async def later(completion):
    note()
    await asyncio.sleep(1000)
"""


@pytest.mark.parametrize("function", ["plain", "later"])
def test_a_reward_that_never_returns_ends_the_step(mine, tmp_path, function):
    name, told = mine(SLOW), []

    async def main():
        scorer = Scorer({"*": [RewardConfig(use=f"{name}:{function}")]}, 0.5, notify=told.append)
        rollouts = rollouts_of(scorer, RolloutConfig(prompts=4, samples=8))
        try:
            with pytest.raises(RolloutError, match=rf"all \d+ samples .* '{function}': took longer than 0\.5 s"):
                await rollouts.take(4)
            return [s.failure.text for s in rollouts.failed]
        finally:
            await rollouts.close()
            await scorer.close()

    texts = asyncio.run(main())
    assert (tmp_path / f"{name}.calls").read_text() == "x" * TRIALS
    assert (
        sum("not called, because it took longer than 0.5 s for all 4 samples before" in t for t in texts) == len(texts) - TRIALS
    )
    first, last = told
    assert f"TimeoutError in reward '{function}': took longer than 0.5 s" in first
    assert "it has not returned for any sample so far" in first
    assert "it is not called any more" in last


def test_a_reward_that_returns_for_others_is_tried_again():
    """Late for the first samples, then not: those after it are scored, and a time-out is passing again."""
    calls, told = Counter(), []

    async def odd(completion, sample):
        calls[sample.index] += 1
        if sample.index < 2 or (calls[sample.index] == 1 and sample.index == 3):
            await asyncio.sleep(1000)
        return 1.0

    scorer = Scorer({"*": []}, 5.0, notify=told.append)
    scorer._rewards["*"] = [replace(Reward.bind(RewardConfig(use="exact")), function=odd, arguments=("completion", "sample"))]

    async def main():
        rollouts = rollouts_of(scorer, RolloutConfig(prompts=1, samples=9))
        [group] = await rollouts.take(1)
        await rollouts.close()
        return group

    group = virtual.run(main())
    assert {s.index for s in group.samples} == {2, 3, 4, 5, 6, 7, 8}
    assert calls == {0: 3, 1: 3, 3: 2, **dict.fromkeys((2, 4, 5, 6, 7, 8), 1)}
    assert len(told) == 1


def test_an_exception_that_is_its_own_cause_has_frames():
    def fail():
        try:
            raise ValueError("round")
        except ValueError as error:
            raise error from error

    with pytest.raises(ValueError, match="round") as caught:
        fail()
    assert "test_failures.py" in user_frames(caught.value)


@pytest.mark.parametrize(("error", "called"), [(CpuTimeExceeded, 9), (MachineBusy, 9), (TimeoutError, TRIALS)])
def test_only_a_function_that_is_late_itself_is_given_up(error, called):
    """A text that takes too long is one sample's, and a busy machine is nobody's; a busy machine is tried again."""

    class Late:
        struck: dict[str, int] = {}
        calls = 0

        async def call(self, path, arguments, seconds, cpu=False):
            self.calls += 1
            raise error("late")

        async def close(self):
            pass

    async def go():
        pool = Late()
        scorer = Scorer({"*": [RewardConfig(use="regex", args={"pattern": "x"})]}, 1.0, pool)
        samples = [Sample(Prompt(str(i), "d", "", (1,)), i, 0, completion="y") for i in range(9)]
        for sample in samples:
            await scorer.score(sample)
        return pool.calls, [s.failure.passing for s in samples]

    assert asyncio.run(go()) == (called, [error is MachineBusy] * 9)
