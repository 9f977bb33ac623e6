"""A language model as judge: one of our own engines, on devices of its own, asked by rewards."""

from __future__ import annotations

import itertools
import re
from typing import Any

from drumroll.config.roles import JudgeRole
from drumroll.data.render import Renderer
from drumroll.engines import EngineLost, Request, Sampling
from drumroll.rewards import REWARDS, Ask
from drumroll.rollout.router import Router
from drumroll.sample import StopReason

SECONDS = 600.0
"""The longest that one answer may take once the judge has begun."""
TEMPLATE = "Question: {prompt}\nAnswer: {completion}\nIs the answer right? Say yes or no."


def ask_by(router: Router, tokenizer: Any, role: JudgeRole) -> Ask:
    """How a reward asks: its question is rendered for the judge, and answered greedily.

    A judge that is lost costs another try, one that must rest is asked for the remainder later.
    """
    renderer, numbers = Renderer(tokenizer), itertools.count()

    async def ask(question: str) -> str:
        number, answer = next(numbers), list[int]()
        tokens = renderer.prompt(question)[-role.max_prompt_tokens :]
        stop = StopReason.ABORTED
        try:
            while stop is StopReason.ABORTED and len(answer) < role.max_tokens:
                sampling = Sampling(temperature=0.0, max_tokens=role.max_tokens - len(answer))
                request = Request(f"judge-{number}", (*tokens, *answer), sampling, 0, number)
                try:
                    done = await router.generate(request, number, number, SECONDS, lambda: None)
                except EngineLost:
                    if router.hopeless is not None:
                        raise
                    continue
                answer += done.tokens
                stop = done.stop
        finally:
            router.forget(number)
        return str(tokenizer.decode(answer, skip_special_tokens=True))

    return ask


@REWARDS.register("judge")
async def judge(prompt: Any, completion: str, judge: Ask, template: str = TEMPLATE) -> float:
    """1 if the judge says yes, a number it names first (up to 1), else 0."""
    answer = (await judge(template.format(prompt=prompt, completion=completion))).strip().lower()
    if answer.startswith("yes"):
        return 1.0
    number = re.match(r"[01](\.\d+)?", answer)
    return min(1.0, float(number[0])) if number else 0.0
