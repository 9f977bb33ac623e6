"""Episodes: token-exact conversations, deadlines, endings, seeds; whatever an environment does."""

import asyncio
import random
from collections import Counter

import pytest
import toy_environments  # noqa: F401  registers the toys
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import TEMPLATE, chat_renderer

from drumroll.batch import pack
from drumroll.config.data import DatasetConfig
from drumroll.config.environment import EnvironmentConfig
from drumroll.config.rollout import RolloutConfig
from drumroll.data.conversation import Conversation
from drumroll.data.render import Renderer
from drumroll.data.source import Reader, no_columns
from drumroll.engines import Request, Sampling
from drumroll.engines.native import NativeEngine
from drumroll.engines.router import Router
from drumroll.envs.episodes import Episodes
from drumroll.envs.rows import demonstrations
from drumroll.envs.runner import where
from drumroll.errors import ConfigError, TemplateError
from drumroll.lifecycle import SampleFailed
from drumroll.models import loading, tiny
from drumroll.processes.pool import KillablePool
from drumroll.rollout.scheduler import Rollouts
from drumroll.sample import Group, Owner, Prompt, Sample, Scene, StopReason, Trace, Turn, episode_seed

PLAIN = Renderer(tiny.tokenizer())
DROPS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if m.role == 'user' or loop.last else 'gone' }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRIMS = TEMPLATE.replace("m.content", "m.content | trim")


# --- conversations ---


def text_of(renderer, tokens):
    return renderer.tokenizer.decode(tokens)


def test_a_plain_conversation_is_its_texts():
    conversation = Conversation(PLAIN, "one:")
    assert text_of(PLAIN, conversation.prompt()) == "<bos>one:"
    assert text_of(PLAIN, conversation.follow("a", "two:", None)) == "two:"
    assert text_of(PLAIN, conversation.follow("b", [{"role": "tool", "content": "three:"}], None)) == "three:"


turns = st.lists(st.tuples(st.text("ab ", max_size=4), st.text("xy ", min_size=1, max_size=4)), max_size=5)


@pytest.mark.parametrize("template", [TEMPLATE, TRIMS])
@given(st.text("xy", min_size=1, max_size=4), turns)
@settings(max_examples=40)
def test_a_chat_grows_by_what_its_template_adds(template, first, turns):
    """What was seen, what was said and what was added, end to end, are the rendered conversation (blanks aside)."""
    renderer = chat_renderer(template)
    conversation = Conversation(renderer, first, system="s")
    seen = text_of(renderer, conversation.prompt())
    for said, observation in turns:
        seen += said + text_of(renderer, conversation.follow(said, observation, None))
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": first}]
    for said, observation in turns:
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": observation}]
    whole = renderer.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert seen.replace(" ", "") == whole.replace(" ", "")
    if template == TEMPLATE:
        assert seen == whole


def test_the_end_of_turn_that_the_policy_wrote_is_not_added_again():
    renderer = chat_renderer(TEMPLATE.replace("</>", "<eos>"))
    conversation = Conversation(renderer, "x")
    conversation.prompt()
    eos = renderer.tokenizer.eos_token_id
    assert conversation.follow("a", "y", eos)[0] != eos
    assert conversation.follow("a", "y", None)[0] == eos  # it was cut: the template's own ends the turn


def test_a_template_that_rewrites_earlier_turns_is_named_with_the_text():
    conversation = Conversation(chat_renderer(DROPS), "x")
    conversation.prompt()
    with pytest.raises(TemplateError, match=r"not prefix-stable: it showed 'hello' where .* 'gone"):
        conversation.follow("hello", "y", None)
    with pytest.raises(TemplateError, match="no chat template"):
        Conversation(PLAIN, "x", system="s")


def test_templates_are_checked_before_anything_is_generated():
    told = []
    for mode in ("trajectory", "step"):
        episodes = opened(EnvironmentConfig(mode=mode), chat_renderer(DROPS), notify=told.append)
        assert episodes.open(sample_of(Scene("corridor")))
        assert episodes.open(sample_of(Scene("corridor")))
    assert [text.partition(":")[0] for text in told] == [
        "the chat template of this model rewrites earlier turns (for example drops their thoughts)"
    ]
    with pytest.raises(TemplateError, match="does not show earlier turns"):
        opened(EnvironmentConfig(earlier_turns="sampled"), chat_renderer(DROPS)).open(sample_of(Scene("corridor")))


@given(turns, st.integers(0, 4), st.booleans())
@settings(max_examples=60)
def test_a_window_shows_the_first_observation_and_the_last_turns(turns, history, keep):
    conversation = Conversation(PLAIN, "first:")
    for said, observation in turns:
        conversation.add(said, observation)
    want = ["first:"] if keep or len(turns) <= history else []
    shown = turns[max(0, len(turns) - history) :]
    if len(shown) < len(turns):
        want.append(turns[len(turns) - len(shown) - 1][1])
    want += [text for turn in shown for text in turn]
    assert text_of(PLAIN, conversation.window(history, keep_first=keep)) == "<bos>" + "".join(want)


def test_a_window_reads_like_demonstrations():
    messages = next(demonstrations("train", 0, "sokoban", form="messages", style="compact"))["messages"]
    rows = demonstrations("train", 0, "sokoban", history=1, style="compact")
    texts = [message["content"] for message in messages]
    conversation = Conversation(PLAIN, texts[0])
    for place in range(1, len(texts), 2):
        assert text_of(PLAIN, conversation.window(1, keep_first=False)) == "<bos>" + next(rows)["prompt"]
        conversation.add(*texts[place : place + 2], *[""] * (place + 2 > len(texts)))


# --- the token record ---


class Recorder:
    """Stands before an engine and notes what it was asked and what it wrote."""

    def __init__(self, engine):
        self.engine = engine
        self.calls = {}

    async def generate(self, request):
        done = await self.engine.generate(request)
        self.calls.setdefault(request.id.partition("#")[0], []).append((request, done))
        return done


def check_record(sample, calls):
    """The sample's traces are, token by token, what the engine saw and wrote; returns how often it was interrupted."""
    resumed = 0
    for number, trace in enumerate(sample.traces):
        at, ended = 0, False
        for request, done in [c for c in calls if c[0].id.split("#")[1] == str(number)]:
            size = len(request.tokens)
            assert list(request.tokens) == trace.tokens[:size]
            between = set(trace.owners[at:size])
            assert between == ({Owner.PROMPT} if not at else {Owner.ENVIRONMENT} if ended else set())
            at, ended = size + len(done.tokens), done.stop is not StopReason.ABORTED
            resumed += not ended
            assert trace.tokens[size:at] == done.tokens
            assert trace.owners[size:at] == [Owner.POLICY] * len(done.tokens)
            assert trace.logprobs[size:at] == done.logprobs
            assert trace.versions[size:at] == done.versions
        assert at == len(trace.tokens) or (not at and trace.owners == [Owner.PROMPT] * len(trace.tokens))
    spans = [(t.trace, t.start, t.end) for t in sample.turns]
    assert spans == sorted(spans)
    covered = Counter(place for trace, start, end in spans for place in ((trace, i) for i in range(start, end)))
    policy = {(n, i) for n, trace in enumerate(sample.traces) for i, o in enumerate(trace.owners) if o is Owner.POLICY}
    assert set(covered) == policy
    assert set(covered.values()) <= {1}
    return resumed


class Rows:
    """A source of prompts that are played."""

    def __init__(self, scene):
        self.scene, self.count = scene, 0
        self.shares = {"": 1.0}

    def draw(self):
        self.count += 1
        return Prompt(f"p{self.count}", "d", "", (), scene=self.scene)

    def exhausted(self):
        return False

    def state(self):
        return {}


class Sum:
    """The environment's reward alone."""

    async def score(self, sample, group=None):
        sample.reward = sample.rewards["environment"]


def opened(config, renderer=PLAIN, context=96, seed=0, **more):
    decode = lambda tokens: renderer.tokenizer.decode(tokens, skip_special_tokens=True)  # noqa: E731
    return Episodes(config, seed, renderer, decode, context, KillablePool, **more)


class Forks:
    """An agent that goes back: it continues any earlier conversation from any of its tokens."""

    def __init__(self, sample, context):
        self.sample, self.context, self.rng = sample, context, random.Random(sample.id)

    async def begin(self):
        self.sample.traces, self.sample.turns = [], []
        return self.show([])

    def show(self, before):
        self.sample.traces.append(Trace())
        return self.add(before, Owner.PROMPT)

    def add(self, before, owner):
        trace = self.sample.traces[-1]
        trace.extend([*before, *(self.rng.randint(3, 20) for _ in range(self.rng.randint(1, 6)))], owner)
        self.start = len(trace.tokens)
        return True

    async def answer(self):
        sample, trace, rng = self.sample, self.sample.traces[-1], self.rng
        sample.turns.append(Turn(len(sample.traces) - 1, self.start, len(trace.tokens), "", reward=rng.random()))
        if len(sample.turns) == 5 or rng.random() < 0.1:
            sample.rewards["environment"] = sum(t.reward for t in sample.turns)
            return False
        if rng.random() < 0.5 and sample.stop is not StopReason.CONTEXT and len(trace.tokens) < self.context - 8:
            return self.add([], Owner.ENVIRONMENT)
        old = rng.choice(sample.traces).tokens
        return self.show(old[: rng.randint(0, min(len(old), self.context - 8))])

    def close(self):
        pass


@pytest.mark.parametrize(
    ("mode", "template"), [("trajectory", TEMPLATE), ("trajectory", None), ("step", None), ("forks", None)]
)
def test_the_record_is_what_the_engine_saw(mode, template):
    """A thousand episodes in all, forked, cut by length, context and limits, interrupted and resumed under new weights."""
    renderer = chat_renderer(template) if template else PLAIN
    model = loading.load("tiny-random", seed=1)
    context, groups, samples, steps = (120 if template else 48), 14, 4, 5
    engine = NativeEngine(model, slots=24, context=context)
    recorder = Recorder(engine)
    rollout = RolloutConfig(
        prompts=groups, samples=samples, max_tokens=6, stop=["e"], max_staleness=2, partial=True, overage="mask"
    )
    how = "trajectory" if mode == "forks" else mode
    config = EnvironmentConfig(use="chatter", max_turns=5, mode=how, history=1, format_penalty=0.5, invalid_penalty=0.25)
    episodes = opened(config, renderer, context)
    begin = (lambda sample: Forks(sample, context)) if mode == "forks" else episodes.open

    async def main():
        router = Router()
        router.join("engine", recorder.generate, 24, engine.interrupt)
        rollouts = Rollouts(rollout, 0, Rows(Scene("chatter")), router, Sum(), episodes.decode, episodes=begin)
        taken, failed = [], []
        for version in range(1, steps + 1):
            groups = await rollouts.take(rollout.prompts)
            weights = {n: p * 1.01 for n, p in model.module.state_dict().items() if n in dict(model.module.named_parameters())}
            await asyncio.to_thread(engine.load, version, weights.items(), recompute=True)
            rollouts.publish(version)
            rollouts.trained(groups)
            taken += [s for g in groups for s in g.samples]
            failed += rollouts.stats.failed
        await rollouts.close()
        return taken, failed

    try:
        taken, failed = asyncio.run(main())
    finally:
        engine.close()
    assert not failed
    assert len(taken) >= groups * samples * steps
    resumed = sum(check_record(sample, recorder.calls[sample.id]) for sample in taken)
    assert resumed > 3
    assert any(len({v for t in s.traces for v in t.versions if v >= 0}) > 1 for s in taken)
    for sample in taken:
        assert sample.reward == pytest.approx(sum(t.reward for t in sample.turns))
        assert len(sample.turns) <= 5
    if mode == "forks":
        assert sum(len(s.traces) > 1 for s in taken) > len(taken) / 2
        return
    stops = Counter(s.stop for s in taken)
    often = StopReason.TURNS if mode == "step" else StopReason.CONTEXT
    assert {StopReason.TERMINATED, StopReason.TRUNCATED, StopReason.MALFORMED, StopReason.TOOL_ERROR, often} <= set(stops)
    for sample in taken:
        assert (len(sample.traces) == len(sample.turns)) if mode == "step" else (len(sample.traces) == 1)


def test_a_turn_computes_only_what_is_new():
    """Keys and values of earlier turns are reused: of a turn, the observation and the token sampled last are computed."""
    engine = NativeEngine(loading.load("tiny-random", seed=1), slots=4, context=256)
    observation, rng = [5, 6, 7, 8, 9, 10, 11], random.Random(0)

    async def turn(name, tokens):
        before = engine.prefilled
        done = await engine.generate(Request(name, tuple(tokens), Sampling(1.0, 12), rng.randint(0, 99), 0))
        return [*tokens, *done.tokens], engine.prefilled - before

    async def main():
        tokens, computed = await turn("0", [rng.randint(3, 20) for _ in range(40)])
        assert computed == 40
        for number in range(1, 6):
            tokens, computed = await turn(str(number), tokens + observation)
            assert computed == len(observation) + 1
        _, forked = await turn("fork", tokens[:60] + observation)
        assert forked == len(observation)
        await asyncio.to_thread(engine.load, 1, engine.model.module.named_parameters(), recompute=True)
        _, anew = await turn("anew", tokens + observation)
        assert anew == len(tokens) + len(observation)  # other weights: nothing cached counts any more

    try:
        asyncio.run(main())
    finally:
        engine.close()


# --- seeds, places, endings ---


async def play(episodes, sample, texts):
    """Play an episode by given turns; the last one is repeated."""
    episode = episodes.open(sample)
    try:
        goes_on = await episode.begin()
        for turn in range(100):
            if not goes_on:
                break
            text = texts[min(turn, len(texts) - 1)]
            tokens = PLAIN.encode(text)
            sample.traces[-1].extend(tokens, Owner.POLICY, [-1.0] * len(tokens), [0] * len(tokens))
            sample.stop = StopReason.LENGTH
            goes_on = await episode.answer()
    finally:
        episode.close()
    return sample


def sample_of(scene, draw=0, index=0, **columns):
    return Sample(Prompt("p", "d", "", (), columns, scene=scene), draw, index)


def played(scene, texts=("r",), context=200, **config):
    async def main():
        episodes = opened(EnvironmentConfig(**config), context=context)
        try:
            return await play(episodes, sample_of(scene), texts)
        finally:
            await episodes.close()

    return asyncio.run(main())


@pytest.mark.parametrize("use", ["toy_environments:Bad", "thread_bad"])
def test_an_episode_is_the_same_wherever_it_runs(use):
    args = {"how": "none"}
    sample = played(Scene(use, args))
    assert (sample.stop, sample.success, sample.rewards) == (StopReason.TERMINATED, True, {"environment": 1.0})
    want = played(Scene("corridor"))
    assert sample.traces == want.traces
    assert sample.turns == want.turns


def test_members_of_a_group_start_equal_and_rows_may_bring_their_seed():
    async def main():
        episodes = opened(EnvironmentConfig(), seed=3)
        found = []
        for draw, index, columns in [(0, 0, {}), (0, 1, {}), (1, 0, {}), (5, 0, {"seed": 7}), (6, 0, {"seed": 7})]:
            sample = sample_of(Scene("chatter"), draw, index, **columns)
            await episodes.open(sample).begin()
            found.append(sample.traces[0].tokens)
        return found

    a, b, c, d, e = asyncio.run(main())
    assert a == b != c
    assert d == e
    assert episode_seed(0, "train", 1) == episode_seed(0, "train", 1) != episode_seed(1, "train", 1)
    assert len({episode_seed(s, stream, d) for s in range(3) for stream in ("train", "eval/x") for d in range(50)}) == 300


def test_turn_limits_penalties_and_context():
    sample = played(Scene("corridor"), ("l", "?", "r"), max_turns=3, format_penalty=0.5, invalid_penalty=0.25)
    assert sample.stop is StopReason.TURNS
    assert [t.reward for t in sample.turns] == [-0.25, -0.5, 0.0]
    assert [t.effective for t in sample.turns] == [False, False, True]
    assert sample.rewards == {"environment": -0.75}
    assert sample.success is False
    assert sample.completion == "l\n?\nr"
    assert sample.turns[0].state != sample.turns[2].state
    assert sample.notes[0].kind == "Endless"
    full = played(Scene("corridor"), context=20)
    assert full.stop is StopReason.CONTEXT
    told = "CutOff in environment 'corridor': the limit of 20 tokens cut the episode off; raise environment.context"
    assert [str(note).startswith(told) for note in full.notes] == [True]
    early = played(Scene("corridor"), context=4)
    assert early.stop is StopReason.CONTEXT
    assert not early.turns
    prompt = early.prompt
    early.reward = early.rewards["environment"]
    assert not pack([Group(prompt, 0, [early])]).mask.any()


BAD = [
    ("reset", "ValueError", "no such level"),
    ("raise", "ValueError", "the floor gave way"),
    ("crash", "WorkerDied", "exited with code 3"),
    ("hang", "TimeoutError", "took longer than 1 s"),
    ("type", "BadAnswer", "a step is a drumroll.envs.Step"),
    ("reward", "BadAnswer", "gave the reward nan"),
    ("observation", "BadAnswer", "showed 7"),
]


@pytest.mark.parametrize(
    ("use", "how", "kind", "text"),
    [
        (use, *bad)
        for use in ("toy_environments:Bad", "thread_bad")
        for bad in BAD
        if (use, bad[0]) != ("thread_bad", "crash")  # a thread cannot outlive its process
    ],
)
def test_bad_environments_fail_their_episode_with_a_name(use, how, kind, text):
    with pytest.raises(SampleFailed) as caught:
        played(Scene(use, {"how": how}), step_timeout=1)
    failure = caught.value.failure
    assert failure.kind == kind
    assert text in failure.text
    assert failure.boundary == f"environment '{use}', {'reset' if how == 'reset' else 'step'}"


def test_harmless_oddities_are_noted():
    def notes(how):
        sample = played(Scene("toy_environments:Bad", {"how": how}))
        assert sample.stop is (StopReason.TURNS if how == "endless" else StopReason.TERMINATED)
        return [str(note) for note in sample.notes]

    where = "environment 'toy_environments:Bad'"
    assert notes("print") == [f"Printed in {where}, step: 'noise on standard output' on standard output"]
    assert notes("endless") == [f"Endless in {where}: no end within max_turns=10"]
    assert notes("close") == []


def test_a_process_that_grows_is_replaced():
    async def main():
        episodes = opened(EnvironmentConfig(workers=1, memory_gb=0.4))
        leaking, sound = (Scene("toy_environments:Bad", {"how": how, "length": 5}) for how in ("leak", "none"))
        try:
            with pytest.raises(SampleFailed) as caught:
                await play(episodes, sample_of(leaking), ["r"])
            return str(caught.value.failure), await play(episodes, sample_of(sound), ["r"])
        finally:
            await episodes.close()

    failure, after = asyncio.run(main())
    assert "TooMuchMemory in environment 'toy_environments:Bad', step: its process has grown to" in failure
    assert after.success


@pytest.mark.parametrize("how", ["wait", "block"])
def test_a_coroutine_that_never_returns_holds_up_nobody(how):
    """Not even one that blocks its event loop: this one stays free, and later episodes get another."""

    async def main():
        episodes = opened(EnvironmentConfig(step_timeout=0.3))
        bad, good = (Scene("toy_environments:Blocking", {"how": each}) for each in (how, "none"))
        assert where(bad.use) == "loop"
        try:
            stuck = asyncio.create_task(play(episodes, sample_of(bad), ["r"]))
            ticks = 0
            while not stuck.done():
                await asyncio.sleep(0.01)
                ticks += 1
            assert ticks > 10
            with pytest.raises(SampleFailed, match="TimeoutError"):
                await stuck
            return await play(episodes, sample_of(good), ["r"])
        finally:
            await episodes.close()

    assert asyncio.run(main()).success


def test_a_hang_or_crash_costs_one_episode_and_its_neighbours_play_on():
    """All in one process: the neighbours are played again in its successor, to the same state."""

    async def main():
        episodes = opened(EnvironmentConfig(workers=1, step_timeout=1.5))
        scenes = [Scene("toy_environments:Bad", {"how": how, "every": 2, "length": 20}) for how in ("hang", "crash")]
        samples = [sample_of(scenes[i % 2], i, seed=i // 2) for i in range(12)]
        try:
            done = await asyncio.gather(*(play(episodes, s, ["r"]) for s in samples), return_exceptions=True)
        finally:
            await episodes.close()
        return done, [s.columns["seed"] for s in (x.prompt for x in samples)]

    done, seeds = asyncio.run(main())
    for result, seed in zip(done, seeds, strict=True):
        if seed % 2 == 0:
            assert isinstance(result, SampleFailed)
        else:
            assert result.stop is StopReason.TURNS
            assert [t.reward for t in result.turns] == [0.0] * 10
            assert text_of(PLAIN, result.traces[0].tokens).endswith("at 9:r")


def test_where_environments_run_and_unknown_names():
    assert where("corridor") == "inline"
    assert where("toy_environments:Corridor") == "inline"  # it is the registered one
    assert where("toy_environments:Waiting") == "loop"
    assert where("toy_environments:Bad") == "process"
    with pytest.raises(ConfigError, match="corridr"):
        opened(EnvironmentConfig(use="corridr"))


def test_rows_name_their_environment():
    default = EnvironmentConfig(use="corridor", args={"length": 2})

    def prompt(row, environment=default, **dataset):
        return Reader("data.train.mix", DatasetConfig(source="x", **dataset), PLAIN, no_columns, environment).prompt(row, 0)

    assert prompt({"seed": 1}).scene == Scene("corridor", {"length": 2})
    assert prompt({"seed": 1}).domain == "mix"
    assert prompt({"environment": "chatter"}).scene == Scene("chatter", {})
    assert prompt({"environment": "chatter"}).domain == "chatter"
    other = Reader("x.y", DatasetConfig(source="x", environment="chatter", environment_args={"a": 1}), PLAIN, no_columns)
    assert other.prompt({}, 0).scene == Scene("chatter", {"a": 1})
    plain = Reader("x.y", DatasetConfig(source="x", environment="none"), PLAIN, no_columns, default)
    assert plain.prompt({"prompt": "q"}, 0).scene is None
    assert prompt({"seed": 1}).id != prompt({"seed": 2}).id
