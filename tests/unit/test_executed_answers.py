"""No scorer and no reader of actions hands a model's text to Python's compiler. tests/unit/test_reasoning.py has reasoning-gym's scorers."""

import subprocess
import sys

PROGRAM = r"""
import sys

compiled = []
def watch(event, args):
    if event == "compile" and args[0] is not None and "gotcha" in str(args[0]):
        compiled.append(str(args[0])[:80])
sys.addaudithook(watch)

import gymnasium.spaces as spaces
from drumroll.envs.adapters.calls import calls_in
from drumroll.envs.adapters.spaces import read
from drumroll.envs.python_math import PythonMath
from drumroll.rewards import numbers
from drumroll.rewards.maths import plain, quick
from drumroll.rewards.symbolic import equal_expressions

CODE = "__import__('os').getenv('gotcha')"
TEXTS = [CODE, f"[{CODE}]", f"\\boxed{{{CODE}}}", f"\\text{{{CODE}}}", f"\\operatorname{{{CODE}}}(x)", f"x_{{{CODE}}}", f"\\frac{{gotcha()}}{{2}}",
         f"{CODE}=1", f"1 \\cdot gotcha({CODE})", f"\\begin{{pmatrix}} gotcha() & {CODE} \\end{{pmatrix}}", f"\\{{gotcha, {CODE}\\}}", "1/gotcha()"]
for given in TEXTS:
    for gold in ("x+1", "\\frac{1}{2}", given + "+0"):
        equal_expressions(given, gold)
        quick(plain(given), plain(gold))
    numbers.read(given)
    calls_in(f'<tool_call>{{"name": "{CODE}", "arguments": {{"a": "{CODE}"}}}}</tool_call>{given}')
    for space in (spaces.Discrete(3), spaces.Box(0, 1, (2,)), spaces.Dict({"a": spaces.Discrete(2)}), spaces.Text(9)):
        read(space, given)
    game = PythonMath(run=lambda code: "")  # code goes to `run` only
    game.reset(0)
    game.step(f"<answer>{given}</answer>")
assert not compiled, compiled
eval("'gotcha'")
assert compiled, "the hook sees nothing"
"""


def test_only_the_sandbox_executes_answers():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == 0, done.stderr
