"""The requests of the comparison: lengths shaped like ShareGPT's, prompts of random token ids."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random

from paxkv.config import require

LENGTHS = """
6+14 2+55 2+10 4+188 74+137 136+39 2+156 15+62 512+42 83+43 42+75 12+101 316+412 142+98 6+138 20+29 462+124 2+5
7+109 1+56 3+24 12+138 5+90 7+175 20+15 4+84 512+79 2+24 88+24 30+126 3+30 16+61 82+56 2+87 61+132 118+86 4+89
2+16 2+22 59+38 4+9 6+10 4+76 2+67 16+44 512+196 3+62 266+131 7+109 4+84 2+512 9+101 29+244 4+99 8+76 2+75 28+63
2+18 12+108 512+85 2+53 2+32 20+41 11+65 10+4 18+41 3+10 1+2 10+22 293+176 2+30 2+191 2+22 16+156 15+59 20+74
145+109 3+62 8+138 339+98 3+57 4+164 15+58 17+88 6+4 89+157 12+104 14+29 323+24 14+70 2+145 8+1 170+59 148+121
79+76 114+183 6+166 1+2 1+2 14+51 319+44 26+109 247+13 4+90 4+54 12+97 86+9 6+30 384+52 34+36 49+52 8+191 7+105
10+20 7+64 512+35 8+92 3+78 19+1 9+101 122+96 512+46 2+73 5+64 4+61 5+68 30+194 20+57
"""
"""Prompt + output tokens of 128 conversations drawn from the ShareGPT trace of the paper, all lengths divided by 4 and
cut at 512, so that a small model on a CPU serves them in seconds. The first 32 have 2,548 + 2,763 tokens, all 128 have
8,726 + 10,336."""


@dataclasses.dataclass(frozen=True)
class Requests:
    """What every engine serves.

    Attributes:
        prompts: token ids.
        outputs: tokens that each request generates.

    Raises:
        ValueError: no requests, an empty prompt, or an output of no tokens.
    """

    prompts: list[list[int]]
    outputs: list[int]

    def __post_init__(self) -> None:
        require(
            len(self.prompts) == len(self.outputs) > 0,
            f"requests need a prompt and an output length each, got {len(self.prompts)} and {len(self.outputs)}",
        )
        for index, (ids, count) in enumerate(zip(self.prompts, self.outputs, strict=True)):
            require(
                len(ids) > 0 and count > 0,
                f"request {index} must have at least one prompt and one output token, got {len(ids)} and {count}",
            )

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        """Of all requests."""
        return sum(self.outputs)

    @property
    def longest(self) -> int:
        """Prompt and output tokens of the longest request."""
        return max(len(ids) + count for ids, count in zip(self.prompts, self.outputs, strict=True))


def shipped_lengths() -> list[tuple[int, int]]:
    """(prompt, output) tokens of each pair of LENGTHS."""
    pairs = (entry.split("+") for entry in LENGTHS.split())
    return [(int(prompt), int(output)) for prompt, output in pairs]


def read_lengths(path: pathlib.Path) -> list[tuple[int, int]]:
    """(prompt, output) tokens from a JSON file: a list of pairs.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is something else.
    """
    try:
        pairs = json.loads(path.read_text())
        return [(int(prompt), int(output)) for prompt, output in pairs]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} must hold a JSON list of [prompt tokens, output tokens], {error}") from error


def make_requests(lengths: list[tuple[int, int]], vocab_size: int, seed: int) -> Requests:
    """Requests of these lengths; the ids of a prompt do not depend on the other requests."""
    prompts = []
    for index, (length, _) in enumerate(lengths):
        rng = random.Random(f"{seed}/{index}")
        prompts.append([rng.randrange(3, vocab_size) for _ in range(length)])
    return Requests(prompts, [output for _, output in lengths])
