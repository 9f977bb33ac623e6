"""Function sources of `data` for environments: instances to play, and demonstrations to imitate.

The teacher of the demonstrations is weak in two ways: a share of its turns follows the environment's `flawed()`, a
systematic mistake, and a share is random. It chooses anew in every turn, so a perfect imitator succeeds as often as the
teacher, with or without memory of past turns. As long as mistakes are the majority, greedy play fails.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any, cast

from drumroll.envs import Environment, Observation, Playable
from drumroll.envs.builtin import make
from drumroll.envs.episode import SPLITS
from drumroll.errors import DataError
from drumroll.sample import Message

Row = dict[str, Any]
FORMS = ("turns", "episodes", "messages")
WEAK: dict[str, tuple[float, float]] = {"frozen_lake": (0.7, 0.15), "sokoban": (0.8, 0.1), "webshop": (0.55, 0.1)}
"""Shares of (flawed, random) turns that leave an imitator in the compact style much to learn."""


def episodes(split: str, seed: int, env: str, **settings: Any) -> Iterator[Row]:
    """Yield instances endlessly.

    `reset(seed, **row)` starts the instance that a row names; the prompt is its first observation.
    """
    for number in _numbers(split, seed, env):
        row = {"instance": number, "split": split}
        yield {"prompt": _first(make(env, **settings), row), **row}


def _numbers(split: str, seed: int, env: str) -> Iterator[int]:
    if split not in SPLITS:
        raise DataError(f"split '{split}' does not exist; environments have 'train' and 'held_out'.")
    rng = random.Random(f"{env}/{split}/{seed}")
    while True:
        yield rng.getrandbits(31)


def _first(made: Environment, row: Row) -> Observation:
    """Return the first observation; if `reset` is a coroutine, a text that names the instance."""
    if inspect.iscoroutinefunction(made.reset):
        return f"{row['split']}/{row['instance']}"
    observation = cast(Observation, made.reset(row["instance"], **row))
    made.close()
    return observation


def demonstrations(
    split: str,
    seed: int,
    env: str,
    share_of_flawed: float | None = None,
    share_of_random: float | None = None,
    form: str = "turns",
    history: int | None = None,
    end: str = "",
    distinct: bool = False,
    **settings: Any,
) -> Iterator[Row]:
    """Yield episodes of a weak teacher. The default shares are the environment's in `WEAK`, or 0.

    - `form: turns` yields a row per turn: `prompt`, with the last `history` turns before it (default: all), and
      `completion`. `end` follows each past turn of the policy. With `distinct`, a prompt occurs once per episode.
    - `form: episodes` yields a row per episode: `prompt`, `completion`, and in `more` the observations and answers
      after that, in order. All answers are imitated.
    - `form: messages` yields a conversation, whose last turn is imitated.
    """
    if form not in FORMS:
        raise DataError(f"demonstrations: form '{form}' does not exist; choose {', '.join(FORMS)}.")
    flawed, careless = WEAK.get(env, (0.0, 0.0))
    flawed = flawed if share_of_flawed is None else share_of_flawed
    careless = careless if share_of_random is None else share_of_random
    if min(flawed, careless) < 0 or flawed + careless > 1:
        raise DataError(
            f"demonstrations: shares of flawed and random turns are {flawed} and {careless}; together they are at most 1."
        )
    for number in _numbers(split, seed, env):
        played = cast(Playable, make(env, **settings))
        messages, outcome = play(played, number, split, flawed, careless)
        if form == "messages":
            yield {"messages": messages, **outcome}
        elif form == "episodes":
            first, answer, *more = [message["content"] for message in messages]
            yield {"prompt": first, "completion": answer, "more": more, **outcome}
        else:
            yield from ({**row, **outcome} for row in _turns(messages, history, end, distinct))


def play(env: Playable, instance: int, split: str, flawed: float = 0.0, careless: float = 0.0) -> tuple[list[Message], Row]:
    """Let the teacher play an episode; return its messages and its outcome."""
    rng = random.Random(f"teacher/{split}/{instance}")
    mistaken: Callable[[], str] | None = getattr(env, "flawed", None)
    if flawed and mistaken is None:
        raise DataError(f"demonstrations: {type(env).__name__} has no flawed(); set share_of_flawed to 0.")
    messages = _said(cast(Observation, env.reset(instance, instance=instance, split=split)))
    total = 0.0
    while True:
        chance = rng.random()
        teacher = mistaken if mistaken and chance < flawed else env.random_action if chance < flawed + careless else env.oracle
        action = teacher()
        step: Any = env.step(action)
        messages += [{"role": "assistant", "content": action}, *_said(step.observation)]
        total += step.reward
        if step.terminated or step.truncated:
            env.close()
            outcome = {"instance": instance, "split": split, "success": bool(step.info.get("success")), "reward": total}
            return messages[: len(messages) - len(_said(step.observation))], outcome


def _said(observation: Observation) -> list[Message]:
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)


def _turns(messages: list[Message], history: int | None, end: str, distinct: bool) -> Iterator[Row]:
    """Yield a row for each turn of the policy, with all text that it had read by then as the prompt."""
    seen: set[str] = set()
    own = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    texts = [message["content"] + (end if message["role"] == "assistant" else "") for message in messages]
    for count, place in enumerate(own):
        first = 0 if history is None or count <= history else own[count - history - 1] + 1
        prompt = "".join(texts[first:place])
        if not (distinct and prompt in seen):
            yield {"prompt": prompt, "completion": messages[place]["content"]}
        seen.add(prompt)
