"""Write a workload to a file and print its hash, rates and length percentiles.

From a data set of the figures, embedded or (with --traces) real, with drawn arrivals:

    python -m scripts.make_workload --dataset=sharegpt --rate=2 --duration=3600 --out=sharegpt.jsonl
    python -m scripts.make_workload --dataset=alpaca --traces=DIR --rate=20 --arrivals=gamma --burstiness=4
    python -m scripts.make_workload --dataset=sharegpt_turns --new_probability=0.5 --rate=0.8      (figure 17)
    python -m scripts.make_workload --dataset=wmt16 --prefix_tokens=341 --rate=40 --duration=1200   (figure 16)

From a file (--format: lengths, trace, mooncake, sharegpt, workload) or a distribution:

    python -m scripts.make_workload --input=pairs.csv --format=lengths --rate=2
    python -m scripts.make_workload --input=trace.csv.gz --format=trace --rate=5 --duration=600
    python -m scripts.make_workload --input=ShareGPT.json --format=sharegpt --tokenizer=tokenizer.json --rate=1
    python -m scripts.make_workload --prompt='lognormal(300,1.2)' --output='uniform(1,256)' --rate=4

Without --out nothing is written. Takes about a second.
"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
from absl import app, flags

from paxkv import workload as wl
from paxkv.workload import datasets, distributions

_DATASET = flags.DEFINE_enum("dataset", None, datasets.NAMES, "data set of the figures")
_TRACES = flags.DEFINE_string(
    "traces", None, "folder with the real traces; without it the embedded statistics are used"
)
_INPUT = flags.DEFINE_string("input", None, "file to read instead of a data set")
_FORMAT = flags.DEFINE_enum(
    "format", None, ["lengths", "trace", "mooncake", "sharegpt", "workload"], "what --input holds"
)
_PROMPT = flags.DEFINE_string("prompt", None, f"distribution of prompt lengths: {distributions.RULES}")
_OUTPUT = flags.DEFINE_string("output", None, "distribution of output lengths")
_PROMPT_COLUMN = flags.DEFINE_string("prompt_column", None, "column of prompt lengths in --input")
_OUTPUT_COLUMN = flags.DEFINE_string("output_column", None, "column of output lengths in --input")
_ARRIVAL_COLUMN = flags.DEFINE_string("arrival_column", None, "column of arrival times in --input")
_TIME_UNIT = flags.DEFINE_enum("time_unit", "s", ["s", "ms", "us"], "unit of a numeric arrival column")
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "tokenizer.json for --format=sharegpt (needs the package tokenizers)"
)
_RATE = flags.DEFINE_float("rate", None, "requests per second; a trace keeps its own rate unless given")
_DURATION = flags.DEFINE_float("duration", None, "seconds; 3600 by default, a trace's own length for traces")
_ARRIVALS = flags.DEFINE_enum("arrivals", "slots", ["slots", "poisson", "gamma", "all_at_once"], "arrival process")
_BURSTINESS = flags.DEFINE_float("burstiness", 1.0, "gamma arrivals: coefficient of variation of the gaps")
_NEW_PROBABILITY = flags.DEFINE_float("new_probability", 0.5, "chat: chance that an arrival starts a conversation")
_PREFIX = flags.DEFINE_integer("prefix_tokens", None, "shared prefix in front of every prompt")
_MAX_TOTAL = flags.DEFINE_integer("max_total_tokens", None, "leave out longer requests; 2047 for the data sets")
_SEED = flags.DEFINE_integer("seed", 0, "seed of arrivals, order and distributions")
_NAME = flags.DEFINE_string("name", None, "name of the workload")
_OUT = flags.DEFINE_string("out", None, "file to write, .jsonl or .jsonl.gz")


_ALWAYS = (_NAME, _OUT)
_DRAWN = (_RATE, _DURATION, _ARRIVALS, _SEED)
_COLUMNS = (_PROMPT_COLUMN, _OUTPUT_COLUMN)


def build() -> wl.Workload:
    """Build the workload that the flags describe."""
    chosen = [flag for flag in (_DATASET, _INPUT, _PROMPT) if flag.value is not None]
    if len(chosen) != 1:
        raise wl.WorkloadError("pass one of --dataset, --input (with --format) or --prompt (with --output)")
    if _INPUT.value is not None and _FORMAT.value not in ("lengths", "sharegpt"):
        return from_trace()
    if _RATE.value is None:
        raise wl.WorkloadError("--rate is needed, since these lengths have no arrival times")
    if _DATASET.value == "sharegpt_turns" or _FORMAT.value == "sharegpt":
        return chat()
    duration = 3600.0 if _DURATION.value is None else _DURATION.value
    if _PREFIX.value is None:
        lengths = pairs(_RATE.value * duration, also=(_BURSTINESS,))
        return wl.build_workload(
            lengths, _RATE.value, duration, arrivals=_ARRIVALS.value, seed=_SEED.value, burstiness=_BURSTINESS.value
        )
    return wl.translation_workload(
        pairs(_RATE.value * duration, also=(_PREFIX,)),
        _RATE.value,
        duration,
        prefix_tokens=_PREFIX.value,
        seed=_SEED.value,
        arrivals=_ARRIVALS.value,
        max_total_tokens=_MAX_TOTAL.value or datasets.PAPER_MAX_TOTAL,
    )


def only(*used: flags.FlagHolder) -> None:
    """Raise for flags that were passed and would have no effect."""
    holders = [value for value in globals().values() if isinstance(value, flags.FlagHolder)]
    idle = sorted({holder.name for holder in holders if holder.present} - {flag.name for flag in (*used, *_ALWAYS)})
    if idle:
        raise wl.WorkloadError(f"no effect with the other flags, leave out: --{', --'.join(idle)}")


def from_trace() -> wl.Workload:
    """Read a file that has arrivals of its own, at another rate or shorter if asked for."""
    used = (_INPUT, _FORMAT, _RATE, _DURATION)
    match _FORMAT.value:
        case "trace":
            only(*used, *_COLUMNS, _ARRIVAL_COLUMN, _TIME_UNIT)
            trace = wl.read_timestamped(
                _INPUT.value,
                arrival=_ARRIVAL_COLUMN.value,
                prompt=_PROMPT_COLUMN.value,
                output=_OUTPUT_COLUMN.value,
                time_unit=_TIME_UNIT.value,
            )
        case "mooncake":
            only(*used)
            trace = wl.read_mooncake(_INPUT.value)
        case "workload":
            only(*used)
            trace = wl.read_workload(_INPUT.value)
        case _:
            raise wl.WorkloadError("--input needs --format: lengths, trace, mooncake, sharegpt or workload")
    if _RATE.value is None and _DURATION.value is None:
        return trace
    return wl.workload_from_trace(trace, rate=_RATE.value, duration_s=_DURATION.value)


def chat() -> wl.Workload:
    """Build the chat workload of figure 17."""
    only(*_DRAWN, _DATASET, _TRACES, _INPUT, _FORMAT, _TOKENIZER, _NEW_PROBABILITY)
    return wl.chat_workload(
        conversations(),
        _RATE.value,
        3600.0 if _DURATION.value is None else _DURATION.value,
        new_probability=_NEW_PROBABILITY.value,
        seed=_SEED.value,
        arrivals=_ARRIVALS.value,
    )


def conversations() -> wl.Conversations:
    """Return the conversations that the flags name."""
    if _DATASET.value == "sharegpt_turns":
        return wl.load_conversations(_TRACES.value)
    if _TOKENIZER.value is None:
        raise wl.WorkloadError("--format=sharegpt needs --tokenizer, the path of a tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise wl.WorkloadError("--tokenizer needs the package tokenizers: pip install 'paxkv[hf]'") from None
    encode = Tokenizer.from_file(_TOKENIZER.value).encode
    return wl.read_sharegpt(_INPUT.value, lambda text: encode(text, add_special_tokens=False))


def pairs(count: float, also: tuple[flags.FlagHolder, ...]) -> wl.Lengths:
    """Return the data set, the file or ``count`` draws of the distribution that the flags name."""
    used = (*_DRAWN, _MAX_TOTAL, *also)
    if _DATASET.value is not None:
        only(*used, _DATASET, _TRACES)
        limit = _MAX_TOTAL.value or datasets.PAPER_MAX_TOTAL
        return wl.load_lengths(_DATASET.value, _TRACES.value, max_total_tokens=limit)
    if _INPUT.value is not None:
        only(*used, *_COLUMNS, _INPUT, _FORMAT)
        lengths = wl.read_lengths(_INPUT.value, prompt=_PROMPT_COLUMN.value, output=_OUTPUT_COLUMN.value)
        return lengths if _MAX_TOTAL.value is None else lengths.with_total_at_most(_MAX_TOTAL.value)
    if _OUTPUT.value is None:
        raise wl.WorkloadError("--prompt needs --output")
    only(*used, _PROMPT, _OUTPUT)
    draws = max(1, round(count))
    return wl.sample_lengths(_PROMPT.value, _OUTPUT.value, draws, seed=_SEED.value, max_total_tokens=_MAX_TOTAL.value)


def describe(workload: wl.Workload) -> str:
    """Return what a reader wants to know of a workload, in a few lines."""
    times = workload.arrival_s
    lines = [
        f"name          {workload.name}",
        f"source        {workload.source}",
        f"content hash  {workload.content_hash}",
        f"requests      {len(workload)}, first at {times[0]:.3f} s, last at {times[-1]:.3f} s",
    ]
    gaps = np.diff(times)
    if gaps.size and gaps.mean() > 0:
        lines.append(
            f"arrivals      {1 / gaps.mean():.4g}/s, gaps vary by {gaps.std() / gaps.mean():.2f} of their mean"
        )
    if workload.prefix_tokens:
        lines.append(f"prefix        {workload.prefix_tokens} tokens shared by all prompts")
    if workload.hash_ids is not None:
        lines.append(f"hash ids      of blocks of {workload.hash_block} tokens")
    lines.append(f"{'tokens':<14}{'mean':>10}{'p10':>8}{'p50':>8}{'p90':>8}{'p99':>8}{'max':>8}")
    total = workload.prompt_tokens + workload.output_tokens
    for label, values in (("prompt", workload.prompt_tokens), ("output", workload.output_tokens), ("sum", total)):
        ranks = np.percentile(values, [10, 50, 90, 99, 100], method="inverted_cdf")
        lines.append(f"  {label:<12}{values.mean():>10.2f}" + "".join(f"{value:>8d}" for value in ranks.astype(int)))
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    try:
        workload = build()
        if _NAME.value is not None:
            workload = dataclasses.replace(workload, name=_NAME.value)
        if _OUT.value is not None:
            wl.write_workload(workload, _OUT.value)
    except wl.WorkloadError as error:
        sys.exit(f"make_workload: {error}")
    print(describe(workload))
    if _OUT.value is not None:
        print(f"wrote         {_OUT.value}")


if __name__ == "__main__":
    app.run(main)
