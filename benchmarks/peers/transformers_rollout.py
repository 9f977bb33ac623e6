"""transformers' `generate`, for benchmarks/rollout.py. Run by the Python of `.bench/trl`.

python transformers_rollout.py MODEL DTYPE
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from lines import answer, jobs
from transformers import AutoModelForCausalLM, AutoTokenizer


def generate(model: Any, ends: list[int], job: dict[str, Any]) -> tuple[int, float]:
    """Tokens written and seconds; prompts are padded on the left, and tokens after a row's end do not count."""
    prompts = [prompt for prompt in job["prompts"] for _ in range(job["samples"])]
    width = max(map(len, prompts))
    rows = torch.tensor([[ends[0]] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    least = {"min_new_tokens": job["tokens"]} if job["forced"] else {}
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            rows,
            attention_mask=mask,
            max_new_tokens=job["tokens"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=ends,
            pad_token_id=ends[0],
            **least,
        )
    seconds = time.perf_counter() - began
    ended = torch.isin(out[:, width:], torch.tensor(ends))
    lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, ended.shape[1])
    return int(lengths.sum()), seconds


def main(path: str, dtype: str) -> None:
    """Load, then serve."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    ends = [tokenizer.eos_token_id]
    answer(ready=True)
    for job in jobs():
        tokens, seconds = generate(model, ends, job)
        answer(tokens=tokens, seconds=seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
