"""Verdicts of IFEval's own checkers on texts from a file. Run by the Python of `.bench/ifeval`; knows nothing of us.

python ifeval_verdicts.py CASES OUT

CASES (JSON) is a list of `{text, id, kwargs}`; OUT gets a list of booleans. Language detection is seeded, so that its verdicts
are always the same.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import langdetect


def package(name: str) -> Path:
    """Where an installed package lies; it is not imported."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def main(cases_file: str, out_file: str) -> None:
    """The strict verdict on every case."""
    tasks = ModuleType("lm_eval.tasks")  # without its __init__, which imports all of lm-eval
    tasks.__path__ = [str(package("lm_eval") / "tasks")]
    sys.modules["lm_eval.tasks"] = tasks
    os.environ["NLTK_DATA"] = str(package("llama_index") / "core" / "_static" / "nltk_cache")
    from lm_eval.tasks.ifeval import utils  # pyrefly: ignore [missing-import]

    langdetect.DetectorFactory.seed = 0
    verdicts = []
    for case in json.loads(Path(cases_file).read_text()):
        row = utils.InputExample(0, [case["id"]], "", [case["kwargs"]])
        verdicts += utils.test_instruction_following_strict(row, case["text"]).follow_instruction_list
    Path(out_file).write_text(json.dumps(verdicts))


if __name__ == "__main__":
    main(*sys.argv[1:])
