"""`textarena:TicTacToe-v0`: the games of textarena, for one player, against opponents, or by self-play.

Each observation holds only what is new to the player since its last turn; the conversation is the memory. In self-play
both sides are turns of one episode, as in our own `tic_tac_toe`.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any, cast

import textarena
from textarena.envs.registration import ENV_REGISTRY

from drumroll.envs import Step
from drumroll.envs.adapters.chance import NUMPY_SEEDS, Chance
from drumroll.errors import ConfigError, did_you_mean
from drumroll.registry import import_path

MOST_PLAYERS = 15
TRIES = 60
MOVE = re.compile(r"\[([^\[\]\n]{1,24})\]")
Player = Callable[[str], str]


class TextArena:
    """A game of textarena.

    `opponent`: `guess` (tries moves that look like those it was shown), `self` (the policy plays all sides), or your
    own `module:function` from observation to action. `seat`: the policy's player number. `players`: the number of
    players, if the game leaves it open. Other settings are passed to the game.
    """

    def __init__(self, name: str, opponent: str = "guess", seat: int = 0, players: int | None = None, **settings: Any) -> None:
        if name not in ENV_REGISTRY:
            raise ConfigError(f"environment textarena:{name} does not exist.{did_you_mean(name, ENV_REGISTRY)}")
        if opponent not in ("guess", "self") and ":" not in opponent:
            raise ConfigError(
                f"environment textarena:{name}: opponent '{opponent}' does not exist; choose guess, self, or your own as module:function."
            )
        self.name, self.opponent, self.seat, self.players, self.settings = name, opponent, seat, players, settings
        self.own = cast(Player, import_path(opponent, "opponent")) if ":" in opponent else None

    def reset(self, seed: int, **row: Any) -> str:
        """Start the game, and let the players before the policy move."""
        self.chance, self.rng = Chance(seed), random.Random(f"moves/{seed}")
        self.seen: dict[int, list[str]] = {}
        self.over = False
        with self.chance.own():
            self.env = textarena.make(self.name, **self.settings)
            self.base: Any = self.env
            while isinstance(self.base, textarena.Wrapper):
                self.base = self.base.env
            self._begin(seed % NUMPY_SEEDS)
            self._others()
            return self._look()

    def step(self, text: str) -> Step:
        """Play the policy's move, and the other players' moves up to its next turn."""
        player = self.base.state.current_player_id
        with self.chance.own():
            self._move(text)
            invalid = self._invalid(self.base, player)
            self._others()
            info: dict[str, Any] = {"effective": not invalid, "player": player}
            if not self.over:
                return Step(self._look(), info=info)
            rewards, facts = self.base.close()
        rewards = {place: float(reward) for place, reward in (rewards or {}).items()}
        reward = rewards.get(player, 0.0)
        info["success"] = not invalid if self.opponent == "self" else reward >= 1 if len(facts) == 1 else reward > 0
        return Step(
            str(facts[player].get("reason") or "The game is over."),
            reward,
            True,
            info=info | {"rewards": rewards, "malformed": invalid and bool(facts[player].get("invalid_move"))},
        )

    def random_action(self) -> str:
        """Return a move that looks like those shown; a legal one if it finds one."""
        with self.chance.own():
            return self._guess(self.base.state.current_player_id)

    def close(self) -> None:
        """Free the episode's resources; it holds none."""

    def _begin(self, seed: int) -> None:
        """Start the game with the first number of players that it accepts; games reject others by an assertion."""
        reason = ""
        for players in [self.players] if self.players else range(1, MOST_PLAYERS + 1):
            try:
                self.env.reset(num_players=players, seed=seed)
            except (AssertionError, ValueError) as error:
                reason = str(error)
            else:
                if self.seat >= players:
                    raise ConfigError(
                        f"environment textarena:{self.name} has {players} players; seat {self.seat} is none of them."
                    )
                return
        raise ConfigError(f"environment textarena:{self.name} cannot begin: {reason}.")

    def _move(self, action: str) -> None:
        self.over, _ = self.env.step(action=action)

    def _others(self) -> None:
        """Let the opponents move until it is the policy's turn."""
        while not self.over and self.opponent != "self" and (player := self.base.state.current_player_id) != self.seat:
            shown = self._look()
            self._move(self.own(shown) if self.own else self._guess(player))

    def _look(self) -> str:
        """Return what is new to the player whose turn it is, without its own messages."""
        player, messages = self.base.get_observation()
        own, names = textarena.ObservationType.PLAYER_ACTION, self.base.state.role_mapping
        new = [
            message if sender == textarena.GAME_ID else f"[{names.get(sender, sender)}] {message}"
            for sender, message, kind in messages
            if not (sender == player and kind is own)
        ]
        self.seen.setdefault(player, []).extend(new)
        return "\n".join(new).strip("\n")

    def _guess(self, player: int) -> str:
        """Return the first candidate move that a copy of the game accepts, else any candidate."""
        moves = list(self._moves(player))
        for move in moves:
            trial = copy.deepcopy(self.env)
            base: Any = trial
            while isinstance(base, textarena.Wrapper):
                base = base.env
            trial.step(action=move)
            if not self._invalid(base, player):
                return move
        return moves[0] if moves else ""

    def _moves(self, player: int) -> list[str]:
        """Return bracketed words that the player saw, newest text first, then variants with other numbers and letters."""
        seen = self.seen.get(player, [])
        newest = _shuffled(MOVE.findall(seen[-1]) if seen else [], self.rng)
        shapes = [word for text in seen for word in MOVE.findall(text)]
        others = [self._varied(self.rng.choice(shapes)) for _ in range(TRIES)] if shapes else []
        return [f"[{word}]" for word in dict.fromkeys([*newest, *others])][:TRIES]

    def _varied(self, word: str) -> str:
        word = re.sub(r"\d+", lambda _: str(self.rng.randint(0, 20)), word)
        return re.sub(r"\b[A-Za-z]\b", lambda _: self.rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), word)

    @staticmethod
    def _invalid(base: Any, player: int) -> bool:
        """Return whether the player's last move was rejected."""
        state = base.state
        return bool(state.game_info[player].get("invalid_move")) or (
            getattr(state, "error_count", 0) > 0 and state.current_player_id == player
        )


def _shuffled(words: list[str], rng: random.Random) -> list[str]:
    return rng.sample(words, len(words))
