"""The engine against other engines, and against itself: same weights, same requests, greedy, float32.

    python -m scripts.bench_engine                                              (about 6 minutes without peers)
    python -m scripts.bench_engine --pythons=ENV1/bin/python,ENV2/bin/python    (with the peers that these have)
    python -m scripts.bench_engine --parts=peers --cores=1 --peers=vllm,transformers --pythons=...
    python -m scripts.bench_engine --model=FOLDER --gguf=FILE --requests=pairs.json
    python -m scripts.bench_engine --table=runs/bench_engine.json               (prints the tables of a run, or of some)

Claims, each a part of the one JSON file that is written:

- peers: 32 requests, on one core and on two: more output tokens per second than vllm's CPU build, twice those of
  transformers' continuous batching, four times levanter's, and the same output ids.
- many: the same with 128 requests and 128 sequences at a time.
- host: at 128 sequences the host's own work is under 5% of a step.
- profile: where a decode step of 128 sequences goes.
- contiguous: a decode step over pages takes at most 1.1 times one over a contiguous cache of the same lengths.
- context: decoding slows with the context, up to 8,192 tokens, no faster than the bytes of the cache say.

The model is a random Llama of 32 million weights made at run time, the requests have lengths shaped like ShareGPT's.
A peer is used if this interpreter or one of ``--pythons`` has its package; the others are named as missing. Engines
take turns on the same cores, pass by pass, and a ratio compares passes of one round. A busy machine shows in the
spread of the passes; the ratios by CPU seconds then say more than those by the clock.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags

from paxkv.record import config_hash, environment, write_atomically
from scripts.peers import contest, served, tables
from scripts.peers.llama_files import LlamaShape, make_weights, write_gguf, write_hf
from scripts.peers.runners.session import Job
from scripts.readme import put_table

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMPARED = {"peers": 32, "many": 128}
"""Parts that compare engines, and their requests."""
PROBED = ("host", "profile", "contiguous", "context")
MAX_LEN = 1024
LONGEST = 2**14  # positions of the model

_PARTS = flags.DEFINE_list("parts", [*COMPARED, *PROBED], "what to measure")
_MODEL = flags.DEFINE_string("model", None, "Hugging Face folder of a model; without it, a random Llama of 32M weights")
_GGUF = flags.DEFINE_string("gguf", None, "with --model: the same weights for the llama.cpp peers, which else sit out")
_REQUESTS = flags.DEFINE_string("requests", None, "JSON list of [prompt tokens, output tokens] for the part peers")
_CORES = flags.DEFINE_list("cores", ["1", "2"], "numbers of cores for the part peers; the others take the first")
_PEERS = flags.DEFINE_string("peers", "all", f"all, none, or some of {','.join(contest.PACKAGES)}")
_PYTHONS = flags.DEFINE_list("pythons", [], "interpreters that may have peers, besides this one")
_REPEATS = flags.DEFINE_integer("repeats", 5, "rounds of timed passes; a slow engine stops early", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "seed of weights and prompts", lower_bound=0)
_OUT = flags.DEFINE_string("out", str(ROOT / "runs" / "bench_engine.json"), "the file that is written")
_TABLE = flags.DEFINE_list("table", [], "files that were written: print their tables, measure nothing")
_README = flags.DEFINE_bool("readme", False, "with --table: put them into README.md too")


def wanted_parts() -> list[str]:
    """The parts of --parts, in the order of the docstring."""
    known = (*COMPARED, *PROBED)
    unknown = [part for part in _PARTS.value if part not in known]
    if unknown or not _PARTS.value:
        raise ValueError(f"--parts={','.join(_PARTS.value)} must name some of {', '.join(known)}")
    return [part for part in known if part in _PARTS.value]


def wanted_peers() -> list[str]:
    """The peers of --peers."""
    if _PEERS.value in ("all", "none"):
        return list(contest.PACKAGES) if _PEERS.value == "all" else []
    peers = _PEERS.value.split(",")
    unknown = [peer for peer in peers if peer not in contest.PACKAGES]
    if unknown:
        raise ValueError(f"--peers={_PEERS.value} must be all, none, or some of {', '.join(contest.PACKAGES)}")
    return peers


def core_sets() -> list[list[int]]:
    """The cores of each number in --cores: the first ones that this process may use."""
    mine = contest.cores_now()
    try:
        counts = [int(count) for count in _CORES.value]
    except ValueError as error:
        raise ValueError(f"--cores={','.join(_CORES.value)} must be whole numbers such as 1,2") from error
    if not counts or min(counts) < 1:
        raise ValueError(f"--cores={','.join(_CORES.value)} must be numbers of at least 1")
    left_out = [count for count in counts if count > len(mine)]
    if left_out:
        print(f"left out: {left_out} cores, this process may use {len(mine)}")
    counts = [count for count in counts if count <= len(mine)] or [1]
    return [mine[:count] for count in counts]


def write_model(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path | None, int]:
    """The model's folder, its GGUF twin if there is one, and V."""
    if _MODEL.value is not None:
        model = pathlib.Path(_MODEL.value)
        shape = json.loads((model / "config.json").read_text())
        return model, pathlib.Path(_GGUF.value) if _GGUF.value is not None else None, int(shape["vocab_size"])
    shape = LlamaShape(max_positions=LONGEST)
    weights = make_weights(shape, _SEED.value)
    write_hf(folder / "model", shape, weights)
    twin = folder / "model.gguf" if importlib.util.find_spec("gguf") else None  # pip install 'paxkv[gguf]'
    if twin is not None:
        write_gguf(twin, shape, weights)
    return folder / "model", twin, shape.vocab_size


def compare(
    part: str,
    model: tuple[pathlib.Path, pathlib.Path | None, int],
    interpreters: dict[str, str],
    core_sets: list[list[int]],
    folder: pathlib.Path,
) -> dict[str, Any]:
    """A part that compares engines: what was served, a row per engine and number of cores, and who failed."""
    path, gguf, vocab_size = model
    lengths = served.shipped_lengths()[: COMPARED[part]]
    if part == "peers" and _REQUESTS.value is not None:
        lengths = served.read_lengths(pathlib.Path(_REQUESTS.value))
    requests = served.make_requests(lengths, vocab_size, _SEED.value)
    answer: dict[str, Any] = {
        "requests": len(lengths),
        "requests_sha256": config_hash([requests.prompts, requests.outputs]),
        "prompt_tokens": requests.prompt_tokens,
        "output_tokens": requests.output_tokens,
        "engines": [],
        "failed": [],
    }
    for cores in core_sets:
        job = Job(
            model=str(path.resolve()),
            gguf=str(gguf.resolve()) if gguf is not None else "",
            prompts=requests.prompts,
            outputs=requests.outputs,
            cores=cores,
            max_len=max(MAX_LEN, requests.longest),
            max_num_seqs=64 if part == "peers" else COMPARED[part],
            max_num_batched_tokens=512,
        )
        entries, failed = contest.compete(interpreters, job, folder, repeats=_REPEATS.value)
        answer["engines"] += [{"cores": len(cores), **row} for row in contest.summarise(entries)]
        answer["failed"] += [{"cores": len(cores), "engine": name, "why": why} for name, why in failed.items()]
        print(f"{part}, cores {cores}\n{tables.engines_table(answer)}", flush=True)
        for name, why in failed.items():
            print(f"failed: {name}: {why}", flush=True)
    return answer


def measure(folder: pathlib.Path, save: Callable[[dict[str, Any]], None]) -> None:
    """All parts asked for; ``save`` gets what there is after each."""
    parts, peers, cores = wanted_parts(), wanted_peers(), core_sets()
    model = write_model(folder)
    found = contest.find_interpreters(peers, _PYTHONS.value)
    if model[1] is None:
        for peer in contest.NEED_GGUF & found.keys():
            del found[peer]
    missing = [peer for peer in peers if peer not in found]
    print(f"peers: {', '.join(found) or 'none'}; not installed: {', '.join(missing) or 'none'}", flush=True)
    summary: dict[str, Any] = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": "given" if _MODEL.value is not None else LlamaShape(max_positions=LONGEST).hf_config(),
        "seed": _SEED.value,
        "not_installed": missing,
        "environment": environment(),
    }
    for part in COMPARED:
        if part in parts:
            sets = cores if part == "peers" else cores[:1]
            summary[part] = compare(part, model, {contest.OURS: sys.executable, **found}, sets, folder)
            save(summary)
    if any(part in PROBED for part in parts):
        contest.take_cores(cores[0])  # before jax is imported: it makes a thread for each core
        from scripts.peers.probes import Probe

        probe = Probe.load(model[0], seed=_SEED.value, repeats=_REPEATS.value)
        for part in PROBED:
            if part in parts:
                summary[part] = getattr(probe, part)()
                print(f"{part}\n{tables.markdown(summary[part])}", flush=True)
                save(summary)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        if not _TABLE.value:
            out = pathlib.Path(_OUT.value)
            out.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="bench_engine-") as folder:
                measure(pathlib.Path(folder), lambda found: write_atomically(out, json.dumps(found, indent=1) + "\n"))
            print(f"wrote {out}")
            return
        text = "\n\n".join(tables.report(json.loads(pathlib.Path(file).read_text())) for file in _TABLE.value)
        if _README.value:
            put_table("peers", text)
        print(text)
    except (ValueError, OSError) as error:
        raise app.UsageError(str(error)) from error


if __name__ == "__main__":
    app.run(main)
