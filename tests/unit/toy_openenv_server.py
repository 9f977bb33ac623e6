"""Small OpenEnv servers: guess a number, by actions of one field or two. Prints both ports.

python toy_openenv_server.py live       served by OpenEnv, with the Python of `.bench/openenv`
python toy_openenv_server.py RECORDING  served without it: the schemas are OpenEnv's, as recorded, and a test holds the
                                        messages against OpenEnv's
"""

import asyncio
import json
import random
import socket
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

FIELDS = {"Guess": ("guess",), "Pair": ("low", "high")}


class Game:
    """The numbers from 1 to `top`, one of which is right."""

    def reset(self, seed=None, top=20, **_):
        self.number = random.Random(seed).randint(1, top)
        return {"hint": f"from 1 to {top}; parity {self.number % 2}"}

    def step(self, action):
        guess = next(getattr(action, name) for names in FIELDS.values() for name in names if hasattr(action, name))
        if guess == 99:
            raise RuntimeError("the dice fell off the table")
        right = guess == self.number
        hint = "right" if right else "higher" if guess < self.number else "lower"
        return {"hint": hint, "done": right, "reward": float(right)}


def action_types(base):
    return [create_model(name, __base__=base, **dict.fromkeys(fields, (int, ...))) for name, fields in FIELDS.items()]


def by_openenv():
    """OpenEnv's own servers."""
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    hint = create_model("Hint", __base__=Observation, hint=(str, ""))

    class Guessing(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self.game, self._state = Game(), State()

        def reset(self, seed=None, episode_id=None, **row):
            self._state = State()
            return hint(**self.game.reset(seed, **row))

        def step(self, action, timeout_s=None, **_):
            self._state.step_count += 1
            return hint(**self.game.step(action))

        @property
        def state(self):
            return self._state

    for action in action_types(Action):
        app = create_fastapi_app(Guessing, action, hint, max_concurrent_envs=8)
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        yield lambda listening, server=server: server.serve([listening])


def by_recording(schemas):
    """The same servers, speaking as OpenEnv's do."""
    from websockets.asyncio.server import serve
    from websockets.datastructures import Headers
    from websockets.http11 import Response

    class Action(BaseModel):
        model_config = ConfigDict(extra="forbid")

    def answer(game, action, message):
        try:
            data = message["data"]
            told = game.reset(**data) if message["type"] == "reset" else game.step(action(**data))
            over = {"reward": told.pop("reward", None), "done": told.pop("done", False)}
            return {"type": "observation", "data": {"observation": told, **over}}
        except ValidationError as error:
            wrong = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": json.loads(error.json())}
        except Exception as error:
            wrong = {"message": str(error), "code": "EXECUTION_ERROR"}
        return {"type": "error", "data": wrong}

    for action, schema in zip(action_types(Action), schemas, strict=True):

        async def session(connection, action=action):
            game = Game()
            async for text in connection:
                await connection.send(json.dumps(answer(game, action, json.loads(text))))

        def plain(connection, request, schema=schema):
            if request.path == "/schema":
                body = json.dumps({"action": schema}).encode()
                return Response(200, "OK", Headers({"Content-Length": str(len(body))}), body)
            return None

        async def server(listening, session=session, plain=plain):
            await (await serve(session, sock=listening, process_request=plain)).serve_forever()

        yield server


async def main(source):
    servers = by_openenv() if source == "live" else by_recording(json.loads(Path(source).read_text())["schemas"])
    serving = []
    for server in servers:
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        print(listening.getsockname()[1], flush=True)
        serving.append(server(listening))
    await asyncio.gather(*serving)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
