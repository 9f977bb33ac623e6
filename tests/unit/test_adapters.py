"""Adapters to other libraries' environments, each with the real library."""

import asyncio
import random
import sys
import tomllib
from pathlib import Path

import pytest
from gymnasium import spaces

from drumroll.envs.adapters import ADAPTERS, adapter_of
from drumroll.envs.builtin import make
from drumroll.envs.check import episode, examine
from drumroll.envs.runner import Runner, find, where
from drumroll.errors import ConfigError, MissingExtra

ROOT = Path(__file__).parent.parent.parent


def play(use, seed=0, turns=None, row=None, **args):
    """An episode by given turns, else by the environment's random player: [observation, (text, step), ...]."""
    (first,), *steps = asyncio.run(episode(use, args, seed, turns, row))
    return [first, *steps]


def passes(use, **args):
    """The environment check finds nothing wrong; returns its notes."""
    findings = asyncio.run(examine(use, args))
    assert not [f for f in findings if f.passed is False], findings
    return {f.name: f.note for f in findings}


# --- names ---


def test_names():
    for use, kind in (
        ("gymnasium:FrozenLake-v1", "process"),
        ("tools:toy_tools:add", "process"),
        ("mcp:python server.py", "thread"),
        ("openenv:http://localhost:1", "inline"),
    ):
        assert adapter_of(use) is ADAPTERS[use.partition(":")[0]]
        assert where(use) == kind
    assert adapter_of("tools:MyEnv") is None  # a user's own module
    assert adapter_of("toy_environments:Corridor") is None


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(ADAPTERS, "textarena", ADAPTERS["textarena"]._replace(package="no_such_package"))
    with pytest.raises(MissingExtra, match=r"The environment textarena:X needs .*: pip install 'drumroll\[textarena\]'"):
        find("textarena:X")


def test_every_extra_is_declared():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {adapter.extra for adapter in ADAPTERS.values() if adapter.extra} <= declared.keys()


def test_global_generators_are_an_episodes_own():
    from drumroll.envs.adapters.chance import Chance

    random.seed(5)
    expected = random.random()
    random.seed(5)
    first, second = Chance(1), Chance(1)
    drawn = []
    for chance in (first, second, first, second):
        with chance.own():
            drawn.append(random.random())
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    assert random.random() == expected


# --- gymnasium ---


def test_gymnasium_plays_in_words():
    names = ["left", "down", "right", "up"]
    lake = "gymnasium:FrozenLake-v1"
    first, *steps = play(
        lake, turns=["down", "down", "<answer>right</answer>", "I go down.", "2", "2"], actions=names, is_slippery=False
    )
    assert "one of left, down, right, up" in first
    assert "[S]FFF" in first
    last = steps[-1][1]
    assert (last.reward, last.terminated, last.info["success"]) == (1.0, True, True)
    assert "[G]" in last.observation
    for odd in ("jump", "up and down", "7", ""):
        _, (_, step) = play(lake, turns=[odd], actions=names)
        assert step.info["malformed"]
        assert "That is no action. Answer with one of" in step.observation
    _, (_, step) = play(lake, turns=["left"], actions=names, is_slippery=False)
    assert step.info["effective"] is False  # the wall


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Blackjack-v1", "CartPole-v1", "Pendulum-v1"])
def test_gymnasium_is_seeded(name):
    use = f"gymnasium:{name}"
    assert play(use, 3) == play(use, 3)
    assert play(use, 3) != play(use, 4)


def test_gymnasium_passes_the_check():
    assert "a whole number from 0 to 1" in make("gymnasium:CartPole-v1").reset(0)
    assert "go on differently" in passes("gymnasium:FrozenLake-v1")["seeds matter"]
    notes = passes("gymnasium:Blackjack-v1")
    assert notes["random_action"].startswith("no success reported, mean reward")
    assert "it has no chance: 5 other seeds" in passes("gymnasium:CliffWalking-v1")["seeds matter"]


REGISTERS = """
import gymnasium
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
gymnasium.register("PondNamed-v0", entry_point="gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv")
gymnasium.register("ponds/PondGiven-v0", entry_point=FrozenLakeEnv)
"""


@pytest.mark.parametrize("name", ["PondNamed-v0", "ponds/PondGiven-v0"])
def test_gymnasium_imports_the_module_that_registers(name, tmp_path, monkeypatch):
    (tmp_path / "my_ponds.py").write_text(REGISTERS)
    monkeypatch.syspath_prepend(tmp_path)
    assert "[S]FFF" in play(f"gymnasium:my_ponds:{name}")[0]
    with pytest.raises(ConfigError, match=r"gymnasium:my_ponds:Pond-v7: "):
        make("gymnasium:my_ponds:Pond-v7")
    with pytest.raises(ConfigError, match=r"No module named 'no_ponds'"):
        make(f"gymnasium:no_ponds:{name}")


def test_every_space_is_read_as_it_is_written():
    from drumroll.envs.adapters.spaces import describe, in_words, read, written

    nested = spaces.Dict({"move": spaces.Discrete(3, start=1), "to": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Text(5)])})
    several = [
        spaces.Discrete(4, start=-1),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(3),
        spaces.Box(0, 9, (2, 2), dtype="int64"),
        spaces.Box(-2, 2, ()),
        spaces.Text(8),
        nested,
        spaces.Sequence(spaces.Discrete(5)),
    ]
    for space in several:
        space.seed(1)
        for _ in range(20):
            value = space.sample()
            again = read(space, written(space, value))
            assert space.contains(again), space
            assert in_words(space, again) == in_words(space, value)
        assert describe(space)
        assert isinstance(space, spaces.Text) or read(space, "§") is None
    assert '"move": a whole number from 1 to 3' in describe(nested)
    assert describe(spaces.Box(0, 1, (2,))) == "2 numbers from 0 to 1"
    assert read(spaces.Discrete(4), "1 or 2") is None
    assert read(spaces.Discrete(4), "1.5") is None
    assert read(spaces.Box(0, 1, (2,)), "0.5") is None
    assert read(nested, '{"move": 1}') is None


def test_what_no_text_can_tell_is_an_error():
    from drumroll.envs.adapters.spaces import describe

    with pytest.raises(ConfigError, match=r"shape \(210, 160, 3\) .* cannot be told in words; wrap"):
        describe(spaces.Box(0, 255, (210, 160, 3)))
    with pytest.raises(ConfigError, match="a Graph space cannot be told"):
        describe(spaces.Graph(spaces.Discrete(2), None))
    with pytest.raises(ConfigError, match="gymnasium:NoSuch-v0"):
        Runner("gymnasium:NoSuch-v0", {})
    with pytest.raises(ConfigError, match="no text rendering"):
        Runner("gymnasium:CartPole-v1", {"render": True})
    with pytest.raises(ConfigError, match="the action 'jump' is not a whole number from 0 to 3"):
        play("gymnasium:FrozenLake-v1", actions={"jump": 7})


# --- reasoning-gym ---


def test_reasoning_gym():
    use = "reasoning_gym:chain_sum"
    notes = passes(use, min_digits=1, max_digits=1)
    assert "success 1.00" in notes["oracle"]
    first, (_, wrong), (_, right) = play(use, 5, turns=["<answer>no</answer>", f"<answer>{solve(use, 5)}</answer>"], tries=2)
    assert first.endswith("Give the final answer in <answer>…</answer>.")
    assert (wrong.reward, wrong.terminated, wrong.info["success"]) == (0.0, False, False)
    assert (right.reward, right.terminated, right.info["success"]) == (1.0, True, True)
    _, (_, lost) = play(use, 5, turns=["<think><answer>0</answer></think> no"])
    assert (lost.reward, lost.terminated) == (0.0, True)
    with pytest.raises(ConfigError, match="is refused: its scorer gives 1 to any answer"):
        Runner("reasoning_gym:game_of_life_halting", {})
    with pytest.raises(ConfigError, match="Did you mean 'chain_sum'"):
        Runner("reasoning_gym:chain_sums", {})
    with pytest.raises(ConfigError, match="does not take"):
        play(use, digits=1)


def solve(use, seed):
    runner = Runner(use, {})
    asyncio.run(runner.reset(seed, {}))
    return runner.environment.entry["answer"]


# --- textarena ---


def test_textarena_alone():
    use = "textarena:GuessTheNumber-v0"
    first, *steps = play(use, 1, turns=[f"[{n}]" for n in (10, 10, 99)])
    assert "guess the number between 1 and 20" in first
    assert "The target number is" in steps[0][1].observation
    assert "[10]" not in steps[0][1].observation  # its own words are not repeated
    assert [step.info["effective"] for _, step in steps] == [True, False, False]
    assert steps[-1][1].terminated
    assert steps[-1][1].info["malformed"]
    won = [play(use, seed, turns=[f"[{n}]" for n in range(1, 13)])[-1][1] for seed in range(8)]
    assert {(s.reward, s.info["success"]) for s in won if s.reward == 1} == {(1.0, True)}
    assert any(s.reward < 1 and not s.info["success"] for s in won)
    passes(use)


def test_textarena_against_an_opponent(mine):
    use = "textarena:TicTacToe-v0"
    assert play(use, 1) == play(use, 1)
    games = [play(use, seed) for seed in range(6)]
    assert len({str(g) for g in games}) > 1
    assert {g[-1][1].reward for g in games} <= {-1.0, 0.0, 1.0}
    assert all(g[-1][1].info["success"] == (g[-1][1].reward > 0) for g in games)
    assert all(step.info["effective"] for game in games for _, step in game[1:])
    second = play(use, 1, seat=1)
    assert "You are Player 1" in second[0]
    assert "Player 0 placed their symbol" in second[0]
    own = mine("def lowest(observation): return min(observation.rpartition('Available Moves:')[2].split(', ')).strip(\" '\")")
    lost = play(use, turns=["[8]", "[7]", "[5]"], opponent=f"{own}:lowest")
    assert (lost[-1][1].reward, lost[-1][1].info["success"]) == (-1.0, False)
    passes(use)


def test_textarena_by_self_play():
    use = "textarena:TicTacToe-v0"
    game = play(use, turns=["[0]", "[3]", "[1]", "[4]", "[2]"], opponent="self")
    assert "You are Player 0" in game[0]
    assert "You are Player 1" in game[1][1].observation
    assert (game[-1][1].reward, game[-1][1].terminated) == (1.0, True)


def test_textarena_errors():
    with pytest.raises(ConfigError, match="Did you mean 'TicTacToe-v0'"):
        Runner("textarena:TicTacTo-v0", {})
    with pytest.raises(ConfigError, match="opponent 'best' does not exist"):
        Runner("textarena:TicTacToe-v0", {"opponent": "best"})
    with pytest.raises(ConfigError, match="has 2 players; seat 2"):
        play("textarena:TicTacToe-v0", seat=2)
    with pytest.raises(ConfigError, match="cannot begin: The number of players has to be 2"):
        play("textarena:TicTacToe-v0", players=3)


# --- GEM ---


class GemGame:
    """GEM's interface: an environment that pays as it is told, and ends with the last payment."""

    def __init__(self, pays=(), truncated=False):
        self.pays, self.truncated = list(pays), truncated

    def reset(self, seed=None):
        return "Begin.", {"suffix": "Your move."}

    def step(self, action):
        reward, over = self.pays.pop(0), not self.pays
        return "Next.", reward, over, over and self.truncated, {"suffix": "Your move."}

    def sample_random_action(self):
        raise NotImplementedError


@pytest.fixture
def gem(monkeypatch):
    """The adapter over a library of GEM's layout: what is registered as what, and the rewards' names."""
    from importlib import import_module
    from types import ModuleType, SimpleNamespace

    entries = {"game:Toy": "gem.envs.game_env.toy:Toy", "math:GSM8K": "gem.envs.math_env:MathEnv"}
    entries |= {"code:Taco8k": "gem.envs.code_env:CodeEnv", "eval:MATH500": "gem.envs.math_env:MathEnv"}
    entries |= {f"rg:{task}": "gem.envs.reasoning_gym:ReasoningGymEnv" for task in ("n_queens", "chain_sum")}
    library: dict[str, dict] = {
        "gem": {"Env": GemGame, "make": lambda name, **settings: GemGame(**settings)},
        "gem.envs": {},
        "gem.envs.registration": {"ENV_REGISTRY": {n: SimpleNamespace(entry_point=e) for n, e in entries.items()}},
        "gem.utils": {},
        "gem.utils.constants": {
            "TERMINAL_STATE": "<end>",
            "LanguageGameReward": SimpleNamespace(success_reward=1.0, format_error_reward=-0.1),
        },
    }
    for name, members in library.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "drumroll.envs.adapters.gem", raising=False)
    yield import_module("drumroll.envs.adapters.gem").Gem
    sys.modules.pop("drumroll.envs.adapters.gem", None)


@pytest.mark.parametrize(
    ("pays", "success"),
    [
        ([0.25, 0.5, 0.25], True),  # Minesweeper: each turn its share of the board
        ([1 / 6] * 6, True),  # Hangman: 0.9999999999999999
        ([0.0, 0.0, 1.0], True),
        ([-0.05, 1.0], True),  # a turn that cost something, then the goal
        ([0.25, 0.5, 0.0], False),
        ([0.9, -0.1], False),
        ([0.0], False),
    ],
)
def test_gem_success_is_the_episodes(gem, pays, success):
    game = gem("game:Toy", pays=pays)
    for _ in range(2):  # the second episode begins at 0
        assert game.reset(0) == "Begin.\nYour move."
        *early, last = [game.step("move") for _ in pays]
        assert (last.terminated, last.info["success"]) == (True, success)
        assert sum(step.reward for step in (*early, last)) == pytest.approx(sum(pays))
        assert not any("success" in step.info for step in early)


@pytest.mark.parametrize("name", ["math:GSM8K", "eval:MATH500", "code:Taco8k", "rg:n_queens"])
def test_gem_refuses_what_executes_the_answer(gem, name):
    with pytest.raises(ConfigError, match=rf"gem:{name} is refused: .* Set environment.args.unsafe: true to allow it"):
        gem(name)
    gem(name, unsafe=True)
    gem("rg:chain_sum")
