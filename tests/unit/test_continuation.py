"""A completion is the same however often it is interrupted, wherever its stop strings lie."""

import asyncio

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drumroll.config.eval import EvalConfig
from drumroll.config.rollout import RolloutConfig
from drumroll.data.render import Renderer
from drumroll.engines import Completion, EngineLost, Request, Sampling
from drumroll.engines.continuation import Continuation
from drumroll.engines.router import Router
from drumroll.models import tiny
from drumroll.rollout.evaluation import Evaluator
from drumroll.rollout.scheduler import Rollouts
from drumroll.sample import Prompt, Sample, StopReason

TOKENIZER = tiny.tokenizer()
ENCODE = Renderer(TOKENIZER).encode
EOS = TOKENIZER.eos_token_id


class Scripted:
    """An engine that writes given tokens and looks for stop strings in what one request wrote, as engines do."""

    def __init__(self, tokens, cuts=()):
        self.tokens, self.cuts = tokens, list(cuts)
        self.prompt = 1

    async def generate(self, request: Request) -> Completion:
        cut = self.cuts.pop(0) if self.cuts else None
        if isinstance(cut, Exception):
            raise cut
        sampling, part = request.sampling, Completion(stop=StopReason.ABORTED)
        for token in self.tokens[len(request.tokens) - self.prompt :]:
            if cut is not None and len(part.tokens) >= cut:
                break
            part.tokens.append(token)
            part.logprobs.append(-float(len(request.tokens) + len(part.tokens)))
            part.versions.append(0)
            longest = max((len(stop) for stop in sampling.stop), default=0)
            tail = TOKENIZER.decode(part.tokens[-(longest + 4) :])
            if token == EOS:
                part.stop = StopReason.EOS
            elif any(stop in tail for stop in sampling.stop):
                part.stop = StopReason.STOP_STRING
            elif len(part.tokens) >= sampling.max_tokens:
                part.stop = StopReason.LENGTH
            else:
                continue
            break
        return part


def written(tokens, cuts, stop, most=100, at_most=None):
    """The completion that a scripted engine writes when its requests are cut after so many tokens."""
    text = Continuation("w", [1], Sampling(max_tokens=most, stop=stop), 0, TOKENIZER.decode)
    return asyncio.run(text.run(Scripted(tokens, cuts).generate, at_most=at_most))


@given(
    st.text("ab", max_size=24),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=2),
    st.lists(st.integers(0, 5), max_size=12),
    st.integers(1, 30),
    st.sampled_from([None, 1, 3]),
)
@example("aab", ["ab"], [2], 30, None)  # between the two characters of a stop string
@example("aaab", ["aab"], [1, 1, 1], 30, None)  # over several interruptions
@example("aab", ["ab"], [3], 3, None)  # in the last token that is allowed
@example("aab", ["ab<eos>"], [2], 30, None)  # that an end of text would complete
def test_interruptions_and_slices_change_nothing(text, stop, cuts, most, at_most):
    tokens = [*ENCODE(text), EOS]
    assert written(tokens, cuts, tuple(stop), most, at_most) == written(tokens, [], tuple(stop), most)


def test_special_tokens_count_in_stop_strings():
    tokens = [*ENCODE("a"), TOKENIZER.bos_token_id, *ENCODE("bbb"), EOS]
    done = written(tokens, [2], ("<bos>b",))
    assert (done.tokens, done.stop) == (tokens[:3], StopReason.STOP_STRING)


def test_an_error_is_raised_unless_the_caller_tries_again():
    text = Continuation("w", [1], Sampling(), 0, TOKENIZER.decode)
    with pytest.raises(EngineLost):
        asyncio.run(text.run(Scripted([5, EOS], [EngineLost("gone")]).generate))
    counted = []
    faults = [1, EngineLost("gone"), ValueError("odd")]
    run = text.run(Scripted([5, EOS], faults).generate, failed=lambda error, tries: counted.append((str(error), tries)))
    assert asyncio.run(run).tokens == [5, EOS]
    assert counted == [("gone", 1), ("odd", 2)]


class Source:
    """Equal prompts without end."""

    shares = {"": 1.0}

    def draw(self):
        return Prompt("p", "d", "", (1,))

    def exhausted(self):
        return False

    def state(self):
        return {}


class Right:
    """Rewards everything."""

    async def score(self, sample, group=None):
        sample.reward = 1.0


def test_the_scheduler_finds_a_stop_string_across_an_interruption():
    """An engine that rests hands back what it has in the middle of the stop string; the sample goes on elsewhere."""
    tokens = ENCODE("aaaSTOPbbbb")
    engine = Scripted(tokens, [5, 5])  # both samples are cut after "aaaST"
    config = RolloutConfig(prompts=1, samples=2, max_tokens=11, stop=["STOP"])

    async def take():
        router = Router()
        router.join("engine", engine.generate, 2)
        rollouts = Rollouts(config, 0, Source(), router, Right(), TOKENIZER.decode)
        [group] = await rollouts.take(1)
        await rollouts.close()
        return group

    for sample in asyncio.run(take()).samples:
        assert sample.completion == "aaaSTOP"
        assert sample.traces[0].tokens == [1, *tokens[:7]]
        assert sample.stop is StopReason.STOP_STRING


def test_an_evaluation_goes_on_after_an_interruption_and_a_lost_engine():
    tokens = ENCODE("aaaSTOPbbbb")
    sampling = Sampling(0.0, 11, ("STOP",))
    sample = Sample(Prompt("p", "d", "", (1,)), 0, 0)

    async def attempt():
        router = Router()
        router.join("first", Scripted(tokens, [5, EngineLost("gone")]).generate, 1)
        evaluator = Evaluator(EvalConfig(), [], router, Right(), TOKENIZER.decode, 0, RolloutConfig())
        asyncio.get_running_loop().call_later(0.01, router.join, "second", Scripted(tokens).generate, 1)
        await evaluator.attempt(sample, sampling, 1, "set", "eval")

    asyncio.run(attempt())
    assert (sample.completion, sample.stop) == ("aaaSTOP", StopReason.STOP_STRING)
