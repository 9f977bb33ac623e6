"""A peer's side of tests that compare tensors (`Recording` in tests/unit/peers.py). Knows nothing of us.

python PROGRAM CASES OUT

CASES (safetensors) holds `CASE/column` for any number of cases; its metadata holds `settings` as JSON, name → options.
OUT gets `NAME/CASE/result` for every setting and case.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

Case = dict[str, Tensor]


def answer_all(prepare: Callable[[Any], Callable[[Case], Case]]) -> None:
    """Answer every case under every setting. `prepare` takes a setting's options and returns the function that answers."""
    cases_file, out_file = sys.argv[1:]
    cases: defaultdict[str, Case] = defaultdict(dict)
    with safe_open(cases_file, "pt") as file:
        settings: dict[str, Any] = json.loads(file.metadata()["settings"])
    for key, value in load_file(cases_file).items():
        case, column = key.split("/")
        cases[case][column] = value
    out: Case = {}
    for name, options in settings.items():
        answer = prepare(options)
        for case, columns in cases.items():
            results = answer({column: value.clone() for column, value in columns.items()})
            out |= {f"{name}/{case}/{key}": value.detach().contiguous() for key, value in results.items()}
    save_file(out, out_file)
