"""A conversation with a model: it is loaded, asked, and its answers shown as they come."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from paxkv.config import SchedulerConfig
from paxkv.engine import Engine, EngineConfig, EngineError
from paxkv.models import chat_template, checkpoint, known, tokenizer
from paxkv.models.architecture import DecoderConfig
from paxkv.output import RequestOutput
from paxkv.sampling import SamplingParams
from paxkv.sched.events import RequestRejected
from paxkv.testing import llama2c


def load(
    name: str, folder: str | None, dtype: str | None, progress: Callable[[int, int], None]
) -> tuple[DecoderConfig, dict, tokenizer.Tokenizer]:
    """Architecture, weights and tokenizer of a model by name or path; ``progress`` as in ``checkpoint.load``.

    Layers are stacked: one layer compiles in a fraction of the time of all, which counts more here than some
    milliseconds a token.
    """
    files = known.find(name, folder)
    words = tokenizer.load(files.tokenizer)
    if files.weights.suffix == ".bin":
        return *llama2c.read(files.weights), words
    return *checkpoint.load(files.weights, dtype=dtype, scan_layers=True, progress=progress), words


def make_engine(
    model: DecoderConfig,
    params: dict,
    words: tokenizer.Tokenizer,
    context: int,
    compile_cache: str | None = None,
    piece: int = 64,
) -> Engine:
    """An engine for one conversation: its pages stay, so that a new turn computes only what is new.

    Args:
        model, params, words: as :func:`load` gives them.
        context: longest conversation, in tokens; no more than the model reads.
        compile_cache: folder for compiled steps.
        piece: longer prompts come in pieces of so many tokens, so that few shapes are compiled.
    """
    limits = SchedulerConfig(
        max_num_seqs=1,
        max_num_batched_tokens=piece,
        max_model_len=min(context, model.max_length),
        step_kind="chunked",
        max_horizon=1,  # every token is shown as it comes
    )
    config = EngineConfig(limits, prefix_caching=True, compile_cache=compile_cache)
    return Engine(model, params, config, tokenizer=words)


@dataclasses.dataclass(frozen=True)
class Chat:
    """Asks a model and shows its answer as it comes.

    Attributes:
        engine: serves it.
        sampling: how tokens are chosen.
        raw: prompts are continued as they stand.
        out: where the answer goes.
    """

    engine: Engine
    sampling: SamplingParams
    raw: bool
    out: TextIO

    def ask(self, messages: Sequence[dict[str, str]]) -> RequestOutput:
        """Shows the answer to a conversation, or the continuation of its last message.

        Raises:
            RequestRejected: it cannot be served, for one because it is too long.
            ValueError: the model has no chat template, or one that refuses the messages.
        """
        words = self.engine.tokenizer
        ids = words.encode(messages[-1]["content"]) if self.raw else chat_template.encode_chat(words, messages)
        shown, output = 0, None
        with contextlib.closing(self.engine.stream(ids, self.sampling)) as stream, interruptible() as asked:
            for output in stream:
                self.out.write(output.text[shown:])
                self.out.flush()
                shown = len(output.text)
                if asked():
                    break
        self.out.write("\n")
        return output


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted for the caller, who stops between two steps rather than inside one; a second one interrupts."""
    presses = []

    def note(signum: int, frame: object) -> None:
        presses.append(signum)
        if len(presses) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(presses)
    finally:
        signal.signal(signal.SIGINT, before)


def speed(output: RequestOutput, compile_s: float) -> str:
    """One line on an answer: its tokens, how fast they came, and what compiling cost."""
    times, count = output.times, len(output.token_ids)
    first_s = times.first_token_s - times.arrival_s
    line = f"{len(output.prompt_ids)} prompt tokens, {output.cached_tokens} of them cached; first token after "
    line += f"{first_s:.2f} s; {count} tokens"
    if count > 1:
        # The median, for steps of a new shape compile first.
        gap = statistics.median(after - before for before, after in itertools.pairwise(times.token_s))
        line += f", {1 / gap:.1f} tokens/s" if gap else ""
    return f"{line}; {compile_s:.2f} s went into compiling; ended by {output.outputs[0].finish_reason or 'Ctrl-C'}"


def turns(prompt: str | None, stdin: TextIO, ask: Callable[[str], str] = input) -> Iterator[str]:
    """What the user says: ``prompt`` alone, or line by line on a terminal, or all that stdin holds."""
    if prompt is not None:
        yield prompt
    elif not stdin.isatty():
        yield stdin.read()
    else:
        while True:
            try:
                line = ask("> ")
            except EOFError:
                return
            if line.strip():
                yield line


def converse(chat: Chat, says: Iterator[str], system: str | None, err: TextIO) -> bool:
    """Answers turn after turn; returns whether every one was answered. What cannot be answered is left out of the
    conversation."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    good = True
    for text in says:
        before = chat.engine.log.seconds
        try:
            output = chat.ask([*messages, {"role": "user", "content": text}])
        except (RequestRejected, EngineError, ValueError, ImportError) as error:
            print(error, file=err)
            good = False
            continue
        print(speed(output, chat.engine.log.seconds - before), file=err)
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": output.text}]
    return good
