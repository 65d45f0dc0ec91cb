"""llama.cpp through llama-cpp-python's C interface, batched by a loop of our own, as a runner: see session.py.

Each call of ``llama_decode`` takes one token of every running sequence and the prompts that still fit. The output of
a sequence is reserved when it is admitted, so nothing is ever preempted. Flash attention stays off: with it, float32
greedy outputs drift from those of every other engine.
"""

from __future__ import annotations

import ctypes
import dataclasses

import session

BATCH = 2048
F32 = 0  # GGML_TYPE_F32


@dataclasses.dataclass
class Running:
    """A sequence in flight: its request, its place in the cache, its newest token and that token's position."""

    request: int
    place: int
    position: int
    token: int = -1


class Loop:
    """Serves the requests of a job once."""

    def __init__(self, llama, job: session.Job, model, context) -> None:
        self.llama, self.job, self.context = llama, job, context
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self.cells = llama.llama_n_ctx(context)
        self.batch = llama.llama_batch_init(BATCH, 0, 1)

    def put(self, token: int, position: int, place: int, wanted: bool) -> int:
        """Adds a token to the batch; returns its index there."""
        batch, index = self.batch, self.batch.n_tokens
        batch.token[index], batch.pos[index] = token, position
        batch.n_seq_id[index], batch.seq_id[index][0] = 1, place
        batch.logits[index] = wanted
        batch.n_tokens += 1
        return index

    def run(self) -> list[list[int]]:
        """The outputs."""
        job = self.job
        outputs: list[list[int]] = [[] for _ in job.prompts]
        waiting, places = list(range(len(job.prompts))), list(range(job.max_num_seqs))
        running: list[Running] = []
        reserved = 0
        while waiting or running:
            self.batch.n_tokens = 0
            asked = [(seq, self.put(seq.token, seq.position, seq.place, True)) for seq in running]
            while waiting and places:
                prompt = job.prompts[waiting[0]]
                need = len(prompt) + job.outputs[waiting[0]]
                if self.batch.n_tokens + len(prompt) > BATCH or reserved + need > self.cells:
                    break
                seq = Running(waiting.pop(0), places.pop(), len(prompt) - 1)
                reserved += need
                running.append(seq)
                last = [self.put(t, i, seq.place, i == seq.position) for i, t in enumerate(prompt)][-1]
                asked.append((seq, last))
            self.decode(asked, outputs)
            for seq in [seq for seq in running if len(outputs[seq.request]) == job.outputs[seq.request]]:
                self.llama.llama_memory_seq_rm(self.llama.llama_get_memory(self.context), seq.place, -1, -1)
                reserved -= len(job.prompts[seq.request]) + job.outputs[seq.request]
                places.append(seq.place)
                running.remove(seq)
        return outputs

    def decode(self, asked: list[tuple[Running, int]], outputs: list[list[int]]) -> None:
        """Runs the batch and takes the likeliest token of each sequence."""
        if not self.batch.n_tokens or self.llama.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError(f"llama_decode refused a batch of {self.batch.n_tokens} tokens; give it more cells")
        for seq, index in asked:
            logits = self.llama.llama_get_logits_ith(self.context, index)
            seq.token = int(numpy.ctypeslib.as_array(logits, shape=(self.vocab_size,)).argmax())
            seq.position += 1
            outputs[seq.request].append(seq.token)


if __name__ == "__main__":
    job = session.start()

    import llama_cpp
    import numpy

    llama_cpp.llama_backend_init()
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    model = llama_cpp.llama_model_load_from_file(job.gguf.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = job.max_num_seqs * job.max_len
    params.n_batch = params.n_ubatch = BATCH
    params.n_seq_max = job.max_num_seqs
    params.n_threads = params.n_threads_batch = job.threads
    params.kv_unified = True
    params.flash_attn_type = 0
    params.type_k = params.type_v = F32
    context = llama_cpp.llama_init_from_model(model, params)
    loop = Loop(llama_cpp, job, model, context)
    session.serve(job, llama_cpp.__version__, loop.run)
