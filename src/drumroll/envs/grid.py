"""Moves on a grid: their names, their directions, and reading them from text."""

from __future__ import annotations

import re

from drumroll.envs.episode import action_in

MOVES = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
NAMES = {"U": "Up", "D": "Down", "L": "Left", "R": "Right"}
LETTERS = {name.lower(): letter for letter, name in NAMES.items()}
BETWEEN = re.compile(r"[\s,;|.>-]+")


def read_moves(text: str, most: int) -> list[str]:
    """The moves in a turn: words (`left, up`), letters (`l`) or a run of capitals (`LLU`). Empty if malformed or too many."""
    moves: list[str] = []
    for piece in BETWEEN.split(action_in(text)):
        if piece.lower() in LETTERS:
            moves.append(LETTERS[piece.lower()])
        elif (piece.isupper() or len(piece) == 1) and set(piece.upper()) <= MOVES.keys():
            moves += piece.upper()
        elif piece:
            return []
    return moves if len(moves) <= most else []


def how_to_move(most: int) -> str:
    """The sentence that tells a policy how to write its moves."""
    example = "<answer>Right</answer>" if most == 1 else "<answer>Right, Up</answer>"
    return f"Answer with {'one move' if most == 1 else f'1 to {most} moves'} out of Up, Down, Left, Right, like {example}."
