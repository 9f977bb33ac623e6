"""Lets a person play an environment in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from drumroll.envs import Observation
from drumroll.envs.runner import Runner


async def play(use: str, args: Mapping[str, Any], seed: int, row: Mapping[str, Any] | None = None) -> float:
    """Play one episode by hand and return its total reward. An empty line is an empty turn; Ctrl-D ends the episode."""
    runner = Runner(use, args)
    total, turns = 0.0, 0
    show(await runner.reset(seed, row or {}))
    try:
        while True:
            try:
                text = input("> ")
            except EOFError:
                break
            step = await runner.step(text)
            turns, total = turns + 1, total + step.reward
            show(step.observation)
            facts = [f"{name} {value}" for name, value in step.info.items() if name != "state"]
            click.echo("  ".join([f"[turn {turns}", f"reward {step.reward:g}", f"total {total:g}", *facts]) + "]")
            if step.terminated or step.truncated:
                click.echo("the episode is over")
                break
    finally:
        runner.close()
    return total


def show(observation: Observation) -> None:
    """Print the observation that the policy would read."""
    if isinstance(observation, str):
        click.echo(observation)
        return
    for message in observation:
        click.echo(f"{message['role']}: {message['content']}")
