"""Models that think: templates that rewrite earlier turns, arguments of templates, limits of thoughts."""

import asyncio
import hashlib
import random
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_continuation import ENCODE, EOS, TOKENIZER, Right, Scripted, Source
from test_data import chat_renderer
from test_episodes import Rows, Sum, opened, sample_of

from drumroll.batch import pack
from drumroll.config.data import DataConfig, DatasetConfig
from drumroll.config.environment import EnvironmentConfig
from drumroll.config.eval import EvalConfig
from drumroll.config.rollout import RolloutConfig
from drumroll.data.conversation import Conversation, check_template
from drumroll.data.source import PromptSource
from drumroll.engines import Completion, Request, Sampling
from drumroll.engines.continuation import CLOSING, OPENING, Continuation, closing_tag
from drumroll.engines.native import NativeEngine
from drumroll.engines.router import Router
from drumroll.envs import ENVIRONMENTS, Step
from drumroll.errors import ConfigError, DataError
from drumroll.models import loading
from drumroll.rollout.evaluation import Evaluator
from drumroll.rollout.scheduler import Rollouts
from drumroll.sample import Owner, Prompt, Sample, Scene, StopReason, episode_seed

# --- chat templates, written after the habits of published ones ---

TOOLS = "{% if tools %}<tools>{{ tools | tojson }}<eos>{% endif %}"
START = "{% if add_generation_prompt %}<assistant>{% endif %}"
KEEPS = TOOLS + "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}" + START
DROPS = KEEPS.replace("m.content", "m.content.split('</think>')[-1]")
"""Earlier thoughts are gone, wherever they are."""
OPENS = DROPS.replace(START, START.replace("<assistant>", "<assistant>{{ '<think>\\n' }}"))
"""Besides, the thought is opened for the model, which earlier turns do not show."""
SINCE = (
    TOOLS + "{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% if loop.index0 > last.user %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{% else %}{{ m.content }}{% endif %}<eos>{% endfor %}"
    + START
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
"""Thoughts since the last user's message are kept, in one form; `enable_thinking: false` opens and closes an empty one."""
TEMPLATES = {"keeps": KEEPS, "drops": DROPS, "opens": OPENS, "since": SINCE}
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
