r"""Talks with a model on this machine, through the engine, streamed.

    python -m experiments.chat --model=smollm2-135m --prompt="What is the capital of France?"
    python -m experiments.chat --model=smollm2-135m                                 (a conversation, until Ctrl-D)
    python -m experiments.chat --model=stories260k --folder=DIR --raw --prompt="Once upon a time"
    python -m experiments.chat --model=DIR --dtype=bfloat16 --temperature=0.7       (a Hugging Face folder, a *.gguf)

Claim: a model that people use answers through pages, a scheduler and the jitted step as it does elsewhere; the first
command prints "The capital of France is Paris." Expected time: about 10 s on two cores, most of it loading and
compiling; --compile_cache=DIR keeps what was compiled. The answer goes to stdout, all else to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.conversation import Chat, converse, load, make_engine, turns
from paxkv.models import known
from paxkv.sampling import SamplingParams

MODEL = flags.DEFINE_string("model", "smollm2-135m", f"one of {', '.join(known.MODELS)}, or a folder or file")
FOLDER = flags.DEFINE_string("folder", None, "where the files of a model known by name lie, if not in a package")
PROMPT = flags.DEFINE_string("prompt", None, "what to ask; without it, a conversation, or what stdin holds")
SYSTEM = flags.DEFINE_string("system", None, "a system message; without it, what the model's template says")
RAW = flags.DEFINE_bool("raw", False, "continue the prompt as it stands, without a chat template")
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 256, "longest answer, in tokens", lower_bound=1)
CONTEXT = flags.DEFINE_integer("context", 2048, "longest conversation, in tokens, if the model reads as many")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the likeliest token each time", lower_bound=0.0)
SEED = flags.DEFINE_integer("seed", None, "of the random choices; without it, others each time")
DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16", "float16"], "of weights and pages; None: the file's")
COMPILE_CACHE = flags.DEFINE_string("compile_cache", None, "folder for compiled steps, so that the next start is fast")


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}; a prompt goes behind --prompt=")
    console = Console(stderr=True)
    columns = (TextColumn("loading {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(Path(MODEL.value).name, total=None)
            loaded = load(
                MODEL.value,
                FOLDER.value,
                DTYPE.value,
                lambda done, total: progress.update(task, completed=done, total=total),
            )
            progress.update(task, completed=(total := progress.tasks[0].total or 1), total=total)
        if loaded[2].chat_template is None and not RAW.value:
            raise ValueError(f"{MODEL.value} has no chat template; with --raw it continues the prompt as it stands")
        engine = make_engine(*loaded, CONTEXT.value, COMPILE_CACHE.value)
        sampling = SamplingParams(temperature=TEMPERATURE.value, seed=SEED.value, max_tokens=MAX_TOKENS.value)
    except (OSError, ValueError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    with engine:
        chat = Chat(engine, sampling, RAW.value, sys.stdout)
        return 0 if converse(chat, turns(PROMPT.value, sys.stdin), SYSTEM.value, sys.stderr) else 1


if __name__ == "__main__":
    app.run(main)
