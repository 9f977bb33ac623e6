"""Training and evaluating from Python, with the same power as the command line."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from drumroll.components import open_evaluator, open_rollouts, scan_data
from drumroll.config import RunConfig, load
from drumroll.errors import ConfigError, RolloutError
from drumroll.observe.progress import Progress, Quiet
from drumroll.observe.trackers import check_installed
from drumroll.pipelines import find_pipeline
from drumroll.registry import search
from drumroll.rewards import Rewards
from drumroll.runfiles.format import CONFIG
from drumroll.runfiles.reader import RunReader
from drumroll.sample import Group, Sample
from drumroll.session import Session
from drumroll.stages import describe
from drumroll.store.lock import locked
from drumroll.store.run import Run
from drumroll.workers.runtime import open_workers, with_lengths

Recipe = RunConfig | Mapping[str, Any] | str | Path
T = TypeVar("T")


def train(
    recipe: Recipe | None = None,
    overrides: Sequence[str] = (),
    *,
    resume: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Train by a recipe (a file, a mapping or a config), or continue the run in the directory `resume`."""
    progress = progress or Quiet()
    try:
        if resume is not None:
            path = RunReader.open(resume).path
            with _held(path, progress):
                config = _config(path / CONFIG, overrides)
                return _await(_train(config, lambda: Run.reopen(path, config), progress, resume=True))
        if recipe is None:
            raise ConfigError("nothing to train: give a recipe, or resume=RUN.")
        config = _config(recipe, overrides)
        with _held(Run.check_ours(config), progress):
            Run.check_free(config, overwrite=overwrite)
            return _await(_train(config, lambda: Run.create(config, overwrite=overwrite), progress, resume=False))
    finally:
        progress.close()


@contextmanager
def _held(path: Path, progress: Progress) -> Generator[None]:
    """Keep other processes from training in a run directory."""
    with locked(path) as exclusive:
        if not exclusive:
            progress.notice(f"the file system of {path} has no locks: make sure that no other process trains in it.")
        yield


async def _train(config: RunConfig, open_run: Callable[[], Run], progress: Progress, *, resume: bool) -> Run:
    """Models, data and rewards are opened first: a recipe that does not work leaves no run directory and replaces none."""
    pipeline = find_pipeline(config.pipeline)
    _look(config)
    workers = await open_workers(config)
    try:
        evaluator = open_evaluator(config, workers)
        parts = pipeline.open(config, workers)
        session = Session(open_run(), workers, evaluator, progress, resume=resume)
        await session.drive(pipeline.train(session, config, parts))
        return session.run
    finally:
        await workers.close()


def _look(config: RunConfig) -> None:
    """Find what is wrong with rewards and local files before any model is loaded."""
    search(config.import_from)
    rewards = Rewards(config.rewards())
    rewards.check_roles(judge=config.roles.judge, reward_model=config.roles.reward_model)
    check_installed(config.trackers)
    scan_data(config, rewards.required_columns)


def evaluate(model: str | Path, recipe: Recipe, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Measure a model, or the model of a run directory, on the recipe's held-out sets."""
    path = Path(model)
    if (path / CONFIG).exists():
        path = RunReader.open(path).model_path
    config = _config(recipe, [*overrides, f"model={path if path.exists() else model}", "roles.actor.model=null"])
    if not config.eval.sets:
        raise ConfigError("the recipe names no held-out sets: add some under eval.sets.")
    return _await(_evaluate(config))


async def _evaluate(config: RunConfig) -> dict[str, float]:
    workers = await open_workers(config)
    try:
        evaluator = open_evaluator(config, workers)
        assert evaluator is not None
        return (await evaluator.run(0))[0]
    finally:
        await workers.close()


def rollout(
    recipe: Recipe, overrides: Sequence[str] = (), *, batches: int = 1, overwrite: bool = False
) -> tuple[Run, dict[str, float]]:
    """Generate and score some batches without training; they are saved in a run directory `<name>-rollout`."""
    config = _config(recipe, overrides)
    if not config.has_rollouts():
        raise ConfigError(f"only reinforcement learning has rollouts; this recipe is pipeline: {config.pipeline}.")
    config = config.model_copy(update={"name": f"{config.name}-rollout"})
    with _held(Run.check_ours(config), Quiet()):
        Run.check_free(config, overwrite=overwrite)
        return _await(_rollout(config, batches, overwrite=overwrite))


async def _rollout(config: RunConfig, batches: int, *, overwrite: bool) -> tuple[Run, dict[str, float]]:
    _look(config)
    workers = await open_workers(config)
    groups: list[Group] = []
    failed: list[Sample] = []
    try:
        rollouts = open_rollouts(config, workers)
        run = Run.create(config, overwrite=overwrite)
        try:
            for batch in range(batches):
                try:
                    taken = await rollouts.take(config.rollout_section().prompts)
                except RolloutError:
                    run.write_rollouts("train", batch + 1, rollouts.failed)
                    raise
                groups += taken
                failed += rollouts.stats.failed
                run.write_rollouts("train", batch + 1, [s for g in taken for s in g.everyone()] + rollouts.stats.failed)
                rollouts.trained(taken)
                rollouts.publish(0)
        finally:
            await rollouts.close()
    finally:
        await workers.close()
    samples = [s for g in groups for s in g.samples]
    return run, describe(groups, 0) | {"rollout/failed": float(len(failed)), "rollout/samples": float(len(samples))}


def _config(recipe: Recipe, overrides: Sequence[str]) -> RunConfig:
    config = load(recipe.model_dump(mode="json") if isinstance(recipe, RunConfig) else recipe, overrides).config
    return with_lengths(config, fetch=True)


def _await(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where an event loop is already running (notebooks)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(asyncio.run(work))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]
