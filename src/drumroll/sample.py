"""The vocabulary: prompts, samples and their traces, groups, states and fates.

Every other module uses these words. This file holds plain data only: no tensors, no I/O, no clock.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

Message = dict[str, Any]
Version = int
GREEDY = -1
"""The index of a group's greedy sample: its reward is a baseline, and it is not trained on."""
FRAME = re.compile(r'^  File "(?:.*[/\\\\])?(.+)", line (\d+)', re.MULTILINE)
"""Matches a frame of a traceback: its file name and line."""
ENVIRONMENT = "environment"
"""The key of the environment's reward among a sample's rewards."""


class Owner(IntEnum):
    """The author of a token. Only the policy's tokens are trained on."""

    PROMPT = 0
    POLICY = 1
    ENVIRONMENT = 2


class StopReason(StrEnum):
    """Why a sample's generation ended."""

    EOS = "eos"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CONTEXT = "context"
    ABORTED = "aborted"
    TERMINATED = "terminated"  # from here on: how an episode ended
    TRUNCATED = "truncated"
    TURNS = "turns"
    MALFORMED = "malformed"
    TOOL_ERROR = "tool_error"


class State(StrEnum):
    """The current state of a sample. A sample that has ended has a `Fate` instead."""

    QUEUED = "queued"
    GENERATING = "generating"
    ACTING = "acting"
    SCORING = "scoring"
    SCORED = "scored"
    ACCEPTED = "accepted"


class Fate(StrEnum):
    """How a sample ended; every sample that starts gets exactly one."""

    TRAINED = "trained"
    BASELINE = "baseline"
    FILTERED = "filtered"
    STALE = "stale"
    FAILED = "failed"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class Scene:
    """The environment of an episode, its arguments, and how its texts are rendered."""

    use: str
    args: Mapping[str, Any] = field(default_factory=dict)
    chat: bool | None = None
    system: str | None = None
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A dataset row: the model's input (as read and as tokens), its domain, and columns for rewards.

    With a `scene` the first tokens come from the environment, so `tokens` is empty.
    """

    id: str
    domain: str
    content: str | tuple[Message, ...]
    tokens: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    stream: str = ""  # the stream that it was drawn from; each stream has a fixed share of a batch
    scene: Scene | None = None
    defect: str = ""  # why the row cannot be used; all its samples fail with it

    @staticmethod
    def stable_id(content: Any) -> str:
        """Return an id that depends only on the content, so that it is the same in every process and run."""
        text = content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(slots=True)
class Trace:
    """A linear token sequence with, per token, its owner, its log-prob when sampled, and the version of the weights.

    `logprobs` and `versions` are meaningful for policy tokens only (0.0 and -1 elsewhere).
    """

    tokens: list[int] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)

    def extend(
        self,
        tokens: list[int],
        owner: Owner,
        logprobs: list[float] | None = None,
        versions: list[Version] | None = None,
    ) -> None:
        """Append tokens of one owner; policy tokens come with their log-probs and versions."""
        assert (owner is Owner.POLICY) == (logprobs is not None) == (versions is not None)
        self.tokens += tokens
        self.owners += [owner] * len(tokens)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(tokens)
        self.versions += versions if versions is not None else [-1] * len(tokens)
        assert len(self.tokens) == len(self.owners) == len(self.logprobs) == len(self.versions)

    def policy_tokens(self) -> list[int]:
        """Return the tokens that the model wrote."""
        return [t for t, o in zip(self.tokens, self.owners, strict=True) if o is Owner.POLICY]


@dataclass(slots=True)
class Turn:
    """The policy's part of one exchange with an environment: the position of its tokens, and their reward.

    Turns with equal `state` began in the same state of the environment.
    """

    trace: int
    start: int
    end: int
    state: str
    reward: float = 0.0
    effective: bool | None = None
    malformed: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sample failed, or what was unusual about it: the kind of the exception, the boundary it crossed, its text.

    `traceback` holds the frames of the user's code. A `passing` failure may not recur in a retry.
    """

    kind: str
    boundary: str
    text: str
    traceback: str = ""
    passing: bool = False

    def __str__(self) -> str:
        found = FRAME.findall(self.traceback)
        where = f" ({found[-1][0]}, line {found[-1][1]})" if found else ""
        return f"{self.kind} in {self.boundary}: {self.text}{where}"

    def told(self) -> str:
        """Return the failure with its traceback."""
        return f"{self}\n{self.traceback}" if self.traceback else str(self)


@dataclass(slots=True)
class Sample:
    """One attempt at a prompt."""

    prompt: Prompt
    draw: int
    index: int
    state: State | Fate = State.QUEUED
    traces: list[Trace] = field(default_factory=list)
    completion: str = ""
    stop: StopReason | None = None
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    attempt: int = 0
    history: list[tuple[str, float]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    notes: list[Failure] = field(default_factory=list)
    success: bool | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # values that rewards logged, by `reward/name`

    @property
    def id(self) -> str:
        """Unique within a run: draw number, index in the group, and the attempt at the draw if it is not the first."""
        own = f"{self.draw}.{'greedy' if self.index == GREEDY else self.index}"
        return own if not self.attempt else f"{own}~{self.attempt}"

    def oldest_version(self) -> Version | None:
        """Return the oldest version of the weights that wrote any of its tokens."""
        versions = [v for trace in self.traces for v in trace.versions if v >= 0]
        return min(versions, default=None)

    def policy_tokens(self) -> list[int]:
        """Return the tokens that the model wrote, in all traces."""
        return [token for trace in self.traces for token in trace.policy_tokens()]

    def policy_length(self) -> int:
        """Return the number of tokens that the model wrote."""
        return sum(len(t.policy_tokens()) for t in self.traces)

    def thought_was_cut(self) -> bool:
        """Return whether a thought of the policy was ended for it: within a turn, tokens that it did not write."""
        spans = [(t.trace, t.start, t.end) for t in self.turns] or [(i, 0, len(t.tokens)) for i, t in enumerate(self.traces)]
        return any(Owner.ENVIRONMENT in self.traces[number].owners[start:end] for number, start, end in spans)


@dataclass(slots=True)
class Group:
    """The samples of one drawn prompt."""

    prompt: Prompt
    draw: int
    samples: list[Sample]
    attempt: int = 0
    greedy: Sample | None = None

    def everyone(self) -> list[Sample]:
        """Return all samples, including the greedy one."""
        return self.samples if self.greedy is None else [*self.samples, self.greedy]

    @property
    def rewards(self) -> list[float]:
        """The rewards of the samples that have one."""
        return [s.reward for s in self.samples if s.reward is not None]


def parse_id(text: str) -> tuple[int, int, int]:
    """Return draw, index and attempt of the sample that has this id."""
    own, _, attempt = text.partition("~")
    draw, _, index = own.partition(".")
    return int(draw), GREEDY if index == "greedy" else int(index), int(attempt or 0)


def episode_seed(run_seed: int, stream: str, draw: int) -> int:
    """Return the 63-bit seed of an episode: the same for all members of a group, so that they start equal."""
    digest = hashlib.sha256(f"episode/{run_seed}/{stream}/{draw}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def sample_seed(run_seed: int, stream: str, draw: int, index: int) -> int:
    """Return the 63-bit seed of a sample's random numbers, which does not depend on how batches are composed."""
    digest = hashlib.sha256(f"{run_seed}/{stream}/{draw}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
