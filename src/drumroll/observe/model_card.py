"""Writes the README.md of an exported model: where it comes from, how it scored, how to load it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drumroll.observe.runs import HELD_OUT, setting
from drumroll.runfiles.durable import write_text
from drumroll.runfiles.format import read_format
from drumroll.runfiles.reader import RunReader

CARD = "README.md"
SCORED = (
    "\n## Use\n\nThe score of an answer is the only output for a prompt with the answer and its end token; higher is better, and the",
    "probability that one answer is preferred to another is the sigmoid of the difference.",
)


def write_card(folder: Path, run: RunReader, step: int, *, adapter: bool = False) -> None:
    """Write the card of a run's model at a step into its folder; `adapter`: it holds LoRA adapters alone."""
    write_text(folder / CARD, "\n".join(_lines(run, step, adapter)) + "\n")


def _lines(run: RunReader, step: int, adapter: bool) -> Iterator[str]:
    settings, name = run.settings, str(run.settings.get("name", run.path.name))
    base = base_model(settings)
    pipeline = str(settings.get("pipeline", "rl"))
    tags = ["drumroll", {"rl": "reinforcement-learning"}.get(pipeline, pipeline)]
    yield "---"
    if base.count("/") == 1 and not Path(base).exists():  # a hub id
        yield f"base_model: {json.dumps(base)}"
    yield f"library_name: {'peft' if adapter else 'transformers'}"
    scores = pipeline == "reward_model"
    yield f"pipeline_tag: {'text-classification' if scores else 'text-generation'}"
    yield f"tags: {json.dumps(tags)}"
    yield "---"
    yield f"# {name}, step {step}"
    what = "LoRA adapters for" if adapter else f"A {'reward' if scores else 'language'} model, trained from"
    yield f"\n{what} `{base}`: run `{name}`, step {step} of {settings.get('steps', '?')}, {_which(run, step)}."
    yield f"Trained with drumroll {read_format(run.path).library}."
    yield "\n| | |\n|---|---|"
    yield from (f"| {label} | {_cell(value)} |" for label, value in _facts(settings).items() if value)
    yield from _scores(run, step)
    yield from SCORED if scores else ("\n## Use",)
    yield from _loading(scores, adapter)
    if scores and not adapter:
        yield "\nA drumroll recipe uses it by `roles: {reward_model: {model: DIRECTORY}}` and `reward: reward_model`."
    elif not adapter:
        yield "\n`drumroll serve .` opens an OpenAI-compatible endpoint; `drumroll eval . recipe.yaml` measures it."


def _loading(scores: bool, adapter: bool) -> Iterator[str]:
    """The lines of Python that load the model."""
    auto = "AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"
    arguments, needs = '"."', "  # with the package peft, and the base model at its place" if adapter else ""
    yield "\n```python"
    if scores and adapter:
        auto, arguments = "AutoPeftModelForSequenceClassification", '".", num_labels=1'
        yield f"from peft import {auto}\nfrom transformers import AutoTokenizer\n"
    else:
        yield f"from transformers import {auto}, AutoTokenizer\n"
    yield f'model = {auto}.from_pretrained({arguments}){needs}\ntokenizer = AutoTokenizer.from_pretrained(".")\n```'


def _which(run: RunReader, step: int) -> str:
    best = run.checkpoints.best_step()
    last = run.metrics[-1]["step"] if run.metrics else step
    names = [*(["the last"] if step == last else []), *(["the best on the held-out sets"] if step == best else [])]
    return " and ".join(names) or "neither the last nor the best"


def base_model(settings: Mapping[str, Any]) -> str:
    """The model that a run started from."""
    return str(setting(settings, "roles.actor.model") or settings.get("model"))


def _facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    sets = setting(settings, "data.train")
    sources = [s.get("source") for s in sets.values() if isinstance(s, Mapping)] if isinstance(sets, Mapping) else []
    return {
        "pipeline": settings.get("pipeline"),
        "advantage": setting(settings, "algorithm.advantage"),
        "data": ", ".join(dict.fromkeys(str(source) for source in sources)),
        "learning rate": setting(settings, "optim.lr"),
        "seed": str(settings.get("seed", "")),
    }


def _scores(run: RunReader, step: int) -> Iterator[str]:
    """The held-out scores before training and at the step."""
    found: dict[float, dict[str, float]] = {}
    for line in run.metrics:
        found.setdefault(line["step"], {}).update({n: v for n, v in line.items() if HELD_OUT.fullmatch(n)})
    now, before = found.get(step, {}), found.get(0, {})
    yield "\n## Held-out scores\n"
    if not now:
        yield "None were measured at this step."
        return
    yield f"| set | before | step {step} |\n|---|---|---|"
    for name, value in now.items():
        start = f"{before[name]:.3f}" if name in before else "–"
        yield f"| {_cell(name.removeprefix('eval/'))} | {start} | {value:.3f} |"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
