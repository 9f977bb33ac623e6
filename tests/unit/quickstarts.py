"""Whole quickstarts, and how well one rank learns in them."""

import functools
import tempfile
from pathlib import Path

import drumroll

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart" / "recipe.yaml"
TWO_RANKS = ("cluster.runtime=ray", "cluster.devices=2", "cluster.kind=cpu", "cluster.threads=1")
SPREAD = 0.03
"""How far below the worst of five seeds of one rank a divided run may end."""


def learnt(folder, *overrides, model="tiny-even"):
    """The held-out accuracies at the end of the quickstart."""
    given = [f"model={model}", "threads=1", f"output={folder}", "eval.every=100", *overrides]
    run = drumroll.train(RECIPE, overrides=given)
    return {name: run.metrics[-1][f"eval/{name}"] for name in ("sums", "reversal")}


@functools.cache
def floors(model="tiny-even"):
    """The lowest accuracies of five seeds of one rank, less the spread."""
    with tempfile.TemporaryDirectory() as folder:
        seeds = [learnt(folder, f"seed={seed}", f"name=seed{seed}", model=model) for seed in range(5)]
    return {name: min(each[name] for each in seeds) - SPREAD for name in seeds[0]}


def first_tokens(run):
    """The tokens of each training sample of step 1."""
    return {s["id"]: s["traces"][0]["tokens"] for s in run.samples if s["step"] == 1 and s["kind"] == "train"}
