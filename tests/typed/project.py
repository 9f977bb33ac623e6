"""A small project of a user, for type checkers: tests/integration/test_typing.py checks it from outside the package."""

from pathlib import Path

import drumroll
from drumroll import Frame, Run, SampleRow, Step

ROWS: list[dict[str, str]] = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]


def correct(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


class Echo:
    def reset(self, seed: int, prompt: str = "") -> str:
        return f"{prompt}{seed}"

    def step(self, text: str) -> Step:
        return Step("", reward=float("1" in text), terminated=True)

    def close(self) -> None:
        pass


def show(step: int, metrics: dict[str, float]) -> None:
    print(step, metrics["reward/sums"])


def keep(row: SampleRow) -> None:
    best = row["reward"]
    print(row["completion"], 0.0 if best is None else best, row["traces"][0]["tokens"][-1])


def main(output: Path) -> float:
    try:
        run: Run = drumroll.train(
            {
                "output": str(output),
                "data": {"train": {"sums": {"source": ROWS}}},
                "reward": {"sums": correct},
                "environment": {"use": Echo},
            },
            ["steps=2"],
            on_step=show,
            on_eval=lambda step, metrics: show(step, metrics),
            on_sample=keep,
        )
    except drumroll.DrumrollError as error:
        raise SystemExit(str(error)) from error
    samples: Frame[SampleRow] = run.samples
    lengths = [len(row["completion"]) for row in samples if row["kind"] == "train"]
    rewards: list[float] = [row["reward"] or 0.0 for row in samples]
    table = samples.to_pandas()
    columns = run.metrics.to_polars().columns
    run.plot("reward", "train/loss").save(output / "plot.svg")
    print(run, len(table), columns, run.config.steps, run.metrics[-1]["step"], max(lengths))
    again = drumroll.load(run.path)
    scores: dict[str, float] = drumroll.evaluate(again, objects={"correct": correct})
    resumed = drumroll.train(resume=run, overrides=["steps=4"], objects={"sums": ROWS})
    return sum(rewards) + sum(scores.values()) + resumed.metrics[0]["step"]
