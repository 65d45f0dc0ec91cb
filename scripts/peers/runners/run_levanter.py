"""Levanter's JAX engine (a page table, continuous decoding) as a runner: see session.py.

It refuses more requests than sequences, so requests go in waves of at most WAVE; it has no thread flag and takes the
cores of its process.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib

import session

WAVE = 16
PAGE = 16

if __name__ == "__main__":
    job = session.start()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

    import haliax
    import jax
    import jax.numpy as jnp
    from haliax.state_dict import from_torch_compatible_state_dict
    from levanter.inference.engine import InferenceEngine, InferenceEngineConfig, Request
    from levanter.inference.jit_scheduler import SeqDecodingParams
    from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
    from safetensors.numpy import load_file

    folder = pathlib.Path(job.model)
    shape = json.loads((folder / "config.json").read_text())
    config = LlamaConfig(
        seq_len=shape["max_position_embeddings"],
        hidden_dim=shape["hidden_size"],
        intermediate_dim=shape["intermediate_size"],
        num_layers=shape["num_hidden_layers"],
        num_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        layer_norm_epsilon=shape["rms_norm_eps"],
        rope=DefaultRotaryEmbeddingsConfig(theta=shape["rope_theta"]),
    )
    model = LlamaLMHeadModel.init(haliax.Axis("vocab", shape["vocab_size"]), config, key=jax.random.PRNGKey(0))
    weights = {name: jnp.asarray(value) for name, value in load_file(folder / "model.safetensors").items()}
    model = from_torch_compatible_state_dict(model, weights)
    limits = InferenceEngineConfig(
        max_seq_len=job.max_len,
        page_size=PAGE,
        max_pages=WAVE * -(-job.max_len // PAGE),
        max_seqs=WAVE,
        max_seqs_in_prefill=WAVE,
        max_queued_tokens=WAVE,
        max_prefill_size=2 * job.max_len,
        max_rounds=32,
        compute_dtype=jnp.float32,
    )
    engine = InferenceEngine.from_model_with_config(model, None, limits)

    def request(index: int) -> Request:
        ids = job.prompts[index]
        decoding = SeqDecodingParams(
            max_num_tokens=jnp.array(len(ids) + job.outputs[index], jnp.int32),
            stop_tokens=None,
            temperature=jnp.array(0.0),
            key=jax.random.PRNGKey(index),
        )
        return Request(prompt_tokens=ids, request_id=index % WAVE, n_generations=1, decode_params=decoding)

    def generate() -> list[list[int]]:
        outputs = []
        for first in range(0, len(job.prompts), WAVE):
            wave = range(first, min(first + WAVE, len(job.prompts)))
            tokens = engine.generate([request(index) for index in wave]).tokens
            outputs += [list(ids)[-job.outputs[index] :] for index, ids in zip(wave, tokens, strict=True)]
        return outputs

    session.serve(job, importlib.metadata.version("levanter"), generate)
