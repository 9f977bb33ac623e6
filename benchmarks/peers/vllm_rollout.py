"""vLLM's CPU build, for benchmarks/rollout.py. Run by the Python of `.bench/vllm`.

python vllm_rollout.py MODEL DTYPE

A job has rows of tokens, each with the length to write past ends of sequence; the sampled tokens' log-probs are returned, as by all.
Eager: its compiled mode starts two minutes later and was no faster where it was measured.
"""

from __future__ import annotations

import os
import sys
import time

from lines import answer, jobs

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def main(path: str, dtype: str) -> None:
    """Load, then serve."""
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    model = LLM(path, dtype=dtype, max_model_len=512, max_num_seqs=64, block_size=32, enforce_eager=True, seed=0)
    answer(ready=True, start_seconds=time.perf_counter() - began)
    for job in jobs():
        options = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, logprobs=0) for n in job["lengths"]]
        began = time.perf_counter()
        done = model.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], options, use_tqdm=False)
        seconds = time.perf_counter() - began
        rows = [request.outputs[0] for request in done]
        assert all(len(row.logprobs or ()) == len(row.token_ids) for row in rows)
        answer(lengths=[len(row.token_ids) for row in rows], seconds=seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
