"""Toy environments: a corridor to walk, a chatterbox that says anything, and all the ways to misbehave."""

import asyncio
import os
import random
import sys
import time

from drumroll.envs import ENVIRONMENTS, Step


class Corridor:
    """Walk right to the end: `r` and `l` move, other turns do nothing."""

    def __init__(self, length=3, limit=20):
        self.length, self.limit, self.at, self.turns = length, limit, 0, 0

    def reset(self, seed, **row):
        self.rng = random.Random(seed)
        self.goal = self.length + self.rng.randint(0, 3)
        return f"goal {self.goal} at 0:"

    def step(self, text):
        self.turns += 1
        move = {"r": 1, "l": -1}.get(text.strip())
        effective = move is not None and self.at + move >= 0
        self.at += move if effective and move else 0
        done = self.at >= self.goal
        info = {"success": done, "effective": effective, "malformed": move is None, "state": str(self.at)}
        return Step(f"at {self.at}:", float(done), done, self.turns >= self.limit, info)

    def oracle(self):
        return "r"

    def random_action(self):
        return self.rng.choice("lr")

    def close(self):
        pass


ENVIRONMENTS.register("corridor", runs="inline")(Corridor)


class Chatter:
    """Anything may be said, for as long as the seed wants; ends in all ways there are."""

    def reset(self, seed, **row):
        self.rng = random.Random(seed)
        return self.say()

    def say(self):
        text = "".join(self.rng.choice("abc def\n") for _ in range(self.rng.randint(0, 9))) + "?"
        return text if self.rng.random() < 0.7 else [{"role": "user", "content": text}]

    def step(self, text):
        rng = random.Random(f"{self.rng.random()}/{text}")  # what follows depends on what was said
        self.rng = rng
        info = {"effective": rng.random() < 0.5, "malformed": rng.random() < 0.2}
        if rng.random() < 0.1:
            info["tool_error"] = "broken"
        return Step(self.say(), rng.random(), rng.random() < 0.15, rng.random() < 0.1, info)

    def close(self):
        pass


ENVIRONMENTS.register("chatter", runs="inline")(Chatter)


class Waiting(Chatter):
    """A coroutine that takes its time."""

    async def step(self, text):
        await asyncio.sleep(0.01)
        return super().step(text)


class Quiz:
    """Sums, one after the other: the tiny model knows the kind of question. Or any `even` number is right."""

    def __init__(self, questions=2, even=False):
        self.questions, self.even = questions, even

    def ask(self):
        self.numbers = [self.rng.randint(0, 9) for _ in range(3)]
        return "+".join(map(str, self.numbers)) + "="

    def reset(self, seed, **row):
        self.rng, self.asked, self.right = random.Random(seed), 1, 0
        return self.ask()

    def step(self, text):
        said = text.strip()
        right = said.isdigit() and int(said) % 2 == 0 if self.even else said == str(sum(self.numbers))
        self.right += right
        done = self.asked >= self.questions
        self.asked += 1
        info = {"effective": said.isdigit(), "success": done and self.right == self.questions}
        return Step(self.ask(), right / self.questions, done, False, info)

    def close(self):
        pass


ENVIRONMENTS.register("quiz", runs="inline")(Quiz)


LEAKED = []


class Blocking(Corridor):
    """A coroutine that blocks its event loop, or waits for ever."""

    def __init__(self, how="none", **args):
        super().__init__(**args)
        self.how = how

    async def step(self, text):
        if self.how == "block":
            time.sleep(6)
        if self.how == "wait":
            await asyncio.sleep(1000)
        return super().step(text)


class Bad(Corridor):
    """A corridor whose steps go wrong, by `how`, for one seed in `every`."""

    def __init__(self, how, every=1, **args):
        super().__init__(**args)
        self.how, self.every = how, every

    def reset(self, seed, **row):
        self.bad = seed % self.every == 0
        if self.bad and self.how == "reset":
            raise ValueError("no such level")
        return super().reset(seed, **row)

    def step(self, text):
        good = super().step(text)
        if not self.bad:
            return good
        if self.how == "raise":
            raise ValueError("the floor gave way")
        if self.how == "hang":
            time.sleep(1000)
        if self.how == "crash":
            os._exit(3)
        if self.how == "leak":
            LEAKED.append(b"x" * 150_000_000)
        if self.how == "type":
            return {"observation": "x"}
        if self.how == "reward":
            return good._replace(reward=float("nan"))
        if self.how == "observation":
            return good._replace(observation=7)
        if self.how == "endless":
            return Step("again:", 0.0)
        if self.how == "print":
            print("noise on standard output")
            sys.stdout.flush()
        return good

    def close(self):
        if self.how == "close":
            raise ValueError("cannot close")


class ThreadBad(Bad):
    """The same in threads."""


ENVIRONMENTS.register("thread_bad", runs="thread")(ThreadBad)


class Moody(Corridor):
    """Says something else each time."""

    def step(self, text):
        step = super().step(text)
        return step._replace(observation=f"{step.observation}{os.urandom(4).hex()}")


class Unseeded(Corridor):
    """Uses the global generator."""

    def reset(self, seed, **row):
        super().reset(seed, **row)
        return f"goal {random.random()}:"
