"""Rows to imitate as traces."""

from drumroll.config import SFTConfig
from drumroll.data.render import Renderer
from drumroll.models import tiny
from drumroll.pipelines.sft import Demonstrations
from drumroll.sample import Owner


def traces(**changes):
    rows = {
        "source": "drumroll.envs.rows:demonstrations",
        "args": {"env": "frozen_lake", "style": "compact", "form": "episodes"},
    }
    given = {"pipeline": "sft", "model": "tiny", "steps": 1, "data": {"train": {"lake": rows}, "max_prompt_tokens": 40}}
    made = Demonstrations(SFTConfig(**given, **changes), Renderer(tiny.tokenizer()))
    return [made.group(i).samples[0].traces[0] for i in range(4)]


def test_observations_are_learned_when_asked_for():
    for plain, whole in zip(traces(), traces(observations=True), strict=True):
        assert plain.tokens == whole.tokens
        assert {Owner.PROMPT, Owner.POLICY} < set(plain.owners)
        assert whole.owners == [Owner.PROMPT] + [Owner.POLICY] * (len(whole.tokens) - 1)


def test_a_long_row_loses_its_tail():
    for whole, short in zip(traces(), traces(max_tokens=50), strict=True):
        assert short.tokens == whole.tokens[:50]
