"""Shows that a change of the code does not change a run: the same deterministic runs at two commits, compared byte by byte.

    .venv/bin/python tools/byte_equal.py BASE [--only quickstart,sft] [--keep FOLDER]

Runs every case at BASE (in a worktree of its own) and in the working tree, on this machine, and compares tokens, owners,
log-probs, versions, rewards and metrics. Only measures of time and memory are left out. Cases are written with the names
of today; `RENAMED` has the names that they, and the metrics, had at BASE.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

ROOT = Path(__file__).parent.parent
Recipe = dict[str, Any]
TIMED = ("time/", "memory/", "rollout/tokens_per_s")
SAMPLE = ("step", "kind", "id", "prompt_id", "completion", "stop", "fate", "reward", "rewards", "traces")
RENAMED: dict[str, str] = {"train/kl_behaviour": "train/kl"}
"""Names of config keys and metrics: today's → those at the base commit; a key with its sections, as `algorithm.preset`."""


def recipe(**changes: Any) -> Recipe:
    """A small deterministic recipe, with sections merged in."""
    base: Recipe = {
        "model": "tiny",
        "steps": 3,
        "deterministic": True,
        "threads": 1,
        "data": {
            "train": {name: {"source": f"drumroll.data.problems:{name}"} for name in ("sums", "reversal")},
            "max_prompt_tokens": 16,
        },
        "rollout": {"prompts": 8, "samples": 4, "max_tokens": 8},
        "reward": "exact",
        "optim": {"lr": 1e-3, "minibatch": 16},
        "eval": {"sets": {"sums": {"source": "drumroll.data.problems:sums", "limit": 16, "sampled": 2}}},
    }
    for key, value in changes.items():
        base[key] = {**base[key], **value} if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return {key: value for key, value in base.items() if value is not None}


def lakes(mode: str) -> Recipe:
    """Episodes on frozen lakes."""
    return recipe(
        data={
            "train": {"lake": {"source": "drumroll.envs.rows:episodes", "args": {"env": "frozen_lake", "style": "compact"}}},
            "max_prompt_tokens": 32,
        },
        environment={"use": "frozen_lake", "args": {"style": "compact", "max_turns": 3}, "max_turns": 3, "mode": mode},
        rollout={"prompts": 4, "samples": 4, "max_tokens": 4},
        reward={},
        eval={"sets": {}},
        steps=2,
    )


@dataclass(frozen=True)
class Case:
    """A run, by a recipe of the repository or one given here."""

    recipe: Recipe | str
    overrides: tuple[str, ...] = ()
    killed_after: int | None = None  # kill it once so many steps are written, and resume
    path: tuple[str, ...] = field(default=())  # folders below the repository that a user's code is imported from
    except_metrics: tuple[str, ...] = ()  # metrics that the change means to change, by the beginnings of their names


MERGED_FROM_COLUMNS = tuple(f"train/{name}" for name in ("behaviour_ratio", "clipped", "entropy", "kl", "ratio"))
"""Means and quantiles of several ranks: computed from all their tokens now, before from the ranks' own means and quantiles."""

CASES: dict[str, Case] = {
    "quickstart": Case("recipes/quickstart/recipe.yaml", ("steps=6", "deterministic=true", "threads=1")),
    "ppo": Case(
        recipe(algorithm={"preset": "ppo", "kl": 0.01}, roles={"critic": {}}, optim={"lr": 1e-3, "minibatch": 16, "epochs": 2})
    ),
    "lora": Case(recipe(roles={"actor": {"lora": {"rank": 4}}}, optim={"lr": 1e-3})),
    "filter": Case(recipe(rollout={"prompts": 8, "samples": 4, "max_tokens": 8, "filter": "zero_variance", "oversample": 2})),
    "trajectory": Case(lakes("trajectory")),
    "step": Case(lakes("step")),
    "agent": Case("examples/agent/recipe.yaml", ("steps=2", "deterministic=true", "threads=1"), path=("examples/agent",)),
    "sft": Case("recipes/tiny-weak/recipe.yaml", ("steps=6", "deterministic=true", "threads=1", "batch=32")),
    "ray": Case(
        recipe(
            cluster={"runtime": "ray", "devices": 2, "kind": "cpu", "threads": 1},
            roles={"actor": {"devices": "0-1"}, "rollout": {"devices": "0-1"}},
        ),
        except_metrics=MERGED_FROM_COLUMNS,
    ),
    "resume": Case(recipe(steps=6, checkpoint={"every": 2}), killed_after=3),
}


# --- running ---


def translated(settings: Recipe, names: dict[str, str]) -> Recipe:
    """A recipe with its keys under the names of another commit."""
    for now, then in names.items():
        *sections, key = now.split(".")
        place: Any = settings
        for section in sections:
            place = place.get(section, {}) if isinstance(place, dict) else {}
        if isinstance(place, dict) and key in place:
            place[then.rpartition(".")[2]] = place.pop(key)
    return settings


def execute(case: Case, tree: Path, folder: Path, names: dict[str, str]) -> Path:
    """Run a case with the code of a tree; returns the run's directory."""
    settings: Recipe = yaml.safe_load((tree / case.recipe).read_text()) if isinstance(case.recipe, str) else case.recipe
    folder.mkdir(parents=True)
    file = folder / "recipe.yaml"
    written = translated(json.loads(json.dumps(settings)), names) | {"name": "run", "output": str(folder)}
    file.write_text(yaml.safe_dump(written, sort_keys=False))
    paths = os.pathsep.join(str(tree / part) for part in ("src", *case.path))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    train = (sys.executable, "-m", "drumroll", "train")
    with (folder / "log.txt").open("w") as log:

        def run(*command: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)

        process = run(*train, str(file), *case.overrides, "--quiet")
        if case.killed_after is not None:
            _kill_after(process, folder / "run" / "metrics.jsonl", case.killed_after)
            process = run(*train, "--resume", str(folder / "run"), "--quiet")
        if process.wait():
            raise SystemExit(f"{tree}: the run ended with {process.returncode}\n{(folder / 'log.txt').read_text()[-3000:]}")
    return folder / "run"


def _kill_after(process: subprocess.Popen[bytes], metrics: Path, steps: int) -> None:
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > steps):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """The files of a commit, for a while."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        git: Callable[..., Any] = lambda *words: subprocess.run(["git", "-C", str(ROOT), *words], check=True)  # noqa: E731
        git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


# --- comparing ---


def facts(run: Path, names: dict[str, str], case: Case) -> dict[str, list[str]]:
    """What must be equal, as lines of text: metrics by step, samples by id, under the names of the base commit."""
    ignored = TIMED + case.except_metrics
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    plain = [{names.get(k, k): v for k, v in m.items() if not k.startswith(ignored)} for m in metrics]
    samples = [row for file in sorted((run / "rollouts").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    shown = [{key: row.get(key) for key in SAMPLE} for row in samples]
    return {
        "metrics": [json.dumps(m, sort_keys=True) for m in plain],
        "samples": sorted(json.dumps(s, sort_keys=True) for s in shown),
    }


def differences(base: dict[str, list[str]], present: dict[str, list[str]]) -> list[str]:
    """One line for each kind of fact that differs, with the first pair."""
    found = []
    for kind, before in base.items():
        after = present[kind]
        if before != after:
            pair = next(((b, a) for b, a in zip(before, after, strict=False) if b != a), ("", ""))
            found.append(f"{kind}: {len(before)} before, {len(after)} after; first that differs:\n  - {pair[0]}\n  + {pair[1]}")
    return found


def main() -> int:
    """Compare all cases; 1 if any differs."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("base", help="the commit to compare with")
    options.add_argument("--only", help="names of cases, with commas between", default=",".join(CASES))
    options.add_argument("--keep", help="where the runs are kept", type=Path)
    asked = options.parse_args()
    wanted = asked.only.split(",")
    if unknown := [name for name in wanted if name not in CASES]:
        options.error(f"there is no case '{unknown[0]}'; there are {', '.join(CASES)}.")
    changed = 0
    with tempfile.TemporaryDirectory() as temporary, worktree(asked.base) as tree:
        folder = asked.keep or Path(temporary)
        for name in wanted:
            before = facts(execute(CASES[name], tree, folder / "base" / name, RENAMED), {}, CASES[name])
            after = facts(execute(CASES[name], ROOT, folder / "present" / name, {}), RENAMED, CASES[name])
            found = differences(before, after)
            changed += bool(found)
            print(
                f"{name:12} {'DIFFERS' if found else 'equal'}: {len(after['samples'])} samples, {len(after['metrics'])} steps"
            )
            print("\n".join(found), end="\n" if found else "", flush=True)
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
