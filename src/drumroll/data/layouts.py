"""Rows as other libraries and published datasets lay them out, mapped onto ours.

Ours: `prompt` (text or messages), `answer` for rewards, `completion` to imitate, `domain`, `tests` for code, and
`instruction_id_list` with `kwargs` for instructions; every other column stays as it is. A layout is a function from row to
row. What a user writes under `columns` and `tags` comes after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drumroll.config.data import DatasetConfig
from drumroll.data.preference_layouts import preference
from drumroll.data.split import Row
from drumroll.errors import BadRow

Layout = Callable[[Row], Row]
MISSING = object()
SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Our roles by ShareGPT's, where they differ."""


def arrange(name: str, config: DatasetConfig, row: Any) -> Any:
    """A row in our layout. What is no row is passed on, to be refused where its number is known."""
    if not isinstance(row, dict):
        return row
    try:
        row = LAYOUTS[config.layout](row)
        row = row | {new: pick(row, path) for new, path in config.columns.items()}
        if config.layout in ("auto", "trl"):
            row = preference(row)
        if config.tag is not None or config.tags:
            value = str(pick(row, config.tag or "domain"))
            row = row | {"domain": config.tags.get(value, value)}
    except LookupError as error:
        layout = "" if config.layout == "auto" else f" (layout: {config.layout})"
        raise BadRow(f"{name}: a row has no {error.args[0]}{layout}; it has {', '.join(sorted(map(str, row)))}.") from None
    return row


def pick(row: Row, path: str) -> Any:
    """A column, or a part of one by dotted path: through mappings, lists (by number) and JSON texts."""
    value: Any = row.get(path, MISSING)
    if value is not MISSING:
        return value
    value = row
    for part in path.split("."):
        if isinstance(value, str):
            value = _parsed(value)
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.lstrip("-").isdigit() and -len(value) <= int(part) < len(value):
            value = value[int(part)]
        else:
            raise LookupError(f"'{path}'")
    return value


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def renamed(*dropped: str, **columns: str) -> Layout:
    """Columns by new name ← old path; the old ones, and those `dropped`, are left out."""
    gone = {*dropped, *columns.values()}

    def layout(row: Row) -> Row:
        kept = {column: value for column, value in row.items() if column not in gone}
        return kept | {new: pick(row, path) for new, path in columns.items()}

    return layout


# --- libraries ---


def auto(row: Row) -> Row:
    """verl's rows and TRL's are recognised; all others are ours already."""
    graded = row.get("reward_model")
    return verl(row) if isinstance(graded, Mapping) and "ground_truth" in graded else trl(row)


def verl(row: Row) -> Row:
    """`data_source`, `prompt`, `reward_model: {ground_truth}`, `extra_info`."""
    source = str(row.get("data_source") or "").replace("/", "-")
    found = {"answer": pick(row, "reward_model.ground_truth")} | ({"domain": source} if source else {})
    return found | row


def trl(row: Row) -> Row:
    """`prompt`, `messages` or `conversations`; `completion` as text or messages; the answer may be called `solution` or `ground_truth`."""
    found = dict(row)
    if row.get("messages") is None and (said := _conversations(row.get("conversations"))):
        first = [{"role": "system", "content": row["system"]}] if row.get("system") and said[0]["role"] != "system" else []
        found["messages"] = [*first, *said]
    completion = row.get("completion")
    if isinstance(completion, Sequence) and not isinstance(completion, str) and len(completion) == 1:
        turn = completion[0]
        if isinstance(turn, Mapping) and {key for key, value in turn.items() if value is not None} == {"role", "content"}:
            found["completion"] = turn["content"]
    for other in ("solution", "ground_truth"):
        if other in row:
            found.setdefault("answer", row[other])
    return found


def _conversations(turns: Any) -> list[Row]:
    """ShareGPT's turns, with `from` and `value`, as messages; messages as they are."""
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not all(isinstance(turn, Mapping) for turn in turns):
        return []
    if all({"from", "value"} <= turn.keys() for turn in turns):
        return [_turn(turn) for turn in turns]
    return list(turns) if all("role" in turn for turn in turns) else []


def _turn(turn: Mapping[str, Any]) -> Row:
    call = _parsed(turn["value"]) if turn["from"] == "function_call" and isinstance(turn["value"], str) else None
    if isinstance(call, Mapping) and {"name", "arguments"} <= call.keys():
        return {"role": "assistant", "content": None, "tool_calls": [{"function": dict(call)}]}
    return {"role": SHAREGPT.get(turn["from"], turn["from"]), "content": turn["value"]}


# --- datasets ---


def kodcode(row: Row) -> Row:
    """KodCode: `test` is a pytest file that imports what it tests from `solution`."""
    found = renamed("test", prompt="question", answer="solution", completion="solution")(row)
    return found | {"tests": [{"pytest": pick(row, "test")}]}


def rlvr_ifeval(row: Row) -> Row:
    """RLVR-IFeval: `ground_truth` names one function and its arguments; IFEval has instruction ids for them."""
    truth = pick(row, "ground_truth")
    truth = _parsed(truth) if isinstance(truth, str) else truth
    if not isinstance(truth, Mapping) or truth.get("func_name") not in _IFEVAL:
        raise LookupError(f"known function in 'ground_truth' ({truth!r:.80})")
    ids, kwargs = instruction(truth)
    return row | {"prompt": pick(row, "messages"), "instruction_id_list": ids, "kwargs": kwargs}


_IFEVAL: dict[str, tuple[str, dict[str, str]]] = {
    "verify_keywords": ("keywords:existence", {"keywords": "keyword_list"}),
    "verify_keyword_frequency": ("keywords:frequency", {"keyword": "word"}),
    "validate_forbidden_words": ("keywords:forbidden_words", {"forbidden_words": "forbidden_words"}),
    "verify_letter_frequency": ("keywords:letter_frequency", {"letter": "letter"}),
    "validate_response_language": ("language:response_language", {"language": "language"}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"num_paragraphs": "N"}),
    "validate_word_constraint": ("length_constraints:number_words", {}),
    "verify_sentence_constraint": ("length_constraints:number_sentences", {}),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": "N", "nth_paragraph": "i", "first_word": "first_word"},
    ),
    "verify_postscript": ("detectable_content:postscript", {"postscript_marker": "postscript_marker"}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"num_placeholders": "N"}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"num_bullets": "N"}),
    "validate_title": ("detectable_format:title", {}),
    "validate_choice": ("detectable_format:constrained_response", {}),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", {"num_highlights": "N"}),
    "validate_sections": (
        "detectable_format:multiple_sections",
        {"section_spliter": "section_splitter", "num_sections": "N"},
    ),
    "validate_json_format": ("detectable_format:json_format", {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"prompt_to_repeat": "original_prompt"}),
    "validate_two_responses": ("combination:two_responses", {}),
    "validate_uppercase": ("change_case:english_capital", {}),
    "validate_lowercase": ("change_case:english_lowercase", {}),
    "validate_frequency_capital_words": ("change_case:capital_word_frequency", {}),
    "validate_end": ("startend:end_checker", {"end_phrase": "end_phrase"}),
    "validate_quotation": ("startend:quotation", {}),
    "validate_no_commas": ("punctuation:no_comma", {}),
}
"""Function → instruction id, and argument of the instruction ← argument of the function."""

_COUNTED = {
    "verify_keyword_frequency": ("frequency", "relation"),
    "verify_letter_frequency": ("let_frequency", "let_relation"),
    "validate_word_constraint": ("num_words", "relation"),
    "verify_sentence_constraint": ("num_sentences", "relation"),
    "validate_frequency_capital_words": ("capital_frequency", "capital_relation"),
}
"""Functions that compare a count with N → arguments for the number and for the relation."""


def instruction(truth: Mapping[str, Any]) -> tuple[list[str], list[Row]]:
    """Ids and arguments. IFEval knows "at least" and "less than" only, so an exact or rough count is a pair of both."""
    name = str(truth["func_name"])
    id_, arguments = _IFEVAL[name]
    own = {new: truth.get(old) for new, old in arguments.items()}
    if name not in _COUNTED:
        return [id_], [own]
    number, relation = _COUNTED[name]
    limits = _limits(str(truth.get("quantifier") or "exactly"), int(truth.get("N") or 0))
    return [id_] * len(limits), [own | {relation: said, number: n} for said, n in limits]


def _limits(quantifier: str, n: int) -> list[tuple[str, int]]:
    slack = max(1, round(n / 10)) if quantifier == "around" else 0
    lower, upper = ("at least", max(0, n - slack)), ("less than", n + slack + 1)
    return {"at least": [lower], "at most": [upper]}.get(quantifier, [lower, upper])


LAYOUTS: dict[str, Layout] = {
    "auto": auto,
    "plain": lambda row: row,
    "trl": trl,
    "verl": verl,
    "deepmath": renamed(
        "r1_solution_2", "r1_solution_3", prompt="question", answer="final_answer", completion="r1_solution_1"
    ),
    "kodcode": kodcode,
    "multi_subject": renamed(prompt="query", answer="label"),
    "crossthink": renamed(answer="reward_model.ground_truth"),
    "rlvr_ifeval": rlvr_ifeval,
}  # fmt: skip
"""Layouts by name; those from DeepMath-103K on are of the data in the ROLL paper."""
