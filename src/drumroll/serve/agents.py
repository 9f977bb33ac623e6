"""Runs a user's agent as an episode: a function that talks to the model through the endpoint and returns a reward, or None.

An agent runs in this process, on a separate event loop (plain functions: each in a thread), so that an agent which
blocks does not hold up training. An agent's errors are failures of its sample.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from typing_extensions import override

from drumroll.config.environment import EnvironmentConfig
from drumroll.config.rollout import RolloutConfig
from drumroll.engines import Sampling
from drumroll.engines.router import Router
from drumroll.envs.episodes import cut_off
from drumroll.envs.executors import in_thread
from drumroll.envs.runner import agent_path
from drumroll.errors import ConfigError, MissingExtra, being_cancelled, user_frames
from drumroll.lifecycle import SampleFailed
from drumroll.processes.loops import Loop
from drumroll.processes.pool import RemoteError
from drumroll.registry import import_path
from drumroll.rewards import Meter
from drumroll.rewards.signatures import check_value
from drumroll.sample import ENVIRONMENT, GREEDY, Failure, Sample, StopReason, sample_seed
from drumroll.serve.caller import LIMITS, Caller, Served
from drumroll.serve.endpoint import Endpoint
from drumroll.serve.protocol import Refused
from drumroll.serve.writing import EngineClient

GIVEN = ("client", "base_url", "api_key", "model", "task", "seed")
"""The arguments that an agent may take besides the columns of its row."""


class Agents:
    """The agents of a run, and the endpoint that they call."""

    def __init__(self, config: EnvironmentConfig, rollout: RolloutConfig, seed: int, served: Served, router: Router) -> None:
        self.config = config
        self.rollout = rollout
        self.seed = seed
        self.served = served
        self.router = router
        self.loop = AgentLoop()
        self.gate = asyncio.Semaphore(config.agents)
        self.callers: dict[str, Caller] = {}
        self.endpoint = Endpoint(served, self._find)
        self._opening: asyncio.Task[None] | None = None

    def find(self, use: str) -> Callable[..., Any]:
        """Return the function that `agent:module:function` names."""
        path = agent_path(use)
        assert path is not None, use
        function = import_path(path, "environment.use")
        if not callable(function):
            raise ConfigError(f"environment.use: '{path}' is a {type(function).__name__}, not a function.")
        if "client" in inspect.signature(function).parameters and find_spec("openai") is None:
            raise MissingExtra(f"agent '{path}' asks for an openai `client`, which", "serve")
        return function

    def open(self, sample: Sample, seed: int, stream: str, sampling: Sampling | None) -> AgentEpisode:
        """Open the episode of a sample whose scene is an agent; in training it samples as the run does."""
        if sampling is None:
            own = self.rollout.of(sample.prompt.domain)
            temperature = 0.0 if sample.index == GREEDY else own.temperature
            sampling = Sampling(temperature, own.length_limit, tuple(own.stop), max_thinking=own.max_thinking_tokens)
        return AgentEpisode(self, sample, seed, stream, sampling)

    def report_late(self, sample: Sample, failure: Failure) -> None:
        """Report the first time-out of an agent at once."""
        if failure.boundary not in self.served.told:
            self.served.told.add(failure.boundary)
            self.served.notify(f"{failure}, for sample {sample.id}.")

    async def listen(self) -> None:
        """Open the endpoint for the first agent."""
        self._opening = self._opening or asyncio.ensure_future(self.endpoint.open())
        await self._opening

    def _find(self, name: str | None) -> Caller:
        if name is None or name not in self.callers:
            raise Refused(
                404, "no sample of this run is at this address: it is over, or the base_url is another.", code="sample_over"
            )
        return self.callers[name]

    async def close(self) -> None:
        """End all agents and the endpoint."""
        for caller in self.callers.values():
            caller.close()
        await self.loop.close()
        await self.endpoint.close()


class AgentLoop(Loop):
    """The event loop that agents run on, with an `openai` client whose connections they share."""

    def __init__(self) -> None:
        super().__init__("agents")
        self._clients: dict[asyncio.AbstractEventLoop, Any] = {}

    def client(self, base_url: str, api_key: str) -> Any:
        """Return the client for a sample's base URL; call it on the loop's thread."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            from openai import AsyncOpenAI

            self._clients[loop] = AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None, max_retries=0)
        return self._clients[loop].with_options(base_url=base_url)

    @override
    async def ending(self) -> None:
        if (client := self._clients.pop(asyncio.get_running_loop(), None)) is not None:
            await client.close()


class AgentEpisode:
    """One agent at work. `begin` plays the whole episode; the policy's turns are the agent's calls."""

    def __init__(self, agents: Agents, sample: Sample, seed: int, stream: str, sampling: Sampling) -> None:
        assert sample.prompt.scene is not None
        self.agents = agents
        self.sample = sample
        self.seed = seed
        self.stream = stream
        self.sampling = sampling
        self.scene = sample.prompt.scene
        self.name = agent_path(self.scene.use) or self.scene.use

    async def begin(self) -> bool:
        """Run the agent to its end."""
        sample = self.sample
        sample.traces, sample.turns, sample.notes, sample.success = [], [], [], None
        async with self.agents.gate:
            await self.agents.listen()
            reward, stop = await self._play()
        if not sample.traces:
            raise self._failed("NoCalls", "it ended without a completion, so there is nothing to train on")
        sample.stop = stop
        if stop is StopReason.CONTEXT:
            sample.notes.append(cut_off(f"agent '{self.name}'", "trajectory", self.agents.served.context))
        if reward is not None:
            sample.rewards[ENVIRONMENT] = reward
        return False

    async def answer(self) -> bool:
        """Never called: an agent's turns are its calls."""
        raise AssertionError("an agent's turns are its calls")

    def close(self) -> None:
        """Free the episode's resources; it holds none."""

    async def _play(self) -> tuple[float | None, StopReason]:
        """Return the agent's reward. Reaching a limit of the run ends the episode; any other error fails it."""
        seconds, handle = self.agents.config.step_timeout, secrets.token_urlsafe(12)
        caller: Caller | None = None
        try:
            async with asyncio.timeout(seconds) as clock:
                caller = self.agents.callers[handle] = self._caller(Meter(clock, seconds))
                value = await self._call(f"{self.agents.endpoint.url}/s/{handle}/v1")
            return check_value(self.name, value), StopReason.TERMINATED
        except (SampleFailed, ConfigError, MissingExtra):
            raise
        except TimeoutError:
            await self.agents.loop.check()
            late = self._failed("TimeoutError", f"took longer than {seconds:g} s between two calls")
            self.agents.report_late(self.sample, late.failure)
            raise late from None
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            if (stop := LIMITS.get(str(getattr(error, "code", None)))) is not None:
                return 0.0, stop
            kind = error.kind if isinstance(error, RemoteError) else type(error).__name__
            raise self._failed(kind, str(error), user_frames(error)) from None
        finally:
            self.agents.callers.pop(handle, None)
            if caller is not None:
                caller.close()
                self.sample.traces, self.sample.turns = caller.calls.traces()
                self.sample.completion = caller.last

    def _caller(self, meter: Meter) -> Caller:
        """Make the caller of this sample. The time that its calls wait and take does not count against the agent."""
        agents, sample, served = self.agents, self.sample, self.agents.served
        served = replace(served, renderer=served.renderer.given(self.scene.template, "template"))
        order = sample.draw * (agents.rollout.most_samples + 1) + sample.index + 1
        client = EngineClient(
            meter.unbilled(agents.router.generate),
            served.spell,
            (sample.draw, sample.attempt),
            order,
            agents.rollout.generation_timeout,
            agents.rollout.retries,
            served.closing,
        )

        def seed(number: int, index: int, asked: int | None) -> int:
            return sample_seed(agents.seed, f"agent/{self.stream}/{number}", sample.draw, sample.index)

        name, turns = f"{self.stream}/{sample.id}", agents.config.max_turns
        return Caller(name, served, client, self.sampling, seed, fixed=True, turns=turns)

    async def _call(self, base_url: str) -> Any:
        agents = self.agents
        function = agents.find(self.scene.use)
        key, own = agents.endpoint.token, "client" in inspect.signature(function).parameters
        given = {"base_url": base_url, "api_key": key, "model": agents.served.name, "seed": self.seed}
        arguments = self._arguments(function, given)
        if inspect.iscoroutinefunction(function):
            loop = agents.loop
            return await loop.run(lambda: function(**arguments, **({"client": loop.client(base_url, key)} if own else {})))

        def call() -> Any:
            if not own:
                return function(**arguments)
            from openai import OpenAI

            with OpenAI(base_url=base_url, api_key=key, timeout=None, max_retries=0) as client:
                return function(**arguments, client=client)

        return await in_thread(call, None)

    def _arguments(self, function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Select the function's arguments by name: those of every agent, the environment's arguments, columns of the row."""
        row = dict(self.sample.prompt.columns)
        offered = {**row, **self.scene.args, **given, "task": row}
        parameters = inspect.signature(function).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return offered
        needed = [p.name for p in parameters if p.default is p.empty and p.name not in offered and p.name != "client"]
        if needed:
            raise self._failed("TypeError", f"asks for '{needed[0]}'; there is {', '.join(sorted({*offered, 'client'}))}")
        return {p.name: offered[p.name] for p in parameters if p.name in offered}

    def _failed(self, kind: str, text: str, frames: str = "") -> SampleFailed:
        return SampleFailed(Failure(kind, f"agent '{self.name}'", text, frames))
