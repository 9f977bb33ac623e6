"""`drumroll init`: writes a small project that trains at once, for a user to change file by file."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from drumroll.data.problems import sums
from drumroll.errors import StoreError
from drumroll.runfiles.durable import make_folder, write_text

ROWS = {"data.jsonl": ("train", 300), "held_out.jsonl": ("held_out", 100)}
"""Files of rows: their split, and how many rows they have."""

RECIPE = """\
# Each key is explained by `drumroll explain KEY`, for example `drumroll explain rollout.samples`.
name: {name}
model: tiny                # built in, for a first try; then a directory or hub id of a model of yours
steps: 60
data:
  train:
    sums: {{source: data.jsonl}}
  max_prompt_tokens: 16
rollout:
  prompts: 16              # groups of a step
  samples: 8               # completions of each prompt
  max_tokens: 8            # longest completion
reward: reward:correct     # the function `correct` in reward.py
optim:
  lr: 5.0e-4
  warmup: 3
eval:
  every: 20
  sets:
    held_out: {{source: held_out.jsonl}}
"""

REWARD = '''\
"""Scores completions. Arguments are bound by name: `completion`, and the columns of the row."""


def correct(completion: str, answer: str) -> float:
    """Return 1 for the right answer, else 0."""
    return float(completion.strip() == answer)
'''

TEST = '''\
"""Checks the reward on answers that are right and wrong. Run it with `pytest`."""

import json
from pathlib import Path

from reward import correct

ROWS = [json.loads(line) for line in (Path(__file__).parent / "data.jsonl").read_text().splitlines()]


def test_right_answers_score_more_than_wrong_ones():
    assert correct("12", answer="12") == correct(" 12 ", answer="12") == 1.0
    assert correct("", answer="12") == correct("112", answer="12") == 0.0


def test_every_row_can_be_answered():
    assert all(correct(row["answer"], row["answer"]) == 1.0 for row in ROWS)
'''

README = """\
# {name}

```sh
drumroll check recipe.yaml       # does the reward tell right from wrong, can the model learn?
drumroll train recipe.yaml       # train; the run is in runs/{name}
drumroll run samples runs/{name}
```

As it is, training takes about 20 s on one core and brings the held-out score from 0.15 to 0.85 (seed 0).

| file | content |
|---|---|
| `data.jsonl`, `held_out.jsonl` | one row per line: `prompt`, and the columns that the reward asks for |
| `reward.py`, `test_reward.py` | the reward, and its test (`pytest`) |
| `recipe.yaml` | model, data, reward, steps; change a key here or on the command line: `drumroll train recipe.yaml steps=50` |
"""


def write_project(folder: Path) -> list[str]:
    """Write a project into a new or empty folder; return lines that say what to do next."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreError(f"{folder} exists and is not empty, so nothing was written; choose another name.")
    make_folder(folder)
    name = folder.resolve().name
    for file, (split, count) in ROWS.items():
        rows = ({"prompt": row["prompt"], "answer": row["answer"]} for row in itertools.islice(sums(split, seed=0), count))
        write_text(folder / file, "".join(json.dumps(row) + "\n" for row in rows))
    write_text(folder / "recipe.yaml", RECIPE.format(name=json.dumps(name)))
    write_text(folder / "README.md", README.format(name=name))
    write_text(folder / "reward.py", REWARD)
    write_text(folder / "test_reward.py", TEST)
    return [f"wrote {folder}: rows, a reward and its test, a recipe. Next:", f"cd {folder}", "drumroll train recipe.yaml"]
