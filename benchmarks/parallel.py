"""Ranks that divide a model: their gradients, memory at rest and at load, the plan's errors, speed, and saving beside training.

python benchmarks/parallel.py [PART ...] [--pairs 5] [--steps 7]
parts: gradients state backends activations load time prediction checkpoint

Ranks are processes on this machine with one thread each, which speak through gloo. The model is SmolLM2-135M in float32,
except for gradients, other backends and activations: those are of the small models of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from figures import figure
from step import OURS, prompts, recipe

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "unit"))

import test_context  # noqa: E402
import test_deepspeed  # noqa: E402
import test_megatron  # noqa: E402
import test_parallel  # noqa: E402
from live_memory import LiveMemory, held, state_bytes  # noqa: E402
from test_memory import batch, work_of  # noqa: E402

import drumroll  # noqa: E402
from drumroll.algorithms.aggregations import Shares  # noqa: E402
from drumroll.algorithms.losses import PolicyLoss  # noqa: E402
from drumroll.config.algorithm import AlgorithmConfig  # noqa: E402
from drumroll.config.optim import OptimConfig  # noqa: E402
from drumroll.config.roles import ParallelConfig  # noqa: E402
from drumroll.learners import Learner, Update  # noqa: E402
from drumroll.learners.backend import LearnerSpec  # noqa: E402
from drumroll.learners.backends.torch import open_backend  # noqa: E402
from drumroll.learners.heads import LogProbHead  # noqa: E402
from drumroll.mesh import Mesh  # noqa: E402
from drumroll.models.shape import find_shape  # noqa: E402
from drumroll.models.smollm2 import fetch  # noqa: E402
from drumroll.placement.memory import Training, predicted_peak  # noqa: E402

ONE, DATA2, SHARD2, TENSOR3 = dict[str, int](), {"data": 2}, {"shard": 2}, {"tensor": 3}
OPTIM = OptimConfig(lr=1e-6, micro_tokens=1024)
WORDS = 40_000
INTERVAL = 0.001
"""Seconds between two looks at a process's memory."""


@contextlib.contextmanager
def ranks(matrix: Any = test_parallel.Matrix) -> Generator[Any]:
    """Ranks of any layout, which live until the block ends."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(matrix(Path(folder))) as made:
        yield made


def update_of(groups: int, samples: int, prompt: int, length: int) -> Update:
    """A policy-gradient update on groups of equal samples."""
    return Update(batch(groups, samples, prompt, length, WORDS), PolicyLoss(AlgorithmConfig()), Shares("token_mean"))


# --- what a rank does ---

OPEN: list[Learner] = []
"""Of a rank's process: its learner."""


def open_model(rank: int, model: str, options: dict[str, Any]) -> None:
    """Open this rank's part of a model."""
    own = test_parallel.RANKS[-1]
    parallel = ParallelConfig(
        data=own.mesh.data, shard=own.mesh.shard, tensor=own.mesh.tensor, reshard=options.get("reshard", True)
    )
    recompute = bool(options.get("recompute"))
    spec = LearnerSpec(model, LogProbHead(), own, OPTIM, parallel=parallel, recompute_activations=recompute)
    OPEN[:] = [Learner(open_backend(spec), OPTIM, total_steps=1000)]


def seconds_of(rank: int, work: Update) -> float:
    """The time of an update."""
    began = time.perf_counter()
    OPEN[0].update(work)
    return time.perf_counter() - began


def state_of(rank: int, work: Update) -> int:
    """The bytes of master weights, moments and gradients; a small update before makes the moments."""
    OPEN[0].update(update_of(2, 2, 4, 4))
    return state_bytes(OPEN[0], work)


def peak_of(rank: int, work: Update) -> int:
    """The peak of live tensor bytes in an update; a small one before makes the moments."""
    OPEN[0].update(update_of(2, 2, 4, 4))
    with LiveMemory(held(OPEN[0])) as live:
        OPEN[0].update(work)
    return live.peak


# --- parts ---


def gradients(given: argparse.Namespace) -> None:
    """The first gradient of a real update against one process, relative L2 norm."""
    with ranks() as made:
        for name, layout in (("data2", "data 2"), ("shard2", "shard 2"), ("tensor2", "tensor 2"), ("context2", "context 2")):
            gradient(name, made.compare(layout, "Llama", "actor", "float32"))
        gradient("zero3", test_deepspeed.compare(made, "ZeRO-3", "Llama", "actor"))
    with ranks(test_megatron.MegatronMatrix) as made:
        cases = (
            ("tensor2", "tensor 2, sequence", "Llama"),
            ("pipeline2", "pipeline 2", "Llama"),
            ("expert2", "expert 2", "Qwen3-MoE"),
        )
        for name, layout, family in cases:
            gradient(f"megatron_{name}", made.compare(layout, family, "actor"))


def gradient(name: str, found: test_parallel.Errors) -> None:
    """A strategy's figure."""
    figure(f"parallel/{name}/gradient_error", found.first, "relative", goal=1e-5, at_most=True, later=found.later)


def ratio(name: str, each: int, whole: int, goal: float) -> None:
    """What one of two ranks holds over what one process does."""
    figure(f"parallel/{name}", each / whole, "x", goal=goal, at_most=True, bytes={"one": whole, "each": each})


def backends(given: argparse.Namespace) -> None:
    """The state of one of two ranks of other backends over that of one process of plain PyTorch."""
    with ranks() as made:
        (whole,) = made.run({}, test_deepspeed.state, "tiny-random", "float32", {})
        each = max(made.run(SHARD2, test_deepspeed.state, "tiny-random", "float32", {"zero": 3}))
        ratio("zero3/state_memory_ratio", each, whole, 0.6)
    with ranks(test_megatron.MegatronMatrix) as made:
        for name, layout, family in (("pipeline2", "pipeline 2", "Qwen2"), ("expert2", "expert 2", "Mostly experts")):
            work, folder = made.works(family, "actor")[0], made.model(family)
            (whole,) = made.run({}, test_megatron.state, folder, work, "torch")
            each = max(made.run(test_megatron.LAYOUTS[layout], test_megatron.state, folder, work, "megatron"))
            ratio(f"megatron_{name}/state_memory_ratio", each, whole, 0.6)


def activations(given: argparse.Namespace) -> None:
    """The activations of one of two ranks along `context` over those of one process, at 8,192 tokens."""
    with ranks() as made:
        (whole,) = made.run({}, test_context.activations, "tiny-even-random", False)
        each = max(made.run({"context": 2}, test_context.activations, "tiny-even-random", False))
    ratio("context2/activation_memory_ratio", each, whole, 0.6)


def state(given: argparse.Namespace) -> None:
    """The state of one of two ranks over that of one process."""
    work, found = update_of(2, 2, 16, 16), list[int]()
    for layout in (ONE, SHARD2):
        with ranks() as made:
            made.run(layout, open_model, given.model, {})
            found.append(max(made.run(layout, state_of, work)))
    whole, each = found
    ratio("shard2/state_memory_ratio", each, whole, 0.52)


def anonymous(pid: int) -> int:
    """The anonymous memory of a process in bytes."""
    found = re.search(r"RssAnon:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 1024 * int(found[1]) if found else 0


def load_peak(layout: dict[str, int], model: str) -> int:
    """The peak of anonymous memory while a rank opens the model, above what it had after its imports."""
    with ranks() as made:
        pids = [process.pid for process in made.pool(layout).processes]
        before, peak, done = [anonymous(pid) for pid in pids], [0] * len(pids), threading.Event()

        def look() -> None:
            while not done.wait(INTERVAL):
                peak[:] = [max(most, anonymous(pid)) for most, pid in zip(peak, pids, strict=True)]

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            made.run(layout, open_model, model, {})
        finally:
            done.set()
            watcher.join()
    return max(most - start for most, start in zip(peak, before, strict=True))


def load(given: argparse.Namespace) -> None:
    """The peak at load of one of two ranks over that of one process."""
    whole, each = load_peak(ONE, given.model), load_peak(SHARD2, given.model)
    ratio("shard2/load_peak_ratio", each, whole, 0.75)


def step_time(given: argparse.Namespace) -> None:
    """An update on two shards over one on two replicas, by turns: the same model, tokens and micro-batches."""
    work, pairs = update_of(8, 8, 32, 42), list[tuple[float, float]]()
    with ranks() as made:
        for layout in (DATA2, SHARD2):
            made.run(layout, open_model, given.model, {})
        for turn in range(given.pairs + 1):
            pair = tuple(max(made.run(layout, seconds_of, work)) for layout in (DATA2, SHARD2))
            print("data2, shard2", pair, file=sys.stderr)
            pairs += [pair] if turn else []
    value = statistics.median(shard / data for data, shard in pairs)
    raw = {"data2": [round(data, 2) for data, _ in pairs], "shard2": [round(shard, 2) for _, shard in pairs]}
    facts = {"tokens": len(work.batch.tokens), "micro_tokens": OPTIM.micro_tokens, "seconds": raw}
    figure("parallel/shard2/step_time_over_data2", value, "x", goal=1.3, at_most=True, **facts)


LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one process": (ONE, {}),
    "data 2": (DATA2, {}),
    "shard 2": (SHARD2, {}),
    "shard 2, reshard false": (SHARD2, {"reshard": False}),
    "shard 2, recompute": (SHARD2, {"recompute": True}),
    "tensor 3": (TENSOR3, {}),
}


def prediction(given: argparse.Namespace) -> None:
    """The plan's memory against the peak of live tensor bytes in a real update: the largest relative error of all layouts."""
    shape, errors, gigabytes = find_shape(given.model), dict[str, float](), dict[str, list[float]]()
    assert shape is not None
    for name, (layout, options) in LAYOUTS.items():
        mesh = Mesh(**layout)
        work = update_of(6 * mesh.shares, 4, 32, 64)  # two equal micro-batches: the plan adds the gradient of an earlier one
        share = work.batch.select(work.batch.shares(mesh.shares)[0])
        predicted = predicted_peak(shape, Training(mesh=mesh, **options), work_of(share, OPTIM.micro_tokens))
        with ranks() as made:
            made.run(layout, open_model, given.model, options)
            peak = max(made.run(layout, peak_of, work))
        errors[name], gigabytes[name] = round(abs(predicted - peak) / peak, 4), [round(b / 1e9, 3) for b in (predicted, peak)]
        print(name, errors[name], gigabytes[name], file=sys.stderr)
    facts = {"errors": errors, "predicted_and_measured_gb": gigabytes}
    figure("parallel/memory_prediction_error", max(errors.values()), "relative", goal=0.15, at_most=True, **facts)


def checkpoint(given: argparse.Namespace) -> None:
    """How long a save blocks a run, and how much slower the step is beside which it is written. Every second step is saved.

    The row of a step has the time for which the save after the step before blocked it.
    """
    with tempfile.TemporaryDirectory() as place:
        folder, model = Path(place), Path(given.model)
        path = recipe(folder, model, prompts(folder, model), "float32")
        fixed = [f"output={folder / 'runs'}", f"steps={given.steps}", "checkpoint.every=2", *OURS["all"]]
        rows = drumroll.train(str(path), fixed).metrics[3:]
    blocked = [row["time/checkpoint"] for row in rows if "time/checkpoint" in row]
    beside = [row["time/step"] - row["time/checkpoint"] for row in rows if "time/checkpoint" in row]
    alone = statistics.median(row["time/step"] for row in rows if "time/checkpoint" not in row)
    raw = {"blocked": [round(s, 3) for s in blocked], "beside": [round(s, 2) for s in beside], "alone": round(alone, 2)}
    figure("parallel/checkpoint_blocked", statistics.median(blocked) / alone, "of a step", goal=0.05, at_most=True, seconds=raw)
    figure("parallel/checkpoint_slowdown", statistics.median(beside) / alone, "x")


PARTS = {
    "gradients": gradients,
    "state": state,
    "backends": backends,
    "activations": activations,
    "load": load,
    "time": step_time,
    "prediction": prediction,
    "checkpoint": checkpoint,
}


def main() -> None:
    """Print the figures of all parts, or of those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=7)
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"there is no part '{min(unknown)}'; choose among: {', '.join(PARTS)}")
    given.model = str(fetch())
    for name in given.parts or PARTS:
        PARTS[name](given)


if __name__ == "__main__":
    main()
