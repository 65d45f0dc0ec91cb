"""A tokenizer that anyone can read: id i is the character of code i, ids 0 to 255."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class LetterTokenizer:
    """Text to ids and back, one character each.

    Args:
        end_ids: ids that end a sequence; as text they are nothing.
    """

    def __init__(self, end_ids: Sequence[int] = ()) -> None:
        self.end_ids = tuple(end_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Raises ``ValueError`` for a character above 255."""
        ids = [ord(letter) for letter in text]
        if ids and max(ids) > 255:
            raise ValueError(f"only the first 256 characters of Unicode have ids, got {chr(max(ids))!r}")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        return "".join(chr(token) for token in ids if token not in self.end_ids)

    def detokenizer(self) -> LetterDetokenizer:
        """Decodes one sequence token by token."""
        return LetterDetokenizer(self)


class LetterDetokenizer:
    """Decodes as tokens come; no character spans two of them, so nothing is ever held back."""

    def __init__(self, tokenizer: LetterTokenizer) -> None:
        self._tokenizer = tokenizer

    def add(self, token: int) -> str:
        """The text that the token adds."""
        return self._tokenizer.decode([token])

    def finish(self) -> str:
        """What was held back."""
        return ""
