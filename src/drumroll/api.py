"""Training and evaluating from Python, with the same power as the command line."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table

from drumroll.components import open_evaluator, open_rollouts, scan_data
from drumroll.config import RunConfig
from drumroll.config import load as load_config
from drumroll.errors import ConfigError, RolloutError
from drumroll.objects import PREFIX, changed, check_sent, held, select, take
from drumroll.observe.callbacks import Callbacks, OnMetrics, OnSample
from drumroll.observe.notebook import Notebook, in_notebook
from drumroll.observe.progress import Progress, Quiet
from drumroll.observe.trackers import check_installed
from drumroll.pipelines import find_pipeline
from drumroll.registry import import_path, search
from drumroll.rewards import Rewards
from drumroll.runfiles.format import CONFIG, OBJECTS
from drumroll.runfiles.reader import RunReader
from drumroll.sample import Group, Sample
from drumroll.session import Session, interrupt
from drumroll.stages import describe
from drumroll.store.lock import locked
from drumroll.store.run import Run
from drumroll.workers.runtime import open_workers, with_lengths

Recipe = RunConfig | Mapping[str, Any] | str | Path
Objects = Mapping[str, Any]
EVALUATION = ("eval", "reward", "environment", "algorithm", "rollout")
"""The sections of a config that an evaluation uses."""
T = TypeVar("T")


def train(
    recipe: Recipe | None = None,
    overrides: Sequence[str] = (),
    *,
    resume: Run | str | Path | None = None,
    overwrite: bool = False,
    objects: Objects | None = None,
    on_step: OnMetrics | None = None,
    on_eval: OnMetrics | None = None,
    on_sample: OnSample | None = None,
    progress: Progress | None = None,
) -> Run:
    """Train by a recipe (a file, a mapping or a config), or continue a run: `resume` is a run or its directory.

    A mapping may hold functions and classes where a recipe names `module:function`, and rows (a list, a DataFrame, a
    `datasets.Dataset`) where it names a source. `objects` gives those that a recipe or a resumed run names `python:NAME`.

    `on_step(step, metrics)` and `on_eval(step, metrics)` are called after each step and evaluation, `on_sample(row)` for
    every recorded sample. An exception in one ends the run after the step's commit. `progress` shows the run; by default
    notebooks show it, and other programs nothing.
    """
    callbacks = Callbacks(on_step, on_eval, on_sample)
    try:
        if resume is not None:
            opened = resume if isinstance(resume, Run) else RunReader.open(resume)
            with locked(opened.path) as exclusive:
                config, given = _config(opened.path / CONFIG, overrides, _given(opened, objects))
                reopen = partial(Run.reopen, opened.path, config, given)
                progress = _shown(config, progress, exclusive=exclusive, other=changed(opened.objects, given))
                with held(given):
                    return _await(_train(config, reopen, progress, callbacks, resume=True))
        if recipe is None:
            raise ConfigError("nothing to train: give a recipe, or resume=RUN.")
        config, given = _config(recipe, overrides, objects)
        with locked(Run.check_ours(config)) as exclusive:
            Run.check_free(config, overwrite=overwrite)
            create = partial(Run.create, config, overwrite=overwrite, given=given)
            progress = _shown(config, progress, exclusive=exclusive)
            with held(given):
                return _await(_train(config, create, progress, callbacks, resume=False))
    finally:
        if progress is not None:
            progress.close()


def _shown(config: RunConfig, progress: Progress | None, *, exclusive: bool, other: Sequence[str] = ()) -> Progress:
    """The given progress, or that of the place where Python runs, told of a lock that does not hold and of `other` objects."""
    shown, path = progress or (Notebook(config.steps) if in_notebook() else Quiet()), Path(config.output) / config.name
    if not exclusive:
        shown.notice(f"the file system of {path} has no locks: make sure that no other process trains in it.")
    for name in other:
        shown.notice(f"'{name}' is not the object that {path / OBJECTS} describes; the run goes on with it.")
    return shown


async def _train(
    config: RunConfig, open_run: Callable[[], Run], progress: Progress, callbacks: Callbacks, *, resume: bool
) -> Run:
    """Models, data and rewards are opened first: a recipe that does not work leaves no run directory and replaces none."""
    pipeline = find_pipeline(config.pipeline)
    _look(config)
    workers = await open_workers(config)
    try:
        evaluator = open_evaluator(config, workers)
        parts = pipeline.open(config, workers)
        session = Session(open_run(), workers, evaluator, progress, resume=resume, callbacks=callbacks)
        await session.drive(pipeline.train(session, config, parts))
        return session.run
    finally:
        await workers.close()


def _look(config: RunConfig) -> None:
    """Find what is wrong with rewards and local files before any model is loaded."""
    search(config.import_from)
    rewards = Rewards(config.rewards())
    rewards.check_roles(judge=config.roles.judge, reward_model=config.roles.reward_model)
    for reward in (r for rewards in config.rewards().values() for r in rewards if r.use.startswith(PREFIX)):
        if not iscoroutinefunction(import_path(reward.use, "reward")):
            check_sent(reward.use.removeprefix(PREFIX), "reward")
    check_installed(config.trackers)
    scan_data(config, rewards.required_columns)


def evaluate(
    model: Run | str | Path, recipe: Recipe | None = None, overrides: Sequence[str] = (), *, objects: Objects | None = None
) -> dict[str, float]:
    """Measure a model, or the model of a run, on the recipe's held-out sets; of a run, by default on its own.

    `objects` gives those that the recipe names `python:NAME`.
    """
    path, given = (model.path, _given(model, objects)) if isinstance(model, RunReader) else (Path(model), dict(objects or {}))
    if (path / CONFIG).exists():
        recipe = path / CONFIG if recipe is None else recipe
        path = RunReader.open(path).model_path
    if recipe is None:
        raise ConfigError(
            f"{model} is not a run directory, so name a recipe with held-out sets: drumroll eval {model} recipe.yaml"
        )
    named = [*overrides, f"model={path if path.exists() else model}", "roles.actor.model=null"]
    config, given = _config(recipe, named, given, EVALUATION)
    if config.trains_scores():
        raise ConfigError(
            f"{model} is a reward model and generates no answers; the report of its run has its accuracy on the pairs under held_out."
        )
    if not config.eval.sets:
        measured = (
            f"; {', '.join(config.held_out_sets())} under held_out is measured in training only"
            if config.held_out_sets()
            else ""
        )
        raise ConfigError(f"the recipe names no held-out sets whose answers are generated: add some under eval.sets{measured}.")
    with held(given):
        return _await(_evaluate(config))


async def _evaluate(config: RunConfig) -> dict[str, float]:
    workers = await open_workers(config)
    try:
        evaluator = open_evaluator(config, workers)
        assert evaluator is not None
        return (await evaluator.run(0))[0]
    finally:
        await workers.close()


def rescore(run: Run | str | Path, overrides: Sequence[str] = (), *, objects: Objects | None = None) -> Table:
    """Score a run's recorded samples again, with the rewards of its config as changed by overrides (`reward=number`).

    The rows are kept in the folder `rescored/`; returns a table of old and new rewards.
    """
    from drumroll.checks.rescore import rescore as again

    opened = run if isinstance(run, RunReader) else RunReader.open(run)
    config, given = _config(opened.path / CONFIG, overrides, _given(opened, objects), ("reward",))
    if not config.has_rollouts():
        raise ConfigError(f"{opened.path} is a run of pipeline: {config.pipeline}, which has no rewards.")
    with held(given):
        return _await(again(opened, config))


def rollout(
    recipe: Recipe, overrides: Sequence[str] = (), *, batches: int = 1, overwrite: bool = False, objects: Objects | None = None
) -> tuple[Run, dict[str, float]]:
    """Generate and score some batches without training; they are saved in a run directory `<name>-rollout`."""
    config, given = _config(recipe, overrides, objects)
    if not config.has_rollouts():
        raise ConfigError(f"only reinforcement learning has rollouts; this recipe is pipeline: {config.pipeline}.")
    config = config.model_copy(update={"name": f"{config.name}-rollout"})
    with locked(Run.check_ours(config)), held(given):
        Run.check_free(config, overwrite=overwrite)
        return _await(_rollout(config, given, batches, overwrite=overwrite))


async def _rollout(config: RunConfig, given: Objects, batches: int, *, overwrite: bool) -> tuple[Run, dict[str, float]]:
    _look(config)
    workers = await open_workers(config)
    groups: list[Group] = []
    failed: list[Sample] = []
    try:
        rollouts = open_rollouts(config, workers)
        run = Run.create(config, overwrite=overwrite, given=given)
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
    metrics = describe(groups, 0, thoughts=config.rollout_section().limits_thoughts)
    return run, metrics | {"rollout/failed": float(len(failed)), "rollout/samples": float(len(samples))}


def load(path: str | Path) -> Run:
    """Open the directory of a run, finished or not."""
    return Run.open(path)


def _config(
    recipe: Recipe, overrides: Sequence[str], objects: Objects | None, within: tuple[str, ...] = ("",)
) -> tuple[RunConfig, dict[str, Any]]:
    """The checked config of a recipe, and the objects that these sections of it name."""
    given = dict(objects or {})
    if isinstance(recipe, RunConfig):
        recipe = recipe.model_dump(mode="json")
    elif isinstance(recipe, Mapping):
        recipe, own = take(recipe, given)
        given |= own
    config = with_lengths(load_config(recipe, overrides).config, fetch=True)
    return config, select(config.model_dump(mode="json"), given, within)


def _given(run: RunReader, objects: Objects | None) -> dict[str, Any]:
    """The objects that a run was made with in this process, and those given now."""
    return {**(run.given if isinstance(run, Run) else {}), **(objects or {})}


def _await(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; where an event loop is already running (notebooks), on another thread.

    There an interrupt of the main thread has the effect of Ctrl-C: the first ends a run after its step, the second at once.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    outcome: Future[T] = Future()
    begun: Future[asyncio.Task[Any] | None] = Future()

    async def main() -> T:
        begun.set_result(asyncio.current_task())
        return await work

    def run() -> None:
        try:
            outcome.set_result(asyncio.run(main()))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=copy_context().run, args=(run,), name="drumroll").start()
    while True:
        try:
            return outcome.result()
        except KeyboardInterrupt:
            if outcome.done():
                raise
            if (task := begun.result()) is not None:
                interrupt(task.get_loop(), task.cancel)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
