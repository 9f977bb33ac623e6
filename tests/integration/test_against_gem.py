"""Games of GEM through our adapter: with its recorded answers, and with the library itself.

GEM pins other versions than ours, so it has an environment of its own. Both play in a process: tests/unit/gem_games.py.
"""

import json
import sys

import peers
import pytest

GAMES, SOURCES = peers.ROOT / "tests" / "unit" / "gem_games.py", str(peers.ROOT / "src")


def played(python, *arguments):
    return json.loads(peers.run([python, *arguments], PYTHONPATH=SOURCES).splitlines()[-1])


@pytest.fixture(scope="module")
def live(request):
    """What the adapter makes of GEM, and the facts about GEM to record."""
    answers = played(peers.python("gem"), GAMES, "live")
    if request.config.getoption("record"):
        peers.write("gem", **answers["facts"])
    return answers


@pytest.fixture(scope="module", params=peers.SOURCES)
def told(request):
    if request.param == "live":
        return request.getfixturevalue("live")["told"]
    peers.read("gem")
    return played(sys.executable, GAMES, peers.RECORDINGS / "gem.json")["told"]


@pytest.mark.peers
def test_the_recording_is_what_gem_answers(live):
    recorded = peers.read("gem")
    assert {name: recorded[name] for name in live["facts"]} == live["facts"]


def test_episodes(told):
    guesses = told["guesses"]
    assert guesses[0] == guesses[1]
    assert len({json.dumps(game) for game in guesses}) > 3
    assert len(guesses[0][0].splitlines()) >= 2  # the rules, and what to do next
    for game in guesses:
        _, reward, terminated, _, info = game[-1]
        assert terminated
        assert info["success"] == (reward >= 1)
        assert all(not step[2] and "success" not in step[4] for step in game[1:-1])


def test_a_cleared_board_pays_in_parts(told):
    for _, *steps in told["cleared"]:
        assert len(steps) > 6
        assert sum(reward for _, reward, *_ in steps) == pytest.approx(1)
        assert [terminated for _, _, terminated, _, _ in steps] == [False] * (len(steps) - 1) + [True]
        assert all(info["effective"] for *_, info in steps)
        assert steps[-1][-1]["success"]


def test_an_answer_ends_its_question(told):
    question, (observation, reward, terminated, _, info) = told["answered"]
    assert question
    assert (observation, reward, terminated, info["success"]) == ("", 1.0, True, True)


def test_mistakes(told):
    _, (_, reward, _, _, info) = told["malformed"]
    assert (reward, info["malformed"], info["effective"]) == (-0.1, True, False)
    assert "Did you mean 'game:GuessTheNumber-v0-easy'" in told["error"]


CHECK = "import asyncio, json; from drumroll.envs.check import examine; print(json.dumps([list(vars(f).values()) for f in asyncio.run(examine({use!r}, {{}}))]))"


@pytest.mark.peers
def test_it_passes_the_check():
    found = played(peers.python("gem"), "-c", CHECK.format(use="gem:game:GuessTheNumber-v0-easy"))
    assert not [finding for finding in found if finding[1] is False], found
    assert {"same seed, same episode", "random_action"} <= {name for name, *_ in found}
