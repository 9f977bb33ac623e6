"""transformers' `generate`, for benchmarks/rollout.py. Run by the Python of `.bench/trl`.

python transformers_rollout.py MODEL DTYPE

A job has rows of tokens, each with the length to write past ends of sequence; the sampled tokens' log-probs are returned, as by all.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from lines import answer, jobs
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, StoppingCriteria
from typing_extensions import override


class Recorded(StoppingCriteria):
    """Ends each row at its length."""

    def __init__(self, width: int, lengths: list[int]) -> None:
        self.ends = width + torch.tensor(lengths)

    @override
    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return input_ids.shape[1] >= self.ends


class Logprobs(LogitsProcessor):
    """Keeps the log-prob of each sampled token, which is known when the next one is asked for."""

    def __init__(self) -> None:
        self.scores: Any = None
        self.found: list[Any] = []

    @override
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.take(input_ids)
        self.scores = scores
        return scores

    def take(self, ids: Any) -> None:
        """The log-probs of the last tokens, under the scores that they were sampled from."""
        if self.scores is not None:
            self.found.append(torch.log_softmax(self.scores.float(), -1).gather(1, ids[:, -1:]))


def generate(model: Any, ends: list[int], job: dict[str, Any]) -> tuple[list[int], float]:
    """Tokens written in each row and seconds; prompts are padded on the left, and tokens after a row's end do not count."""
    prompts, lengths = job["prompts"], job["lengths"]
    width = max(map(len, prompts))
    rows = torch.tensor([[ends[0]] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    logprobs = Logprobs()
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            rows,
            attention_mask=mask,
            min_new_tokens=max(lengths),  # no row ends by itself
            max_new_tokens=max(lengths),
            stopping_criteria=[Recorded(width, lengths)],
            logits_processor=[logprobs],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=ends,
            pad_token_id=ends[0],
        )
        logprobs.take(out)
    seconds = time.perf_counter() - began
    assert len(logprobs.found) == out.shape[1] - width
    ended = torch.isin(out[:, width:], torch.tensor(ends))
    return torch.where(ended.any(1), ended.int().argmax(1), ended.shape[1]).tolist(), seconds


def main(path: str, dtype: str) -> None:
    """Load, then serve."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    ends = [tokenizer.eos_token_id]
    answer(ready=True)
    for job in jobs():
        lengths, seconds = generate(model, ends, job)
        answer(lengths=lengths, seconds=seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
