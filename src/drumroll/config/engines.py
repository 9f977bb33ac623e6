"""The engine backends by name, and what config and runtimes must know of a backend before they make an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from drumroll.errors import ConfigError
from drumroll.registry import import_path, search

KEY = "roles.rollout.backend"


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What an engine backend is, and which parts of the config it supports."""

    title: str
    """Its name in sentences."""
    own_process: bool = False
    """It computes in processes of its own, so it needs the `ray` runtime; weights reach it through host memory, unless
    its processes receive them (`drumroll.engines.ReceivesWeights`)."""
    shares_weights: bool = False
    """In the learner's process it generates with the learner's own weights; without this trait it gets a copy."""
    adapters: bool = False
    """It takes LoRA adapters (`Engine.load_adapter`)."""
    deterministic: bool = False
    """With `deterministic: true` a request's tokens and log-probs never depend on other requests."""
    replayable: bool = True
    """Its log-probs are of the distribution that the learner computes, so training may use its samples."""
    parallel: bool = False
    """It takes `roles.rollout.parallel`."""
    options: bool = False
    """It takes `roles.rollout.options`."""


ENGINES: dict[str, EngineTraits] = {
    "native": EngineTraits("the native engine", shares_weights=True, adapters=True, deterministic=True),
    "vllm": EngineTraits("vLLM", own_process=True, adapters=True, parallel=True, options=True),
}
"""The built-in backends; `engines/<name>.py` implements each."""


def known_backend(backend: str) -> str:
    """Refuse a name that is neither a built-in backend nor an import path."""
    if backend not in ENGINES and ":" not in backend:
        raise ValueError(f"input should be {' or '.join(map(repr, ENGINES))}, or your own engine as module:NAME")
    return backend


def traits_of(backend: str, import_from: Iterable[str] = ()) -> EngineTraits:
    """The traits of a built-in backend, or of the user's `module:NAME`, which is imported from these folders."""
    if backend in ENGINES:
        return ENGINES[backend]
    search(import_from)
    found = import_path(backend, KEY)
    traits = getattr(found, "traits", None)
    if not isinstance(traits, EngineTraits):
        raise ConfigError(f"{KEY}: '{backend}' is a {type(found).__name__}, not a drumroll.engines.EngineBackend.")
    return traits
