"""Small OpenEnv servers: guess a number, by actions of one field or two. Run by the Python of `.bench/openenv`; prints both ports."""

import asyncio
import random
import socket

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int


class Hint(Observation):
    hint: str = ""


class Pair(Action):
    low: int
    high: int


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, top=20, **kwargs):
        self.number, self._state = random.Random(seed).randint(1, top), State()
        return Hint(hint=f"from 1 to {top}; parity {self.number % 2}")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        guess = action.guess if isinstance(action, Guess) else action.low
        if guess == 99:
            raise RuntimeError("the dice fell off the table")
        right = guess == self.number
        return Hint(hint="right" if right else "higher" if guess < self.number else "lower", done=right, reward=float(right))

    @property
    def state(self):
        return self._state


async def serve():
    servers = []
    for action in (Guess, Pair):
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        print(listening.getsockname()[1], flush=True)
        app = create_fastapi_app(Guessing, action, Hint, max_concurrent_envs=8)
        servers.append(uvicorn.Server(uvicorn.Config(app, log_level="error")).serve([listening]))
    await asyncio.gather(*servers)


if __name__ == "__main__":
    asyncio.run(serve())
