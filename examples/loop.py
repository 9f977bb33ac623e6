"""The training loop of `drumroll train`, written out from the public stages.

    python examples/loop.py                    the quickstart's run, 20 steps
    python examples/loop.py recipe.yaml steps=50 optim.lr=5e-4

It leaves out files, terminal and resume; the losses are the same, which a test asserts. Take it as your own starting
point: reorder the stages of `train`, replace one, or look at what flows between them.

One stage is replaced already: `rollout` below generates a step's groups all at once and waits for the last. The
scheduler of `drumroll train` also oversamples, filters, retries, plays environments and generates while the learner
trains. To use it, open it with `drumroll.components.open_rollouts(config, workers)` and call its `take(prompts)` instead
of `rollout`, `publish(step)` after the stage `publish`, and `trained(groups)` at the end of a step.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from drumroll.components import decoder, open_scorer, open_workers, speller
from drumroll.config import RLConfig, load
from drumroll.data.render import Renderer
from drumroll.data.source import PromptSource
from drumroll.engines import Completion, Request, Sampling
from drumroll.engines.continuation import Continuation
from drumroll.rewards import Scorer
from drumroll.rewards.group_calls import GroupCalls
from drumroll.sample import Fate, Group, Owner, Prompt, Sample, Trace, sample_seed
from drumroll.stages import advantages, describe, infer, pack, publish, update
from drumroll.workers.batch_builder import BatchBuilder
from drumroll.workers.runtime import Workers

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart" / "recipe.yaml"
Metrics = dict[str, float]


# --- rollout: this example's own stage ---


async def generate(config: RLConfig, workers: Workers, sample: Sample) -> None:
    """Generate one completion; keep its tokens with their log-probs and the versions that sampled them."""
    rollout, prompt = config.rollout, sample.prompt.tokens
    sampling = Sampling(rollout.temperature, rollout.length_limit, tuple(rollout.stop))
    seed = sample_seed(config.seed, "train", sample.draw, sample.index)
    order = sample.draw * rollout.samples + sample.index

    def send(request: Request) -> Awaitable[Completion]:  # to the least loaded engine, samples of a group to the same
        return workers.router.generate(request, sample.draw, order, math.inf, lambda: None)

    completion = await Continuation(sample.id, prompt, sampling, seed, speller(workers), order).run(send)
    trace = Trace()
    trace.extend(list(prompt), Owner.PROMPT)
    trace.extend(completion.tokens, Owner.POLICY, completion.logprobs, completion.versions)
    sample.traces, sample.stop = [trace], completion.stop
    sample.completion = decoder(workers)(completion.tokens)


async def attempt(config: RLConfig, workers: Workers, scorer: Scorer, sample: Sample, calls: GroupCalls) -> None:
    """Generate a sample and score it at once, while the others of its group are still being generated."""
    await generate(config, workers, sample)
    await scorer.score(sample, calls)  # only rewards with `group: true` wait for the others
    calls.leave(sample)
    if sample.failure:
        sample.state = Fate.FAILED


async def rollout(config: RLConfig, workers: Workers, scorer: Scorer, prompts: list[tuple[int, Prompt]]) -> list[Group]:
    """Generate and score all groups of a step; a failed sample leaves its group, and a group needs two."""
    groups = [Group(p, draw, [Sample(p, draw, i) for i in range(config.rollout.samples)]) for draw, p in prompts]
    calls = {group.draw: GroupCalls(range(config.rollout.samples)) for group in groups}
    samples = [sample for group in groups for sample in group.samples]
    await asyncio.gather(*(attempt(config, workers, scorer, sample, calls[sample.draw]) for sample in samples))
    for group in groups:
        group.samples = [sample for sample in group.samples if sample.state is not Fate.FAILED]
        workers.router.forget(group.draw)
    return [group for group in groups if len(group.samples) > 1]


# --- the loop ---


async def train(config: RLConfig, report: Callable[[int, Metrics], None]) -> None:
    """Generate, score, train, publish; until the steps are done."""
    workers = await open_workers(config)
    try:
        scorer = open_scorer(config, workers, config.rollout)
        source = PromptSource(config.data, config.seed, Renderer(workers.tokenizer), scorer.required_columns)
        memory = await workers.batch_builder.call(0, BatchBuilder.start)  # state of the algorithm's parts
        count, temperature = config.rollout.prompts, config.rollout.temperature

        for step in range(1, config.steps + 1):
            drawn = [source.draw() for _ in range(count)]
            prompts = [(number, prompt) for number, prompt in enumerate(drawn, (step - 1) * count) if prompt is not None]
            if not prompts:  # data.epochs are over
                break
            groups = await rollout(config, workers, scorer, prompts)

            async with workers.training():  # devices shared with generation belong to training
                batch = await pack(workers, groups)
                batch = await infer(workers, batch, temperature)
                batch, metrics = await advantages(workers, batch, memory)
                metrics |= await update(workers, batch, temperature, idle=step <= config.algorithm.critic_first)
            await publish(workers, step)

            report(step, describe(groups, step - 1) | metrics)
    finally:
        await workers.close()


def show(step: int, metrics: Metrics) -> None:
    """Print one line per step."""
    rewards = [name for name in metrics if name.startswith("reward/")]
    names = (*rewards, "train/loss", "train/entropy", "train/grad_norm", "train/mismatch")
    print(f"step {step:3d}  " + "  ".join(f"{name} {metrics.get(name, 0.0):.4g}" for name in names))


def main() -> None:
    """Read the recipe and train."""
    arguments = sys.argv[1:] or [str(RECIPE), "steps=20"]
    config = load(arguments[0], arguments[1:]).config
    assert isinstance(config, RLConfig), "this example is about reinforcement learning"
    assert not config.has_episodes(), "this example plays no environments; use open_rollouts, as the docstring says"
    asyncio.run(train(config, show))


if __name__ == "__main__":
    main()
