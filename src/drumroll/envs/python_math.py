"""Mathematics with a Python tool: the policy may run code, reads what it printed, and answers with a number.

Where code runs is the caller's choice: `run` is a function from code to output, or its name `module:function`. It should confine
the code; what it raises is a failure of the episode, not an answer to the policy.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

from drumroll.envs import ENVIRONMENTS, Step
from drumroll.envs.episode import THOUGHT, Episode, action_in, draw, require
from drumroll.registry import import_path
from drumroll.rewards.text import NUMBER, number

CODE = re.compile(r"<python>(.*?)(?:</python>|\Z)|```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
ANSWERED = re.compile(r"<answer>", re.IGNORECASE)
HOW = "Write code between <python> and </python> to run it and read what it prints, or give the result as <answer>number</answer>."


@ENVIRONMENTS.register("python_math", runs="thread")
class PythonMath(Episode):
    """Questions come from the row (`question`, `answer`), or are made: `terms` numbers of up to `digits` digits."""

    name = "python_math"

    def __init__(
        self,
        run: Callable[[str], str] | str,
        terms: int = 3,
        digits: int = 4,
        max_output: int = 1000,
        style: str = "words",
        max_turns: int = 5,
        split: str = "train",
    ) -> None:
        super().__init__(style, split, max_turns)
        require(self.name, terms >= 2 and digits >= 1, f"terms must be at least 2 and digits 1, got {terms} and {digits}")
        self.run: Callable[[str], str] = import_path(run, "environment python_math.run") if isinstance(run, str) else run
        self.terms, self.digits, self.max_output = terms, digits, max_output
        self._question, self._answer, self._printed = "", "", ""

    def reset(
        self,
        seed: int,
        instance: int | None = None,
        split: str | None = None,
        question: str | None = None,
        answer: object = None,
        **row: Any,
    ) -> str:
        """Begin with the row's question, or with the one that the seed names."""
        self.begin(seed)
        if question is None:
            number = seed if instance is None else instance
            question = draw(self.name, number, split or self.split, self._made, str)
            answer = self._value(question)
        self._question, self._answer, self._printed = question, str(answer), ""
        return f"math\n{question}\n" if self.style == "compact" else f"{question}\n{HOW}"

    def step(self, text: str) -> Step:
        """Run code, or take the answer. Code counts only when no answer is given with it."""
        text = THOUGHT.sub("", text)
        code = CODE.search(text)
        if code and not ANSWERED.search(text):
            output = self.run(code[1] if code[1] is not None else code[2]).strip()
            self._printed = output
            shown = output if len(output) <= self.max_output else f"{output[: self.max_output]}..."
            said = f"\n{shown}\n" if self.style == "compact" else f"Output:\n{shown or '(nothing was printed)'}"
            return self.answered(said, effective=True, state=f"{self._question}|{output}")
        given = action_in(text)
        if not NUMBER.fullmatch(given):
            said = "\n?number\n" if self.style == "compact" else f"That is neither code nor a number. {HOW}"
            return self.unread(said, f"{self._question}|{self._printed}")
        right = bool(number(given, self._answer))
        said = "Right." if right else f"Wrong: it is {self._answer}."
        return self.answered(said, effective=True, state=f"{self._question}|{given}", reward=right, over=True, success=right)

    def oracle(self) -> str:
        """Compute, then answer what was printed. Of a row's own question only the answer is known."""
        if self._printed or "=" not in self._question:
            return f"<answer>{self._answer}</answer>"
        return f"<python>print({self._question.partition('=')[0].strip()})</python>"

    def random_action(self) -> str:
        """Any number, or some code."""
        guess = self.rng.randint(0, 10**self.digits)
        return f"<python>print({guess})</python>" if self.rng.random() < 0.5 else f"<answer>{guess}</answer>"

    def _made(self, rng: random.Random) -> str:
        numbers = [rng.randint(0, 10**self.digits - 1) for _ in range(self.terms)]
        return "".join(f"{n} {rng.choice('+-*')} " for n in numbers[:-1]) + f"{numbers[-1]} = ?"

    @staticmethod
    def _value(question: str) -> int:
        """The value of a made question: products first, then sums from left to right."""
        total = 0
        for part in question.partition("=")[0].replace("- ", "+ -1 * ").split("+"):
            product = 1
            for factor in part.split("*"):
                product *= int(factor)
            total += product
        return total
