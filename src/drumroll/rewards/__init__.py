"""Rewards: the user's functions, bound to columns by name and routed by domain.

The user writes `def correct(completion, answer) -> float | None`, sync or async. `completion` is the text that the
model wrote, `prompt` the row's prompt, `sample` the whole sample; any other argument is a column of the row. `None`
means "not applicable". An exception, a NaN or a non-number is that sample's failure and is shown with its text.

A coroutine may also take `judge` (asks the judge a question), `reward_model` (returns its score), `sandbox` (runs
untrusted programs) and `processes` (runs a function in a process that can be killed).
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from drumroll.config.reward import ALL_DOMAINS, RewardConfig
from drumroll.config.sandbox import SandboxConfig
from drumroll.errors import ConfigError, MissingExtra, being_cancelled, user_frames
from drumroll.processes.deadline import CpuTimeExceeded, MachineBusy
from drumroll.processes.pool import KillablePool, RemoteError
from drumroll.registry import Registry
from drumroll.sample import ENVIRONMENT, Failure, Sample
from drumroll.sandbox import Sandbox, open_sandbox

RewardFunction = Callable[..., Any]
Ask = Callable[[str], Awaitable[str]]
"""Sends a question to the judge and returns its answer."""
Rate = Callable[[Any, str], Awaitable[float]]
"""Sends a prompt and a completion to the reward model and returns its score."""


class Pool(Protocol):
    """Runs `module:function` calls, each with its own deadline; `struck` counts the deadlines that passed."""

    struck: Counter[str]

    async def call(self, path: str, arguments: dict[str, Any], seconds: float, cpu: bool = False) -> Any: ...
    async def close(self) -> None: ...


class Meter:
    """The deadline of one reward call. It stops while the reward waits for a service, which has its own deadline."""

    def __init__(self, clock: asyncio.Timeout, seconds: float) -> None:
        self._clock, self._seconds, self._waiting = clock, seconds, 0

    def unbilled(self, service: Any) -> Any:
        """Wrap a service so that waiting for it does not count against the reward's deadline."""

        async def call(*args: Any, **kwargs: Any) -> Any:
            self._waiting += 1
            self._clock.reschedule(None)
            try:
                return await service(*args, **kwargs)
            finally:
                self._waiting -= 1
                if not self._waiting and not self._clock.expired():
                    self._clock.reschedule(asyncio.get_running_loop().time() + self._seconds)

        return None if service is None else call


class Processes:
    """The process pool as a reward sees it: runs code that may hang on the main thread of a separate process."""

    def __init__(self, pool: Pool, seconds: float, meter: Meter) -> None:
        self._call, self._seconds = meter.unbilled(pool.call), seconds

    async def run(self, path: str, arguments: dict[str, Any], at_most: float | None = None, cpu: bool = False) -> Any:
        """Run `module:function` and return its result, or raise `TimeoutError`.

        Waiting for a free process does not count against the reward.

        With `cpu` the limit is in CPU time, for functions that only compute: past it the call raises `CpuTimeExceeded`.
        """
        return await self._call(path, arguments, min(self._seconds, at_most or self._seconds), cpu)


REWARDS: Registry[RewardFunction] = Registry("reward")
TRIALS = 4
"""The number of samples on which a reward is tried until it has returned once."""
SERVICES = ("judge", "reward_model", "sandbox", "processes")
GIVEN = ("completion", "prompt", "sample", *SERVICES)
BUILT_IN = (
    *("text", "maths", "choice", "patterns", "structured", "instructions"),
    *("code", "judge", "model", "reasoning"),
)
"""The modules that register the built-in rewards. They import third-party packages only when a reward is used."""


class BadReward(ValueError):
    """A reward function returned something that is not a finite number or None."""


@dataclass(frozen=True)
class Reward:
    """A reward function bound to its arguments."""

    name: str
    weight: float
    function: RewardFunction
    arguments: tuple[str, ...]
    optional: frozenset[str]
    fixed: Mapping[str, Any]
    path: str | None
    keeps_time: bool = False

    @classmethod
    def bind(cls, config: RewardConfig) -> Reward:
        """Look up the function and read its signature."""
        function = REWARDS.get(config.use)
        traits = REWARDS.traits(config.use)
        module, extra = traits.get("requires", (None, ""))
        if module is not None and find_spec(module) is None:
            raise MissingExtra(f"reward '{config.use}'", extra)
        if (check := traits.get("check")) is not None:
            check(config.args)
        name = config.use.rpartition(":")[2]
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in config.args]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        unknown = set(config.args) - set(inspect.signature(function).parameters)
        if unknown and not takes_any:
            raise ConfigError(
                f"reward '{config.use}' takes no argument '{sorted(unknown)[0]}'; it takes {', '.join(p.name for p in named)}."
            )
        if not inspect.iscoroutinefunction(function) and (asked := set(SERVICES).intersection(p.name for p in named)):
            raise ConfigError(
                f"reward '{config.use}' asks for '{min(asked)}', so it must be a coroutine: async def {name}(...)."
            )
        return cls(
            name=name,
            weight=config.weight,
            function=function,
            arguments=tuple(p.name for p in named),
            optional=frozenset(p.name for p in named if p.default is not p.empty),
            fixed=dict(config.args),
            path=_path(config.use, function),
            keeps_time=bool(traits.get("keeps_time")),
        )

    @property
    def columns(self) -> list[str]:
        """The columns that a row must have."""
        return [a for a in self.arguments if a not in GIVEN and a not in self.optional]

    def inputs(self, sample: Sample, **services: Any) -> dict[str, Any]:
        """Return the function's keyword arguments for one sample."""
        given = {"completion": sample.completion, "prompt": sample.prompt.content, "sample": sample, **services}
        row = sample.prompt.columns
        found = {a: given[a] if a in given else row[a] for a in self.arguments if a in given or a in row}
        return {**found, **self.fixed}

    async def __call__(self, sample: Sample, pool: Pool, seconds: float, services: Mapping[str, Any]) -> float | None:
        """Compute the reward.

        Built-ins and coroutines run here; the user's other functions run in a process that can be killed.
        """
        if inspect.iscoroutinefunction(self.function):
            async with asyncio.timeout(None if self.keeps_time else seconds) as clock:
                meter = Meter(clock, seconds)
                models = {name: meter.unbilled(services.get(name)) for name in ("judge", "reward_model")}
                given = {**services, **models, "processes": Processes(pool, seconds, meter)}
                value = await self.function(**self.inputs(sample, **given))
        elif self.path is None:
            value = self.function(**self.inputs(sample))
        else:
            value = await pool.call(self.path, self.inputs(sample), seconds)
        return check_value(self.name, value)


def _path(use: str, function: RewardFunction) -> str | None:
    """Return the import path for a separate process; None for a built-in, unless it declares the trait `isolated`."""
    if use not in REWARDS.parts:
        return use
    return f"{function.__module__}:{function.__name__}" if REWARDS.traits(use).get("isolated") else None


def check_value(name: str, value: Any) -> float | None:
    """Return a finite number or None; raise `BadReward` for anything else."""
    if value is None:
        return None
    if not isinstance(value, int | float) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, int | float):
        raise BadReward(f"reward '{name}' returned {value!r}, a {type(value).__name__}; it must return a number or None")
    if not math.isfinite(value):
        raise BadReward(f"reward '{name}' returned {value}; it must return a finite number or None")
    return float(value)


class Trial:
    """The first calls of a reward.

    Until one has returned, only a few run; if all of those time out, the reward is not called again.
    """

    def __init__(self) -> None:
        self.returned = False
        self.late = 0
        self._running = 0
        self._changed = asyncio.Event()

    @property
    def hopeless(self) -> bool:
        """Whether the reward timed out for every sample of the trial."""
        return not self.returned and self.late >= TRIALS

    async def admit(self) -> bool:
        """Wait until another call may start; return False if none will."""
        while not self.returned and not self.hopeless and self._running + self.late >= TRIALS:
            await self._changed.wait()
        return not self.hopeless

    @contextmanager
    def watched(self) -> Generator[None]:
        """Count a call by its outcome; a cancelled call does not count."""
        self._running += 1
        try:
            yield
            self.returned = True
        except CpuTimeExceeded:  # the sample's text is to blame, not the function
            self.returned = True
            raise
        except MachineBusy:  # neither the sample nor the function is to blame
            raise
        except TimeoutError:
            self.late += 1
            raise
        except Exception:
            self.returned = True
            raise
        finally:
            self._running -= 1
            self._changed.set()
            self._changed.clear()


class Rewards:
    """The rewards of each domain, bound to their functions. It does not score; see `Scorer`."""

    def __init__(self, by_domain: Mapping[str, Sequence[RewardConfig]]) -> None:
        for name in BUILT_IN:
            import_module(f"drumroll.rewards.{name}")
        self._rewards = {domain: [Reward.bind(c) for c in configs] for domain, configs in by_domain.items()}

    def _asking(self, service: str) -> list[str]:
        """Return the names of the rewards that take a service."""
        return [r.name for rewards in self._rewards.values() for r in rewards if service in r.arguments]

    def check_roles(self, **roles: Any) -> None:
        """Raise a ConfigError if a reward takes a role's model and that role is None."""
        for role, there in roles.items():
            if there is None and (asking := self._asking(role)):
                raise ConfigError(
                    f"reward '{asking[0]}' asks a {role.replace('_', ' ')}, but there is none: "
                    f"name one under roles.{role} (model: ...)."
                )

    def rewards(self, domain: str, *, played: bool = False) -> list[Reward]:
        """Return the rewards of a domain, or those of all domains. A domain `played` in an environment needs none."""
        found = self._rewards.get(domain) or self._rewards.get(ALL_DOMAINS)
        if not found:
            if played:
                return []
            raise ConfigError(
                f"no reward for domain '{domain}'; `reward` names {', '.join(self._rewards) or 'none'}: add one for it, or one for all others as `\"*\"`."
            )
        return found

    def required_columns(self, domain: str, *, played: bool = False) -> list[tuple[str, str]]:
        """Return (column, reward that needs it) for the rows of a domain."""
        return [(column, f"reward '{r.name}'") for r in self.rewards(domain, played=played) for column in r.columns]


class Scorer(Rewards):
    """Scores samples with the rewards of their domain."""

    def __init__(
        self,
        by_domain: Mapping[str, Sequence[RewardConfig]],
        timeout: float = 30.0,
        pool: Pool | None = None,
        judge: Ask | None = None,
        reward_model: Rate | None = None,
        sandbox: SandboxConfig | None = None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(by_domain)
        self.timeout = timeout
        self.notify = notify
        self._trials: dict[int, Trial] = {}  # keyed by id(reward)
        self.pool = pool or KillablePool(2)
        self.check_roles(judge=judge, reward_model=reward_model)
        self.sandbox: Sandbox | None = (
            open_sandbox(sandbox or SandboxConfig(), self.pool.struck) if self._asking("sandbox") else None
        )
        self._services = {"judge": judge, "reward_model": reward_model, "sandbox": self.sandbox}

    async def score(self, sample: Sample) -> None:
        """Set the sample's reward, or its failure. The reward of an environment counts in full."""
        played = ENVIRONMENT in sample.rewards
        total, applicable = sample.rewards.get(ENVIRONMENT, 0.0), played
        for reward in self.rewards(sample.prompt.domain, played=played):
            try:
                value = await self._call(reward, sample)
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and being_cancelled():
                    raise
                sample.failure = self._failure(reward, error)
                return
            if value is not None:
                sample.rewards[reward.name] = value
                total += reward.weight * value
                applicable = applicable or reward.weight != 0
        if applicable:
            sample.reward = total
        else:
            sample.failure = Failure("NotApplicable", "rewards", "every reward returned None")

    async def _call(self, reward: Reward, sample: Sample) -> float | None:
        """Call a reward, unless its trial failed. The first time-out is reported at once."""
        trial = self._trials.setdefault(id(reward), Trial())
        if not await trial.admit():
            raise TimeoutError(
                f"not called, because it took longer than {self.timeout:g} s for all {trial.late} samples before"
            )
        try:
            with trial.watched():
                return await reward(sample, self.pool, self.timeout, self._services)
        except TimeoutError as error:
            if trial.late == 1 or trial.hopeless:
                self.notify(self._late(self._failure(reward, error), sample, trial))
            raise

    def _late(self, failure: Failure, sample: Sample, trial: Trial) -> str:
        if trial.hopeless:
            return f"{failure}. So did every sample so far, so it is not called any more."
        return f"{failure}, for sample {sample.id}" + (
            "." if trial.returned else "; it has not returned for any sample so far."
        )

    def _failure(self, reward: Reward, error: BaseException) -> Failure:
        kind = error.kind if isinstance(error, RemoteError) else type(error).__name__
        late = kind == TimeoutError.__name__ or isinstance(error, TimeoutError)
        text = str(error) or (f"took longer than {self.timeout:g} s" if late else "")
        again = late and not isinstance(error, CpuTimeExceeded) and self._trials[id(reward)].returned
        passing = again or isinstance(error, MachineBusy)
        return Failure(kind, f"reward '{reward.name}'", text, user_frames(error), passing)

    async def close(self) -> None:
        """End the worker processes and the sandbox."""
        await self.pool.close()
        if self.sandbox is not None:
            await self.sandbox.close()
