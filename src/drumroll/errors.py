"""The error model.

1. *Vocabulary.* Everything a user can cause or fix is a `DrumrollError`; its message is one or two sentences
   that name the key, the value, what is allowed and the fix. The command line prints it and exits with 2.
2. *Classification at the boundary.* Config, data, models, rewards and files are checked where they enter;
   foreign exceptions (pydantic, YAML, OSError, a user's reward) are translated there and nowhere else.
3. *A bad sample is data.* A failure inside one sample becomes its `Failure` (kind, boundary, text) and a fate;
   it never unwinds the loop. Its traceback is cut to the frames of the user's code.
4. *Invariants are asserts.* An `AssertionError` is a bug of ours, and is allowed to show its traceback.
"""

from __future__ import annotations

import asyncio
import difflib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

FRAMES = 12
"""Frames shown of a user's code."""


class DrumrollError(Exception):
    """Something the user can understand and fix."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the sentence alone, as the command line does."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(DrumrollError):
    """A key, a value, or a combination of values that cannot be used."""


class DataError(DrumrollError):
    """A dataset that cannot be read, or a row that lacks what it needs."""


class BadRow(DataError):
    """A row that cannot be used though its dataset can; met while training it costs its own samples only."""


class TemplateError(DataError):
    """A chat template that does not keep what was said before."""


class ModelError(DrumrollError):
    """A model that cannot be found or loaded."""


class HubError(ModelError):
    """A hub that cannot be reached, so that nobody knows whether it has the model."""


class AlgorithmError(DrumrollError):
    """An estimator or loss that gave something that is not a number."""


class PeerFailed(DrumrollError):
    """A rank whose peers did not meet it in a collective; the cause is usually another rank's own error."""


class StoreError(DrumrollError):
    """A run directory that cannot be written, read or resumed."""


class TrackerError(DrumrollError):
    """A tracker that is required and cannot be opened."""


class RolloutError(DrumrollError):
    """A step that cannot be completed: everything filtered or failed, or no engine left."""


class NoEngines(RolloutError):
    """No engine has been alive for longer than allowed."""


class MissingExtra(DrumrollError):
    """An optional dependency that is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional part that is not installed: pip install 'drumroll[{extra}]'")


class Interrupted(DrumrollError):
    """The user asked the run to stop."""


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """A suggestion to append to an error, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f" Did you mean '{close[0]}'?" if close else ""


def being_cancelled() -> bool:
    """Whether the running task is being cancelled; any other `CancelledError` was raised by the code that it called."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def user_frames(error: BaseException) -> str:
    """The frames of the user's code in an exception's traceback, or in its cause's, as Python prints them.

    Installed packages count only where nothing else is there. An exception from another process has its `frames` with it.
    """
    if isinstance(brought := getattr(error, "frames", None), str):
        return brought
    causes, cause, seen = [], error, set[int]()
    while cause is not None and id(cause) not in seen:  # `raise error from error` is its own cause
        seen.add(id(cause))
        causes.append([f for f in traceback.extract_tb(cause.__traceback__) if _foreign(f.filename)])
        cause = cause.__cause__ or cause.__context__
    own = [[f for f in frames if not _installed(f.filename)] for frames in causes]
    frames = next((found for found in (*own, *causes) if found), [])
    return "".join(traceback.format_list(frames[-FRAMES:])).rstrip()


def _foreign(file: str) -> bool:
    """Whether a file is neither ours nor Python's."""
    ours = file.startswith((f"{Path(__file__).parent}/", "<"))
    return not ours and (_installed(file) or not file.startswith(sysconfig.get_path("stdlib")))


def _installed(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
