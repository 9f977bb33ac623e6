"""Toy tools: functions, and classes as TRL has them."""

import random
from typing import Literal


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b (int): The second
    """
    return a + b


async def find(words: list[str], where: Literal["title", "text"] = "title") -> dict:
    """Look for words.

    :param words: what to look for
    """
    return {"hits": len(words), "where": where}


def divide(a: float, b: float) -> float:
    """Divide."""
    return a / b


def long(count: int) -> str:
    """Say much."""
    return "x" * count


def loose(*numbers: int) -> int:
    """Cannot be called by name."""
    return sum(numbers)


def half(answer: str, **row: object) -> float:
    """A score of one's own."""
    return 0.5 if answer else 0.0


class Vault:
    """Open a vault: turn the dial to its number. Rewarded for coming near, and for opening it."""

    def __init__(self, top: int = 5):
        self.top = top
        self.done = False

    def reset(self, level: int = 1, **row) -> str:
        self.number, self.dial, self.open = random.randint(1, self.top), 0, False
        return f" The dial goes up to {self.top}, level {level}."

    def turn(self, by: int) -> str:
        """Turn the dial.

        Args:
            by: How far.
        """
        self.dial = max(0, min(self.top, self.dial + by))
        return f"the dial is at {self.dial}"

    async def push(self) -> str:
        """Push the door."""
        self.open = self.done = self.dial == self.number
        return "it opens" if self.open else "it is locked"

    def get_reward(self) -> float:
        return 1.0 if self.open else 0.1 * (self.dial == self.number)

    def _secret(self) -> int:
        return self.number


class NoReset:
    """Lacks what it needs."""

    def look(self) -> str:
        """Look."""
        return ""


def sums(split, seed):
    """Rows `3+4=` with their answer."""
    rng = random.Random(f"{split}/{seed}")
    while True:
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        yield {"prompt": f"{a}+{b}=", "answer": str(a + b)}
