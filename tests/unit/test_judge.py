"""A judge is asked by template, understood however it puts it, asked again when that may help, and never twice."""

import asyncio
import contextlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumroll.config.reward import RewardConfig
from drumroll.config.roles import JudgeRole, RolesConfig
from drumroll.errors import ConfigError, DataError, MissingExtra
from drumroll.rewards import Scorer
from drumroll.rewards.judge_client import Judge, JudgeFailed, Passing, Reply, by_engine, open_judge
from drumroll.rewards.templates import TEMPLATES, fill, spelled, template
from drumroll.rewards.verdicts import verdict, winner
from drumroll.runfiles.judge_answers import Answers
from drumroll.sample import Prompt, Sample

# --- verdicts ---


@pytest.mark.parametrize(
    ("said", "scale", "value"),
    [
        ("Yes.", None, 1.0),
        ("no", None, 0.0),
        ("**Yes**, because 2+2=4.", None, 1.0),
        ("No, that is not right.", None, 0.0),
        ("I would say the answer is incorrect.", None, 0.0),
        ("The answer is not correct", None, 0.0),
        ("The result is correct", None, 1.0),
        ("0.5 of it", None, 0.5),
        ("1", None, 1.0),
        ("1/10", None, 0.1),
        ("1/10", 10, 0.1),
        ("7/10", None, 0.7),
        ("I give it 7 out of 10.", 10, 0.7),
        ("7", 10, 0.7),
        ("Score: 8", 10, 0.8),
        ("The rating is 12", 10, 1.0),
        ("-3", 10, 0.0),
        ("85%", None, 0.85),
        ("7", None, None),
        ("[[9]]", 10, 0.9),
        ("Rating: [[5/10]]", None, 0.5),
        ('{"verdict": "yes"}', None, 1.0),
        ('Thinking... {"a": 1} so ```json\n{"reason": "x", "verdict": false}\n```', None, 0.0),
        ('{"score": 7}', 10, 0.7),
        ('{"verdict": 0.25}', None, 0.25),
        ('{"verdict": "3/4"}', None, 0.75),
        ('Some say {odd. {"scores": [10, 5, 0]}', 10, 0.5),
        ('{"scores": {"style": 10, "facts": 0}}', 10, 0.5),
        ("<think>yes yes 9/10</think> no", None, 0.0),
        ("<think>never ends, 10/10", None, None),
        ("", None, None),
        ("hmm", None, None),
        ("3/0", None, None),
        ('{"verdict": NaN}', 10, None),
    ],
)
def test_verdicts(said, scale, value):
    assert verdict(said, scale) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("said", "side"),
    [
        ("[[A]]", "A"),
        ("A is wordy, so [[B]]", "B"),
        ("[[C]]", "tie"),
        ('{"winner": "B"}', "B"),
        ('{"verdict": "tie"}', "tie"),
        ("B", "B"),
        ("Answer A is better.", "A"),
        ("A better one is Answer B", "B"),
        ("I prefer response b", "B"),
        ("It is a tie", "tie"),
        ("a matter of taste", None),
        ("", None),
    ],
)
def test_winners(said, side):
    assert winner(said) == side


@given(st.text() | st.text(alphabet='{}[]"/0123456789.%ABC ye', max_size=40), st.sampled_from([None, 10.0]))
def test_nothing_a_judge_says_breaks_the_parser(said, scale):
    value = verdict(said, scale)
    assert value is None or 0.0 <= value <= 1.0
    assert winner(said) in ("A", "B", "tie", None)


# --- templates ---


def test_templates_are_names_texts_and_files(tmp_path):
    assert template("score").scale == 10
    assert template("Is {completion} good?").text == "Is {completion} good?"
    (tmp_path / "mine.txt").write_text("Grade {completion}")
    assert template(str(tmp_path / "mine.txt")).text == "Grade {completion}"
    with pytest.raises(ConfigError, match=r"template 'scor' is neither a name .* Did you mean 'score'\?"):
        Scorer({"*": [RewardConfig(use="judge", args={"template": "scor"})]}, judge=lambda q: None)
    (tmp_path / "bad.txt").write_text("Grade it")
    with pytest.raises(ConfigError, match="names no field"):
        template(str(tmp_path / "bad.txt"))


def test_filling():
    turns = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi {completion}"})
    assert fill('{prompt} {completion} {"verdict": 1}', {"prompt": turns[1:], "completion": "{prompt}"}) == (
        'Hi {completion} {prompt} {"verdict": 1}'
    )
    assert spelled(turns) == "system: Be kind.\nuser: Hi {completion}"
    assert spelled(["short", "true"]) == "1. short\n2. true"
    with pytest.raises(DataError, match="needs 'rubric', but there is only completion, prompt"):
        fill(TEMPLATES["rubric"].text, {"prompt": "p", "completion": "c"})


def scored(use, says, completion="4", args=(), **columns):
    """What a sample's rewards are when the judge says this (a text, or a function of the question)."""
    heard = []

    async def ask(question):
        heard.append(question)
        return says(question) if callable(says) else says

    async def go():
        scorer = Scorer({"*": [RewardConfig(use=use, args=dict(args))]}, judge=ask)
        sample = Sample(Prompt("p", "d", "2+2", (1,), columns), 0, 0, completion=completion)
        await scorer.score(sample)
        await scorer.close()
        return sample

    return asyncio.run(go()), heard


def test_the_reward_by_template():
    sample, heard = scored("judge", "7", args={"template": "score"})
    assert sample.reward == 0.7
    assert heard == [fill(TEMPLATES["score"].text, {"prompt": "2+2", "completion": "4"})]
    sample, heard = scored("judge", '{"scores": [10, 0]}', args={"template": "rubric", "rubric": ["right", "kind"]})
    assert (sample.reward, "1. right\n2. kind" in heard[0]) == (0.5, True)
    assert "Right answer: 4\n" in scored("judge", "yes", args={"template": "reference"}, answer="4")[1][0]
    assert scored("judge", "3", args={"template": "{completion}?", "scale": 5})[0].reward == 0.6
    missing = scored("judge", "yes", args={"template": "reference"})[0]
    assert "needs 'answer'" in str(missing.failure)


def test_what_cannot_be_read_and_what_is_labelled_is_noted():
    sample, _ = scored("judge", "hmm", args={"unreadable": 0.3})
    assert (sample.reward, sample.rewards["judge_readable"]) == (0.3, 0.0)
    assert scored("judge", "yes", judge_label=1)[0].rewards["judge_agreement"] == 1.0
    assert scored("judge", "yes", judge_label="no")[0].rewards["judge_agreement"] == 0.0
    assert "judge_agreement" not in scored("judge", "yes")[0].rewards


def prefers(text):
    """A judge that knows what it likes, whatever the order."""
    return lambda question: "[[A]]" if question.index(text) < question.index("[Answer B]") else "[[B]]"


@pytest.mark.parametrize(
    ("says", "value"),
    [(prefers("mine"), 1.0), (prefers("theirs"), 0.0), ("[[A]]", 0.5), ("[[B]]", 0.5), ("[[C]]", 0.5), ("?", 0.5)],
)
def test_pairs_are_asked_both_ways(says, value):
    sample, heard = scored("judge_pairwise", says, completion="mine", answer="theirs")
    assert sample.reward == value
    assert [q.index("mine") < q.index("theirs") for q in heard] == [True, False]
    assert sample.rewards["judge_readable"] == float(says != "?")


def test_pairs_may_be_asked_once():
    sample, heard = scored(
        "judge_pairwise", "[[A]]", completion="mine", args={"swap": False, "against": "other"}, other="theirs"
    )
    assert (sample.reward, len(heard)) == (1.0, 1)
    sample, _ = scored("judge_pairwise", "[[A]]", completion="mine", args={"against": "other"})
    assert "compared with the column 'other', but there is only completion, prompt" in str(sample.failure)


def test_waiting_for_the_judge_is_not_billed_to_the_reward():
    async def slow(question):
        await asyncio.sleep(0.3)
        return "yes"

    async def go():
        scorer = Scorer({"*": [RewardConfig(use="judge")]}, timeout=0.1, judge=slow)
        sample = Sample(Prompt("p", "d", "2+2", (1,)), 0, 0, completion="4")
        await scorer.score(sample)
        return sample

    assert asyncio.run(go()).reward == 1.0


# --- asking ---


def role(**changes):
    return JudgeRole(**({"model": "m", "backoff": 0.0} | changes))


def test_failures_that_may_pass_are_tried_again():
    tries = []

    async def flaky(question):
        tries.append(question)
        if len(tries) % 3:
            raise Passing("busy")
        return Reply("yes", 10, 2)

    async def go():
        judge = Judge(role(price={"input": 1e6, "output": 2e6}), flaky, None)
        assert [await judge("q"), await judge("q")] == ["yes", "yes"]
        found = judge.metrics()
        assert found == {f"judge/{k}": v for k, v in (
            ("calls", 6), ("cached", 0), ("retried", 4), ("failed", 0), ("tokens_in", 20), ("tokens_out", 4), ("cost", 28.0)
        )}  # fmt: skip
        assert judge.metrics() == {}
        with pytest.raises(JudgeFailed, match="the judge m did not answer in 2 tries: busy"):
            await Judge(role(retries=1), flaky, None)("q")

    asyncio.run(go())


def test_nothing_is_asked_twice(tmp_path):
    asked = []

    async def slow(question):
        asked.append(question)
        await asyncio.sleep(0.01)
        return Reply(question.upper(), 1, 1)

    async def go(answers):
        judge = Judge(role(), slow, answers)
        return await asyncio.gather(*(judge(q) for q in "abab")), judge.metrics()

    path = tmp_path / "judge.jsonl"
    said, found = asyncio.run(go(Answers(path)))
    assert (said, asked) == (["A", "B", "A", "B"], ["a", "b"])
    assert (found["judge/calls"], found["judge/cached"]) == (2, 2)
    with path.open("a") as file:
        file.write('["torn')
    assert asyncio.run(go(Answers(path)))[1]["judge/calls"] == 0
    assert len(asked) == 2
    asyncio.run(go(None))
    assert len(asked) == 6


def test_who_waits_for_the_same_answer_survives_the_first_ones_failure():
    tries = []

    async def once_bad(question):
        tries.append(question)
        await asyncio.sleep(0.01)
        if len(tries) == 1:
            raise JudgeFailed("no")
        return Reply("yes", 1, 1)

    async def go():
        judge = Judge(role(), once_bad, Answers())
        return await asyncio.gather(judge("q"), judge("q"), judge("q"), return_exceptions=True)

    first, second, third = asyncio.run(go())
    assert isinstance(first, JudgeFailed)
    assert (second, third, len(tries)) == ("yes", "yes", 2)


def test_tries_keep_to_the_rate():
    async def quick(question):
        return Reply("yes", 1, 1)

    async def go():
        judge = Judge(role(requests_per_minute=1200), quick, None)
        began = time.monotonic()
        await asyncio.gather(*(judge(str(n)) for n in range(5)))
        return time.monotonic() - began

    assert asyncio.run(go()) >= 4 * 0.05


CHAT = "{% for m in messages %}<bos>{{ m.role }}: {{ m.content }}<eos>{% endfor %}<bos>judge: "


def shown(question, limit, template=CHAT):
    """What a judge of so many prompt tokens reads."""
    from drumroll.engines import Completion
    from drumroll.engines.router import Router
    from drumroll.models import tiny
    from drumroll.sample import StopReason

    tokenizer, seen = tiny.tokenizer(), []
    tokenizer.chat_template = template

    async def generate(request):
        seen.append(list(request.tokens))
        return Completion([3], stop=StopReason.EOS)

    async def go():
        router = Router()
        router.join("engine", generate, 1)
        await by_engine(role(max_prompt_tokens=limit), router, tokenizer)(question)

    asyncio.run(go())
    assert len(seen[0]) <= limit
    return tokenizer.decode(seen[0])


@pytest.mark.parametrize("template", [CHAT, None], ids=["chat", "plain"])
def test_a_long_completion_is_shortened_in_its_middle(template):
    fields = {"prompt": "what is two and two?", "answer": "four", "completion": "begin " + "x" * 3000 + " end"}
    question = fill(TEMPLATES["reference"].text, fields)
    whole, short = shown(question, 5000, template), shown(question, 400, template)
    for part in ("Question: what is two and two?", "Right answer: four", "Given answer: begin x", "x end\n", "Say yes or no."):
        assert part in short
    assert re.search(r"x\n\[... \d+ characters left out ...\]\nx", short)
    assert "left out" not in whole
    assert whole.startswith(short[:60])
    assert short.endswith(whole[-20:])
    assert len(short) > 350  # as much as fits


def test_two_long_answers_are_shortened_alike():
    fields = {"prompt": "which?", "first": "a" * 2000, "second": "b" * 2000}
    short = shown(fill(TEMPLATES["pairwise"].text, fields), 500)
    assert short.count("left out") == 2
    assert short.count("a" * 30) == short.count("b" * 30) > 0
    assert "End with [[A]], [[B]], or [[C]]" in short


@pytest.mark.parametrize(
    "question",
    ["head " + "x" * 3000 + " tail", fill("head {prompt} tail {completion}", {"prompt": "x" * 3000, "completion": "y"})],
)
def test_a_question_that_is_long_without_the_completion_loses_its_own_middle(question):
    short = shown(question, 200)
    assert "user: head x" in short
    assert "left out" in short
    assert short.endswith("judge: ")


def test_a_limit_without_room_is_told():
    with pytest.raises(JudgeFailed, match=r"max_prompt_tokens: 5 leaves no room"):
        shown("x" * 50, 5)


def test_the_router_forgets_every_question():
    from drumroll.engines.router import Router
    from drumroll.models import tiny

    router = Router()

    async def fails(request):
        raise RuntimeError("out of memory")

    async def go():
        router.join("engine", fails, 1)
        with pytest.raises(RuntimeError):
            await by_engine(role(), router, tiny.tokenizer())("2+2?")

    asyncio.run(go())
    assert router._sticky == {}


def test_keys_are_named_never_written(monkeypatch):
    there = {"url": "http://127.0.0.1:1/v1", "key_env": "A_JUDGES_KEY"}
    with pytest.raises(ConfigError, match="the environment variable A_JUDGES_KEY is not set"):
        open_judge(role(**there), None)
    monkeypatch.setenv("A_JUDGES_KEY", "sesame")
    assert "sesame" not in RolesConfig(judge=role(**there)).model_dump_json()
    for wrong in ({"key_env": "X"}, {"url": "http://x", "devices": 1}):
        with pytest.raises(ValueError):
            role(**wrong)
    monkeypatch.setitem(__import__("sys").modules, "openai", None)
    with pytest.raises(MissingExtra, match=r"roles.judge.url needs .*drumroll\[judge\]"):
        open_judge(role(**there), None)


# --- an endpoint ---


class Endpoint(ThreadingHTTPServer):
    """A small OpenAI-compatible server; `script` gives, per request, what to do instead of answering."""

    daemon_threads = True

    def __init__(self, script=()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.heard, self.keys = list(script), [], []
        self.lock, self.present, self.most = threading.Lock(), 0, 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        with self.server.lock:
            self.server.present += 1
            self.server.most = max(self.server.most, self.server.present)
        try:
            self.answer()
        finally:
            with self.server.lock:
                self.server.present -= 1

    def answer(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.heard.append(body)
        self.server.keys.append(self.headers["authorization"])
        step = self.server.script.pop(0) if self.server.script else "answer"
        if step == "hang":
            time.sleep(2)
        if step == "slow":
            time.sleep(0.1)
        if isinstance(step, int):
            headers = {"retry-after": "0.01"} if step == 429 else {}
            return self.reply(step, b'{"error": {"message": "not now"}}', headers)
        if step in ("text", "{}", "[1, 2"):
            return self.reply(200, step.encode(), {})
        said = {"role": "assistant", "content": "7/10"}
        usage = {"prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23}
        whole = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
        choice = {"index": 0, "finish_reason": "stop", "message": said}
        return self.reply(200, json.dumps(whole | {"choices": [choice]}).encode(), {})

    def reply(self, code, body, headers):
        with contextlib.suppress(OSError):
            self.send_response(code)
            for name, value in {"content-type": "application/json", "content-length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *args): ...


@pytest.fixture
def endpoint():
    servers = []

    def start(*script):
        server = Endpoint(script)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(server, *questions, **changes):
    async def go():
        judge = open_judge(role(url=server.url, **changes), None)
        try:
            return await asyncio.gather(*map(judge, questions)), judge.metrics()
        finally:
            await judge.close()

    return asyncio.run(go())


def test_an_endpoint_is_asked_as_told(endpoint, monkeypatch):
    monkeypatch.setenv("A_JUDGES_KEY", "sesame")
    server = endpoint()
    said, found = ask(server, "How good?", key_env="A_JUDGES_KEY", max_tokens=9, options={"seed": 3}, price={"input": 1.0})
    assert said == ["7/10"]
    [body] = server.heard
    assert body["messages"] == [{"role": "user", "content": "How good?"}]
    assert (body["model"], body["max_tokens"], body["temperature"], body["seed"]) == ("m", 9, 0.0, 3)
    assert server.keys == ["Bearer sesame"]
    assert (found["judge/tokens_in"], found["judge/tokens_out"], found["judge/cost"]) == (20, 3, 20e-6)


@pytest.mark.parametrize("failure", [429, 500, 503, "hang", "text", "{}", "[1, 2"])
def test_failures_that_may_pass(endpoint, failure):
    server = endpoint(failure)
    said, found = ask(server, "How good?", timeout=1.0)
    assert said == ["7/10"]
    assert (found["judge/retried"], found["judge/calls"], len(server.heard)) == (1, 2, 2)


@pytest.mark.parametrize(
    ("script", "sentence"),
    [([401], "answered 401"), ([404], "answered 404"), ([500] * 3, "did not answer in 3 tries: .* answered 500")],
)
def test_failures_that_stay(endpoint, script, sentence):
    server = endpoint(*script)
    with pytest.raises(JudgeFailed, match=sentence):
        ask(server, "How good?", retries=2)
    assert len(server.heard) == len(script)


def test_no_connection_is_told():

    class Nobody:
        url = "http://127.0.0.1:9/v1"

    with pytest.raises(JudgeFailed, match="did not answer in 2 tries"):
        ask(Nobody, "How good?", retries=1)


def test_at_most_so_many_at_once(endpoint):
    server = endpoint(*["slow"] * 8)
    _, found = ask(server, *"abcdefgh", slots=2, timeout=30.0)
    assert (found["judge/calls"], server.most) == (8, 2)
