"""paxkv's engine as a runner: see session.py."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import session

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

if __name__ == "__main__":
    job = session.start()

    import paxkv
    from paxkv.config import SchedulerConfig
    from paxkv.engine import Engine, EngineConfig
    from paxkv.models import checkpoint
    from paxkv.sampling import SamplingParams

    config, params = checkpoint.load(job.model)
    limits = SchedulerConfig(
        max_num_seqs=job.max_num_seqs,
        max_num_batched_tokens=job.max_num_batched_tokens,
        max_model_len=job.max_len,
        step_kind="chunked",
        max_horizon=8,
    )
    engine = Engine(config, params, EngineConfig(scheduler=limits))
    sampling = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in job.outputs]
    before: dict[str, float] = {}

    def generate() -> list[list[int]]:
        before.update(dataclasses.asdict(engine.stats), compiles=len(engine.log.entries))
        return [list(output.outputs[0].token_ids) for output in engine.generate(job.prompts, sampling)]

    def extra() -> dict[str, float]:
        after = dataclasses.asdict(engine.stats) | {"compiles": len(engine.log.entries)}
        return {name: after[name] - before[name] for name in after}

    session.serve(job, paxkv.__version__, generate, extra)
