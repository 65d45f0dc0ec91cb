"""Hugging Face transformers with its paged continuous batching as a runner: see session.py."""

from __future__ import annotations

import os

import session

if __name__ == "__main__":
    job = session.start()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    import torch
    import transformers

    torch.set_num_threads(job.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job.model, dtype=torch.float32, attn_implementation="paged|sdpa"
    ).eval()
    generation = transformers.GenerationConfig(
        max_new_tokens=max(job.outputs), do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    page = 16
    batching = transformers.ContinuousBatchingConfig(
        block_size=page,
        num_blocks=job.max_num_seqs * -(-job.max_len // page),
        max_batch_tokens=job.max_num_batched_tokens,
    )

    def generate() -> list[list[int]]:
        options = {"generation_config": generation, "continuous_batching_config": batching}
        with model.continuous_batching_context_manager(**options) as manager:
            names = [
                manager.add_request(ids, max_new_tokens=count)
                for ids, count in zip(job.prompts, job.outputs, strict=True)
            ]
            done: dict[str, list[int]] = {}
            while len(done) < len(names):
                result = manager.get_result(timeout=10)
                if result is not None and result.is_finished():
                    done[result.request_id] = list(result.generated_tokens)
        return [done[name] for name in names]

    session.serve(job, transformers.__version__, generate)
