"""Data sets drawn from a named distribution, for studies that follow no trace."""

from __future__ import annotations

import math
import re

import numpy as np

from paxkv.workload import validate
from paxkv.workload.arrivals import MAX_REQUESTS, MAX_SEED
from paxkv.workload.validate import WorkloadError, require
from paxkv.workload.workload import Lengths

_RULE = re.compile(r"\s*([a-z]+)\s*\(([^()]*)\)\s*", re.ASCII)
RULES = "fixed(n), uniform(least, most), geometric(mean), lognormal(mean, cv)"


def sample_lengths(
    prompt: str, output: str, count: int, *, seed: int = 0, max_total_tokens: int | None = None, name: str = "sampled"
) -> Lengths:
    """Draw ``count`` independent pairs of lengths.

    Args:
        prompt, output: rules: ``fixed(n)``; ``uniform(least, most)``, both included; ``geometric(mean)``;
            ``lognormal(mean, cv)`` with cv the standard deviation over the mean. Lengths are rounded, and at
            least 1.
        count: pairs to draw.
        max_total_tokens: pairs above it are drawn again, not cut.

    Raises:
        WorkloadError: an unknown rule, a parameter out of range, or a limit that hardly any pair meets.
    """
    count = validate.whole_number(count, "count", least=1, most=MAX_REQUESTS)
    rng = np.random.RandomState(validate.whole_number(seed, "seed", most=MAX_SEED))
    limit = 2 * validate.MAX_TOKENS
    if max_total_tokens is not None:
        limit = validate.whole_number(max_total_tokens, "max_total_tokens", least=2)
    prompts, outputs = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for _ in range(1000):
        more = _draw(prompt, "prompt", count, rng), _draw(output, "output", count, rng)
        keep = more[0] + more[1] <= limit
        prompts, outputs = np.append(prompts, more[0][keep]), np.append(outputs, more[1][keep])
        if len(prompts) >= count:
            source = f"distribution:prompt {prompt}, output {output}, seed {seed}"
            return Lengths(name, prompts[:count], outputs[:count], source)
    raise WorkloadError(
        f"max_total_tokens={limit} must leave enough pairs, got {len(prompts)} of {count} in 1000 tries with "
        f"prompt {prompt} and output {output}; raise it"
    )


def _draw(rule: str, field: str, count: int, rng: np.random.RandomState) -> np.ndarray:
    """Draw ``count`` lengths by one rule, int64 [count]."""
    match = _RULE.fullmatch(rule) if isinstance(rule, str) else None
    if match is None:
        raise WorkloadError(f"{field} must be one of {RULES}, got {rule!r}")
    kind, arguments = match[1], match[2].split(",")
    try:
        numbers = [float(argument) for argument in arguments]
    except ValueError:
        raise WorkloadError(f"the numbers of {field}={rule!r} must be plain numbers; the rules are {RULES}") from None
    bad = [x for x in numbers if not (math.isfinite(x) and 0 < x <= validate.MAX_TOKENS)]
    require(
        not bad, f"the numbers of {field}={rule!r} must be above 0 and at most {validate.MAX_TOKENS}, got {bad[:1]}"
    )
    whole = all(x == int(x) for x in numbers)
    match kind, numbers:
        case "fixed", [n] if whole:
            drawn = np.full(count, n)
        case "uniform", [least, most] if whole and least <= most:
            drawn = rng.randint(int(least), int(most) + 1, size=count)
        case "geometric", [mean] if mean >= 1:
            drawn = rng.geometric(1 / mean, size=count)
        case "lognormal", [mean, cv]:
            sigma = math.sqrt(math.log1p(cv * cv))
            drawn = np.exp(math.log(mean) - sigma**2 / 2 + sigma * rng.standard_normal(count))
        case _:
            raise WorkloadError(f"{field} must be one of {RULES}, with whole numbers of tokens, got {rule!r}")
    return np.clip(np.rint(drawn), 1, validate.MAX_TOKENS).astype(np.int64)
