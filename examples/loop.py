"""The whole training loop, written out from the public stage functions.

    python examples/loop.py                    the quickstart's run, 20 steps
    python examples/loop.py recipe.yaml steps=50 optim.lr=5e-4

This is what `drumroll train` does, minus files, terminal and resume: the losses are the same, which a test asserts.
Take it as your own starting point: reorder the stages, replace one, or look at what flows between them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from drumroll.algorithms import Algorithm
from drumroll.batch import Batch, pack
from drumroll.config import RLConfig, load
from drumroll.data.render import Renderer
from drumroll.data.source import PromptSource
from drumroll.engines import Engine, Sampling
from drumroll.engines.continuation import Continuation
from drumroll.learners import Learner, Update
from drumroll.rewards import Scorer
from drumroll.sample import Fate, Group, Owner, Prompt, Sample, Trace, sample_seed
from drumroll.workers.runtime import Workers, open_workers

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart" / "recipe.yaml"


async def write(config: RLConfig, workers: Workers, sample: Sample, sampling: Sampling) -> None:
    """Generation: one completion, kept token by token with its log-probs and the version that sampled it."""
    prompt = sample.prompt.tokens
    key = sample_seed(config.seed, "train", sample.draw, sample.index)
    place = sample.draw * config.rollout.samples + sample.index
    writing = Continuation(sample.id, prompt, sampling, key, workers.tokenizer.decode, place)
    completion = await writing.run(lambda request: workers.rollout.call(0, Engine.generate, request))
    trace = Trace()
    trace.extend(list(prompt), Owner.PROMPT)
    trace.extend(completion.tokens, Owner.POLICY, completion.logprobs, completion.versions)
    sample.traces, sample.stop = [trace], completion.stop
    sample.completion = workers.tokenizer.decode(completion.tokens, skip_special_tokens=True)


async def live(config: RLConfig, workers: Workers, scorer: Scorer, sample: Sample, sampling: Sampling) -> None:
    """The life of a sample: it is scored the moment it ends, whatever its neighbours do."""
    await write(config, workers, sample, sampling)
    await scorer.score(sample)
    if sample.failure:
        sample.state = Fate.FAILED


async def rollout(config: RLConfig, workers: Workers, scorer: Scorer, prompts: list[tuple[int, Prompt]]) -> list[Group]:
    """All groups of a step at once; samples, not batches, are what the engine sees."""
    sampling = Sampling(config.rollout.temperature, config.rollout.max_tokens, tuple(config.rollout.stop))
    groups = [Group(p, draw, [Sample(p, draw, i) for i in range(config.rollout.samples)]) for draw, p in prompts]
    samples = [sample for group in groups for sample in group.samples]
    await asyncio.gather(*(live(config, workers, scorer, sample, sampling) for sample in samples))
    for group in groups:
        group.samples = [s for s in group.samples if s.state is not Fate.FAILED]
    return [group for group in groups if len(group.samples) > 1]


async def infer(config: RLConfig, workers: Workers, algorithm: Algorithm, batch: Batch) -> Batch:
    """Forward passes: only those that the algorithm needs."""
    temperature = config.rollout.temperature
    old: Tensor | None = None
    reference: Tensor | None = None
    if "old log-probs" in algorithm.needs:
        old = await workers.actor.call(0, Learner.infer, batch, temperature)
    if "reference" in algorithm.needs and workers.reference is not None:
        reference = await workers.reference.call(0, Learner.infer_reference, batch, temperature)
    return batch.with_(old=old, reference=reference)


async def train(config: RLConfig, report: Callable[[int, dict[str, float]], None]) -> None:
    """Generate, score, train, publish; until the steps are done."""
    workers = await open_workers(config)
    try:
        scorer = Scorer(config.rewards(), config.rollout.reward_timeout, sandbox=config.sandbox)
        source = PromptSource(config.data, config.seed, Renderer(workers.tokenizer), scorer.required_columns)
        batch_size = config.rollout.prompts * config.rollout.samples
        single = config.optim.epochs == 1 and (config.optim.minibatch or batch_size) >= batch_size
        algorithm = Algorithm(config.algorithm, single_update=single, longest=config.rollout.max_tokens)

        for step in range(1, config.steps + 1):
            first = (step - 1) * config.rollout.prompts
            prompts = [(first + i, source.draw()) for i in range(config.rollout.prompts)]

            groups = await rollout(config, workers, scorer, prompts)
            batch = pack(groups)
            batch = await infer(config, workers, algorithm, batch)
            batch = algorithm.advantages(batch)
            work = Update(batch, algorithm.loss, algorithm.aggregate, config.rollout.temperature)
            metrics = (await workers.actor.call(0, Learner.update, work)).metrics()
            await workers.publish(step)

            report(step, {"reward": float(batch.rewards.mean()), **metrics})
    finally:
        await workers.close()


def show(step: int, metrics: dict[str, float]) -> None:
    """One line a step."""
    names = ("reward", "train/loss", "train/entropy", "train/grad_norm", "train/mismatch")
    print(f"step {step:3d}  " + "  ".join(f"{name} {metrics.get(name, 0.0):.4g}" for name in names))


def main() -> None:
    """Read the recipe and go."""
    arguments = sys.argv[1:] or [str(RECIPE), "steps=20"]
    config = load(arguments[0], arguments[1:]).config
    assert isinstance(config, RLConfig), "this example is about reinforcement learning"
    asyncio.run(train(config, show))


if __name__ == "__main__":
    main()
