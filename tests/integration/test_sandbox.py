"""Programs in boxes: honest ones pass, hostile ones get nothing and leave nothing."""

import asyncio
import gc
import os
import shutil
import sys
from pathlib import Path

import pytest

from drumroll.config.sandbox import SandboxConfig
from drumroll.sandbox import Assert, Call, Limits, Pytest, Status, Stdio

sys.path.insert(0, str(Path(__file__).parent))
from hostile import ALL

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap cannot be had here (make system installs it)")

LOOK = "import os\nprint(len([p for p in os.listdir('/proc') if p.isdigit()]), os.listdir('/tmp'))"
ALONE = [Stdio("", "4 []")]  # bubblewrap, the zygote, the supervisor, itself


class Boxes:
    """A sandbox called from plain tests."""

    def __init__(self, **config):
        from drumroll.sandbox import open_sandbox

        self.runner = asyncio.Runner()
        self.sandbox = open_sandbox(SandboxConfig(**config))

    def run(self, program, tests, limits=None):
        return self.runner.run(self.sandbox.run(program, tests, limits or Limits(seconds=60)))

    def close(self):
        self.runner.run(self.sandbox.close())
        self.runner.close()


@pytest.fixture(scope="module")
def boxes():
    before = open_files()
    made = Boxes(workers=1)
    made.sandbox.grace = 2
    yield made
    made.close()
    assert open_files() <= before
    assert not bwraps()


def open_files():
    gc.collect()  # files of earlier tests
    return len(os.listdir("/proc/self/fd"))


def bwraps():
    """How many bubblewraps are our children, zombies too."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:
            continue
        found += int(rest.split()[1]) == os.getpid() and "bwrap" in name
    return found


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_hostile_programs_get_nothing_and_leave_nothing(boxes, case):
    outcome = boxes.run(case.program, case.tests, case.limits)
    assert "ESCAPED" not in outcome.stdout, outcome
    assert outcome.status in case.statuses, outcome
    assert outcome.passed < outcome.total or outcome.passed == 0, outcome
    assert outcome.seconds < case.limits.seconds + 3  # run time, whatever the machine has to do besides
    after = boxes.run(LOOK, ALONE)
    assert after.status is Status.PASSED, after


def test_boxes_are_replaced_only_when_lost(boxes):
    boxes.run("print(1)", [Stdio("", "1")])
    started = boxes.sandbox.started
    for _ in range(5):
        assert boxes.run("print(1)", [Stdio("", "1")]).status is Status.PASSED
        assert boxes.run("x = 1 / 0", [Stdio("", "1")]).status is Status.ERROR
    assert boxes.sandbox.started == started


CLASSES = """
import math
from collections import deque, namedtuple
Point = namedtuple("Point", "x y")
LIMIT = 10
class Broke(ValueError): pass
class Account:
    def __init__(self, money=0): self.money = money
    def take(self, n):
        if n > self.money: raise Broke(f"only {self.money}")
        self.money -= n
        return self
    def __eq__(self, other): return self.money == other.money
    def __len__(self): return self.money
    def __iter__(self): return iter(range(self.money))
    def __getitem__(self, n): return n * 2
class Solution:
    def double(self, x): return [2 * v for v in x]
def area(r): return math.pi * r ** 2
def pairs(n): return [(i, str(i)) for i in range(n)]
def sort(x): x.sort()
def apply(f, x): return [f(v) for v in x]
def count(n):
    for i in range(n): yield i
def things(): return {1: {2, 3}, "a": (None, True, 1.5), (1, 2): b"x"}
def big(): return 7 ** 500
def hello(name): print(f"hello {name}")
def wait(n): raise TimeoutError("late")
def parse(s):
    import json
    return json.loads(s)
def queue(): return deque([1, 2])
def point(): return Point(1, 2)
"""
HONEST = {
    "values": [Call("pairs", [2], [[0, "0"], [1, "1"]]), Call("area", [2.0], 12.566371), Call("big", [], 7**500)],
    "methods": [Call("double", [[1, 2]], [2, 4]), Call("Solution.double", [[3]], [6]), Call("area", {"r": 1}, 3.1415926535)],
    "generators": [Call("count", [3], [0, 1, 2]), Assert("assert sum(count(5)) == 10")],
    "asserts": [
        Assert("assert things() == {1: {2, 3}, 'a': (None, True, 1.5), (1, 2): b'x'}"),
        Assert("assert math.isclose(area(1), math.pi) and LIMIT == 10"),
        Assert("x = [3, 1, 2]\nsort(x)\nassert x == [1, 2, 3]"),
        Assert("assert apply(lambda v: v + 1, [1, 2]) == [2, 3]"),
        Assert("a = Account(5)\nassert a.take(2).money == 3 and len(a) == 3 and list(a) == [0, 1, 2] and a[4] == 8"),
        Assert("assert Account(1) == Account(1) and isinstance(Account(), Account) and not isinstance(3, Account)"),
        Assert("a = Account(1)\na.money = 7\nassert a.money == 7"),
        Assert("try:\n    Account(1).take(9)\n    assert False\nexcept ValueError as e:\n    assert 'only 1' in str(e)"),
        Assert("import json\ntry:\n    parse('{')\n    assert False\nexcept json.JSONDecodeError: pass"),
        Assert("def check(candidate):\n    assert candidate(3) == [(0, '0'), (1, '1'), (2, '2')]\ncheck(pairs)"),
        Assert("from solution import area as a\nimport solution\nassert a(0) == 0 and solution.LIMIT == 10"),
        Assert("assert list(queue()) == [1, 2] and point() == (1, 2)"),
    ],
    "pytest": [
        Pytest(
            "import pytest\nfrom solution import *\nfrom solution import Broke\n"
            "@pytest.fixture\ndef rich(): return Account(100)\n"
            "def test_take(rich): assert rich.take(1).money == 99\n"
            "def test_broke():\n    with pytest.raises(Broke, match='only 0'): Account().take(1)\n"
            "@pytest.mark.parametrize('r, a', [(0, 0), (1, 3.14159)])\ndef test_area(r, a): assert area(r) == pytest.approx(a, rel=1e-4)\n"
            "class TestPrints:\n    def test_hello(self, capsys):\n        hello('you')\n        assert capsys.readouterr().out == 'hello you\\n'\n"
            "@pytest.mark.skip\ndef test_later(): assert False\n"
            "def test_files(tmp_path): assert tmp_path.exists()\n"
        )
    ],
    "unittest": [Pytest("import unittest, solution\nclass TestArea(unittest.TestCase):\n    def test_it(self): self.assertEqual(solution.area(0), 0)\n")],
}  # fmt: skip


@pytest.mark.parametrize("kind", HONEST)
def test_honest_programs_pass(boxes, kind):
    outcome = boxes.run(CLASSES, HONEST[kind])
    assert outcome.status is Status.PASSED, outcome
    assert outcome.passed == outcome.total >= len(HONEST[kind])


@pytest.mark.parametrize(
    ("program", "given", "wanted"),
    [
        ("print(int(input()) ** 2)", "3\n", "9"),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", "1 2\n3\n", "6\n"),
        ("import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read().upper())", "äbc\n", "äBC"),
        ("print('a ')\nprint('b')\nprint()", "", "a\nb"),
        ("print(1 / 3)", "", "0.333333333"),
        ("for line in open(0): print(line.strip()[::-1])", "abc\ndef", "cba\nfed"),
        ("import threading\nthreading.Thread(target=lambda: print(5)).start()", "", "5"),
        ("import atexit\natexit.register(print, 2)\nprint(1)", "", "1\n2"),
        ("import sys\nprint(1)\nsys.exit()", "", "1"),
        ("if __name__ == '__main__': print('main')", "", "main"),
        ("open('/tmp/x', 'w').write('hi')\nprint(open('x').read())", "", "hi"),
        ("import subprocess\nprint(subprocess.run(['echo', 'hi'], capture_output=True, text=True).stdout)", "", "hi"),
        ("import asyncio\nasync def f(): print(1)\nasyncio.run(f())", "", "1"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\nprint(A())", "", "A(x=1)"),
        ("import sys\nsys.setrecursionlimit(10 ** 5)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(20000))", "", "20000"),
        ("print(len(input()))", "x" * 300_000, "300000"),
    ],
)
def test_input_and_output(boxes, program, given, wanted):
    outcome = boxes.run(program, [Stdio(given, wanted)])
    assert outcome.status is Status.PASSED, outcome


def test_fractions_and_early_stops(boxes):
    tests = [
        Stdio("1", "1"),
        Stdio("2", "4"),
        Call("f", [1], 1),
        Call("f", [2], 0),
        Call("f", [3], 9),
        Pytest("def test_a(): pass\ndef test_b(): assert 0"),
    ]
    program = "def f(n): return n * n\nif __name__ == '__main__': print(f(int(input())))"
    outcome = boxes.run(program, tests)
    assert (outcome.status, outcome.passed, outcome.total) == (Status.FAILED, 5, 7)
    assert "f returned 4" in outcome.why
    early = boxes.run(program, tests, Limits(seconds=60, stop_early=True))
    assert (early.status, early.passed) == (Status.FAILED, 3)
    hung = boxes.run("while True: pass", [Stdio("", "1")] * 20, Limits(seconds=2))
    assert (hung.status, hung.total) == (Status.TIMEOUT, 20)
    assert hung.seconds < 4  # it ran once


def test_what_went_wrong_is_said(boxes):
    raised = boxes.run("print('so far')\n1 / 0", [Stdio("", "1")])
    assert (raised.why, raised.stdout) == ("ZeroDivisionError: division by zero", "so far\n")
    assert "line 2" in raised.stderr
    assert "SyntaxError" in boxes.run("def", [Call("f", [], 1)]).why
    assert "defines no 'f'" in boxes.run("x = 1", [Call("f", [], 1)]).why
    assert "AssertionError" in boxes.run("def f(): return 1", [Assert("assert f() == 2")]).why


def test_many_programs_at_once_and_a_cancelled_one():
    before, boxes = bwraps(), Boxes(workers=3)

    async def go():
        runs = [boxes.sandbox.run(f"print({n})", [Stdio("", str(n if n % 3 else -1))], Limits(seconds=60)) for n in range(60)]
        hanging = asyncio.ensure_future(boxes.sandbox.run("while True: pass", [Stdio("", "")], Limits(seconds=600)))
        outcomes = await asyncio.gather(*runs)
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        return outcomes

    try:
        outcomes = boxes.runner.run(go())
        assert [o.status is Status.PASSED for o in outcomes] == [n % 3 != 0 for n in range(60)]
        assert boxes.sandbox.started == 3
        assert boxes.run(LOOK, ALONE).status is Status.PASSED
    finally:
        boxes.close()
    assert bwraps() == before
