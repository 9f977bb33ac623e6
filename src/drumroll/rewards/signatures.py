"""The signatures of reward functions: our own, a group's, TRL's and verl's, recognised by the names of their arguments.

A signature says how a function's arguments are filled for one sample or for several, and how its result is read. Nothing
here calls a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from drumroll.errors import ConfigError
from drumroll.rewards.extraction import split_thinking
from drumroll.sample import Sample

Word = Callable[[Sample], Any]


class BadReward(ValueError):
    """A reward function returned something that is not a finite number or None."""


@dataclass(frozen=True)
class Outcome:
    """The result of a reward for one sample.

    `parts` are numbers that are logged and never summed; `extra` holds other values that are kept with the sample.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Signature:
    """How arguments are filled.

    `words` are the arguments that come from the sample. With `lists` every argument is a list with an entry per sample.
    With `columns` other arguments are columns of the row. `needs` are words that need a column. `always` are words that
    `**kwargs` receives. With `dicts` the function may return numbers beside its score.
    """

    words: Mapping[str, Word]
    lists: bool = False
    columns: bool = True
    dicts: bool = False
    always: tuple[str, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)


def _messages(sample: Sample) -> Any:
    content = sample.prompt.content
    return content if isinstance(content, str) else list(content)


def _answer_message(sample: Sample) -> Any:
    """The completion as TRL gives it: a list of messages if the prompt is a conversation."""
    text = sample.completion
    return text if isinstance(sample.prompt.content, str) else [{"role": "assistant", "content": text}]


def _data_source(sample: Sample) -> Any:
    return sample.prompt.columns.get("data_source") or sample.prompt.domain


def _ground_truth(sample: Sample) -> Any:
    row = sample.prompt.columns
    graded = row.get("reward_model")
    if isinstance(graded, Mapping) and "ground_truth" in graded:
        return graded["ground_truth"]
    return row["ground_truth"] if "ground_truth" in row else row.get("answer")


def _extra_info(sample: Sample) -> Any:
    """verl's column; without it, the columns that no other argument of verl's holds."""
    row = sample.prompt.columns
    if (own := row.get("extra_info")) is not None:
        return dict(own) if isinstance(own, Mapping) else own
    return {name: value for name, value in row.items() if name not in VERL_COLUMNS}


VERL_COLUMNS = ("prompt", "messages", "data_source", "domain", "reward_model", "ground_truth", "answer", "extra_info")
SPLIT: dict[str, Word] = {
    "thinking": lambda sample: split_thinking(sample.completion)[0],
    "final": lambda sample: split_thinking(sample.completion)[1],
}
OURS = Signature(
    {"completion": lambda s: s.completion, "prompt": lambda s: s.prompt.content, "sample": lambda s: s, **SPLIT},
)
GROUP = Signature(
    {"completions": lambda s: s.completion, "prompt": lambda s: s.prompt.content, "samples": lambda s: s, **SPLIT},
    lists=True,
)
TRL = Signature(
    {
        "prompts": _messages,
        "completions": _answer_message,
        "completion_ids": Sample.policy_tokens,
        "completions_ids": Sample.policy_tokens,  # as TRL's documentation has spelled it
        **SPLIT,
    },
    lists=True,
    always=("prompts", "completions", "completion_ids"),
)
VERL_WORDS: dict[str, Word] = {
    "data_source": _data_source,
    "solution_str": lambda s: s.completion,
    "ground_truth": _ground_truth,
    "extra_info": _extra_info,
}
VERL = Signature({**VERL_WORDS, **SPLIT}, columns=False, dicts=True, needs={"ground_truth": "answer"})
VERL_BATCH = Signature(
    {**{f"{name}s": word for name, word in VERL_WORDS.items()}, **SPLIT},
    lists=True,
    columns=False,
    dicts=True,
    needs={"ground_truths": "answer"},
)

LOGS = ("log_extra", "log_metric")
TRL_GIVEN = ("trainer_state", *LOGS)
"""What TRL's trainer gives to a function besides the samples."""
TRL_MARKS = ("prompts", "completion_ids", "completions_ids", *TRL_GIVEN)
MARKS = {
    "completion": OURS,
    "sample": OURS,
    "completions": GROUP,
    "samples": GROUP,
    **dict.fromkeys(TRL_MARKS, TRL),
    "solution_str": VERL,
    "solution_strs": VERL_BATCH,
}
"""Arguments that decide the signature. `completions` alone is a group's; with `**kwargs` it is TRL's."""


def recognise(use: str, names: Collection[str], *, takes_any: bool, group: bool) -> Signature:
    """Return the signature of a function with these arguments. `takes_any` says that it has `**kwargs`."""
    found = {word: MARKS[word] for word in MARKS if word in names}
    if "completions" in found and (takes_any or TRL in found.values()):
        found["completions"] = TRL
    first = next(iter(found), "completion")
    signature = found.get(first, OURS)
    if other := next((word for word, its in found.items() if its is not signature), None):
        raise ConfigError(
            f"reward '{use}' takes both '{first}' and '{other}', which belong to different signatures: take 'completion' to score "
            "one sample, 'completions' (TRL: with 'prompts' or **kwargs) to score lists, 'solution_str' as in verl."
        )
    if signature is GROUP and not group:
        raise ConfigError(
            f"reward '{use}' takes '{first}', but neither 'prompts' nor **kwargs as TRL's functions do: "
            "write group: true to score whole groups with it, or let it take 'completion' to score one sample."
        )
    if group and not signature.lists:
        lists = "'solution_strs', 'ground_truths', ..." if signature is VERL else "'completions'"
        raise ConfigError(
            f"reward '{use}' scores one sample, so it cannot have group: true: let it take {lists} (lists with an entry per sample) "
            "and return a list, or leave group out."
        )
    return signature


# --- reading results ---


def check_value(name: str, value: Any) -> float | None:
    """Return a finite number or None; raise `BadReward` for anything else."""
    if value is None:
        return None
    if not isinstance(value, int | float) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, int | float):
        raise BadReward(f"reward '{name}' returned {value!r}, a {type(value).__name__}; it must return a number or None")
    if not math.isfinite(value):
        raise BadReward(f"reward '{name}' returned {value}; it must return a finite number or None")
    return float(value)


def read(signature: Signature, name: str, result: Any, count: int) -> list[Outcome | BadReward]:
    """Return what a function's result means for each of the samples that it was called with."""
    if not signature.lists:
        return [_outcome(signature, name, result)]
    values = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise BadReward(
            f"reward '{name}' returned {values!r:.80}, a {type(values).__name__}; it must return a list with a number or None per completion"
        )
    if len(values) != count:
        raise BadReward(f"reward '{name}' returned {len(values)} values for {count} completions; it must return one for each")
    return [_outcome(signature, name, value) for value in values]


def _outcome(signature: Signature, name: str, value: Any) -> Outcome | BadReward:
    try:
        if not (signature.dicts and isinstance(value, Mapping)):
            return Outcome(check_value(name, value))
        if "score" not in value:
            raise BadReward(
                f"reward '{name}' returned a dict without 'score'; it has {', '.join(map(str, value)) or 'nothing'}"
            )
        rest = {str(key): _plain(each) for key, each in value.items() if key != "score" and each is not None}
        parts = {key: float(each) for key, each in rest.items() if isinstance(each, int | float) and math.isfinite(each)}
        return Outcome(check_value(name, value["score"]), parts, {key: each for key, each in rest.items() if key not in parts})
    except BadReward as error:
        return error


def _plain(value: Any) -> Any:
    """A number of numpy or torch as Python's; a number that JSON cannot hold as text."""
    if hasattr(value, "item"):
        with suppress(ValueError, RuntimeError):  # an array of several
            value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
