"""What `--dry-run` shows of a training row: which of its tokens are trained."""

import pytest

from drumroll.config import load
from drumroll.data.render import Renderer
from drumroll.models import tiny
from drumroll.pipelines import find_pipeline

PROMPTS = {"train": {"sums": {"source": "drumroll.data.problems:sums"}}}
ANSWERS = {"train": {"sums": {"source": "drumroll.data.problems:demonstrations", "args": {"task": "sums", "flawed": 0.0}}}}
CASES = {
    "rl": ({"data": PROMPTS, "reward": "exact"}, ["trained: the completion"]),
    "rl with rows to imitate": (
        {"data": PROMPTS, "reward": "exact", "algorithm": {"sft": 0.1}, "demonstrations": {"data": ANSWERS}},
        ["trained: the completion", "the first row to imitate: "],
    ),
    "distill": (
        {"pipeline": "distill", "data": ANSWERS, "on_policy": 0.5, "roles": {"teacher": {"model": "tiny"}}},
        ["trained: the policy's own completion", "the first row with a given answer: "],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_row_is_shown_with_the_tokens_that_are_trained(case):
    given, beginnings = CASES[case]
    config = load({"model": "tiny", **given}).config
    lines = list(find_pipeline(config.pipeline).show(config, Renderer(tiny.tokenizer())))
    titles = [line for line in lines if not line.startswith("  ")]
    assert len(titles) == len(beginnings)
    assert all(title.startswith(beginning) for title, beginning in zip(titles, beginnings, strict=True))
    rows = [line for line in lines if line.startswith("  ")]
    assert len(rows) == len(titles) - 1
    for row in rows:  # <bos>1+2=[3][<eos>]
        prompt, bracket, answer = row.partition("=")
        assert bracket
        assert "[" not in prompt
        assert answer.startswith("[")
        assert answer.endswith("[<eos>]")
