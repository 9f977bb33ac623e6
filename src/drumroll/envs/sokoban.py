"""Sokoban: push every box onto a goal. Boxes cannot be pulled, so a wrong push may be final.

A level is solvable by construction: boxes start on their goals and are pulled away at random; the way back is a solution.
A breadth-first search then confirms it and measures the shortest one.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from dataclasses import dataclass
from typing import Any

from drumroll.envs import ENVIRONMENTS, Step
from drumroll.envs.episode import Episode, draw, require
from drumroll.envs.grid import MOVES, NAMES, how_to_move, read_moves

SYMBOLS = "#_OX*PS"
PULLS = 60

Boxes = frozenset[int]
Position = tuple[int, Boxes]


@dataclass(frozen=True)
class Level:
    """A room with walls all round; a square is its place in reading order."""

    size: int
    walls: frozenset[int]
    goals: Boxes
    boxes: Boxes
    player: int

    @property
    def steps(self) -> dict[str, int]:
        """By how much each move changes a square."""
        return {move: down * self.size + right for move, (down, right) in MOVES.items()}

    def moved(self, player: int, boxes: Boxes, step: int) -> Position | None:
        """Where a move leads; None against a wall or a box that does not give way."""
        to = player + step
        if to in self.walls:
            return None
        if to not in boxes:
            return to, boxes
        beyond = to + step
        if beyond in self.walls or beyond in boxes:
            return None
        return to, boxes - {to} | {beyond}

    def alive(self) -> set[int]:
        """The squares from which a box could come to a goal: pulls from the goals reach them."""
        seen, todo = set(self.goals), list(self.goals)
        while todo:
            at = todo.pop()
            for step in self.steps.values():
                source = at - step
                if source not in self.walls and source - step not in self.walls and source not in seen:
                    seen.add(source)
                    todo.append(source)
        return seen

    def solve(self, player: int, boxes: Boxes) -> str | None:
        """The shortest solution from a position as letters, or None."""
        alive, steps = self.alive(), self.steps
        start = (player, boxes)
        came: dict[Position, tuple[Position, str] | None] = {start: None}
        todo = deque([start])
        while todo:
            at = todo.popleft()
            if at[1] == self.goals:
                return _way(came, at)
            for letter, step in steps.items():
                to = self.moved(*at, step)
                if to is not None and to not in came and (to[1] is at[1] or to[1] <= alive):
                    came[to] = (at, letter)
                    todo.append(to)
        return None

    def text(self, player: int, boxes: Boxes, symbols: str = SYMBOLS) -> str:
        """The room as lines; symbols are of wall, floor, goal, box, box on goal, player, player on goal."""
        wall, floor, goal, box, done, here, here_on_goal = symbols

        def symbol(at: int) -> str:
            if at in self.walls:
                return wall
            if at == player:
                return here_on_goal if at in self.goals else here
            if at in boxes:
                return done if at in self.goals else box
            return goal if at in self.goals else floor

        return "\n".join("".join(symbol(r * self.size + c) for c in range(self.size)) for r in range(self.size))


def _way(came: dict[Position, tuple[Position, str] | None], at: Position) -> str:
    letters: list[str] = []
    while (back := came[at]) is not None:
        at, letter = back
        letters.append(letter)
    return "".join(reversed(letters))


@functools.lru_cache(maxsize=1024)
def level(size: int, boxes: int, walls: float, shortest: int, longest: int, instance: int, split: str) -> Level:
    """A level whose shortest solution has between `shortest` and `longest` moves."""

    def make(rng: random.Random) -> Level | None:
        made = _pulled(size, boxes, walls, rng)
        if made.boxes & made.goals:
            return None
        solution = made.solve(made.player, made.boxes)
        assert solution is not None, "a level made by pulls has no solution"
        return made if shortest <= len(solution) <= longest else None

    return draw("sokoban", instance, split, make, lambda made: made.text(made.player, made.boxes))


def _pulled(size: int, boxes: int, share: float, rng: random.Random) -> Level:
    """A random room with its boxes pulled off their goals by a random walk."""
    squares = range(size * size)
    border = {s for s in squares if s // size in (0, size - 1) or s % size in (0, size - 1)}
    walls = border | {s for s in squares if s not in border and rng.random() < share}
    free = [s for s in squares if s not in walls]
    if len(free) < boxes + 1:
        return _pulled(size, boxes, 0.0, rng)
    *goals, player = rng.sample(free, boxes + 1)
    room = Level(size, frozenset(walls), frozenset(goals), frozenset(goals), player)
    at, steps = set(goals), list(room.steps.values())
    for _ in range(PULLS * boxes):
        step = rng.choice(steps)
        if player + step in walls or player + step in at:
            continue
        if player - step in at and rng.random() < 0.8:
            at.remove(player - step)
            at.add(player)
        player += step
    return Level(size, room.walls, room.goals, frozenset(at), player)


RULES = """You are in a store room, seen from above, and push boxes: {here} is you, {box} a box, {goal} a goal, {done} a box on a goal, {there} you on a goal, {wall} a wall, {floor} free floor. Walk into a box to push it; two in a row do not move, and boxes cannot be pulled. Push every box onto a goal."""


@ENVIRONMENTS.register("sokoban", runs="thread")
class Sokoban(Episode):
    """`size` (walls included), `boxes`, share of inner `walls`, `shortest` solution, `moves` allowed in a turn, `symbols`."""

    name = "sokoban"

    def __init__(
        self,
        size: int = 6,
        boxes: int = 1,
        walls: float = 0.12,
        shortest: int = 4,
        moves: int = 1,
        symbols: str = SYMBOLS,
        box_reward: float = 0.0,
        move_cost: float = 0.0,
        style: str = "words",
        max_turns: int = 20,
        split: str = "train",
    ) -> None:
        super().__init__(style, split, max_turns)
        require(self.name, size >= 5 and boxes >= 1, f"size must be at least 5 and boxes at least 1, got {size} and {boxes}")
        require(self.name, moves >= 1, f"moves must be at least 1, got {moves}")
        distinct = len(symbols) == len(SYMBOLS) == len(set(symbols)) and symbols.isprintable()
        require(self.name, distinct, f"symbols must be {len(SYMBOLS)} different characters like {SYMBOLS}, got '{symbols}'")
        self.size, self.boxes, self.walls, self.shortest, self.moves = size, boxes, walls, shortest, moves
        self.symbols, self.box_reward, self.move_cost = symbols, box_reward, move_cost
        self._level: Level
        self._at: Position
        self._plan: dict[Position, str] = {}

    def reset(self, seed: int, instance: int | None = None, split: str | None = None, **row: Any) -> str:
        """Begin in the row's level, or in the one that the seed names."""
        self.begin(seed)
        number = seed if instance is None else instance
        self._level = level(self.size, self.boxes, self.walls, self.shortest, self.max_turns, number, split or self.split)
        self._at = (self._level.player, self._level.boxes)
        self._plan = {}
        if self.style == "compact":
            return f"push\n{self._board()}\n"
        names = dict(zip(("wall", "floor", "goal", "box", "done", "here", "there"), self.symbols, strict=True))
        return f"{RULES.format(**names)}\n{how_to_move(self.moves)}\n\n{self._board()}"

    def step(self, text: str) -> Step:
        """One move or several, in order, until the room is solved."""
        moves = read_moves(text, self.moves)
        if not moves:
            said = "?UDLR" if self.style == "compact" else f"That is no move. {how_to_move(self.moves)}"
            return self.unread(self._shown(said), self._state())
        before = self._at
        steps = self._level.steps
        made = 0
        for move in moves:
            self._at = self._level.moved(*self._at, steps[move]) or self._at
            made += 1
            if self._at[1] == self._level.goals:
                break
        solved = self._at[1] == self._level.goals
        gained = len(self._at[1] & self._level.goals) - len(before[1] & self._level.goals)
        reward = float(solved) + self.box_reward * gained - self.move_cost * made
        said = "Solved." if solved else "Nothing moved." if self._at == before else f"Moves made: {made}."
        observation = self._shown("" if self.style == "compact" else said)
        changed = self._at != before
        return self.answered(observation, effective=changed, state=self._state(), reward=reward, over=solved, success=solved)

    def oracle(self) -> str:
        """The next moves of a shortest solution; any move when there is none left."""
        if self._at not in self._plan:
            at, solution = self._at, self._level.solve(*self._at) or "U"
            for done, letter in enumerate(solution):
                self._plan[at] = solution[done:]
                at = self._level.moved(*at, self._level.steps[letter]) or at
        return self._said(self._plan[self._at][: self.moves])

    def random_action(self) -> str:
        """Any one move."""
        return self._said(self.rng.choice("UDLR"))

    def flawed(self) -> str:
        """Straight to the nearest box, sideways first, and on in that direction."""
        player, boxes = self._at
        row, column = divmod(player, self.size)
        away = [(abs(b // self.size - row) + abs(b % self.size - column), b) for b in boxes - self._level.goals]
        box_row, box_column = divmod(min(away)[1], self.size)
        if box_column != column:
            return self._said("R" if box_column > column else "L")
        return self._said("D" if box_row > row else "U")

    def _board(self) -> str:
        """The room; compact without its outer wall, which is always there."""
        room = self._level.text(*self._at, self.symbols)
        return "\n".join(row[1:-1] for row in room.split("\n")[1:-1]) if self.style == "compact" else room

    def _state(self) -> str:
        return self._level.text(*self._at)

    def _shown(self, said: str) -> str:
        said = f"{said}\n" if said else ""
        return f"\n{said}{self._board()}\n" if self.style == "compact" else f"{said}{self._board()}"

    def _said(self, letters: str) -> str:
        return self.say(letters if self.style == "compact" else ", ".join(NAMES[letter] for letter in letters))
