"""Checks whether an environment is fit to train on, by playing it in a separate process, where it can do no harm.

Each finding passes, fails, or is information only.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from drumroll.envs import Observation, Step
from drumroll.envs.runner import Runner, where
from drumroll.processes.pool import KillablePool, RemoteError, WorkerDied

SEEDS = 20
LONGEST = 200
"""Turns after which an episode counts as endless."""
MALFORMED = ("", "%%%", "x" * 10_000)


@dataclass(frozen=True)
class Finding:
    """One finding; `passed` is None for information that is neither right nor wrong."""

    name: str
    passed: bool | None
    note: str


Record = list[tuple[Any, ...]]


async def examine(use: str, args: dict[str, Any], seconds: float = 120.0) -> list[Finding]:
    """Play the environment and return the findings. An environment that hangs or kills its process yields a finding too."""
    kind = where(use)
    pool = KillablePool(1)
    found: list[tuple[str, bool | None, str]]
    try:
        found = await pool.call("drumroll.envs.check:inspect", {"use": use, "args": args, "seconds": seconds / 2}, seconds)
    except TimeoutError:
        found = [("ends in time", False, f"it was still playing after {seconds:g} s: a call hangs or is very slow")]
    except (WorkerDied, RemoteError) as error:
        found = [("stays alive", False, str(error))]
    finally:
        await pool.close()
    return [Finding("runs", None, f"{kind}: {WHERE[kind]}"), *(Finding(*each) for each in found)]


WHERE = {
    "inline": "on the event loop, so it must never block",
    "loop": "on an event loop that environments share",
    "thread": "in threads, for calls that wait for others",
    "process": "in processes that can be killed",
}


def inspect(use: str, args: dict[str, Any], seconds: float) -> list[tuple[str, bool | None, str]]:
    """Return all findings as plain data; runs inside the process."""
    return asyncio.run(_inspect(use, args, seconds))


async def _inspect(use: str, args: dict[str, Any], seconds: float) -> list[tuple[str, bool | None, str]]:
    found: list[tuple[str, bool | None, str]] = []
    began, globals_before = time.perf_counter(), _global_state()
    try:
        first = await episode(use, args, 0)
    except Exception as error:
        return [("answers", False, f"{type(error).__name__}: {error}")]
    found.append(("answers", True, "an observation, then steps of the right types"))
    again = await episode(use, args, 0)
    found.append(_same("same seed, same episode", first, again))
    found.append(await _seeds(use, args, first))
    untouched = all(before in ("", after) for before, after in zip(globals_before, _global_state(), strict=True))
    found.append(("leaves the global generators alone", untouched, "" if untouched else "random or numpy.random was used"))
    found.append(await _odd_turns(use, args))
    ended = len(first) <= LONGEST
    found.append(("ends by itself", None, f"after {len(first) - 1} turns" if ended else f"not within {LONGEST} turns"))
    for name in ("oracle", "random_action"):
        found += await _policy(use, args, name, began + seconds)
    return [*found, await _speed(use, args)]


async def _seeds(use: str, args: dict[str, Any], first: Record) -> tuple[str, bool | None, str]:
    """Check whether other seeds start differently or, with the same turns, continue differently."""
    name, turns, seeds = "seeds matter", [text for text, _ in first[1:]], range(1, 6)
    if getattr(Runner(use, args).environment, "from_rows", False):
        return name, None, "its rows decide how an episode begins"
    others = [await episode(use, args, seed, turns) for seed in seeds]
    begin = sum(other[0] != first[0] for other in others)
    if begin:
        return name, True, f"{begin} of {len(seeds)} other seeds begin differently"
    go_on = sum(other != first for other in others)
    if not go_on:  # a game without chance; one that draws from elsewhere fails "same seed, same episode"
        return name, None, f"it has no chance: {len(seeds)} other seeds begin and go on alike, so all episodes start equal"
    return name, True, f"no other seed begins differently, {go_on} of {len(seeds)} go on differently"


async def episode(
    use: str, args: dict[str, Any], seed: int, turns: list[str] | None = None, row: dict[str, Any] | None = None
) -> Record:
    """Play an episode with the given turns, else with the environment's random player, else with numbers.

    Returns [(observation,), (text, step), ...].
    """
    runner = Runner(use, args)
    try:
        record: Record = [(await runner.reset(seed, row or {}),)]
        choose = _chooser(runner, "random_action")
        for turn in range(LONGEST if turns is None else len(turns)):
            text = turns[turn] if turns is not None else choose() if choose else str(turn % 4)
            step = await runner.step(text)
            record.append((text, step))
            if step.terminated or step.truncated:
                break
        return record
    finally:
        runner.close()


def _chooser(runner: Runner, name: str) -> Callable[[], str] | None:
    return getattr(runner.environment, name, None)


def _same(name: str, first: Record, again: Record) -> tuple[str, bool, str]:
    for turn, (a, b) in enumerate(zip(first, again, strict=False)):
        if a[:-1] != b[:-1]:
            return (
                name,
                False,
                f"turn {turn} differs: its random player plays {_short(a[0])} and {_short(b[0])}{_after(first[1:turn])}",
            )
        if a != b:
            return name, False, f"turn {turn} differs: {_short(a[-1])} and {_short(b[-1])}{_after(first[1 : turn + 1])}"
    if len(first) != len(again):
        return name, False, f"it ends after {len(first) - 1} and {len(again) - 1} turns{_after(min(first, again, key=len)[1:])}"
    return name, True, f"{len(first) - 1} turns played twice"


def _short(answer: Observation | Step) -> str:
    return f"{answer!r:.60}"


def _after(turns: Record, most: int = 8) -> str:
    """The actions that were played, the last of them if they are many."""
    left_out = "…, " if len(turns) > most else ""
    return f", after the actions {left_out}{', '.join(f'{text!r:.40}' for text, _ in turns[-most:])}" if turns else ""


async def _odd_turns(use: str, args: dict[str, Any]) -> tuple[str, bool, str]:
    runner = Runner(use, args)
    try:
        await runner.reset(0, {})
        for text in MALFORMED:
            step = await runner.step(text)
            if step.terminated or step.truncated:
                return "bears malformed turns", True, "they end the episode"
    except Exception as error:
        return "bears malformed turns", False, f"{type(error).__name__}: {error}"
    finally:
        runner.close()
    return "bears malformed turns", True, "they are answered"


async def _policy(use: str, args: dict[str, Any], name: str, until: float) -> list[tuple[str, bool | None, str]]:
    """Measure how well the environment's own oracle or random player does, if it has one."""
    total, played = 0.0, 0
    successes: list[bool] = []  # of the episodes that report it; one without end is none
    for seed in range(SEEDS):
        runner = Runner(use, args)
        try:
            await runner.reset(seed, {})
            choose = _chooser(runner, name)
            if choose is None or time.perf_counter() > until:
                break
            played += 1
            reported: bool | None = False
            for _ in range(LONGEST):
                step = await runner.step(choose())
                total += step.reward
                if step.terminated or step.truncated:
                    reported = step.info.get("success")
                    break
            successes += [] if reported is None else [bool(reported)]
        except Exception as error:
            return [(name, False, f"seed {seed}: {type(error).__name__}: {error}")]
        finally:
            runner.close()
    if not played:
        return [(name, None, "it has none")]
    share = f"success {sum(successes) / len(successes):.2f}" if successes else "no success reported"
    note = f"{share}, mean reward {total / played:.3g} over {played} seeds"
    return [(name, all(successes) if name == "oracle" and successes else None, note)]


async def _speed(use: str, args: dict[str, Any], seconds: float = 0.5) -> tuple[str, None, str]:
    resets = steps = 0
    reset_time = step_time = 0.0
    while reset_time + step_time < seconds:
        runner = Runner(use, args)
        began = time.perf_counter()
        await runner.reset(resets, {})
        choose = _chooser(runner, "random_action")
        reset_time, resets = reset_time + time.perf_counter() - began, resets + 1
        for turn in range(20):
            text = choose() if choose else str(turn % 4)
            began = time.perf_counter()
            step = await runner.step(text)
            step_time, steps = step_time + time.perf_counter() - began, steps + 1
            if step.terminated or step.truncated:
                break
        runner.close()
    return "speed", None, f"reset {1e3 * reset_time / resets:.3g} ms, step {1e3 * step_time / max(1, steps):.3g} ms"


def _global_state() -> tuple[str, ...]:
    """Return the state of the process-wide generators. An environment that advances them is not reproducible beside others."""
    numpy = sys.modules.get("numpy")
    return (str(random.getstate()), str(numpy.random.get_state()) if numpy is not None else "")


def findings_table(use: str, findings: list[Finding]) -> Table:
    """Format the findings for the terminal."""
    table = Table("check", "", title=f"environment {use}", title_justify="left")
    table.add_column("found", overflow="fold")
    marks = {True: Text("ok", "green"), False: Text("fails", "red"), None: Text("")}
    for finding in findings:
        table.add_row(finding.name, marks[finding.passed], Text(finding.note))
    return table
