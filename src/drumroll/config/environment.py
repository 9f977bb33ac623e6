"""`environment`: what the policy talks to, and how an episode becomes traces to train on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from drumroll.config.section import Section


class EnvironmentConfig(Section):
    """Multi-turn episodes. A dataset may name an environment of its own (`data.train.<name>.environment`)."""

    use: str | None = None
    """A built-in by name, an adapter's (`gymnasium:FrozenLake-v1`), `module:Class`, or an agent that calls the model itself,
    `agent:module:function`. Default: prompts are answered once."""
    args: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    mode: Literal["trajectory", "step"] = "trajectory"
    """One trace for the whole episode (as long as earlier turns stay as they are), or one for every turn, which shows the last `history` turns only."""
    earlier_turns: Literal["template", "sampled"] = "template"
    """trajectory: how earlier turns are shown. As the chat template shows them: where it rewrites them (drops their thoughts), the episode continues in a further trace. Or as they were sampled, in one trace."""
    history: int = Field(2, ge=0)
    """step: how many past turns are shown besides the first observation and the present one."""
    keep_first: bool = True
    """step: whether the first observation, which often has the rules, is shown before the window when it is not in it."""
    max_turns: int = Field(10, ge=1)
    """An episode ends after so many turns of the policy, each of at most `rollout.max_tokens`."""
    context: int | None = Field(None, ge=2)
    """trajectory: longest episode in tokens, observations included. Default: data.max_prompt_tokens, and twice rollout.max_tokens a turn."""
    workers: int = Field(2, ge=1)
    """Processes for environments that compute; one that hangs or crashes is replaced and costs one episode."""
    memory_gb: float = Field(4.0, gt=0)
    """A process of environments that has grown larger is replaced; the episode that it grew in fails."""
    reset_timeout: float = Field(60.0, gt=0)
    """Seconds that starting an episode may take."""
    step_timeout: float = Field(30.0, gt=0)
    """Seconds that one step may take; of an agent, the time between two calls."""
    agents: int = Field(64, ge=1)
    """Agents at work at once."""
    format_penalty: float = Field(0.0, ge=0)
    """Taken from the reward for every turn that the environment could not read (`malformed`)."""
    invalid_penalty: float = Field(0.0, ge=0)
    """Taken from the reward for every turn that was read but did nothing (`effective: False`)."""


NONE = EnvironmentConfig()
"""Prompts are answered once."""
