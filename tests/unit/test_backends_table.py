"""The table of docs/parallelism.md that compares the other backends, and mixtures of experts, with one process.

`python tests/unit/test_backends_table.py` writes it anew; `make test-slow` runs the cases in the tests of each backend.
"""

import contextlib
import tempfile
from dataclasses import astuple
from functools import reduce
from pathlib import Path

import test_deepspeed
import test_experts
import test_megatron
from test_parallel import DOCS, LIMITS, Errors, Matrix

BEGIN, END = "<!-- table: tests/unit/test_backends_table.py -->\n", "<!-- end of the table of backends -->\n"
DENSE = ("Llama", "Qwen2", "Qwen3", "Gemma 3")
BOTH = ("actor", "critic")
CASES = [
    *(("megatron", layout, family, BOTH) for family in test_megatron.FAMILIES for layout in test_megatron.layouts_of(family)),
    *(("deepspeed", strategy, family, (*BOTH, "LoRA")) for strategy in test_deepspeed.STRATEGIES for family in DENSE),
    *(("torch", layout, family, BOTH) for layout in ("data 2", "shard 2") for family in ("Qwen3-MoE", "Mixtral")),
]
"""Backend, strategy, model, roles."""


def numbers(errors):
    return [f"{number:.0e}" for number in astuple(errors)]


def rows():
    """Each case's largest errors over its roles."""
    kinds = {
        "megatron": (test_megatron.MegatronMatrix, lambda made, *case: made.compare(*case)),
        "deepspeed": (Matrix, test_deepspeed.compare),
        "torch": (
            lambda folder: Matrix(folder, test_experts.FAMILIES),
            lambda made, *case: made.compare(*case, "float32"),
        ),
    }
    for kind, (matrix, compare) in kinds.items():
        with tempfile.TemporaryDirectory() as folder, contextlib.closing(matrix(Path(folder))) as made:
            for _, strategy, family, roles in (case for case in CASES if case[0] == kind):
                worst = reduce(Errors.worst, [compare(made, strategy, family, role) for role in roles])
                yield "| " + " | ".join([kind, strategy, family, ", ".join(roles), *numbers(worst)]) + " |\n"


def table():
    head = "| backend | strategy | model | roles | first gradient | later gradients | change | log-probs | metrics |\n"
    limits = "| limit | | | | " + " | ".join(numbers(LIMITS["float32"])) + " |\n"
    return BEGIN + head + "|---" * 9 + "|\n" + limits + "".join(rows()) + END


def test_the_table_of_the_docs_has_every_case_within_the_limits():
    text = DOCS.read_text("utf-8")
    lines = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].splitlines()[2:]
    limit, *found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    again = "write it anew: python tests/unit/test_backends_table.py"
    assert limit[4:] == numbers(LIMITS["float32"]), again
    assert [row[:4] for row in found] == [[*case[:3], ", ".join(case[3])] for case in CASES], again
    for row in found:
        assert all(float(number) <= float(bound) for number, bound in zip(row[4:], limit[4:], strict=True)), (row, again)


if __name__ == "__main__":
    text = DOCS.read_text("utf-8")
    DOCS.write_text(text[: text.index(BEGIN)] + table() + text[text.index(END) + len(END) :], "utf-8")
