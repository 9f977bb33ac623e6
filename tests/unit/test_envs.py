"""Environments: the seed decides all, splits never meet, the right way succeeds, chance rarely does, odd text never raises."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumroll.config.data import DatasetConfig
from drumroll.data.rows import read
from drumroll.envs import ENVIRONMENTS
from drumroll.envs.builtin import make
from drumroll.envs.episode import action_in
from drumroll.envs.frozen_lake import lake
from drumroll.envs.grid import read_moves
from drumroll.envs.rows import WEAK, demonstrations, episodes, play
from drumroll.envs.sokoban import SYMBOLS, level
from drumroll.envs.tic_tac_toe import best, free, taken, winner
from drumroll.errors import ConfigError, DataError
from drumroll.models import tiny


def run_python(code):
    """A real interpreter, alone in its process."""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout or done.stderr


SETTINGS = [
    ("frozen_lake", {}),
    ("frozen_lake", {"size": 8, "style": "compact", "corners": True}),
    ("sokoban", {}),
    ("sokoban", {"style": "compact", "moves": 4}),
    ("sokoban", {"size": 8, "boxes": 2, "max_turns": 40, "symbols": "W.gb+me"}),
    ("webshop", {}),
    ("webshop", {"style": "compact", "repeat_goal": True}),
    ("lookup", {"hops": 3}),
    ("lookup", {"hops": 2, "style": "compact"}),
    ("tic_tac_toe", {}),
    ("tic_tac_toe", {"opponent": "perfect", "style": "compact"}),
    ("python_math", {"run": run_python}),
]
EACH = pytest.mark.parametrize(
    ("name", "settings_"), SETTINGS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "plain"
)
RANDOM_AT_MOST = {"frozen_lake": 0.2, "sokoban": 0.2, "webshop": 0.05, "lookup": 0.2, "python_math": 0.05}


def successes(name, given, episodes, split="train", **teacher):
    return sum(play(make(name, **given), number, split, **teacher)[1]["success"] for number in range(episodes)) / episodes


@EACH
def test_the_oracle_succeeds(name, settings_):
    assert successes(name, settings_, 4 if name == "python_math" else 25, split="held_out") == 1.0


@EACH
def test_chance_rarely_succeeds(name, settings_):
    if name in RANDOM_AT_MOST:
        rate = successes(name, settings_, 8 if name == "python_math" else 100, careless=1.0)
        assert rate <= RANDOM_AT_MOST[name]


@EACH
def test_the_seed_decides_everything(name, settings_):
    for seed in range(3):
        first, second = make(name, **settings_), make(name, **settings_)
        assert first.reset(seed) == second.reset(seed)
        assert first.reset(seed, instance=5, prompt="a column") == second.reset(seed + 1, instance=5)
        assert play(first, seed, "train", careless=0.3) == play(second, seed, "train", careless=0.3)


@EACH
def test_splits_never_meet(name, settings_):
    made = make(name, **settings_)
    starts = {split: {made.reset(0, instance=n, split=split) for n in range(40)} for split in ("train", "held_out")}
    assert starts["train"]
    assert not starts["train"] & starts["held_out"]
    with pytest.raises(DataError, match=r"train.*held_out"):
        made.reset(0, split="tset")


@EACH
def test_every_episode_ends_and_tells(name, settings_):
    made = make(name, **settings_)
    made.reset(1)
    for turn in range(1, made.max_turns + 1):
        step = made.step("?!")
        assert step.observation
        assert step.info["effective"] is False
        assert step.info["malformed"] is True
        assert step.info["success"] is False
        assert isinstance(step.info["state"], str)
        assert not step.terminated
        assert step.truncated == (turn == made.max_turns)


PIECES = st.sampled_from(["<answer>", "</answer>", "<think>", "search[", "click[", "]", "R", "left", "5", "[", "<search>", "buy now", "\n", "1e9"])  # fmt: skip


@EACH
@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=5).map("".join), max_size=6), st.integers(0, 2**62))
def test_odd_text_never_raises(name, settings_, texts, seed):
    made = make(name, **{**settings_, **({"run": str} if name == "python_math" else {})})
    assert made.reset(seed, instance=seed % 10)
    for text in texts:
        step = made.step(text)
        assert 0 <= step.reward <= 1 or name == "tic_tac_toe"
        if step.terminated or step.truncated:
            break


@EACH
def test_compact_pages_are_written_in_the_tiny_alphabet(name, settings_):
    if settings_.get("style") == "compact":
        for number in range(20):
            messages, _ = play(make(name, **settings_), number, "train", careless=0.3)
            assert set("".join(m["content"] for m in messages)) <= set(tiny.ALPHABET)


EPISODES = """
import json
from drumroll.envs.rows import demonstrations
import itertools
names = ["frozen_lake", "sokoban", "webshop", "lookup", "tic_tac_toe"]
print(json.dumps({n: list(itertools.islice(demonstrations("train", 3, n, 0.0, 0.4, form="messages"), 3)) for n in names}))
"""


def test_episodes_are_the_same_in_every_process():
    source = os.path.dirname(os.path.dirname(os.path.dirname(sys.modules["drumroll.envs"].__file__)))
    said = [
        subprocess.run(
            [sys.executable, "-c", EPISODES],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": source},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert all(len(rows) == 3 for rows in json.loads(said[0]).values())


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("R", "R"),
        (" <answer> R </answer> ", "R"),
        ("<think>L or <answer>U</answer></think><answer>R</answer>", "R"),
        ("<answer>L</answer> no, <answer>R</answer>", "R"),
        ("<ANSWER>R", "R"),
        ("<think>for ever", ""),
        ("", ""),
    ],
)
def test_actions_are_found(text, action):
    assert action_in(text) == action


@pytest.mark.parametrize(
    ("text", "moves"),
    [
        ("RRUL", "RRUL"),
        ("right, Up", "RU"),
        ("Left || down", "LD"),
        ("l", "L"),
        ("<answer>Up</answer>", "U"),
        ("dull", ""),
        ("I go right", ""),
        ("RRRRR", ""),
        ("", ""),
    ],
)
def test_moves_are_read(text, moves):
    assert "".join(read_moves(text, 4)) == moves


@given(st.integers(4, 9), st.floats(0.2, 1), st.booleans(), st.integers(0, 10**9))
def test_every_lake_can_be_crossed_in_time(size, holes, corners, instance):
    rows = lake(size, holes, corners, instance, "train")
    cells = {(r, c): letter for r, row in enumerate(rows) for c, letter in enumerate(row)}
    assert sorted(letter for letter in cells.values() if letter in "SG") == ["G", "S"]
    assert set(cells.values()) <= set("SGFH")
    reached = {cell for cell, letter in cells.items() if letter == "S"}
    for _ in range(4 * size):
        near = {(r + d, c + e) for r, c in reached for d, e in ((0, 1), (1, 0), (0, -1), (-1, 0))}
        reached |= {cell for cell in near if cells.get(cell, "H") != "H"}
    assert any(cells[cell] == "G" for cell in reached)


def test_ice_may_be_slippery():
    slips = 0
    for number in range(20):
        made = make("frozen_lake", slippery=True, size=6, max_turns=100)
        assert "slippery" in made.reset(number)
        best_ = make("frozen_lake", size=6)
        best_.reset(number)
        slips += made.step("Right").info["state"] != best_.step("Right").info["state"]
    assert 3 < slips < 20
    assert successes("frozen_lake", {"slippery": True, "sure": 0.8, "holes": 0.2, "max_turns": 100}, 40) > 0.3


def test_a_lake_for_a_tiny_model_is_short():
    made = make("frozen_lake", style="compact")
    assert len(made.reset(0)) <= 26
    assert len(made.step("R").observation) <= 26


@settings(max_examples=25, deadline=None)
@given(st.integers(5, 7), st.integers(1, 2), st.integers(0, 10**9))
def test_every_level_can_be_solved(size, boxes, instance):
    made = level(size, boxes, 0.1, 4, 40, instance, "train")
    at = (made.player, made.boxes)
    assert len(made.boxes) == len(made.goals) == boxes
    assert not made.boxes & made.goals
    for letter in made.solve(*at) or "":
        at = made.moved(*at, made.steps[letter]) or at
    assert at[1] == made.goals


def test_sokoban_pays_for_boxes_and_moves_when_asked():
    messages, told = play(make("sokoban", box_reward=0.5, move_cost=0.1), 3, "train")
    assert told["reward"] == pytest.approx(1.5 - 0.1 * (len(messages) // 2))


def test_symbols_change_the_picture_only():
    plain, other = make("sokoban", style="compact"), make("sokoban", style="compact", symbols="W.gb+me")
    assert plain.reset(1).partition("\n")[2].translate(str.maketrans(SYMBOLS, "W.gb+me")) == other.reset(1).partition("\n")[2]
    assert plain.step("L").info["state"] == other.step("L").info["state"]


def test_self_play_rewards_both_players():
    made = make("tic_tac_toe")
    made.reset(0)
    step = None
    while step is None or not step.terminated:
        step = made.step(made.flawed())
    winner_, loser = ("X", "O") if step.info["rewards"]["X"] > 0 else ("O", "X")
    assert step.info["rewards"] == {winner_: 1.0, loser: -1.0}
    assert step.info["player"] == winner_
    assert step.reward == 1.0


def test_perfect_play_is_perfect():
    board = "........."
    while not winner(board):
        board = taken(board, best(board))
    assert winner(board) == "-"
    assert best("XX.OO....") == 2
    assert successes("tic_tac_toe", {"opponent": "random"}, 60) > 0.7
    assert successes("tic_tac_toe", {"opponent": "perfect"}, 60, careless=1.0) < 0.6
    assert free("XOX......") == [3, 4, 5, 6, 7, 8]


def test_code_is_run_and_answers_are_graded():
    made = make("python_math", run=run_python)
    assert "2 + 2" in made.reset(0, question="What is 2 + 2?", answer="4")
    step = made.step("Let me see: ```python\nprint(2 + 2)\n```")
    assert step.observation == "Output:\n4"
    assert "ZeroDivisionError" in made.step("<python>1 / 0</python>").observation
    step = made.step("<answer>4.0</answer>")
    assert (step.reward, step.terminated, step.info["success"]) == (1.0, True, True)
    assert make("python_math", run="builtins:str").run(5) == "5"


def test_a_question_takes_its_look_ups():
    for hops in (1, 2, 3):
        messages, told = play(make("lookup", hops=hops, hits=1), 0, "train")
        assert told["success"]
        assert len(messages) // 2 <= hops + 1


@pytest.mark.parametrize(("name", "low", "high"), [("frozen_lake", 0.1, 0.25), ("sokoban", 0.1, 0.2), ("webshop", 0.2, 0.4)])
def test_weak_teachers_leave_something_to_learn(name, low, high):
    flawed, careless = WEAK[name]
    assert low <= successes(name, {"style": "compact"}, 400, flawed=flawed, careless=careless) <= high


def test_demonstrations_come_as_turns_and_as_conversations():
    conversation = next(demonstrations("train", 0, "frozen_lake", 0.0, 0.0, form="messages", style="compact"))
    assert [m["role"] for m in conversation["messages"]] == ["user", "assistant"] * (len(conversation["messages"]) // 2)
    assert conversation["success"]
    said = [m["content"] for m in conversation["messages"]]
    for history in (None, 0, 1):
        rows = itertools.islice(
            demonstrations("train", 0, "frozen_lake", 0.0, 0.0, history=history, end="|", style="compact"), len(said) // 2
        )
        for turn, row in enumerate(rows):
            first = 0 if history is None else max(0, turn - history)
            past = "".join(f"{said[2 * i]}{said[2 * i + 1]}|" for i in range(first, turn))
            assert row["prompt"] == past + said[2 * turn]
            assert row["completion"] == said[2 * turn + 1]
    whole = next(demonstrations("train", 0, "frozen_lake", 0.0, 0.0, form="episodes", style="compact"))
    assert [whole["prompt"], whole["completion"], *whole["more"]] == said


def test_a_prompt_may_come_once_in_an_episode():
    given_ = {"env": "frozen_lake", "share_of_flawed": 1.0, "share_of_random": 0.0, "history": 0, "style": "compact"}
    rows = list(itertools.islice(demonstrations("train", 0, **given_), 200))
    episodes_ = {row["instance"]: [r["prompt"] for r in rows if r["instance"] == row["instance"]] for row in rows}
    distinct = list(itertools.islice(demonstrations("train", 0, distinct=True, **given_), 30))
    expected = [prompt for prompts in episodes_.values() for prompt in dict.fromkeys(prompts)]
    assert [row["prompt"] for row in distinct] == expected[:30]
    assert len(expected) < len(rows)


@pytest.mark.parametrize(
    ("given_", "word"),
    [
        ({"env": "frozen_lake", "form": "song"}, "turns, episodes, messages"),
        ({"env": "frozen_lake", "share_of_flawed": 0.8, "share_of_random": 0.3}, "at most 1"),
        ({"env": "lookup", "share_of_flawed": 0.5}, "no flawed"),
    ],
)
def test_demonstrations_that_cannot_be_are_named(given_, word):
    with pytest.raises(DataError, match=word):
        next(demonstrations("train", 0, **given_))


def test_the_page_shows_an_environment_of_ones_own(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    code = next(block for block in page.split("```python\n") if block.startswith("from drumroll.envs import Step")).partition(
        "```"
    )[0]
    (tmp_path / "guessing_game.py").write_text(
        f"{code}\n\nclass Later(Guess):\n    async def reset(self, seed, **row):\n        pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    game = make("guessing_game:Guess", turns=4)
    assert "number" in game.reset(41)
    assert [game.step(text).observation for text in ("41", "43", "x")] == ["Higher.", "Lower.", "A number, please."]
    assert game.step("42").info["success"]
    assert next(episodes("train", 0, "guessing_game:Guess"))["prompt"].startswith("Guess")
    row = next(episodes("train", 0, "guessing_game:Later"))
    assert row["prompt"] == f"train/{row['instance']}"


def test_rows_name_instances():
    config = DatasetConfig(source="drumroll.envs.rows:episodes", args={"env": "sokoban", "style": "compact"}, limit=20)
    rows = read("data", config, 0)
    assert len(rows) == 20
    for row in rows:
        assert make("sokoban", style="compact").reset(99, **row) == row["prompt"]
    other = list(itertools.islice(episodes("held_out", 0, "sokoban", style="compact"), 20))
    assert not {r["prompt"] for r in rows} & {r["prompt"] for r in other}


@pytest.mark.parametrize(
    ("name", "given_", "word"),
    [
        ("frozen_lake", {"size": 1}, "size"),
        ("frozen_lake", {"style": "long"}, "compact or words"),
        ("frozen_lake", {"sizes": 4}, "sizes"),
        ("sokoban", {"symbols": "##_OX*P"}, "symbols"),
        ("sokoban", {"max_turns": 0}, "max_turns"),
        ("webshop", {"products": 3}, "products"),
        ("webshop", {"files": ["one"]}, "files"),
        ("tic_tac_toe", {"opponent": "me"}, "perfect"),
        ("lookup", {"hops": 4}, "hops"),
        ("python_math", {}, "run"),
        ("frozen_lakes", {}, "Did you mean 'frozen_lake'"),
    ],
)
def test_settings_that_cannot_be_are_named(name, given_, word):
    with pytest.raises(ConfigError, match=word):
        make(name, **given_)


def test_settings_that_allow_no_instance_are_named():
    with pytest.raises(ConfigError, match="wider"):
        make("frozen_lake", size=2, corners=True, holes=0.0).reset(0, split="held_out")


def test_every_environment_says_where_it_runs():
    for name in ENVIRONMENTS.parts:
        assert ENVIRONMENTS.traits(name)["runs"] in ("inline", "thread", "process")
