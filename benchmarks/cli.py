"""How long the command line takes to answer: a whole process, from its start to its end.

python benchmarks/cli.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from figures import figure

TRIES = 9
COMMANDS = {
    "help": ("--help",),
    "explain": ("explain", "optim.lr"),
    "completion": (),
}
GOALS = {"help": 0.3}
COMPLETING = {"_DRUMROLL_COMPLETE": "bash_complete", "COMP_WORDS": "drumroll train recipe.yaml optim.", "COMP_CWORD": "3"}
START = "import sys; sys.argv[0] = 'drumroll'; from drumroll.cli import main; main()"


def seconds(*arguments: str, **environment: str) -> float:
    """One command in a process of its own."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", START, *arguments], env=os.environ | environment, stdout=subprocess.DEVNULL, check=True
    )
    return time.perf_counter() - began


def main() -> None:
    """The median of several tries, after one that fills the caches of the file system."""
    bare = statistics.median(_python() for _ in range(TRIES))
    for name, arguments in COMMANDS.items():
        environment = COMPLETING if name == "completion" else {}
        tries = [seconds(*arguments, **environment) for _ in range(TRIES + 1)][1:]
        figure(
            f"cli/{name}_s",
            statistics.median(tries),
            "s",
            goal=GOALS.get(name),
            at_most=True,
            tries=TRIES,
            slowest=round(max(tries), 3),
            python_alone=round(bare, 3),
        )


def _python() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
