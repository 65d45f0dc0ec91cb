"""Tokenizers: text to ids and back, from a ``tokenizer.json``, a GGUF file or a ``tok*.bin`` of llama2.c.

However a text is cut into tokens, what a token says is a fixed string of bytes. So decoding is one table for all kinds,
and decoding as tokens come is exact: the same bytes go through the same UTF-8 decoder, which holds back a character
until its last byte is there.
"""

from __future__ import annotations

import codecs
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from paxkv.config import require

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endofturn|>")
"""Tokens that end a turn of a chat; a template that names one means it, though files often name another end token."""

_SPACE, _BYTE = "\u2581", re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Text to ids and back.

    Args:
        cut: text → ids, without a start token.
        texts: the bytes that each id says; empty for tokens that are no text.
        start_id: put in front of every text; None: nothing is.
        end_ids: what a model says when it is done.
        spaced: whether ``cut`` puts a space in front of a text.
        chat_template: how a conversation is written for the model, in Jinja, where the files tell.
        names: texts of special tokens that a template may ask for, such as ``bos_token``.
    """

    def __init__(
        self,
        cut: Callable[[str], list[int]],
        texts: Sequence[bytes],
        *,
        start_id: int | None = None,
        end_ids: Iterable[int] = (),
        spaced: bool = False,
        chat_template: str | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._cut, self.texts = cut, tuple(texts)
        self.start_id, self.spaced = start_id, spaced
        self.end_ids = tuple(sorted(set(end_ids)))
        self.chat_template = chat_template
        self.names = dict(names or {})
        wrong = [token for token in self.end_ids if not 0 <= token < len(self.texts)]
        require(not wrong, f"end ids must lie in the vocabulary of {len(self.texts)}, got {wrong}; check the files")

    @property
    def vocab_size(self) -> int:
        """Number of ids; a model may have more rows, which mean nothing."""
        return len(self.texts)

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """Ids of a text. Special tokens that it spells out become those tokens.

        Args:
            start: whether to put the start token in front, if there is one. A chat template writes its own.

        Raises:
            ValueError: the text cannot be written as UTF-8.
        """
        text.encode()  # half of a surrogate pair has no bytes
        head = [self.start_id] if start and self.start_id is not None else []
        return head + self._cut(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids: special tokens say nothing, bytes that are no UTF-8 become U+FFFD.

        The space that encoding put in front of a text is taken away where a text's beginning can be seen: behind a
        start token, or at once if the tokenizer has none. So the output of a model continues its prompt as it should.
        """
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.add, ids)) + detokenizer.finish()

    def detokenizer(self) -> Detokenizer:
        """Decodes one sequence token by token, to the same text as :meth:`decode`."""
        return Detokenizer(self)


class Detokenizer:
    """Decodes as tokens come, in constant time for each, never half a character."""

    __slots__ = ("_decoder", "_spaced", "_starts", "_texts")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._texts = tokenizer.texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._starts = tokenizer.start_id if tokenizer.spaced else None
        self._spaced = tokenizer.spaced and tokenizer.start_id is None  # whether a space to take away may come

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        if token == self._starts:
            self._spaced = True
        said = self._texts[token] if 0 <= token < len(self._texts) else b""
        if self._spaced and said:
            self._spaced = False
            said = said.removeprefix(b" ")
        return self._decoder.decode(said)

    def finish(self) -> str:
        """What was held back: U+FFFD for a character that was never finished."""
        return self._decoder.decode(b"", final=True)


def load(path: str | pathlib.Path) -> Tokenizer:
    """The tokenizer of a model.

    Args:
        path: a folder with tokenizer.json (and tokenizer_config.json, config.json, generation_config.json), a file
            *.gguf, or a file *.bin of llama2.c.

    Raises:
        FileNotFoundError: nothing there, or no tokenizer.json in the folder.
        ImportError: the package that reads the format is missing; names the extra that brings it.
        ValueError: a kind of tokenizer that is not supported, or a file that is damaged.
    """
    from paxkv.models import tokenizer_files

    path = pathlib.Path(path)
    if path.is_dir():
        return tokenizer_files.from_folder(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; give a folder with tokenizer.json, a *.gguf or a tok*.bin")
    if path.suffix == ".gguf":
        from paxkv.models.gguf_file import GGUFFile

        return tokenizer_files.from_gguf(GGUFFile(path))
    require(path.suffix == ".bin", f"a tokenizer is a folder, a *.gguf or a tok*.bin, got {path}")
    return tokenizer_files.from_llama2c(path)


def byte_level_text(piece: str) -> bytes:
    """What a piece of a byte-level vocabulary says: each of its characters stands for a byte, or it is plain text."""
    try:
        return bytes(_BYTE_OF[letter] for letter in piece)
    except KeyError:
        return piece.encode()


def spaced_text(piece: str) -> bytes:
    """What a piece of a SentencePiece vocabulary says: U+2581 is a space, <0x0A> a byte."""
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable Latin-1 stands for itself, the others for U+0100 and up in turn."""
    letters, above = {}, 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or (0xA1 <= byte <= 0xFF and byte != 0xAD):
            letters[chr(byte)] = byte
        else:
            letters[chr(above)] = byte
            above += 1
    return letters


_BYTE_OF = _byte_letters()
