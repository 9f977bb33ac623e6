"""Runs everything around a pipeline's loop: evaluation, files, checkpoints, terminal, interruption.

A pipeline calls `start`, then `commit` once per step, then `finish`. A resume continues from the newest checkpoint that the
ledger names, and does the steps after it again.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from drumroll.config.best import MEASURED
from drumroll.envs.metrics import EPISODES
from drumroll.errors import Interrupted
from drumroll.learners import Learner
from drumroll.observe.callbacks import Callbacks
from drumroll.observe.failures import complaints
from drumroll.observe.hints import Hints
from drumroll.observe.model_card import write_card
from drumroll.observe.progress import Progress
from drumroll.observe.report import write_report
from drumroll.observe.runs import HELD_OUT
from drumroll.observe.trackers import Trackers
from drumroll.rollout.evaluation import Evaluator
from drumroll.runfiles.format import LEDGER
from drumroll.sample import Sample
from drumroll.store.ledger import Ledger
from drumroll.store.run import Run
from drumroll.store.saving import BackgroundSaver
from drumroll.workers.group import WorkerGroup
from drumroll.workers.runtime import Workers

Metrics = dict[str, float]


class Resumable(Protocol):
    """A part of the loop whose place is kept in checkpoints."""

    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


class Remembered(dict[str, Any]):
    """Plain data that a loop carries from step to step."""

    def state(self) -> dict[str, Any]:
        return dict(self)

    def restore(self, state: Mapping[str, Any]) -> None:
        self.update(state)


class Session:
    """One training run from its first step, or from its last checkpoint, to its end."""

    def __init__(
        self,
        run: Run,
        workers: Workers,
        evaluator: Evaluator | None,
        progress: Progress,
        *,
        resume: bool,
        callbacks: Callbacks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self._clock = clock
        self.config = run.config
        self.workers = workers
        workers.notify = progress.notice
        self.evaluator = evaluator
        self._best_by = run.config.eval.decided_by(run.config.held_out_sets())
        self.progress = progress
        self.callbacks = callbacks or Callbacks()
        self.trackers = Trackers(run, progress.notice)
        self.step = 0
        self.resume = resume
        self.before: Metrics = {}
        self.after: Metrics = {}
        self._earlier_seconds = 0.0
        self._began = self._clock()
        self._stage_times: Metrics = {}
        self._peaks: Metrics = {}
        self._resumable: dict[str, Resumable] = {}
        self._measures: list[Callable[[], Coroutine[Any, Any, Metrics]]] = []
        self._stopping = False
        self._told: set[str] = set()
        self.hints = Hints(run, run.config, progress.notice)
        self.ledger: Ledger | None = None
        self._committed: dict[str, Any] = {}
        self._write_time: Metrics = {}
        self._saver = BackgroundSaver(run.checkpoints, clock, self._written)

    def open_ledger(self) -> Ledger:
        """Return the ledger of this run, opened at the first call. It listens to every event of a sample."""
        if self.ledger is None:
            self.ledger = Ledger(self.run.path / LEDGER)
        return self.ledger

    def watch(self, **parts: Resumable) -> None:
        """Keep these parts' places in checkpoints."""
        self._resumable |= parts

    def measure(self, function: Callable[[], Coroutine[Any, Any, Metrics]]) -> None:
        """Call a function with every evaluation; its metrics are the evaluation's too."""
        self._measures.append(function)

    @asynccontextmanager
    async def stage(self, name: str) -> AsyncGenerator[None]:
        """Measure a stage: it shows as `time/<name>`, `memory/<name>/<role>` and in the terminal."""
        self.progress.stage(name)
        began = self._clock()
        try:
            yield
        finally:
            self._stage_times[f"time/{name}"] = self._stage_times.get(f"time/{name}", 0.0) + self._clock() - began
        for role, peak in (await self.workers.memory()).items():
            self._peaks[f"memory/{name}/{role}"] = peak

    # --- the three calls of a pipeline ---

    async def start(self) -> None:
        """Return to the newest checkpoint, or evaluate the untrained model."""
        ledger = self.open_ledger()
        saved = self._saved() if self.resume else None
        if saved is not None:
            await self.recover(saved)
            self.run.write_config()  # only now: an override that the checkpoint refuses must not stay
        else:
            if self.resume and self.run.metrics:
                self.progress.notice(f"{self.run.path} has no complete checkpoint: the run begins again at step 0.")
            if self.resume:
                self.run.write_config()
            self.run.rewind(-1)
            self.run.checkpoints.discard_after(0)
            self.run.checkpoints.restore_best(None)
            ledger.resume(0)
            self._committed = self._state()
            self.before = self.after = await self._evaluate()
            self._best_by.score(self.before)  # refuses a metric that is not measured
            self.run.append_metrics(0, self.before | self._take_times())
            self.trackers.log(0, self.before)
            self._committed = self._state()
        self.progress.begin(self.step, self.before)
        self.callbacks.check()
        self.hints.at_start({s.name: len(s.prompts) for s in self.evaluator.sets} if self.evaluator else {})
        if self._stopping:
            raise self._interrupted()

    async def commit(self, metrics: Metrics, samples: Sequence[Sample] = ()) -> None:
        """Make a step durable: rollouts and metrics, its commit row last; start to write its checkpoint if one is due.

        A run that was asked to stop ends here, and one whose last checkpoint could not be written or whose callback failed.
        """
        await self._saver.check()
        self.step += 1
        self._committed = self._state()
        ledger = self.open_ledger()
        ledger.next_step()
        config, last = self.config, self.step == self.config.steps
        metrics |= _speeds(metrics, self._stage_times)
        if samples:
            self.run.write_rollouts("train", self.step, samples)
            self.callbacks.samples(self.step, "train", samples)
            self._complain(samples)
            self.progress.sampled(self.step, samples)
        self.hints.after_step(self.step, metrics, samples)
        best: Mapping[str, Any] | None = None
        if last or (config.eval.every and self.step % config.eval.every == 0):
            best = await self._evaluate_step(metrics)
            self.trackers.show(self.step, "train", samples)
        metrics |= self._take_times()
        if not config.deterministic:  # how much was asked beyond the batch depends on timing
            metrics |= self.workers.metrics()
        self.run.append_metrics(self.step, metrics)
        self.trackers.log(self.step, metrics)
        self.progress.committed(self.step, metrics)
        self.callbacks.step(self.step, metrics)
        stop = (self._stopping and not last) or self.callbacks.error is not None
        due = best is not None or last or stop or bool(config.checkpoint.every and self.step % config.checkpoint.every == 0)
        if due:
            await self._save(best or self._saver.best())
        ledger.commit(self.step)
        if stop:
            await self._saver.wait()
            self.callbacks.check()
            raise self._interrupted()

    def record_failed(self, samples: Sequence[Sample]) -> None:
        """Keep the samples of a step that cannot be completed, for `run samples` and the report; a resume drops them."""
        if samples:
            self.run.write_rollouts("train", self.step + 1, samples)
            write_report(self.run)

    async def finish(self) -> None:
        """Export the model, summarise, report. A run that ended before `steps` is evaluated and saved here."""
        if self.step and self.step < self.config.steps:
            metrics: Metrics = {}
            best = await self._evaluate_step(metrics)
            self.run.append_metrics(self.step, metrics | self._take_times())
            await self._save(best or self._saver.best())
            self.open_ledger().commit(self.step)
        await self._saver.wait()
        with self.run.new_model() as folder:
            await self.workers.actor.broadcast(Learner.export, folder.absolute())
            write_card(folder, self.run, self.step)
        self._close_ledger()
        self.run.write_summary(self.summary())
        write_report(self.run)
        self.trackers.close()
        self.progress.finish(self.run, self.summary())
        self.callbacks.check()

    def summary(self) -> dict[str, Any]:
        """Before and after per held-out set, or domain of one (`set/domain`), steps and seconds."""
        sets = [*(s.name for s in (self.evaluator.sets if self.evaluator else ())), *self.config.held_out_sets()]
        domains = [found[1] for key in self.after if (found := HELD_OUT.fullmatch(key)) and "/" in found[1]]

        def pick(metrics: Metrics, suffix: str) -> Metrics:
            return {name: metrics[key] for name in (*sets, *domains) if (key := f"eval/{name}{suffix}") in metrics}

        ends = (("before", self.before), ("after", self.after))
        kinds = ("sampled", *(kind for kind in (*EPISODES, *MEASURED) if pick(self.after, f"/{kind}")))
        return {
            "name": self.config.name,
            "model": self.config.model,
            "seed": self.config.seed,
            "steps": self.step,
            "seconds": round(self.seconds(), 2),
            "before": pick(self.before, ""),
            "after": pick(self.after, ""),
            **{f"{when}_{kind}": pick(now, f"/{kind}") for kind in kinds for when, now in ends},
            "best_step": self.run.checkpoints.best_step(),
        }

    def seconds(self) -> float:
        """Time spent in this run, earlier sessions of it included."""
        return self._earlier_seconds + self._clock() - self._began

    # --- evaluation and checkpoints ---

    async def _evaluate(self) -> Metrics:
        metrics: Metrics = {}
        if self.evaluator is not None:
            async with self.stage("eval"):
                metrics, samples = await self.evaluator.run(self.step)
            self.run.write_rollouts("eval", self.step, samples)
            self.callbacks.samples(self.step, "eval", samples)
            self.trackers.show(self.step, "eval", samples)
            self._complain(samples)
        for measure in self._measures:
            async with self.stage("eval"):
                metrics |= await measure()
        if metrics:
            self.callbacks.eval(self.step, metrics)
        return metrics

    def _complain(self, samples: Sequence[Sample]) -> None:
        for line in complaints(samples, self._told):
            self.progress.notice(f"step {self.step}: {line}")

    async def _evaluate_step(self, metrics: Metrics) -> Mapping[str, Any] | None:
        """Evaluate now; returns step and score if it is the best so far."""
        self.after = await self._evaluate()
        metrics |= self.after
        score, by = self._best_by.score(self.after), self._best_by.name
        found = {"step": self.step, "score": score} | ({"by": by} if by else {})
        return found if self._best_by.improves(score, self._saver.best()) else None

    def _close_ledger(self) -> None:
        ledger, self.ledger = self.ledger, None
        if ledger is not None:
            ledger.close()

    def _take_times(self) -> Metrics:
        times = self._stage_times | self._peaks | self._write_time
        self._stage_times, self._peaks, self._write_time = {}, {}, {}
        return times

    def _written(self, seconds: float) -> None:
        self._write_time = {"time/checkpoint_write": seconds}

    def _state(self) -> dict[str, Any]:
        loop = {name: part.state() for name, part in self._resumable.items()}
        return {"loop": loop, "before": self.before, "after": self.after}

    async def _save(self, best: Mapping[str, Any] | None) -> None:
        """Take a snapshot of the step and begin to write it. A step saved before keeps its weights."""
        checkpoints = self.run.checkpoints
        async with self.stage("checkpoint"):
            await self._saver.wait()
            evaluations = {"before": self.before, "after": self.after, "best": best}
            state = {**self._committed, **evaluations, "seconds": self.seconds()}
            if self.step in checkpoints.steps():
                checkpoints.amend(self.step, state)
                checkpoints.restore_best(best)
                return
            learners = self.workers.learners()
            for group in learners.values():
                await group.broadcast(Learner.snapshot)
        parts = {part: partial(_write_learner, group) for part, group in learners.items()}
        self._saver.start(self.step, parts, state, self.open_ledger())

    def _saved(self) -> int | None:
        """The step that a resume continues from."""
        if self.ledger is None:
            return max(self.run.checkpoints.steps(), default=None)
        return self.run.checkpoints.newest(self.ledger.checkpoints(), self.ledger.committed())

    async def recover(self, step: int) -> None:
        """Return to a complete checkpoint, with learners made anew where some were lost; later steps are done again.

        Call it while nothing is in flight. Nothing is deleted before the checkpoint is loaded.
        """
        await self._end_save()
        await self.workers.renew_learners()
        state, ledger = self.run.checkpoints.state(step), self.open_ledger()
        for part, group in self.workers.learners().items():
            await group.broadcast(Learner.load, (self.run.checkpoints.path(step) / part).absolute())
        self.run.checkpoints.discard_after(step)  # first: their rows in the ledger tell that they are superseded
        self.run.rewind(step)
        self.run.checkpoints.restore_best(state.get("best"))
        ledger.resume(step)
        self._rebuild(ledger, step)
        await self.workers.publish(step)
        for name, resumable in self._resumable.items():
            resumable.restore(state["loop"][name])
        self.step, self.before, self.after = step, state["before"], state["after"]
        self._earlier_seconds, self._began = state["seconds"], self._clock()
        self._committed = self._state()

    def _rebuild(self, ledger: Ledger, step: int) -> None:
        """Write the rows that the ledger has lost of the steps up to a checkpoint."""
        found, named = self.run.checkpoints, ledger.checkpoints()
        lost = sorted(set(range(1, step + 1)) - ledger.committed())
        unnamed = {s: found.path(s).name for s in found.steps() if s not in named}
        outcomes = list(self.run.outcomes(lost))
        if lost or unnamed:
            ledger.rebuild(lost, unnamed, outcomes)
        if lost:
            self.progress.notice(
                f"{LEDGER} has no commit of {len(lost)} of the {step} steps before {found.path(step).name}, the newest complete checkpoint: "
                f"the run continues from it, and {len(outcomes)} samples in {LEDGER} were rebuilt from rollouts/."
            )

    async def _end_save(self) -> None:
        """Wait for the save in flight. Its failure is only told: the run ends, or returns to an earlier checkpoint."""
        try:
            await self._saver.wait()
        except asyncio.CancelledError:  # abandoned
            pass
        except Exception as error:
            self.progress.notice(f"a checkpoint was not saved: {error}")

    # --- interruption ---

    async def drive(self, loop: Coroutine[Any, Any, None]) -> None:
        """Run a pipeline's loop. The first Ctrl-C ends it after the step, saved; the second at once, as it last was saved."""
        task = asyncio.ensure_future(loop)

        def stop() -> None:
            if not self._stopping:
                self._stopping = True
                self.progress.notice("Stopping after this step; Ctrl-C again ends the run at once, without saving the step.")
                return
            self.workers.interrupt()
            self._saver.abandon()
            task.cancel()

        with self.run.recorded_end(), _on_interrupt(stop):
            try:
                await task
            except asyncio.CancelledError:
                self._saver.abandon()
                raise (self._interrupted() if self._stopping else asyncio.CancelledError()) from None
            finally:
                await self._end_save()
                self._close_ledger()
                self.trackers.close()
                self.progress.close()

    def _interrupted(self) -> Interrupted:
        """How the run was left, and how to go on."""
        saved = self._saved()
        where = "before the first step" if saved is None else f"after step {saved}"
        return Interrupted(f"interrupted; saved {where}. Continue with: drumroll train --resume {self.run.path}")


async def _write_learner(group: WorkerGroup[Learner], folder: Path) -> None:
    await group.broadcast(Learner.write, folder.absolute())


def _speeds(metrics: Metrics, times: Metrics) -> Metrics:
    """Generated tokens per second of generation, and of the whole step."""
    tokens, seconds = metrics.get("rollout/tokens", metrics.get("train/tokens", 0.0)), sum(times.values())
    speeds = {"time/step": seconds, "time/tokens_per_s": tokens / max(seconds, 1e-9)}
    if "time/rollout" in times:
        speeds["rollout/tokens_per_s"] = tokens / max(times["time/rollout"], 1e-9)
    return speeds


_stops: dict[asyncio.AbstractEventLoop, Callable[[], None]] = {}


def interrupt(loop: asyncio.AbstractEventLoop, otherwise: Callable[[], Any]) -> None:
    """Pass an interrupt of the main thread to the session on another thread's loop, or call `otherwise` there."""
    loop.call_soon_threadsafe(_stops.get(loop, otherwise))


@contextmanager
def _on_interrupt(stop: Callable[[], None]) -> Generator[None]:
    """Call `stop` on SIGINT and SIGTERM while the block runs; outside the main thread, when `interrupt` is called."""
    loop = asyncio.get_running_loop()
    _stops[loop] = stop
    handled = []
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, stop)
            handled.append(number)
    try:
        yield
    finally:
        del _stops[loop]
        for number in handled:
            loop.remove_signal_handler(number)
