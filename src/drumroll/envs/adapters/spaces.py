"""gymnasium spaces as text: describes them, formats their values, and parses values from text."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from gymnasium import spaces

from drumroll.errors import ConfigError

Space = spaces.Space[Any]
MOST = 64
"""The most numbers that a text lists one by one."""
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)
NESTED = (spaces.Dict, spaces.Tuple, spaces.Sequence)


def describe(space: Space) -> str:
    """Describe the values of a space. Raises ConfigError for a space that text cannot express."""
    match space:
        case spaces.Discrete():
            return f"a whole number from {space.start} to {space.start + space.n - 1}"
        case spaces.Text():
            return f"a text of at most {space.max_length} characters"
        case spaces.MultiBinary() | spaces.MultiDiscrete() | spaces.Box():
            return _numbers(space)
        case spaces.Dict():
            return "; ".join(f'"{key}": {describe(part)}' for key, part in space.spaces.items())
        case spaces.Tuple():
            return ", then ".join(describe(part) for part in space.spaces)
        case spaces.Sequence():
            return f"a list, each entry {describe(space.feature_space)}"
        case _:
            raise _unspeakable(f"a {type(space).__name__} space")


def _numbers(space: Space) -> str:
    shape = space.shape or ()
    count = int(np.prod(shape))
    if count > MOST:
        raise _unspeakable(f"a {type(space).__name__} space of shape {shape} ({count} numbers, more than {MOST})")
    what = "a number" if count == 1 else f"{count} numbers"
    if isinstance(space, spaces.MultiBinary):
        return f"{what}, each 0 or 1"
    if isinstance(space, spaces.MultiDiscrete):
        return f"{count} whole numbers, each from its lowest to its highest: " + ", ".join(
            f"{low}-{low + size - 1}" for low, size in zip(space.start.ravel(), space.nvec.ravel(), strict=True)
        )
    assert isinstance(space, spaces.Box)
    lows, highs = space.low.ravel(), space.high.ravel()
    if not space.is_bounded():
        return what
    if count == 1 or (np.ptp(lows) == 0 and np.ptp(highs) == 0):
        return f"{what} from {lows[0]:g} to {highs[0]:g}"
    return f"{what}, in their order " + ", ".join(f"{low:g} to {high:g}" for low, high in zip(lows, highs, strict=True))


def _unspeakable(what: str) -> ConfigError:
    return ConfigError(
        f"{what} cannot be told in words; wrap the environment so that it shows texts or few numbers (gymnasium.ObservationWrapper)."
    )


def in_words(space: Space, value: Any) -> str:
    """Format a value as text, with few digits."""
    match space:
        case spaces.Text():
            return str(value)
        case spaces.Dict():
            return "\n".join(f"{key}: {in_words(part, value[key])}" for key, part in space.spaces.items())
        case spaces.Tuple():
            return "; ".join(in_words(part, each) for part, each in zip(space.spaces, value, strict=True))
        case spaces.Sequence():
            return "; ".join(in_words(space.feature_space, each) for each in value)
        case spaces.Box() if space.dtype is not None and np.issubdtype(space.dtype, np.floating):
            return ", ".join(f"{number:.4g}" for number in np.ravel(value))
        case _:
            return ", ".join(str(int(number)) for number in np.ravel(value))


def written(space: Space, value: Any) -> str:
    """Format a value as a policy writes it; `read` parses it back."""
    if isinstance(space, NESTED):
        return json.dumps(_plain(space, value))
    if isinstance(space, spaces.Text):
        return str(value)
    return " ".join(str(number) for number in np.ravel(value).tolist())


def _plain(space: Space, value: Any) -> Any:
    """Convert a value to JSON data."""
    match space:
        case spaces.Dict():
            return {key: _plain(part, value[key]) for key, part in space.spaces.items()}
        case spaces.Tuple():
            return [_plain(part, each) for part, each in zip(space.spaces, value, strict=True)]
        case spaces.Sequence():
            return [_plain(space.feature_space, each) for each in value]
        case _:
            return np.asarray(value).tolist()


def read(space: Space, text: str) -> Any:
    """Parse a value of the space from text; None if the text holds none."""
    try:
        if isinstance(space, NESTED):
            value = _made(space, json.loads(text))
        elif isinstance(space, spaces.Text):
            value = text
        else:
            value = _made(space, [float(number) for number in NUMBER.findall(text)])
    except (ValueError, TypeError, KeyError, OverflowError):
        return None
    return value if space.contains(value) else None


def _made(space: Space, data: Any) -> Any:
    """Make a value of the space from plain data."""
    match space:
        case spaces.Dict():
            return {key: _made(part, data[key]) for key, part in space.spaces.items()}
        case spaces.Tuple():
            return tuple(_made(part, each) for part, each in zip(space.spaces, data, strict=True))
        case spaces.Sequence():
            return tuple(_made(space.feature_space, each) for each in data)
        case spaces.Text():
            return str(data)
        case spaces.Discrete():
            [number] = set(np.ravel(data).tolist())
            return np.int64(whole(number))
        case _ if isinstance(space, ARRAYS):
            numbers = np.ravel(data).tolist()
            integral = space.dtype is not None and np.issubdtype(space.dtype, np.integer)
            return np.array([whole(n) if integral else float(n) for n in numbers], space.dtype).reshape(space.shape or ())
        case _:
            raise ValueError


def whole(number: Any) -> int:
    """Return the number as an int; raise ValueError if it has a fraction."""
    if int(number) != number:
        raise ValueError
    return int(number)
