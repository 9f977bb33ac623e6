"""Plays episodes: records the turns of a policy and an environment as token-exact traces, with rewards and stop reasons.

A trace holds exactly the tokens that the engine read and wrote. An environment that raises, hangs, crashes or returns
nonsense ends its own episode with a typed failure, never the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from drumroll.config.environment import EnvironmentConfig
from drumroll.data.conversation import Conversation, check_template
from drumroll.data.render import Renderer
from drumroll.engines import Sampling
from drumroll.envs import Observation, Step
from drumroll.envs.adapters import has_tools
from drumroll.envs.executors import Executor, Executors
from drumroll.envs.runner import agent_path, find
from drumroll.errors import being_cancelled, user_frames
from drumroll.lifecycle import Episode as Playing
from drumroll.lifecycle import SampleFailed
from drumroll.processes.pool import RemoteError
from drumroll.rewards import Pool
from drumroll.sample import ENVIRONMENT, Failure, Owner, Sample, Scene, StopReason, Trace, Turn, episode_seed

T = TypeVar("T")
REWRITES = (
    "the chat template of {} rewrites earlier turns (for example drops their thoughts): where it does, an episode continues in a "
    "further trace; environment.earlier_turns: sampled shows them as they were sampled, in one trace."
)
CUT_OFF = "CutOff"
"""The kind of the note of an episode that the context limit ended."""


class Agents(Protocol):
    """Opens episodes that a user's agent plays."""

    def find(self, use: str) -> Callable[..., Any]: ...
    def open(self, sample: Sample, seed: int, stream: str, sampling: Sampling | None) -> Playing: ...
    async def close(self) -> None: ...


class Episodes:
    """Opens the episodes of a run."""

    def __init__(
        self,
        config: EnvironmentConfig,
        seed: int,
        renderer: Renderer,
        decode: Callable[[list[int]], str],
        context: int,
        open_pool: Callable[[int], Pool],
        open_agents: Callable[[], Agents] | None = None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config = config
        self.seed = seed
        self.renderer = renderer
        self.decode = decode
        self.context = context
        self.executors = Executors(config, open_pool)
        self._checked: set[str] = set()
        self._open_agents = open_agents
        self._notify = notify
        self._late: set[str] = set()
        self._agents: Agents | None = None
        if config.use is not None:  # report a wrong name before anything starts
            _ = self.agents.find(config.use) if agent_path(config.use) else find(config.use)

    def open(self, sample: Sample, stream: str = "train", sampling: Sampling | None = None) -> Playing | None:
        """Return the episode of a sample, or None if its prompt is a single-turn task.

        A `seed` column in the row overrides the seed.

        An agent makes its own calls, so it receives `sampling`; the default is that of training.
        """
        scene = sample.prompt.scene
        if scene is None:
            return None
        own = sample.prompt.columns.get("seed")
        seed = episode_seed(self.seed, stream, sample.draw) if own is None else int(own)
        if agent_path(scene.use) is not None:
            return self.agents.open(sample, seed, stream, sampling)
        self._check_template(scene)
        return Episode(self, sample, scene, seed, self.executors.open(scene))

    def _check_template(self, scene: Scene) -> None:
        """Try the chat template on conversations before the first episode of a kind; report once what it rewrites."""
        kind = repr((scene.chat, scene.system, scene.template, tools := has_tools(scene.use)))
        if self.config.mode == "step" or kind in self._checked:
            return
        self._checked.add(kind)
        renderer, sampled = self.renderer.given(scene.template, "template"), self.config.earlier_turns == "sampled"
        if check_template(renderer, chat=scene.chat, system=scene.system, sampled=sampled, tools=tools):
            self._notify(REWRITES.format(renderer.name))

    @property
    def agents(self) -> Agents:
        """The opener of agent episodes, made when the first agent is named."""
        if self._agents is None:
            assert self._open_agents is not None, "agents need an endpoint"
            self._agents = self._open_agents()
        return self._agents

    def report_late(self, sample: Sample, failure: Failure) -> None:
        """Report the first time-out of each environment call at once."""
        if failure.boundary not in self._late:
            self._late.add(failure.boundary)
            self._notify(f"{failure}, for sample {sample.id}.")

    async def close(self) -> None:
        """End all processes."""
        await self.executors.close()
        if self._agents is not None:
            await self._agents.close()


class Episode:
    """One sample's interaction with its environment."""

    def __init__(self, episodes: Episodes, sample: Sample, scene: Scene, seed: int, executor: Executor) -> None:
        self.episodes = episodes
        self.config = episodes.config
        self.context = episodes.context
        self.renderer = episodes.renderer.given(scene.template, "template")
        self.decode = episodes.decode
        self.sample = sample
        self.scene = scene
        self.seed = seed
        self.executor = executor
        self._conversation: Conversation | None = None
        self._written = 0  # tokens of the last trace before the policy's current turn
        self._state = ""
        self._printed = False

    async def begin(self) -> bool:
        """Reset the environment and show the policy the first observation. Returns whether the policy has a turn."""
        config, scene = self.config, self.scene
        self.sample.traces, self.sample.turns, self.sample.notes, self.sample.success = [], [], [], None
        first = await self._guard(
            "reset", config.reset_timeout, self.executor.reset(self.seed, self.sample.prompt.columns, config.reset_timeout)
        )
        self._state = digest(first)
        sampled = config.earlier_turns == "sampled"
        self._conversation = Conversation(self.renderer, first, chat=scene.chat, system=scene.system, sampled=sampled)
        return self._show(self._conversation.prompt())

    async def answer(self) -> bool:
        """Pass the policy's turn to the environment and record the reward.

        Show the next observation unless the episode is over.
        """
        sample, trace = self.sample, self.sample.traces[-1]
        tokens = trace.tokens[self._written :]
        turn = Turn(len(sample.traces) - 1, self._written, len(trace.tokens), self._state)
        sample.turns.append(turn)
        text = self.decode(tokens)
        if sample.stop is StopReason.CONTEXT:
            return self._end(StopReason.CONTEXT, text)
        limit = self.config.step_timeout
        step = await self._guard("step", limit, self.executor.step(text, limit))
        self._reward(turn, step)
        ending = self._ending(step)
        if ending is not None:
            return self._end(ending, text)
        self._state = digest(step.info.get("state", step.observation))
        return self._next(text, step.observation, tokens)

    def close(self) -> None:
        """Free the episode's resources; errors no longer matter."""
        with suppress(Exception):
            self.executor.close()

    async def _guard(self, action: str, seconds: float, answer: Awaitable[T]) -> T:
        """Await an environment's answer and turn any error into the failure of this sample."""
        boundary = f"environment '{self.scene.use}', {action}"
        try:
            got = await answer
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            kind = error.kind if isinstance(error, RemoteError) else type(error).__name__
            text = str(error) or (f"took longer than {seconds:g} s" if isinstance(error, TimeoutError) else "")
            failure = Failure(kind, boundary, text, user_frames(error))
            if isinstance(error, TimeoutError):
                self.episodes.report_late(self.sample, failure)
            raise SampleFailed(failure) from None
        if self.executor.printed and not self._printed:
            self._printed = True
            self.sample.notes.append(Failure("Printed", boundary, f"{self.executor.printed.strip()!r:.80} on standard output"))
        return got

    def _reward(self, turn: Turn, step: Step) -> None:
        turn.effective, turn.malformed = step.info.get("effective"), bool(step.info.get("malformed"))
        turn.reward = step.reward
        if turn.malformed:
            turn.reward -= self.config.format_penalty
        elif turn.effective is False:
            turn.reward -= self.config.invalid_penalty
        self.sample.success = step.info.get("success", self.sample.success)

    def _ending(self, step: Step) -> StopReason | None:
        """Return why the episode ends with this step, or None if it goes on."""
        if step.terminated or step.truncated:
            if step.info.get("malformed"):
                return StopReason.MALFORMED
            if step.info.get("tool_error"):
                return StopReason.TOOL_ERROR
            return StopReason.TERMINATED if step.terminated else StopReason.TRUNCATED
        return StopReason.TURNS if len(self.sample.turns) >= self.config.max_turns else None

    def _next(self, text: str, observation: Observation, written: list[int]) -> bool:
        """Show an observation: appended to the trace, or in a new trace, in step mode and where earlier turns are rewritten."""
        conversation = self._conversation
        assert conversation is not None
        if self.config.mode == "step":
            conversation.add(text, observation)
            return self._show(conversation.window(self.config.history, keep_first=self.config.keep_first))
        last = written[-1] if written and self.sample.stop is StopReason.EOS else None
        kept, tokens = conversation.advance(text, len(written), observation, last)
        trace = self.sample.traces[-1]
        if kept < len(trace.tokens):
            return self._show([*trace.tokens[:kept], *tokens])
        if len(trace.tokens) + len(tokens) >= self.context:
            return self._end(StopReason.CONTEXT)
        trace.extend(tokens, Owner.ENVIRONMENT)
        self._written = len(trace.tokens)
        return True

    def _show(self, tokens: list[int]) -> bool:
        """Start a new trace, if the context leaves the policy room to write."""
        if len(tokens) >= self.context and self.sample.traces:
            return self._end(StopReason.CONTEXT)
        trace = Trace()
        trace.extend(tokens, Owner.PROMPT)
        self.sample.traces.append(trace)
        self._written = len(tokens)
        return True if len(tokens) < self.context else self._end(StopReason.CONTEXT)

    def _end(self, stop: StopReason, text: str | None = None) -> bool:
        """End the episode. Its reward is the sum of its turns' rewards."""
        sample, said = self.sample, self._conversation.turns if self._conversation else []
        sample.stop = stop
        if stop is StopReason.TURNS:
            limit = self.config.max_turns
            sample.notes.append(Failure("Endless", f"environment '{self.scene.use}'", f"no end within max_turns={limit}"))
        if stop is StopReason.CONTEXT:
            sample.notes.append(cut_off(f"environment '{self.scene.use}'", self.config.mode, self.context))
        sample.completion = "\n".join(said if text is None else [*said, text])
        sample.rewards[ENVIRONMENT] = sum(turn.reward for turn in sample.turns)
        return False


def cut_off(boundary: str, mode: str, context: int) -> Failure:
    """Return the note of an episode that did not fit into the context."""
    key = "environment.context" if mode == "trajectory" else "data.max_prompt_tokens"
    return Failure(CUT_OFF, boundary, f"the limit of {context} tokens cut the episode off; raise {key}, or let it say less")


def digest(state: Observation) -> str:
    """Return a short hash of a state; equal states have equal hashes."""
    text = state if isinstance(state, str) else json.dumps(state, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
