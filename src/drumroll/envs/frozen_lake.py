"""FrozenLake: cross the ice to the goal without falling into a hole; gymnasium's dynamics on maps of our own.

A map is solvable by construction: a path over a random waypoint is laid first, holes are made beside it.
"""

from __future__ import annotations

import functools
import random
from typing import Any

from drumroll.envs import ENVIRONMENTS, Step
from drumroll.envs.episode import Episode, draw, require
from drumroll.envs.grid import NAMES, how_to_move, read_moves
from drumroll.errors import MissingExtra

Cell = tuple[int, int]
GYM_MOVES = "LDRU"
DISCOUNT = 0.99

RULES = """You cross a frozen lake, seen from above: P is you, _ is safe ice, O a hole, G the goal. Reach G without falling into a hole."""
SLIPPERY = " The ice is slippery: you may slide to the left or right of where you meant to go."


@functools.lru_cache(maxsize=4096)
def lake(size: int, holes: float, corners: bool, instance: int, split: str) -> tuple[str, ...]:
    """A map in gymnasium's letters: S start, G goal, F ice, H hole."""

    def make(rng: random.Random) -> tuple[str, ...]:
        start, goal = ((0, 0), (size - 1, size - 1)) if corners else _ends(size, rng)
        waypoint = (rng.randrange(size), rng.randrange(size))
        path = {start, goal, *_path(start, waypoint, rng), *_path(waypoint, goal, rng)}
        letters = dict.fromkeys(path, "F") | {start: "S", goal: "G"}
        return tuple(
            "".join(letters.get((r, c)) or ("H" if rng.random() < holes else "F") for c in range(size)) for r in range(size)
        )

    return draw("frozen_lake", instance, split, make, "\n".join)


def _ends(size: int, rng: random.Random) -> tuple[Cell, Cell]:
    """A start and a goal at least `size` moves apart."""
    while True:
        start, goal = [(rng.randrange(size), rng.randrange(size)) for _ in range(2)]
        if abs(start[0] - goal[0]) + abs(start[1] - goal[1]) >= size:
            return start, goal


def _path(start: Cell, end: Cell, rng: random.Random) -> list[Cell]:
    """A random shortest way between two cells."""
    rows, columns = end[0] - start[0], end[1] - start[1]
    steps = [(1 if rows > 0 else -1, 0)] * abs(rows) + [(0, 1 if columns > 0 else -1)] * abs(columns)
    rng.shuffle(steps)
    cells = [start]
    for down, right in steps:
        cells.append((cells[-1][0] + down, cells[-1][1] + right))
    return cells


@ENVIRONMENTS.register("frozen_lake", runs="inline")
class FrozenLake(Episode):
    """`size`, `slippery` with the chance `sure` of going where meant, share of `holes`, start and goal in the `corners` or anywhere."""

    name = "frozen_lake"

    def __init__(
        self,
        size: int = 4,
        slippery: bool = False,
        sure: float = 1 / 3,
        holes: float = 0.35,
        corners: bool = False,
        style: str = "words",
        max_turns: int | None = None,
        split: str = "train",
    ) -> None:
        super().__init__(style, split, 4 * size if max_turns is None else max_turns)
        require(self.name, size >= 2, f"size must be at least 2, got {size}")
        require(self.name, 0 <= holes <= 1 and 0 < sure <= 1, "holes and sure are shares between 0 and 1")
        self.size, self.slippery, self.sure, self.holes, self.corners = size, slippery, sure, holes, corners
        self._env: Any = None
        self._map: tuple[str, ...] = ()
        self._policy: list[int] = []

    def reset(self, seed: int, instance: int | None = None, split: str | None = None, **row: Any) -> str:
        """Begin on the row's map, or on the map that the seed names."""
        try:
            from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
        except ImportError:
            raise MissingExtra("The environment frozen_lake", "gym") from None
        self.begin(seed)
        self._map = lake(self.size, self.holes, self.corners, seed if instance is None else instance, split or self.split)
        self._env = FrozenLakeEnv(desc=list(self._map), is_slippery=self.slippery, success_rate=self.sure)
        self._env.reset(seed=seed)
        self._policy = []
        if self.style == "compact":
            return f"lake\n{self._board()}\n"
        return f"{RULES}{SLIPPERY if self.slippery else ''}\n{how_to_move(1)}\n\n{self._board()}"

    def step(self, text: str) -> Step:
        """One move."""
        moves = read_moves(text, 1)
        if not moves:
            said = "?UDLR" if self.style == "compact" else f"That is no move. {how_to_move(1)}"
            return self.unread(self._shown(said), self._board())
        before = self._env.s
        _, reward, over, _, _ = self._env.step(GYM_MOVES.index(moves[0]))
        success = self._letter() == "G"
        if success:
            said = "You reached the goal."
        elif over:
            said = "You fell into a hole."
        elif self._env.s == before:
            said = "You did not move."
        else:
            said = f"You meant to go {NAMES[moves[0]].lower()}." if self.slippery else f"You went {NAMES[moves[0]].lower()}."
        observation = self._shown("" if self.style == "compact" else said)
        return self.answered(
            observation, effective=self._env.s != before, state=self._board(), reward=float(reward), over=over, success=success
        )

    def oracle(self) -> str:
        """The move of highest value, by value iteration; without slips, a shortest way."""
        return self._said(self._best())

    def random_action(self) -> str:
        """Any direction."""
        return self._said(self.rng.choice(GYM_MOVES))

    def flawed(self) -> str:
        """The right move with left and right confused."""
        return self._said({"L": "R", "R": "L"}.get(self._best(), self._best()))

    def _best(self) -> str:
        self._policy = self._policy or self._solved()
        return GYM_MOVES[self._policy[self._env.s]]

    def _solved(self) -> list[int]:
        """The best move of every cell. Later moves are worth less, so short ways are better."""
        chances: Any = self._env.P
        values = [0.0] * self.size**2
        while True:
            worth = [
                [sum(p * (r + DISCOUNT * values[to] * (not end)) for p, to, r, end in chances[cell][move]) for move in range(4)]
                for cell in range(self.size**2)
            ]
            best = [max(of) for of in worth]
            if max(abs(a - b) for a, b in zip(best, values, strict=True)) < 1e-9:
                return [of.index(max(of)) for of in worth]
            values = best

    def _letter(self) -> str:
        return "".join(self._map)[self._env.s]

    def _board(self) -> str:
        """The map with the player on it: P, or X in a hole, or * at the goal."""
        cells = list("".join(self._map).replace("S", "_").replace("F", "_").replace("H", "O"))
        cells[self._env.s] = {"H": "X", "G": "*"}.get(self._letter(), "P")
        return "\n".join("".join(cells[i : i + self.size]) for i in range(0, self.size**2, self.size))

    def _shown(self, said: str) -> str:
        said = f"{said}\n" if said else ""
        return f"\n{said}{self._board()}\n" if self.style == "compact" else f"{said}{self._board()}"

    def _said(self, letter: str) -> str:
        return self.say(letter if self.style == "compact" else NAMES[letter])
