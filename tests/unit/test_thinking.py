"""Models that think: templates that rewrite earlier turns, arguments of templates, limits of thoughts."""

import asyncio
import random
from collections import Counter

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from test_continuation import ENCODE, EOS, TOKENIZER, Right, Scripted, Source
from test_data import chat_renderer
from test_episodes import Rows, Sum, opened, sample_of
from thinking_templates import KEEPS, OPENS, SINCE, TEMPLATES

import drumroll
from drumroll.batch import pack
from drumroll.config.data import DataConfig, DatasetConfig
from drumroll.config.environment import EnvironmentConfig
from drumroll.config.eval import EvalConfig
from drumroll.config.loading import load
from drumroll.config.rollout import RolloutConfig
from drumroll.data.conversation import Conversation, check_template
from drumroll.data.source import PromptSource
from drumroll.engines import Completion, Sampling
from drumroll.engines.continuation import CLOSING, OPENING, Continuation, closing_tag
from drumroll.engines.native import NativeEngine
from drumroll.engines.router import Router
from drumroll.envs import ENVIRONMENTS, Step
from drumroll.envs.episode import action_in
from drumroll.errors import ConfigError, DataError
from drumroll.models import loading, tiny
from drumroll.rollout.evaluation import Evaluator
from drumroll.rollout.scheduler import Rollouts
from drumroll.sample import Owner, Prompt, Sample, Scene, StopReason, episode_seed
from drumroll.serve.chat import marks, place
from drumroll.serve.traces import Calls
from drumroll.stages import describe

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


class Talk:
    """A user, or tools, that say anything, for as long as the seed wants."""

    def reset(self, seed, **row):
        self.rng = random.Random(seed)
        first = [{"role": "user", "content": self.words()}]
        return [{"role": "tools", "content": "look", "tools": [LOOK]}, *first] if self.rng.random() < 0.4 else first

    def words(self):
        return "".join(self.rng.choice(["a", "b", " ", "\n", "</think>", "<eos>"]) for _ in range(self.rng.randint(1, 6))) + "?"

    def step(self, text):
        self.rng = random.Random(f"{self.rng.random()}/{text}")
        kind = self.rng.choice(["text", "user", "tool", "tool", "tools"])
        answer = [{"role": "user" if kind == "user" else "tool", "content": self.words()} for _ in range(1 + (kind == "tools"))]
        return Step(self.words() if kind == "text" else answer, self.rng.random(), terminated=self.rng.random() < 0.15)

    def close(self):
        pass


ENVIRONMENTS.register("talk", runs="inline")(Talk)


class Speaker:
    """An engine that thinks aloud in random ways, a turn by seed and position, and is interrupted now and then."""

    def __init__(self, context, version=0):
        self.context, self.version, self.calls, self.rng = context, version, {}, random.Random(7)
        self.marker = TOKENIZER.encode("<assistant>")

    def script(self, seed, start):
        rng = random.Random(f"{seed}/{start}")
        words = lambda most: "".join(rng.choice("cde\n") for _ in range(rng.randint(0, most)))  # noqa: E731
        thought = rng.choice(
            ["", f"<think>{words(9)}</think>", f"<think>\n{words(9)}\n</think>\n\n", words(9), f"{words(9)}</think>"]
        )
        answer = rng.choice([words(6), f"<tool_call>{words(4)}</tool_call>", f"{words(2)}<think>{words(9)}</think>{words(3)}"])
        return [*ENCODE(f"{thought}{answer}"), *([EOS] if rng.random() < 0.9 else ENCODE("d" * 60))]

    async def generate(self, request):
        if len(request.tokens) >= self.context:  # a closing tag did not fit
            return Completion(stop=StopReason.CONTEXT)
        tokens, marker = list(request.tokens), self.marker
        start = max(i for i in range(len(tokens)) if tokens[i : i + len(marker)] == marker) + len(marker)
        room = min(request.sampling.max_tokens, self.context - len(tokens))
        part = self.script(request.seed, start)[len(tokens) - start :][:room] or ENCODE("d")
        if EOS in part:
            part, stop = part[: part.index(EOS) + 1], StopReason.EOS
        else:
            stop = StopReason.LENGTH if len(part) == request.sampling.max_tokens else StopReason.CONTEXT
        if self.rng.random() < 0.2:
            part, stop = part[: self.rng.randint(0, len(part) - 1)], StopReason.ABORTED
        done = Completion(part, [-0.5 - p for p in range(len(part))], [self.version] * len(part), stop)
        self.calls.setdefault(request.id.partition("#")[0], []).append((request, done))
        return done


def played(renderer, count, context=220, limit=None, **environment):
    """Episodes of random talk, by the scheduler itself; the groups and what the engine saw and wrote for each sample."""
    engine = Speaker(context)
    config = EnvironmentConfig(use="talk", max_turns=6, **environment)
    rollout = RolloutConfig(prompts=count, samples=1, max_tokens=40, max_thinking_tokens=limit)
    episodes, told = opened(config, renderer, context), []

    async def main():
        router = Router()
        router.join("engine", engine.generate, 32)
        closing = closing_tag(renderer.tokenizer)
        options = {"spell": renderer.tokenizer.decode, "episodes": episodes.open, "closing": closing}
        rollouts = Rollouts(rollout, 0, Rows(Scene("talk")), router, Sum(), episodes.decode, **options)
        groups = await rollouts.take(count)
        told.extend(rollouts.stats.failed)
        await rollouts.close()
        return groups

    groups = asyncio.run(main())
    assert not told
    return groups, engine.calls


def check_trained(groups, calls):
    """What is trained is what the engine wrote, each token once, after exactly what it saw."""
    batch = pack(groups)
    wrote, trained = [], batch.tokens[batch.mask].tolist()
    for sample in (s for group in groups for s in group.samples):
        for number, trace in enumerate(sample.traces):
            at = 0
            for request, done in (c for c in calls[sample.id] if c[0].id.split("#")[1] == str(number)):
                size, end = len(request.tokens), len(request.tokens) + len(done.tokens)
                if not done.tokens:
                    continue  # interrupted before the first token
                assert list(request.tokens) == trace.tokens[:size]
                assert set(trace.owners[at:size]) <= ({Owner.ENVIRONMENT} if at else {Owner.PROMPT})
                assert trace.tokens[size:end] == done.tokens
                assert set(trace.owners[size:end]) == {Owner.POLICY}
                assert (trace.logprobs[size:end], trace.versions[size:end]) == (done.logprobs, done.versions)
                wrote += done.tokens
                at = end
            assert at == len(trace.tokens)
    assert trained == wrote
    assert batch.behaviour[batch.mask].lt(0).all()


def check_shown(groups, renderer, keeps=None):
    """Before every turn the trace reads as the template shows the conversation (`keeps`: as another template does)."""
    tokenizer = (keeps or renderer).tokenizer
    for sample in (s for group in groups for s in group.samples):
        talk = Talk()
        messages, tools = talk.reset(episode_seed(0, "train", sample.draw)), None
        if messages[0]["role"] == "tools":
            tools, messages = messages[0]["tools"], messages[1:]
        for turn in sample.turns:
            trace = sample.traces[turn.trace]
            want = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
            seen = TOKENIZER.decode(trace.tokens[: turn.start])
            assert "".join(seen.split()) == "".join(want.split())  # a template may strip blanks around a turn
            text = TOKENIZER.decode(trace.tokens[turn.start : turn.end], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})
            answer = talk.step(text).observation
            messages += [{"role": "user", "content": answer}] if isinstance(answer, str) else answer


@pytest.mark.parametrize("limit", [None, 5])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_thousand_episodes_are_trained_as_they_were_seen(name, limit):
    renderer = chat_renderer(TEMPLATES[name])
    groups, calls = played(renderer, 130, limit=limit)
    check_trained(groups, calls)
    check_shown(groups, renderer)
    samples = [s for g in groups for s in g.samples]
    traces = Counter(len(s.traces) for s in samples)
    assert set(traces) == {1} if name == "keeps" else len(traces) > 2
    if name == "since":  # tool results keep the thoughts before them: fewer traces than turns
        assert any(1 < len(s.traces) < len(s.turns) for s in samples)
    assert any(s.thought_was_cut() for s in samples) == (limit is not None)


@pytest.mark.parametrize("name", ["drops", "opens", "since"])
@pytest.mark.parametrize("off", [-1, 1])
def test_a_fork_that_is_off_by_one_is_noticed(name, off, monkeypatch):
    right = Conversation.advance

    def wrong(self, turn, size, observation, last):
        before = sum(part.tokens for part in self._parts) + size
        kept, tokens = right(self, turn, size, observation, last)
        return (kept if kept == before else kept + off), tokens

    monkeypatch.setattr(Conversation, "advance", wrong)
    renderer = chat_renderer(TEMPLATES[name])
    groups, calls = played(renderer, 10)
    check_trained(groups, calls)  # consistent in itself, but
    with pytest.raises(AssertionError):
        check_shown(groups, renderer)


@pytest.mark.parametrize("name", ["drops", "since"])
def test_earlier_turns_are_shown_as_sampled_if_asked(name):
    renderer = chat_renderer(TEMPLATES[name])
    groups, calls = played(renderer, 40, earlier_turns="sampled")
    check_trained(groups, calls)
    check_shown(groups, renderer, keeps=chat_renderer(KEEPS))
    assert {len(s.traces) for g in groups for s in g.samples} == {1}


talks = st.lists(
    st.tuples(
        st.sampled_from(["a", "<think>\nb\n</think>\n\nc", "<think>d</think>", "e</think>f"]), st.sampled_from(["user", "tool"])
    ),
    max_size=5,
)


@pytest.mark.parametrize("name", TEMPLATES)
@given(talks)
def test_the_endpoint_departs_where_episodes_do(name, turns):
    renderer, calls, messages = chat_renderer(TEMPLATES[name]), Calls(), [{"role": "user", "content": "hi"}]
    talk = Conversation(renderer, "hi")
    seen = talk.prompt()
    for said, role in (*turns, ("end", "user")):
        now = place(renderer, messages, [], calls.along(marks(messages, [])))
        written = Completion([*ENCODE(said), EOS], [-1.0] * (len(said) + 1), [0] * (len(said) + 1), StopReason.EOS)
        answer = {"role": role, "content": "so"}
        messages.append({"role": "assistant", "content": said})
        call = calls.add(now.parent, now.tokens, written, marks(messages, []), now.text, said)
        assert call.seen() == seen
        messages.append(answer)
        kept, tokens = talk.advance(said, len(written.tokens), [answer], EOS)
        seen = [*call.after()[:kept], *tokens]
    traces, spans = calls.traces()
    assert sum(owner is Owner.POLICY for trace in traces for owner in trace.owners) == sum(
        len(c.written.tokens) for c in calls.all
    )
    assert all(traces[turn.trace].tokens[: turn.start] == call.seen() for call, turn in zip(calls.all, spans, strict=True))


# --- limits of thoughts ---


def cut(script, limit, most, opened):
    """What is written, token by token: characters of the script, and a closing tag where a thought has had its tokens."""
    text, owned, begun = "", [], 0 if opened else None
    while len(text) < most:
        if begun is not None and len(text) - begun == limit and most - len(text) > len(CLOSING):
            text, owned, begun = text + CLOSING, owned + [False] * len(CLOSING), None
        text, owned = text + script[len(text)], [*owned, True]
        if text.endswith(CLOSING):
            begun = None
        elif begun is None and text.endswith(OPENING):
            begun = len(text)
    return text, owned


pieces = st.lists(st.sampled_from(["a", "b", OPENING, CLOSING, "<thi", "nk>"]), max_size=14).map("".join)


@given(pieces, st.integers(1, 9), st.integers(10, 40), st.booleans(), st.lists(st.integers(0, 6), max_size=12))
@example(f"{OPENING}aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 3, 40, False, [2, 1, 8])
@example("aaa<thinnnnnnk>aaaaaaaaaaaa", 9, 40, True, [])
def test_a_thought_has_at_most_so_many_tokens_however_it_is_interrupted(text, limit, most, opened, cuts):
    prompt = [1, *ENCODE(f"{OPENING}\n" if opened else "a")]
    script = text + "c" * 60
    engine = Scripted(ENCODE(script), cuts)
    engine.prompt = len(prompt)
    sampling = Sampling(max_tokens=most, max_thinking=limit)
    turn = Continuation("w", prompt, sampling, 0, TOKENIZER.decode, closing=closing_tag(TOKENIZER))
    done = asyncio.run(turn.run(engine.generate))
    want, owned = cut(script, limit, most, opened)
    assert (TOKENIZER.decode(done.tokens), done.stop) == (want, StopReason.LENGTH)
    assert [version >= 0 for version in done.versions] == owned
    assert all((logprob == 0) == (version < 0) for logprob, version in zip(done.logprobs, done.versions, strict=True))


def test_a_stop_string_that_the_closing_tag_completes_ends_the_turn():
    tag = closing_tag(TOKENIZER)

    def turn(*stop):
        sampling = Sampling(max_tokens=60, stop=stop, max_thinking=12)
        text = Continuation("w", [1], sampling, 0, TOKENIZER.decode, closing=tag)
        done = asyncio.run(text.run(Scripted([*ENCODE(f"{OPENING}{'a' * 20}bcd{'e' * 9}"), EOS]).generate))
        return TOKENIZER.decode(done.tokens), done.stop

    assert turn() == (f"{OPENING}{'a' * 12}{CLOSING}bcd{'e' * 9}<eos>", StopReason.EOS)
    assert turn(CLOSING) == (f"{OPENING}{'a' * 12}{CLOSING}", StopReason.STOP_STRING)
    assert turn(">bcdeeee") == (f"{OPENING}{'a' * 12}{CLOSING}bcdeeee", StopReason.STOP_STRING)
    assert turn(f"{CLOSING}bc") == (f"{OPENING}{'a' * 12}{CLOSING}bc", StopReason.STOP_STRING)


def test_training_and_evaluation_write_the_answer_after_a_cut_thought():
    script = [*ENCODE(f"{OPENING}{'a' * 12}yes"), EOS]
    config = RolloutConfig(prompts=1, samples=2, max_tokens=30, max_thinking_tokens=4)
    sampling = Sampling(0.0, 30, max_thinking=4)
    sample = Sample(Prompt("p", "d", "", (1,)), 0, 0)

    async def main():
        router = Router()
        router.join("engine", Scripted(script).generate, 2)
        options = {"spell": TOKENIZER.decode, "closing": closing_tag(TOKENIZER)}
        decode = lambda tokens: TOKENIZER.decode(tokens, skip_special_tokens=True)  # noqa: E731
        rollouts = Rollouts(config, 0, Source(), router, Right(), decode, **options)
        [group] = await rollouts.take(1)
        await rollouts.close()
        evaluator = Evaluator(EvalConfig(), [], router, Right(), decode, 0, config, **options)
        await evaluator.attempt(sample, sampling, 1, "set", "eval")
        return group

    group = asyncio.run(main())
    batch = pack([group])
    rows = zip(batch.tokens.split(batch.lengths.tolist()), batch.mask.split(batch.lengths.tolist()), strict=True)
    trained = [TOKENIZER.decode(tokens[mask].tolist()) for tokens, mask in rows]
    assert trained == [f"{OPENING}aaaayes<eos>"] * 2
    assert describe([group], 0, thoughts=True)["rollout/thoughts_cut"] == 1.0
    assert "rollout/thoughts_cut" not in describe([group], 0)
    for each in (*group.samples, sample):
        assert each.completion == f"{OPENING}aaaa{CLOSING}yes"
        assert each.thought_was_cut()
        assert each.policy_length() == len(f"{OPENING}aaaayes") + 1


def test_limits_hold_while_weights_change():
    """The native engine, interrupted and resumed under new weights: the thoughts that the template opens end on time."""
    renderer, limit = chat_renderer(OPENS), 5
    model = loading.load("tiny-random", seed=1)
    engine = NativeEngine(model, slots=16, context=160)
    rollout = RolloutConfig(prompts=6, samples=2, max_tokens=20, max_thinking_tokens=limit, max_staleness=1, partial=True)
    episodes = opened(EnvironmentConfig(use="talk", max_turns=3), renderer, 160)
    options = {"spell": renderer.tokenizer.decode, "episodes": episodes.open, "closing": closing_tag(renderer.tokenizer)}

    async def main():
        router, taken = Router(), []
        router.join("engine", engine.generate, 16, engine.interrupt)
        rollouts = Rollouts(rollout, 0, Rows(Scene("talk")), router, Sum(), episodes.decode, **options)
        for version in (1, 2, 3):
            groups = await rollouts.take(rollout.prompts)
            await asyncio.to_thread(engine.load, version, model.module.named_parameters(), recompute=True)
            rollouts.publish(version)
            rollouts.trained(groups)
            taken += [s for g in groups for s in g.samples]
            assert not rollouts.stats.failed
        await rollouts.close()
        return taken

    try:
        taken = asyncio.run(main())
    finally:
        engine.close()
    turns = [(s.traces[t.trace], t.start, t.end) for s in taken for t in s.turns]
    assert sum(s.thought_was_cut() for s in taken) > len(taken) / 4
    for trace, start, end in turns:
        text, owners = TOKENIZER.decode(trace.tokens[start:end]), trace.owners[start:end]
        assert CLOSING in text or end - start <= limit or len(trace.tokens) + len(CLOSING) >= 160
        if Owner.ENVIRONMENT in owners:
            assert owners.index(Owner.ENVIRONMENT) == limit
            assert owners.count(Owner.ENVIRONMENT) == len(CLOSING)
            assert owners[-1] is Owner.POLICY


def test_a_run_with_cut_thoughts_is_deterministic_and_resumed_exactly(small, mine, untimed):
    rows = mine("def rows(split, seed):\n    return [{'prompt': f'{i}+1=<think>', 'answer': str(i + 1)} for i in range(8)]")
    train = {"train": {"rows": {"source": f"{rows}:rows"}}}
    sets = {"every": 1, "sets": {"held": {"source": f"{rows}:rows", "max_thinking_tokens": 2}}}
    limits = {"max_tokens": 16, "max_thinking_tokens": 3}
    made = small(model="tiny-random", deterministic=True, eval=sets, rollout=limits, checkpoint={"every": 1})
    made["data"] |= train
    whole = drumroll.train({**made, "name": "whole"})
    part = drumroll.train({**made, "steps": 1})
    assert untimed(drumroll.train(resume=part.path, overrides=["steps=2"])) == untimed(whole)
    assert whole.metrics[1]["rollout/thoughts_cut"] > 0
    assert whole.metrics[0]["eval/held/thoughts_cut"] > 0


def thinking_model(folder, template):
    tiny.random_model(0).save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_learner_predicts_what_was_sampled_across_traces(small, tmp_path):
    made = small(
        model=thinking_model(tmp_path / "model", OPENS),
        steps=1,
        rollout={"max_tokens": 16, "max_thinking_tokens": 4},
        environment={"use": "chatter", "max_turns": 3, "context": 200},
        eval={"sets": {}},
    )
    made |= {"data": {"train": {"seeds": {"source": "drumroll.data.seeds:seeds"}}}, "reward": {}}
    run = drumroll.train(made)
    assert run.metrics[1]["rollout/thoughts_cut"] > 0
    assert run.metrics[1]["train/mismatch"] < 1e-4
    assert max(len(row["traces"]) for row in run.samples) == 3


def test_a_limit_that_leaves_no_room_is_refused(small):
    with pytest.raises(
        ConfigError, match=r"eval.sets.sums: max_thinking_tokens 8 leaves no room for an answer within max_tokens 8"
    ):
        load(small(eval={"sets": {"sums": {"max_thinking_tokens": 8}}}))
    with pytest.raises(ValueError, match="max_thinking_tokens: 64 leaves no room for an answer within max_tokens: 64"):
        RolloutConfig(max_tokens=64, max_thinking_tokens=64)
    with pytest.raises(ValueError, match=r"rollout.domains.code.max_thinking_tokens: 9 leaves no room"):
        RolloutConfig(max_tokens=64, domains={"code": {"max_tokens": 8, "max_thinking_tokens": 9}})


@pytest.mark.parametrize(
    ("turn", "action"),
    [("<think>a</think> r", "r"), ("a b</think>\n\nr", "r"), ("a</think><think>b</think>r", "r"), ("r", "r")],
)
def test_thoughts_are_no_part_of_an_action(turn, action):
    assert action_in(turn) == action


# --- arguments of templates ---


def prompts_of(tmp_path, renderer, own, common):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "hi"}\n')
    train = {"rows": DatasetConfig(source=str(path), template=own)}
    source = PromptSource(DataConfig(train=train, template=common), 0, renderer.given(common, "data.template"))
    return TOKENIZER.decode(source.draw().tokens)


def test_templates_get_arguments_of_the_run_and_of_a_dataset(tmp_path):
    renderer = chat_renderer(SINCE)
    assert renderer.variables == ["enable_thinking"]
    date = "{% if not date is defined %}{% set date = 'today' %}{% endif %}{% set mode = mode | default('a') %}{{ date }}{{ mode }}"
    assert chat_renderer(f"{date}{{% generation %}}{SINCE}{{% endgeneration %}}").variables == [
        "date",
        "enable_thinking",
        "mode",
    ]
    off = "<user>hi<eos><assistant><think>\n\n</think>\n\n"
    assert prompts_of(tmp_path, renderer, {}, {"enable_thinking": False}) == off
    assert prompts_of(tmp_path, renderer, {"enable_thinking": False}, {"enable_thinking": True}) == off
    assert prompts_of(tmp_path, renderer, {"enable_thinking": True}, {"enable_thinking": False}) == "<user>hi<eos><assistant>"
    with pytest.raises(ConfigError, match=r"^data.train.rows.template: .* no variable 'thinking'; it has enable_thinking. Did"):
        prompts_of(tmp_path, renderer, {"thinking": False}, {})
    with pytest.raises(ConfigError, match=r"no variable 'tools' and none that can be set"):
        chat_renderer(KEEPS).given({"tools": []}, "data.template")
    with pytest.raises(ConfigError, match=r"does not exist, so it has no variable 'x'"):
        chat_renderer(None).given({"x": 1}, "data.template")


def test_episodes_get_the_arguments_of_their_dataset():
    async def first(template):
        sample = sample_of(Scene("talk", template=template))
        await opened(EnvironmentConfig(), chat_renderer(SINCE)).open(sample).begin()
        return TOKENIZER.decode(sample.traces[0].tokens)

    assert asyncio.run(first({"enable_thinking": False})) == asyncio.run(first({})) + "<think>\n\n</think>\n\n"


def test_an_empty_thought_of_the_template_departs_too():
    """The generation prompt holds an empty thought that earlier turns do not show: each turn begins a trace."""
    renderer = chat_renderer(SINCE).given({"enable_thinking": False}, "data.template")
    talk = Conversation(renderer, "a")
    tokens, turn = talk.prompt(), ENCODE("b")
    kept, more = talk.advance("b", 1, "c", None)
    assert kept == 0
    tokens = more
    kept, more = talk.advance("d", 1, "e", None)
    shown = TOKENIZER.decode([*tokens, *turn][:kept] + more)
    assert shown == "<user>a<eos><assistant>b<eos><user>c<eos><assistant>d<eos><user>e<eos><assistant><think>\n\n</think>\n\n"


def test_the_check_holds_thoughts_and_tool_calls():
    assert [check_template(chat_renderer(t), chat=None, system=None) for t in TEMPLATES.values()] == [False, True, True, True]
    picky = KEEPS.replace(
        "{% for m in messages %}", "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    )
    assert not check_template(chat_renderer(picky), chat=None, system=None)
    with pytest.raises(DataError, match="refused a conversation: no"):
        check_template(chat_renderer(picky), chat=None, system=None, tools=True)


def test_a_dry_run_shows_arguments_and_says_what_is_rewritten(small, tmp_path, drumroll):
    folder, recipe = thinking_model(tmp_path / "model", SINCE), tmp_path / "recipe.yaml"
    made = small(model=folder, data={"template": {"enable_thinking": False}}, environment={"use": "frozen_lake"})
    recipe.write_text(yaml.safe_dump(made))
    code, said, _ = drumroll("train", str(recipe), "--dry-run")
    assert code == 0
    assert "data.template: enable_thinking=false" in said
    assert "rewrites earlier turns" in " ".join(said.split())
    code, _, said = drumroll("train", str(recipe), "data.template={enable: true}", "--dry-run")
    assert code == 2
    assert "has no variable 'enable'; it has enable_thinking." in " ".join(said.split())
