"""The scorers of reasoning-gym as a reward.

Some scorers `eval` the answer, or parts of the row, in this process (sympy's `parse_expr` does too). `EVALUATED` lists them; their texts
reach `eval` only if they are data or arithmetic.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from drumroll.rewards import REWARDS

TAGGED = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
NAMED = re.compile(r"answer(?: is)?\s*[:=]?\s+(.+?)\.?\s*$", re.IGNORECASE)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
FUNCTIONS = re.compile(r"a?(?:sin|cos|tan)h?|cot|sec|csc|exp|log|ln|sqrt|[aA]bs|Integral")
"""The only functions that a formula may call."""
DATA = (ast.Constant, ast.List, ast.Tuple, ast.Name, ast.UnaryOp, ast.unaryop, ast.expr_context)

Entry = dict[str, Any]


def data(text: Any) -> bool:
    """Whether `eval` of the text calls nothing: it is no Python, or consists of constants, names and lists."""
    try:
        tree = ast.parse(text.lstrip(" \t"), mode="eval")
    except Exception:  # eval fails alike
        return True
    return all(isinstance(node, DATA) for node in ast.walk(tree.body))


def formula(text: Any) -> bool:
    """Whether the text is arithmetic on numbers and names: no strings, attributes or subscripts, calls of `FUNCTIONS` only."""
    try:
        return text.isascii() and all(_arithmetic(node) for node in ast.walk(ast.parse(text.strip(), mode="eval").body))
    except Exception:
        return False


def _arithmetic(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=value):
            return type(value) in (int, float, complex)
        case ast.Name(id=name):
            return not name.startswith("_")
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return FUNCTIONS.fullmatch(name) is not None
    return isinstance(node, (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context))


EVALUATED: dict[str, tuple[Callable[[Any], bool], Callable[[str, Entry], tuple[Any, ...]]]] = {
    "binary_matrix": (data, lambda text, entry: (text,)),
    "bitwise_arithmetic": (formula, lambda text, entry: (entry["metadata"]["problem"],)),
    "countdown": (formula, lambda text, entry: (text,)),
    "intermediate_integration": (formula, lambda text, entry: (text, entry["metadata"]["integrand"])),
    "n_queens": (data, lambda text, entry: (text,)),
    "number_sorting": (data, lambda text, entry: (entry["answer"],)),
    "polynomial_multiplication": (formula, lambda text, entry: (text, entry["answer"])),
    "puzzle24": (formula, lambda text, entry: (text,)),
    "simple_integration": (formula, lambda text, entry: (text, entry["metadata"]["integrand"])),
    "spiral_matrix": (data, lambda text, entry: (text,)),
    "string_insertion": (data, lambda text, entry: (text,)),
}
"""Tasks whose scorers evaluate texts as Python: the check that each text must pass, and the texts."""


@REWARDS.register("reasoning_gym", isolated=True, requires=("reasoning_gym", "reasoning-gym"))
def reasoning_gym(
    completion: str, answer: object, task: str, metadata: Any = None, prompt: Any = None, partial: bool = False
) -> float:
    """1 when the task's own scorer gives full marks to what is extracted from the completion; `partial` keeps lower marks.

    What the scorer cannot read scores 0.
    """
    entry = {"question": prompt, "answer": answer, "metadata": metadata}
    best = max((_score(task, text, entry) for text in extracted(completion, str(answer))), default=0.0)
    return best if partial else float(best >= 1.0)


def extracted(completion: str, answer: str) -> list[str]:
    """What to score: the last marked answer; without one the whole text, and the last number if a number is asked for."""
    for mark in (TAGGED, BOXED):
        if found := mark.findall(completion):
            return [found[-1].strip()]
    text = completion.strip()
    named = NAMED.search(text)
    candidates = [text, *([named[1]] if named else [])]
    if NUMBER.fullmatch(answer.strip()):
        candidates += NUMBER.findall(text.replace(",", ""))[-1:]
    return [candidate for candidate in candidates if candidate]


def _score(task: str, text: str, entry: dict[str, Any]) -> float:
    try:
        if task in EVALUATED:
            harmless, texts = EVALUATED[task]
            if not all(harmless(each) for each in texts(text, entry)):
                return 0.0
        return min(1.0, max(0.0, float(_scorer(task)(text, entry))))
    except Exception:  # its scorers parse, evaluate and index what a model wrote
        return 0.0


@cache
def _scorer(task: str) -> Any:
    from reasoning_gym.factory import get_score_answer_fn

    return get_score_answer_fn(task)
