"""Tools: schemas from functions, calls in text, episodes with functions, TRL's classes and real MCP servers."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy_tools
from test_adapters import passes, play
from test_data import TEMPLATE, chat_renderer
from test_episodes import played

from drumroll.data.conversation import Conversation
from drumroll.envs.adapters.calls import Call, Unreadable, calls_in, written
from drumroll.envs.adapters.schema import BadCall, Tool
from drumroll.envs.runner import Runner
from drumroll.errors import ConfigError
from drumroll.sample import Scene, StopReason

HERE = Path(__file__).parent
FUNCTIONS = "tools:toy_tools:add,toy_tools:divide,toy_tools:find,toy_tools:long"
SERVER = f"mcp:python {HERE / 'toy_mcp_server.py'}"


def call(name, **arguments):
    return written(Call(name, arguments))


# --- schemas ---


def test_a_function_is_its_schema():
    assert Tool(toy_tools.add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first number."},
                    "b": {"type": "integer", "description": "The second", "default": 1},
                },
                "required": ["a"],
            },
        },
    }
    properties = Tool(toy_tools.find).schema["function"]["parameters"]["properties"]
    assert properties["words"] == {"type": "array", "items": {"type": "string"}, "description": "what to look for"}
    assert properties["where"]["enum"] == ["title", "text"]
    with pytest.raises(ConfigError, match="tool 'loose': the parameter 'numbers' has no name"):
        Tool(toy_tools.loose)


def test_arguments_are_checked():
    assert Tool(toy_tools.add).bind({"a": "3"}) == {"a": 3, "b": 1}
    for wrong in ({}, {"a": "x"}, {"a": 1, "c": 2}):
        with pytest.raises(BadCall, match=r"^(a|c): "):
            Tool(toy_tools.add).bind(wrong)


# --- calls ---


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [Call("f", {"a": 1})]),
        (
            'first <tool_call>{"name": "f"}</tool_call> then <tool_call>{"name": "g", "arguments": "{}"}',
            [Call("f", {}), Call("g", {})],
        ),
        ('<tool_call>{"function": {"name": "f", "arguments": {}}}</tool_call>', [Call("f", {})]),
        ('{"name": "f", "parameters": {"a": 1}}', [Call("f", {"a": 1})]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}]', [Call("f", {})]),
        ('<think><tool_call>{"name": "f"}</tool_call></think>42', []),
        ("42", []),
        ("[1, 2]", []),
        ("[]", []),
        ('{"a": 1}', []),
        ("{no json}", []),
    ],
)
def test_calls_are_found(text, found):
    assert calls_in(text) == found


@pytest.mark.parametrize(
    "body", ["", "{", "f(1)", "[]", "3", '{"name": 3}', '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": "x"}']
)
def test_unreadable_calls_say_why(body):
    [found] = calls_in(f"<tool_call>{body}</tool_call>")
    assert isinstance(found, Unreadable)
    assert found.reason


# --- conversations with tools ---

TOOLS = [Tool(toy_tools.add).schema]
FIRST = [{"role": "tools", "content": "call add", "tools": TOOLS}, {"role": "user", "content": "1+2"}]
RESULTS = [{"role": "tool", "name": "add", "content": "3"}, {"role": "tool", "name": "add", "content": "4"}]


def rendered(template, first=FIRST, **how):
    renderer = chat_renderer(template)
    conversation = Conversation(renderer, first, **how)
    return [
        renderer.tokenizer.decode(conversation.prompt()),
        renderer.tokenizer.decode(conversation.follow("x", RESULTS, None)),
    ]


def test_a_template_that_knows_tools_gets_them():
    template = "{% for t in tools %}({{ t.function.name }}){% endfor %}" + TEMPLATE
    assert rendered(template) == ["(add)<user>1+2</><assistant>", "</><tool>3</><tool>4</><assistant>"]
    window = Conversation(chat_renderer(template), FIRST)
    window.add("x", RESULTS)
    assert window.renderer.tokenizer.decode(window.window(1)).startswith("(add)<user>1+2</><assistant>x</>")


def test_a_template_that_does_not_gets_words():
    response = "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    assert rendered(TEMPLATE) == ["<user>call add\n\n1+2</><assistant>", f"</><user>{response}</><assistant>"]
    assert rendered(TEMPLATE, system="be brief")[0] == "<system>be brief\n\ncall add</><user>1+2</><assistant>"
    assert Conversation(chat_renderer(None), FIRST).prompt()  # plain text


# --- functions ---


def test_functions_are_called_and_the_answer_is_scored():
    turns = [call("add", a=2, b=3), f"{call('divide', a=1, b=4)}{call('find', words=['a'])}", "<answer>5</answer>"]
    first, *steps = play(FUNCTIONS, turns=turns, row={"prompt": "2+3?", "answer": 5})
    tools, task = first
    assert [t["function"]["name"] for t in tools["tools"]] == ["add", "divide", "find", "long"]
    assert '"name": "add"' in tools["content"]
    assert task == {"role": "user", "content": "2+3?"}
    assert steps[0][1].observation == [{"role": "tool", "name": "add", "content": "5"}]
    assert [m["content"] for m in steps[1][1].observation] == ["0.25", '{"hits": 1, "where": "title"}']
    last = steps[2][1]
    assert (last.reward, last.terminated, last.info["success"]) == (1.0, True, True)
    for answer, reward in (("5.0", 1.0), ("6", 0.0), ("", 0.0)):
        assert play(FUNCTIONS, turns=[answer], row={"prompt": "", "answer": 5})[-1][1].reward == reward
    assert play(FUNCTIONS, turns=["x"], score="toy_tools:half")[-1][1].reward == 0.5
    unscored = play(FUNCTIONS, turns=["x"], teach=False, prompt="go")
    assert unscored[0] == [{"role": "user", "content": "go"}]
    assert "success" not in unscored[-1][1].info


def test_errors_of_tools_are_told_and_counted():
    wrong = [call("divide", a=1, b=0), call("sub", a=1), call("add", a="x"), "<tool_call>{</tool_call>"]
    told = [step.observation[0]["content"] for _, step in play(FUNCTIONS, turns=wrong, max_errors=9)[1:]]
    assert told[0] == "error: ZeroDivisionError: float division by zero"
    assert "there is no tool 'sub', only add, divide" in told[1]
    assert told[2].startswith("error: a: Input should be a valid integer")
    assert told[3].startswith("error: the call could not be read: it is not JSON")
    _, *steps = play(FUNCTIONS, turns=wrong, max_errors=3)
    assert [s.truncated for _, s in steps] == [False, False, True]
    assert steps[-1][1].info["success"] is False
    output = play(FUNCTIONS, turns=[call("long", count=50)], max_output=10)[-1][1].observation[0]["content"]
    assert output == "xxxxxxxxxx… (40 characters more)"


@pytest.mark.parametrize(
    ("turns", "stop"),
    [
        ([call("divide", a=1, b=0)], StopReason.TOOL_ERROR),
        (["<tool_call>{</tool_call>"], StopReason.MALFORMED),
        ([call("add", a=1)], StopReason.TURNS),
        (["4"], StopReason.TERMINATED),
    ],
)
def test_the_right_stop_reason(turns, stop):
    """Through a real episode in a process of its own."""
    scene = Scene(FUNCTIONS, {"teach": False, "max_errors": 2})
    assert played(scene, turns, context=4000, max_turns=4).stop is stop


def test_functions_pass_the_check():
    notes = passes(FUNCTIONS, prompt="Add.")
    assert notes["seeds matter"] == "its rows decide how an episode begins"
    with pytest.raises(ConfigError, match=r"has no 'ad'.* Did you mean 'add'"):
        Runner("tools:toy_tools:ad", {})


# --- TRL's environment classes ---


def test_a_class_as_trl_has_it():
    use = "trl:toy_tools:Vault"
    turns = [call("turn", by=1)] * 5 + [call("push")]
    first, *_ = play(use, 3, turns=turns, row={"prompt": "Open it.", "level": 2})
    tools, task = first
    assert [t["function"]["name"] for t in tools["tools"]] == ["push", "turn"]
    assert task["content"] == "Open it. The dial goes up to 5, level 2."
    for seed in range(4):
        steps = []
        for turn in range(5):
            steps = play(use, seed, turns=[call("turn", by=1)] * (turn + 1) + [call("push")], prompt="")[1:]
            if steps[-1][1].terminated:
                break
        assert steps[-1][1].info["success"]
        assert sum(step.reward for _, step in steps) == pytest.approx(1.0)  # near, then open
    gave_up = play(use, 3, turns=[call("turn", by=9), "I give up"], prompt="", args={"top": 1})
    assert gave_up[-1][1].terminated
    assert sum(step.reward for _, step in gave_up[1:]) == pytest.approx(0.1)
    assert play(use, 1) == play(use, 1)
    assert passes(use)["same seed, same episode"]
    with pytest.raises(ConfigError, match=r"has no reset\(\)"):
        play("trl:toy_tools:NoReset")


# --- MCP ---


def test_mcp_over_stdio():
    turns = [call("multiply", a=6, b=7), call("tick"), call("tick"), call("fail", why="rain"), "42"]
    first, *steps = play(SERVER, turns=turns, row={"prompt": "6*7?", "answer": 42})
    assert [t["function"]["name"] for t in first[0]["tools"]] == ["multiply", "tick", "fail"]
    assert first[0]["tools"][0]["function"]["parameters"]["required"] == ["a", "b"]
    said = [step.observation[0]["content"] for _, step in steps[:-1]]
    assert said[:3] == ["42", "tick 1", "tick 2"]
    assert said[3].startswith("error: ")
    assert steps[3][1].info["tool_error"]
    assert steps[-1][1].reward == 1.0
    again = play(SERVER, turns=[call("tick")])
    assert again[-1][1].observation[0]["content"] == "tick 1"  # a server of its own
    shared = [play(SERVER, turns=[call("tick")], shared=True)[-1][1].observation[0]["content"] for _ in range(2)]
    assert shared == ["tick 1", "tick 2"]
    scene = Scene(SERVER, {"teach": False, "shared": True, "max_errors": 1})
    assert played(scene, [call("fail", why="x")], context=4000).stop is StopReason.TOOL_ERROR


def test_mcp_over_http():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, HERE / "toy_mcp_server.py", str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        steps = play(f"mcp:http://127.0.0.1:{port}/mcp", turns=[call("multiply", a=6, b=7)])
        assert steps[-1][1].observation[0]["content"] == "42"
    finally:
        process.kill()
        process.wait()


def test_a_server_that_cannot_be_used_is_one_sentence(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('out of order')")
    with pytest.raises(ConnectionError, match=r"the MCP server 'python .*broken.py' cannot be used: .*out of order"):
        play(f"mcp:python {script}")
    with pytest.raises(ConnectionError, match="cannot be used"):
        play("mcp:no-such-command-here")


def test_mcp_passes_the_check():
    notes = passes(SERVER, shared=True, prompt="Multiply.")
    assert notes["runs"].startswith("thread")
