"""Plays games of GEM through our adapter, and prints the adapter's answers as JSON.

python gem_games.py live       with GEM, by the Python of `.bench/gem`; prints GEM's own answers too, to be recorded
python gem_games.py RECORDING  with those answers instead of GEM

A recorded answer keeps numbers, flags and our actions. Texts are GEM's, so digests stand for them.
"""

import asyncio
import hashlib
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

NUMBER, MINES, LEGS = "game:GuessTheNumber-v0-easy", "game:Minesweeper-v0-easy", "rg:leg_counting"
SOLVERS = {MINES: lambda env: clear(env), LEGS: lambda env: "\\boxed{" + env.data["answer"] + "}"}
END = "the end"


def clear(env):
    """Reveal the first cell, flag all mines, then reveal what has none."""
    cells = [(r, c) for r in range(env.rows) for c in range(env.cols)]
    mines = [] if env.first_reveal else [(r, c) for r, c in cells if env.grid[r][c] == -1]
    hidden = [("flag", r, c) for r, c in mines if not env.flags[r][c]]
    hidden += [("reveal", r, c) for r, c in cells if (r, c) not in mines and not env.revealed[r][c]]
    return "\\boxed{{{} {} {}}}".format(*hidden[0])


# --- GEM, recorded ---


def recording(gem, terminal):
    """Keep a tree of what GEM answers: by environment, seed and the actions so far."""
    tree, make = {}, gem.make

    def fact(value):
        if isinstance(value, str):
            return END if value == terminal else f"text {hashlib.sha256(value.encode()).hexdigest()[:8]}"
        return {key: fact(part) for key, part in value.items()} if isinstance(value, dict) else value

    def made(name, **settings):
        env = make(name, **settings)
        reset, step, draw, node = env.reset, env.step, env.sample_random_action, {}

        def enter(below, key, answer):
            nonlocal node
            node = below.setdefault(key, {"answer": [fact(part) for part in answer]})
            return answer

        def act(action):
            node["drawn"] = action
            return action

        env.reset = lambda seed: enter(tree.setdefault(name, {}), str(seed), reset(seed=seed))
        env.step = lambda action: enter(node.setdefault("then", {}), action, step(action))
        env.sample_random_action = lambda **options: act(draw(**options))  # GEM's own examples have options
        env.solution = lambda: act(SOLVERS[name](env))
        return env

    gem.make = made
    return tree


class Replayed:
    """An environment that answers as recorded; an action that was not recorded is an error."""

    def __init__(self, seeds):
        self.seeds = seeds

    def reset(self, seed):
        self.node = self.seeds[str(seed)]
        return self.node["answer"]

    def step(self, action):
        self.node = self.node["then"][action]
        return self.node["answer"]

    def sample_random_action(self):
        return self.node["drawn"]

    solution = sample_random_action


def replay(facts):
    """Stand in for the parts of GEM that the adapter imports."""

    class Env:
        def sample_random_action(self):
            raise NotImplementedError

    registry = {name: SimpleNamespace(entry_point=entry) for name, entry in facts["registry"].items()}
    parts = {
        "gem": {"Env": Env, "make": lambda name, **_: Replayed(facts["episodes"][name])},
        "gem.envs": {},
        "gem.envs.registration": {"ENV_REGISTRY": registry},
        "gem.utils": {},
        "gem.utils.constants": {"TERMINAL_STATE": END, "LanguageGameReward": SimpleNamespace(**facts["rewards"])},
    }
    for name, members in parts.items():
        sys.modules[name] = module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(members)


# --- the games ---


async def play(name, seed, turns=50):
    """An episode by the environment's random player, by its solution, or by given turns: [observation, step, ...]."""
    from drumroll.envs.runner import Runner

    runner = Runner(f"gem:{name}", {})
    record = [await runner.reset(seed, {})]
    for turn in range(turns) if isinstance(turns, int) else turns:
        env = runner.environment
        text = turn if isinstance(turn, str) else env.env.solution() if name in SOLVERS else env.random_action()
        step = await runner.step(text)
        record.append([*step])
        if step.terminated or step.truncated:
            break
    return record


def games():
    from drumroll.envs.runner import Runner

    try:
        Runner(f"gem:{NUMBER[:-1]}", {})
    except Exception as caught:
        error = str(caught)
    return {
        "guesses": [asyncio.run(play(NUMBER, seed)) for seed in (0, 0, 1, 2, 3, 4, 5, 6)],
        "cleared": [asyncio.run(play(MINES, seed)) for seed in range(4)],
        "answered": asyncio.run(play(LEGS, 3)),
        "malformed": asyncio.run(play(NUMBER, 0, ["five"])),
        "error": error,
    }


def live():
    """Play with GEM; the adapter's answers, and what is to be recorded."""
    import gem
    from gem.envs.registration import ENV_REGISTRY
    from gem.utils.constants import TERMINAL_STATE, LanguageGameReward

    rewards = {name: value for name, value in vars(LanguageGameReward).items() if name.endswith("_reward")}
    registry = {name: ENV_REGISTRY[name].entry_point for name in (NUMBER, MINES, LEGS)}
    episodes = recording(gem, TERMINAL_STATE)
    return {"told": games(), "facts": {"rewards": rewards, "registry": registry, "episodes": episodes}}


def main(source):
    if source == "live":
        print(json.dumps(live()))
    else:
        replay(json.loads(Path(source).read_text()))
        print(json.dumps({"told": games()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
