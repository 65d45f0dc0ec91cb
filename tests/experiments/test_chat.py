"""The chat: a model from a folder, streamed, turn after turn; what cannot be answered is told and harms nothing."""

from __future__ import annotations

import io
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from experiments import conversation
from paxkv.models import chat_template
from paxkv.models.families import from_hf_config, tensor_map
from paxkv.sampling import SamplingParams
from tests.models import vocabularies
from tests.models.checkpoints import LLAMA

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model that has learned nothing but its vocabulary."""
    inner = vocabularies.byte_level_json()
    hf = LLAMA | dict(model_type="llama", vocab_size=inner.get_vocab_size(), max_position_embeddings=256)
    draw, tensors = np.random.default_rng(5), {}
    for rule in tensor_map(from_hf_config(hf)):
        for source, shape in zip(rule.sources, rule.shapes, strict=True):
            tensors[source] = draw.standard_normal(shape, np.float32) if len(shape) == 2 else np.ones(shape, np.float32)
    place = tmp_path_factory.mktemp("model")
    save_file(tensors, place / "model.safetensors")
    settings = {"eos_token": "</s>", "chat_template": vocabularies.CHATML}
    return vocabularies.write_folder(place, inner, config=hf, tokenizer_config=settings)


@pytest.fixture(scope="module")
def engine(folder):
    return conversation.make_engine(*conversation.load(str(folder), None, None, lambda *done: None), 256, piece=16)


class Out(io.StringIO):
    """Remembers how often it was written to."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += bool(text)
        return super().write(text)


def talk(engine, says, *, system=None, raw=False, **changes) -> tuple[Out, str, bool]:
    out, err = Out(), io.StringIO()
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **changes})
    good = conversation.converse(conversation.Chat(engine, sampling, raw, out), iter(says), system, err)
    return out, err.getvalue(), good


def test_an_answer_comes_in_pieces(engine):
    out, err, good = talk(engine, ["or"])
    ids = chat_template.encode_chat(engine.tokenizer, [{"role": "user", "content": "or"}])
    (want,) = engine.generate([ids], SamplingParams(temperature=0.0, max_tokens=12))
    assert good and out.getvalue() == want.text + "\n" and out.writes > 4
    assert f"{len(ids)} prompt tokens, 0 of them cached" in err
    assert "; 12 tokens, " in err and " tokens/s; " in err and err.endswith("ended by length\n")


def test_a_conversation_goes_on(engine):
    """The second turn reads the first, whose pages are still there."""
    out, err, good = talk(engine, ["or else", "and"], system="short", max_tokens=16)
    first, second = err.splitlines()
    assert good and out.getvalue().count("\n") >= 2
    assert int(second.split()[0]) > int(first.split()[0]) + 16
    assert int(second.split("tokens, ")[1].split()[0]) >= 32


def test_a_prompt_as_it_stands(engine):
    out, err, _ = talk(engine, ["or"], raw=True)
    (want,) = engine.generate(["or"], SamplingParams(temperature=0.0, max_tokens=12))
    assert out.getvalue() == want.text + "\n"
    assert int(err.split()[0]) == len(engine.tokenizer.encode("or"))


def test_too_long_a_turn_is_left_out(engine):
    out, err, good = talk(engine, ["\U0001f642" * 100, "or"])
    refusal, answered = err.splitlines()
    assert not good and "max_model_len is 256" in refusal
    assert answered.startswith(f"{len(engine.tokenizer.encode('or')) + 17} ") or " prompt tokens" in answered
    assert out.getvalue().count("\n") >= 1


@pytest.fixture
def interruptible():
    """Ctrl-C as in a terminal: a shell starts what runs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_an_answer_only(engine):
    """It is noticed between two steps; the next turn is answered."""

    class Pressing(Out):
        def write(self, text: str) -> int:
            if self.writes == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return super().write(text)

    out, err = Pressing(), io.StringIO()
    talker = conversation.Chat(engine, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), False, out)
    assert conversation.converse(talker, iter(["or", "or"]), None, err)
    assert [line.split()[-1] for line in err.getvalue().splitlines()] == ["Ctrl-C", "length"]
    assert not engine.has_work
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_turns_come_from():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines = iter(["one", "  ", "two"])

    def ask(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    assert list(conversation.turns("x", io.StringIO("y"))) == ["x"]
    assert list(conversation.turns(None, io.StringIO("a\nb"))) == ["a\nb"]
    assert list(conversation.turns(None, Terminal(), ask)) == ["one", "two"]


def command(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.chat", *arguments], cwd=ROOT, input=stdin, capture_output=True, text=True
    )


def test_the_command(folder):
    done = command(f"--model={folder}", "--context=64", "--max_tokens=3", stdin="or")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n") and "; 3 tokens, " in done.stderr
    assert "loading model" in done.stderr


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("none", "a model is one of smollm2-135m, stories260k, or a path that exists, got 'none'"),
        ("base", "has no chat template; with --raw it continues the prompt as it stands"),
    ],
)
def test_a_command_that_cannot_be_carried_out(folder, tmp_path, model, said):
    (tmp_path / "base").mkdir()
    for file in folder.iterdir():
        if file.name != "tokenizer_config.json":
            (tmp_path / "base" / file.name).symlink_to(file)
    done = command(f"--model={tmp_path / model if model == 'base' else model}", "--prompt=or")
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr and "Traceback" not in done.stderr
