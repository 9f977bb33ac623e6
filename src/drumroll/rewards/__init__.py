"""Rewards: the user's functions, bound to columns by name and routed by domain.

The user writes `def correct(completion, answer) -> float | None`, sync or async. `completion` is the text that the
model wrote, `thinking` and `final` its parts before and after `</think>`, `prompt` the row's prompt, `sample` the whole
sample; any other argument is a column of the row. `None` means "not applicable". An exception, a NaN or a non-number is that
sample's failure and is shown with its text. `signatures.py` has the other signatures: a group's, TRL's and verl's.

A coroutine may also take `judge` (asks the judge a question), `reward_model` (returns its score), `sandbox` (runs
untrusted programs) and `processes` (runs a function in a process that can be killed).
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Protocol

from drumroll.config.reward import ALL_DOMAINS, RewardConfig
from drumroll.config.sandbox import SandboxConfig
from drumroll.errors import ConfigError, MissingExtra, being_cancelled, user_frames
from drumroll.processes.deadline import CpuTimeExceeded, MachineBusy
from drumroll.processes.pool import KillablePool, RemoteError
from drumroll.registry import Registry
from drumroll.rewards.group_calls import GroupCalls
from drumroll.rewards.recorded import Log
from drumroll.rewards.signatures import LOGS, TRL, TRL_GIVEN, BadReward, Outcome, Signature, read, recognise
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
RECORDED = "drumroll.rewards.recorded"
BUILT_IN = (
    *("text", "maths", "choice", "patterns", "structured", "instructions"),
    *("code", "judge", "model", "reasoning"),
)
"""The modules that register the built-in rewards. They import third-party packages only when a reward is used."""


@dataclass(frozen=True)
class Reward:
    """A reward function bound to its arguments."""

    name: str
    weight: float
    function: RewardFunction
    signature: Signature
    arguments: tuple[str, ...]
    optional: frozenset[str]
    fixed: Mapping[str, Any]
    path: str | None
    takes_any: bool = False
    group: bool = False
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
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in config.args]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = tuple(p.name for p in named)
        bound = cls(
            name=config.use.rpartition(":")[2],
            weight=config.weight,
            function=function,
            signature=recognise(config.use, names, takes_any=takes_any, group=config.group),
            arguments=names,
            optional=frozenset(p.name for p in named if p.default is not p.empty),
            fixed=dict(config.args),
            path=_path(config.use, function),
            takes_any=takes_any,
            group=config.group,
            keeps_time=bool(traits.get("keeps_time")),
        )
        bound._check(config.use, [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY])
        return bound

    def _check(self, use: str, by_position: Sequence[str]) -> None:
        """Raise a ConfigError for arguments that cannot be filled."""
        if by_position:
            raise ConfigError(
                f"reward '{use}' takes '{by_position[0]}' by position only; rewards are called with names: drop the '/'."
            )
        unknown = set(self.fixed) - set(inspect.signature(self.function).parameters)
        if unknown and not self.takes_any:
            raise ConfigError(f"reward '{use}' takes no argument '{min(unknown)}'; it takes {', '.join(self.arguments)}.")
        if not self.is_coroutine and (asked := set(SERVICES).intersection(self.arguments)):
            raise ConfigError(f"reward '{use}' asks for '{min(asked)}', so it must be a coroutine: async def {self.name}(...).")
        unfilled = [] if self.signature.columns else [a for a in self._required if a not in self._given]
        if unfilled:
            raise ConfigError(
                f"reward '{use}' has verl's signature, whose other arguments are fixed: write args: {{{unfilled[0]}: ...}}, "
                "or give it a default."
            )

    @property
    def is_coroutine(self) -> bool:
        """Whether the function is awaited; so may be a callable object."""
        return any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__)))

    @property
    def _given(self) -> tuple[str, ...]:
        """The arguments that are no columns."""
        return (*self.signature.words, *SERVICES, *(TRL_GIVEN if self.signature is TRL else ()))

    @property
    def _required(self) -> list[str]:
        return [a for a in self.arguments if a not in self.optional]

    @property
    def columns(self) -> list[str]:
        """The columns that a row must have."""
        needs = self.signature.needs
        return [needs.get(a, a) for a in self._required if a in needs or a not in self._given]

    def describe(self) -> str:
        """The reward's name; a function that looks at no sample probably calls the completion by another name."""
        words = set(self.signature.words).intersection(self.arguments)
        return f"reward '{self.name}'" + ("" if words else " (which takes no 'completion', the text of the model)")

    @property
    def logs(self) -> list[str]:
        """The functions for logging that it takes."""
        return [name for name in LOGS if self.signature is TRL and (self.takes_any or name in self.arguments)]

    def inputs(self, samples: Sequence[Sample], **given: Any) -> dict[str, Any]:
        """Return the function's keyword arguments for one sample, or with lists for several."""
        each = [self._of(sample) for sample in samples]
        found = {name: [one[name] for one in each] for name in each[0]} if self.signature.lists else each[0]
        named = {n: v for n, v in given.items() if n in self.arguments or (self.takes_any and n in TRL_GIVEN)}
        return {**found, **named, **self.fixed}

    def _of(self, sample: Sample) -> dict[str, Any]:
        words, row = self.signature.words, sample.prompt.columns if self.signature.columns else {}
        asked = [a for a in self.arguments if a in words or (a in row and a not in self._given)]
        if self.takes_any:
            asked += [*self.signature.always, *(c for c in row if c not in (*self._given, "prompt", "completion"))]
        return {a: words[a](sample) if a in words else row[a] for a in dict.fromkeys(asked)}

    async def __call__(
        self, samples: Sequence[Sample], pool: Pool, seconds: float, services: Mapping[str, Any], state: Any = None
    ) -> list[Outcome | BadReward]:
        """Compute the reward of samples: of one, or of several with lists. `state` is TRL's `trainer_state`.

        Built-ins and coroutines run here; the user's other functions run in a process that can be killed.
        """
        given, log = {"trainer_state": state} if self.signature is TRL else {}, Log(len(samples))
        logs = {name: getattr(log, name) for name in self.logs}
        if self.is_coroutine:
            async with asyncio.timeout(None if self.keeps_time else seconds) as clock:
                meter = Meter(clock, seconds)
                models = {name: meter.unbilled(services.get(name)) for name in ("judge", "reward_model")}
                given |= {**services, **models, "processes": Processes(pool, seconds, meter), **logs}
                value = await self.function(**self.inputs(samples, **given))
        elif self.path is None:
            value = self.function(**self.inputs(samples, **given, **logs))
        elif logs:
            call = {"arguments": self.inputs(samples, **given), "count": len(samples), "logs": list(logs)}
            value, log = await pool.call(f"{RECORDED}:{self.path}", call, seconds)
        else:
            value = await pool.call(self.path, self.inputs(samples, **given), seconds)
        return [log.added_to(i, outcome) for i, outcome in enumerate(read(self.signature, self.name, value, len(samples)))]


def _path(use: str, function: RewardFunction) -> str | None:
    """Return the import path for a separate process; None for a built-in, unless it declares the trait `isolated`."""
    if use not in REWARDS.parts:
        return use
    return f"{function.__module__}:{function.__name__}" if REWARDS.traits(use).get("isolated") else None


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


def _named_apart(configs: Sequence[RewardConfig]) -> list[Reward]:
    """Bind the rewards of a domain. Where functions have one name, it gets the module (`a.score`) or a number (`score-2`)."""
    bound = [Reward.bind(config) for config in configs]
    uses = {reward.name: {c.use for c, r in zip(configs, bound, strict=True) if r.name == reward.name} for reward in bound}
    names = [c.use.replace(":", ".") if len(uses[r.name]) > 1 else r.name for c, r in zip(configs, bound, strict=True)]
    counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return [replace(r, name=n if k == 1 else f"{n}-{k}") for r, n, k in zip(bound, names, counts, strict=True)]


class Rewards:
    """The rewards of each domain, bound to their functions. It does not score; see `Scorer`."""

    def __init__(self, by_domain: Mapping[str, Sequence[RewardConfig]]) -> None:
        for name in BUILT_IN:
            import_module(f"drumroll.rewards.{name}")
        self._rewards = {domain: _named_apart(configs) for domain, configs in by_domain.items()}

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
        return [(column, r.describe()) for r in self.rewards(domain, played=played) for column in r.columns]


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
        steps: int = 0,
    ) -> None:
        super().__init__(by_domain)
        self.steps = steps  # of the whole run
        self.timeout = timeout
        self.notify = notify
        self._trials: dict[int, Trial] = {}  # keyed by id(reward)
        self.pool = pool or KillablePool(2)
        self.check_roles(judge=judge, reward_model=reward_model)
        self.sandbox: Sandbox | None = (
            open_sandbox(sandbox or SandboxConfig(), self.pool.struck) if self._asking("sandbox") else None
        )
        self._services = {"judge": judge, "reward_model": reward_model, "sandbox": self.sandbox}

    async def score(self, sample: Sample, group: GroupCalls | None = None) -> None:
        """Set the sample's reward, or its failure. The reward of an environment counts in full.

        A group reward waits for the other samples of `group`; without one the sample is a group of its own.
        """
        played = ENVIRONMENT in sample.rewards
        total, applicable = sample.rewards.get(ENVIRONMENT, 0.0), played
        for reward in self.rewards(sample.prompt.domain, played=played):
            try:
                found = await self._outcome(reward, sample, group)
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and being_cancelled():
                    raise
                sample.failure = self._failure(reward, error)
                return
            if found.value is not None:
                sample.rewards[reward.name] = found.value
                total += reward.weight * found.value
                applicable = applicable or reward.weight != 0
            sample.rewards |= {f"{reward.name}/{part}": number for part, number in found.parts.items()}
            sample.extra |= {f"{reward.name}/{name}": value for name, value in found.extra.items()}
        if applicable:
            sample.reward = total
        else:
            sample.failure = Failure("NotApplicable", "rewards", "every reward returned None")

    async def _outcome(self, reward: Reward, sample: Sample, group: GroupCalls | None) -> Outcome:
        call = partial(self._call, reward)
        if reward.group and group is not None:
            return await group.score(id(reward), sample, call)
        (found,) = await call([sample])
        if isinstance(found, BadReward):
            raise found
        return found

    async def _call(self, reward: Reward, samples: Sequence[Sample]) -> list[Outcome | BadReward]:
        """Call a reward, unless its trial failed. The first time-out is reported at once."""
        trial = self._trials.setdefault(id(reward), Trial())
        if not await trial.admit():
            raise TimeoutError(
                f"not called, because it took longer than {self.timeout:g} s for all {trial.late} samples before"
            )
        try:
            with trial.watched():
                return await reward(samples, self.pool, self.timeout, self._services, self._state(samples))
        except TimeoutError as error:
            if trial.late == 1 or trial.hopeless:
                self.notify(self._late(self._failure(reward, error), samples[0], trial))
            raise

    def _state(self, samples: Sequence[Sample]) -> SimpleNamespace:
        """TRL's `trainer_state`; the step is that of the weights that wrote the samples."""
        versions = [version for s in samples for trace in s.traces for version in trace.versions]
        return SimpleNamespace(global_step=max([0, *versions]), max_steps=self.steps)

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
