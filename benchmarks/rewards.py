"""How many answers the `math` reward checks in a second: by text and exact numbers here, and by math-verify in two processes.

python benchmarks/rewards.py
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time

from figures import figure

from drumroll.config.reward import RewardConfig
from drumroll.processes.pool import KillablePool
from drumroll.rewards import Scorer
from drumroll.sample import Prompt, Sample

GROUP = 8
"""Samples with the same gold answer, as in training."""
REPEATS = 3
THOUGHT = "We add what is given, carry the one, and check the sum again by taking it apart. " * 20

Pair = tuple[str, str]
"""What a completion says, and the gold answer."""


def quick_pair(rng: random.Random, gold: int) -> Pair:
    """One that text and exact numbers decide; half of them are right."""
    said = gold if rng.random() < 0.5 else gold + rng.randint(1, 9)
    forms = [
        f"\\boxed{{{said}}}",
        f"<answer>{said:,}</answer>",
        f"The answer is ${said}$.",
        f"\\boxed{{\\frac{{{2 * said}}}{{2}}}}",
    ]
    return f"{THOUGHT}{rng.choice(forms)}", str(gold)


def symbolic_pair(rng: random.Random, gold: int) -> Pair:
    """One that only algebra decides; half of them are right. Few are written alike, so that little is read twice."""
    n, k, off = gold + 2, rng.randint(2, 999), rng.choice([0, 1])
    forms = [
        (f"{n}\\sqrt{{{n}}}", f"\\frac{{{k}\\sqrt{{{n**3 + off}}}}}{{{k}}}"),
        (f"(x+{n})^2", f"x^2{k:+}x{2 * n - k:+}x+{n * n + off}"),
        (f"\\frac{{x+{n}}}{{2}}", f"\\frac{{{k}x+{k * n + k * off}}}{{{2 * k}}}"),
        (f"({n}, {n + 1})", f"({n}, \\frac{{{k * (n + 1 + off)}}}{{{k}}})"),
        (f"\\{{{n}, {2 * n}\\}}", f"\\{{{2 * n + off}, \\frac{{{k * n}}}{{{k}}}\\}}"),
        (f"{n}\\pi", f"\\frac{{{k * n + off}\\pi}}{{{k}}}"),
    ]
    wanted, said = forms[gold % len(forms)]
    return f"{THOUGHT}\\boxed{{{said}}}", wanted


async def rate(pairs: list[Pair], pool: KillablePool) -> float:
    """Answers a second, all asked for at once."""
    scorer = Scorer({"*": [RewardConfig(use="math")]}, pool=pool)
    samples = [Sample(Prompt(str(i), "d", "", (1,), {"answer": g}), i, 0, completion=c) for i, (c, g) in enumerate(pairs)]
    began = time.perf_counter()
    await asyncio.gather(*map(scorer.score, samples))
    seconds = time.perf_counter() - began
    assert all(sample.failure is None for sample in samples), next(s.failure for s in samples if s.failure)
    right = statistics.mean(sample.reward or 0.0 for sample in samples)
    assert 0.3 < right < 0.7, f"{right} of the answers count as right, about half of them are"
    return len(pairs) / seconds


async def main() -> None:
    """Both paths; the processes are warm, as they are after a run's first step."""
    rng, pool = random.Random(0), KillablePool(2)
    try:
        quick = [quick_pair(rng, n) for n in range(1000) for _ in range(GROUP)]
        rates = [await rate(quick, pool) for _ in range(REPEATS)]
        figure("rewards/math_fast_per_s", statistics.median(rates), "1/s", goal=5000, pairs=len(quick), repeats=REPEATS)
        await rate([symbolic_pair(rng, n) for n in range(24) for _ in range(4)], pool)
        rates = []
        for r in range(REPEATS):
            pairs = [symbolic_pair(rng, n) for n in range(100 * r, 100 * r + 100) for _ in range(GROUP)]
            rates.append(await rate(pairs, pool))
        facts = {"pairs": 100 * GROUP, "repeats": REPEATS, "processes": pool.size, "group": GROUP}
        figure("rewards/math_verify_per_s", statistics.median(rates), "1/s", goal=250, **facts)
    finally:
        await pool.close()


if __name__ == "__main__":
    asyncio.run(main())
