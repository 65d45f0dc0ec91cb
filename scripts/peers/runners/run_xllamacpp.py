"""llama.cpp's own server loop, from the prebuilt package xllamacpp, as a runner: see session.py.

Flash attention stays off: with it, float32 greedy outputs drift from those of every other engine.
"""

from __future__ import annotations

import importlib.metadata
import re
from concurrent.futures import ThreadPoolExecutor

import session

SLOTS = 16

if __name__ == "__main__":
    job = session.start()

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = job.gguf
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * job.max_len
    params.n_batch, params.n_ubatch = max(2048, job.max_len), 512
    params.cont_batching, params.kv_unified = True, True
    params.cache_prompt, params.cache_ram_mib = False, 0
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job.threads
    params.warmup = False
    server = xllamacpp.Server(params)

    def answer(index: int) -> list[int]:
        options = {
            "prompt": job.prompts[index],
            "n_predict": job.outputs[index],
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": False,
        }
        reply = server.handle_completions(options)
        reply = reply[0] if isinstance(reply, list) else reply
        # The vocabulary of the GGUF file spells token 7 as "t7": the text holds the ids.
        return [int(number) for number in re.findall(r"t(\d+)", reply["choices"][0]["text"])]

    def generate() -> list[list[int]]:
        with ThreadPoolExecutor(len(job.prompts)) as pool:
            return list(pool.map(answer, range(len(job.prompts))))

    session.serve(job, importlib.metadata.version("xllamacpp"), generate)
