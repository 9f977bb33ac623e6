"""TicTacToe: a game of two, by self-play. Both sides are played by the policy, in turns of one episode.

The form of a multi-agent episode here: the observation says whose turn it is, `info["player"]` says who has just played, and the
last step has `info["rewards"]`, each player's own (1, 0 or -1). `Step.reward` is that of the player who has just played. Against
a built-in opponent (`opponent: random | perfect`) the policy plays one side and `Step.reward` is its own.
"""

from __future__ import annotations

import functools
import random
import re
from typing import Any

from drumroll.envs import ENVIRONMENTS, Step
from drumroll.envs.episode import Episode, action_in, draw, require

LINES = ("012", "345", "678", "036", "147", "258", "048", "246")
OPPONENTS = ("self", "random", "perfect")
HOW = "Answer with the number of a free square, like <answer>5</answer>."
RULES = "TicTacToe: X and O take squares in turn; three in a row, column or diagonal win. Free squares show their numbers."


def winner(board: str) -> str:
    """X or O, `-` for a draw, or nothing while the game goes on."""
    for a, b, c in LINES:
        if board[int(a)] != "." and board[int(a)] == board[int(b)] == board[int(c)]:
            return board[int(a)]
    return "" if "." in board else "-"


def to_move(board: str) -> str:
    """Whose turn it is; X begins."""
    return "X" if board.count("X") == board.count("O") else "O"


def taken(board: str, square: int) -> str:
    """The board after a move."""
    return board[:square] + to_move(board) + board[square + 1 :]


def free(board: str) -> list[int]:
    """The squares that can be taken."""
    return [square for square, mark in enumerate(board) if mark == "."]


@functools.cache
def value(board: str) -> int:
    """What perfect play comes to for the side to move: 1, 0 or -1."""
    won = winner(board)
    if won:
        return 0 if won == "-" else -1
    return max(-value(taken(board, square)) for square in free(board))


def best(board: str) -> int:
    """A perfect move; one that wins at once goes first."""
    return max(free(board), key=lambda square: (winner(taken(board, square)) != "", -value(taken(board, square))))


@ENVIRONMENTS.register("tic_tac_toe", runs="inline")
class TicTacToe(Episode):
    """`opening` random moves make the instance; it is never lost for the side to move. `opponent: self | random | perfect`.

    Success: by self-play, a game played to its end; against random, a win; against perfect, no loss.
    """

    name = "tic_tac_toe"

    def __init__(
        self, opponent: str = "self", opening: int = 2, style: str = "words", max_turns: int = 15, split: str = "train"
    ) -> None:
        super().__init__(style, split, max_turns)
        require(self.name, opponent in OPPONENTS, f"opponent '{opponent}' does not exist; choose one of {', '.join(OPPONENTS)}")
        require(self.name, 1 <= opening <= 4, f"opening must be between 1 and 4 moves, got {opening}")
        self.opponent, self.opening = opponent, opening
        self._board = ""

    def reset(self, seed: int, instance: int | None = None, split: str | None = None, **row: Any) -> str:
        """Begin after the opening; the policy has the next move."""
        self.begin(seed)
        self._board = draw(self.name, seed if instance is None else instance, split or self.split, self._opened, str)
        return self._shown("ttt\n" if self.style == "compact" else f"{RULES} {HOW}\n\n")

    def _opened(self, rng: random.Random) -> str | None:
        board = "." * 9
        for _ in range(self.opening):
            board = taken(board, rng.choice(free(board)))
        return board if value(board) >= 0 else None

    def step(self, text: str) -> Step:
        """Take a square for the side to move."""
        player = to_move(self._board)
        given = re.fullmatch(r"[1-9]", action_in(text))
        if not given or self._board[int(given[0]) - 1] != ".":
            said = "\n?" if self.style == "compact" else f"That is not the number of a free square. {HOW}\n\n"
            told = {"malformed": not given, "player": player}
            return self.answered(self._shown(said), effective=False, state=self._board, **told)
        self._board = taken(self._board, int(given[0]) - 1)
        if self.opponent != "self" and not winner(self._board):
            reply = best(self._board) if self.opponent == "perfect" else self.rng.choice(free(self._board))
            self._board = taken(self._board, reply)
        return self._outcome(player)

    def _outcome(self, player: str) -> Step:
        won = winner(self._board)
        shown = self._shown("\n" if self.style == "compact" else "")
        if not won:
            return self.answered(shown, effective=True, state=self._board, player=player)
        rewards = {mark: 0.0 if won == "-" else 1.0 if won == mark else -1.0 for mark in "XO"}
        success = self.opponent == "self" or rewards[player] >= (1 if self.opponent == "random" else 0)
        told = {"success": success, "player": player, "rewards": rewards}
        return self.answered(shown, effective=True, state=self._board, reward=rewards[player], over=True, **told)

    def oracle(self) -> str:
        """A perfect move."""
        return self.say(str(best(self._board) + 1))

    def random_action(self) -> str:
        """Any free square."""
        return self.say(str(self.rng.choice(free(self._board)) + 1))

    def flawed(self) -> str:
        """The first free square."""
        return self.say(str(free(self._board)[0] + 1))

    def _shown(self, said: str) -> str:
        """The board and whose turn it is."""
        won = winner(self._board)
        if self.style == "compact":
            marks, end = self._board, f"{won or to_move(self._board)}\n"
        else:
            marks = "".join(str(i + 1) if mark == "." else mark for i, mark in enumerate(self._board))
            end = "A draw." if won == "-" else f"{won} has won." if won else f"You play {to_move(self._board)}."
        return f"{said}{marks[:3]}\n{marks[3:6]}\n{marks[6:]}\n{end}"
