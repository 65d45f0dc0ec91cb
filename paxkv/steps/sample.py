"""The next token of each row, on the device: penalties, temperature, filters, one draw.

What is done to a row, in this order; a neutral value leaves the row's bits as they are:

1. ``bias_values`` are added to the logits of ``bias_ids``.
2. Repetition: a logit of a token seen in the prompt or the output is divided by ``repetition`` if positive, else
   multiplied. Then ``frequency`` times the token's count in the output, and ``presence`` if that is not 0, are
   subtracted: these two look at the output only (the convention of the OpenAI interface and of vLLM).
3. Logits of ``ban_ids`` become minus infinity.
4. ``temperature`` divides them; 0 takes the most likely token and ends here.
5. ``top_k`` keeps exactly that many; of equal logits the lowest ids.
6. ``top_p`` keeps, of the distribution that ``top_k`` left, the most likely tokens until they reach that
   probability, the one that reaches it included; of equal logits the lowest ids.
7. ``min_p`` keeps tokens at least that fraction as likely as the most likely one. (The order of 4 to 7 is that of
   Hugging Face transformers. vLLM applies ``min_p`` before ``top_k``.)

A row's token depends on nothing but the row. Its random numbers are those of ``fold_in(request key, position)``, a
hash without state, so neither the batch, nor chunking, nor a preemption can move them. And everything that decides
a token is either done to each logit alone or a sum of integers, which no backend and no batch size can round
differently: probabilities are held as multiples of 2^-25 of the largest one. Tokens less likely than half of that
are never drawn; float32 noise added to logits would lose them too. (The log-probabilities that are reported contain a
sum of floats, which may round differently in a batch of another size.)

There is no sort: a threshold is found by halving the range of the float's own bits, in passes that XLA vectorises.
The draw has two stages, first a group of tokens, then a token of it, so that a row of V logits costs V/32 random
numbers.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from paxkv.sampling import VARIANTS, Variant

LANES = 32
"""Tokens of a group. A row of V logits is seen as [LANES, C]: token ``lane * C + group``."""

WEIGHT_BITS = 25
"""The most likely token weighs 2^25: a group of LANES weighs at most 2^30 and fits an int32."""

_LIMB = 15


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampleInputs:
    """Parameters per row; R rows, padding rows included (they may hold anything, zeros for instance).

    ``greedy`` reads none of them, ``sample`` the first group, ``full`` all.

    Attributes:
        temperature: [R], 0 for greedy rows.
        top_k: [R], 0 keeps all.
        top_p: [R], 1 keeps all.
        min_p: [R], 0 keeps all.
        seeds: [R, 2] request key, see :func:`paxkv.sampling.request_seed`.
        positions: [R] position of the token that is sampled.
        repetition, presence, frequency: [R] penalties; 1, 0 and 0 are none.
        history: [R, length] ids of prompt and output, padded with -1.
        prompt_lens: [R] how many of them are the prompt.
        bias_ids, bias_values: [R, biases], ids padded with -1.
        ban_ids: [R, banned] ids that must not be sampled, padded with -1.
    """

    temperature: Float32[Array, " R"] | None = None
    top_k: Int32[Array, " R"] | None = None
    top_p: Float32[Array, " R"] | None = None
    min_p: Float32[Array, " R"] | None = None
    seeds: UInt32[Array, "R 2"] | None = None
    positions: Int32[Array, " R"] | None = None
    repetition: Float32[Array, " R"] | None = None
    presence: Float32[Array, " R"] | None = None
    frequency: Float32[Array, " R"] | None = None
    history: Int32[Array, "R length"] | None = None
    prompt_lens: Int32[Array, " R"] | None = None
    bias_ids: Int32[Array, "R biases"] | None = None
    bias_values: Float32[Array, "R biases"] | None = None
    ban_ids: Int32[Array, "R banned"] | None = None


_DRAW = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
_FIELDS = {"greedy": (), "sample": _DRAW, "full": tuple(field.name for field in dataclasses.fields(SampleInputs))}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """What was chosen. Under ``jit`` an attribute that is not returned costs nothing.

    Attributes:
        tokens: [R] ids in 0..V-1.
        logprobs: [R] log-probability of each in the model's own distribution: before penalties, temperature, filters.
        top_ids: [R, top] most likely tokens of that distribution, most likely first, of equal ones the lowest id.
        top_logprobs: [R, top] theirs.
    """

    tokens: Int32[Array, " R"]
    logprobs: Float32[Array, " R"]
    top_ids: Int32[Array, "R top"]
    top_logprobs: Float32[Array, "R top"]


def sample(logits: Float32[Array, "R V"], inputs: SampleInputs, *, variant: Variant, top_logprobs: int = 0) -> Sampled:
    """Chooses a token for each row.

    A logit that is not a number counts as minus infinity, plus infinity as the largest float. A row whose logits are
    all minus infinity (or banned) gives token 0, and log-probability minus infinity where the model's own were.

    Args:
        logits: of the model.
        inputs: per-row parameters.
        variant: ``greedy`` (every row takes the most likely token), ``sample`` (4 to 7 above) or ``full`` (1 to 7).
            A row that does not need a higher variant gets the same result in it.
        top_logprobs: how many of the most likely tokens to report.

    Raises:
        ValueError: an unknown variant, a field of ``inputs`` that it needs is None, more tokens wanted than there are.
    """
    if variant not in VARIANTS:
        raise ValueError(f"a variant is one of {', '.join(VARIANTS)}, got {variant!r}")
    missing = [name for name in _FIELDS[variant] if getattr(inputs, name) is None]
    if missing:
        raise ValueError(f"variant {variant!r} needs every field of its group, got None for {', '.join(missing)}")
    if not 0 <= top_logprobs <= logits.shape[-1]:
        raise ValueError(f"top_logprobs must lie in 0..V={logits.shape[-1]}, got {top_logprobs}; ask for fewer tokens")
    logits = clean(logits.astype(jnp.float32))
    scores = penalise(logits, inputs) if variant == "full" else logits
    tokens = argmax(scores)
    if variant != "greedy":
        weights = kept_weights(scores, inputs)
        keys = position_keys(inputs.seeds, inputs.positions)
        tokens = jnp.where(inputs.temperature == 0, tokens, draw(weights, keys))
    top = logits.max(-1)
    lowest = jnp.where(jnp.isfinite(top), top, 0.0)
    # Minus infinity minus the log of an empty sum would not be a number.
    log_sum = jnp.where(jnp.isfinite(top), jnp.log(jnp.exp(logits - lowest[:, None]).sum(-1)), 0.0)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    top_values, top_ids = lax.top_k(logits, top_logprobs)
    return Sampled(
        tokens=tokens,
        logprobs=chosen - lowest - log_sum,
        top_ids=top_ids.astype(jnp.int32),
        top_logprobs=top_values - lowest[:, None] - log_sum[:, None],
    )


def clean(logits: Float32[Array, "R V"]) -> Float32[Array, "R V"]:
    """Logits without NaN (minus infinity instead) and plus infinity (the largest float)."""
    return jnp.where(jnp.isnan(logits), -jnp.inf, jnp.minimum(logits, jnp.finfo(jnp.float32).max))


def argmax(scores: Float32[Array, "R V"]) -> Int32[Array, " R"]:
    """Index of the largest, the lowest of equal ones; 0 if all are minus infinity. Two passes that vectorise, which
    ``jnp.argmax`` does not on a CPU."""
    ids = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return jnp.where(scores == scores.max(-1, keepdims=True), ids, scores.shape[1]).min(-1)


def penalise(logits: Float32[Array, "R V"], inputs: SampleInputs) -> Float32[Array, "R V"]:
    """Steps 1 to 3: bias, penalties, bans."""
    num_rows, vocab = logits.shape
    rows = jnp.arange(num_rows)[:, None]

    def ids(values: Int32[Array, "R n"]) -> Int32[Array, "R n"]:
        # A negative index would count from the end; one past the end is dropped.
        return jnp.where(values < 0, vocab, values)

    logits = logits.at[rows, ids(inputs.bias_ids)].add(inputs.bias_values, mode="drop")
    history = ids(inputs.history)
    is_output = jnp.arange(history.shape[1]) >= inputs.prompt_lens[:, None]
    counts = jnp.zeros(logits.shape, jnp.int32).at[rows, history].add(is_output.astype(jnp.int32), mode="drop")
    seen = jnp.zeros(logits.shape, jnp.bool_).at[rows, history].set(True, mode="drop")
    repetition = inputs.repetition[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - inputs.frequency[:, None] * counts - inputs.presence[:, None] * (counts > 0)
    return clean(logits).at[rows, ids(inputs.ban_ids)].set(-jnp.inf, mode="drop")


def kept_weights(scores: Float32[Array, "R V"], inputs: SampleInputs) -> Int32[Array, "R lanes C"]:
    """Steps 4 to 7: each token's weight, in 2^-25 of the most likely one's; 0 for what a filter removed.

    The vocabulary is padded to a multiple of LANES with tokens of weight 0. A greedy row is weighed at temperature 1.
    """
    num_rows, vocab = scores.shape
    groups = -(-vocab // LANES)
    scores = jnp.pad(scores, ((0, 0), (0, LANES * groups - vocab)), constant_values=-jnp.inf)
    scores = scores.reshape(num_rows, LANES, groups)

    def per_row(values: Array) -> Array:
        return values[:, None, None]

    top = scores.max((1, 2))
    below = scores - per_row(jnp.where(jnp.isfinite(top), top, 0.0))
    below = below / per_row(jnp.where(inputs.temperature == 0, 1.0, inputs.temperature))
    odds = jnp.exp(below)  # 1 for the most likely token
    weights = jnp.round(odds * 2.0**WEIGHT_BITS).astype(jnp.int32)
    # How far below the top a token lies is never negative, so the float's bits, as an integer, are in the same order.
    order = lax.bitcast_convert_type(jnp.abs(below), jnp.int32)

    top_k = jnp.where(inputs.top_k > 0, inputs.top_k.astype(jnp.float32), jnp.inf)
    weights = lax.cond(
        jnp.any(inputs.top_k > 0),
        lambda: jnp.where(_first(order, jnp.ones_like(weights), top_k), weights, 0),
        lambda: weights,
    )
    top_p = jnp.where(inputs.top_p < 1, inputs.top_p * row_mass(weights), jnp.inf)
    weights = lax.cond(
        jnp.any(inputs.top_p < 1), lambda: jnp.where(_first(order, weights, top_p), weights, 0), lambda: weights
    )
    return jnp.where(odds >= per_row(inputs.min_p), weights, 0)


def row_mass(weights: Int32[Array, "R lanes C"]) -> Float32[Array, " R"]:
    """Sum of a row's weights: exact, then rounded once. It does not depend on the order of summation."""
    groups = weights.sum(1, dtype=jnp.int32)  # each at most 2^30
    high = (groups >> _LIMB).sum(-1, dtype=jnp.int32)
    low = (groups & ((1 << _LIMB) - 1)).sum(-1, dtype=jnp.int32)
    high, low = high + (low >> _LIMB), low & ((1 << _LIMB) - 1)
    return high.astype(jnp.float32) * 2.0**_LIMB + low.astype(jnp.float32)


def _threshold(
    order: Int32[Array, "R lanes C"], weights: Int32[Array, "R lanes C"], budget: Float32[Array, " R"], bits: int
) -> Int32[Array, " R"]:
    """The largest c such that the tokens of order below c weigh less than the budget, in ``bits`` passes."""

    def try_bit(i: Array, found: Int32[Array, " R"]) -> Int32[Array, " R"]:
        higher = found | (1 << (bits - 1 - i))
        weight = row_mass(jnp.where(order < higher[:, None, None], weights, 0))
        return jnp.where(weight < budget, higher, found)

    return lax.fori_loop(0, bits, try_bit, jnp.zeros(order.shape[0], jnp.int32))


def _first(
    order: Int32[Array, "R lanes C"], weights: Int32[Array, "R lanes C"], budget: Float32[Array, " R"]
) -> Bool[Array, "R lanes C"]:
    """The first tokens by order, then by id, that together weigh at least the budget: as few as do, at least one."""
    limit = _threshold(order, weights, budget, 31)[:, None, None]
    before, equal = order < limit, order == limit
    # Equal tokens weigh the same; how many of them the budget still needs:
    each = jnp.where(equal, weights, 0).max((1, 2)).astype(jnp.float32)
    wanted = jnp.ceil((budget - row_mass(jnp.where(before, weights, 0))) / jnp.maximum(each, 1.0))
    wanted = jnp.maximum(wanted, 1.0)
    too_many = equal.sum((1, 2), dtype=jnp.int32) > wanted

    def lowest_ids() -> Bool[Array, "R lanes C"]:
        size = order.shape[1] * order.shape[2]
        ids = lax.broadcasted_iota(jnp.int32, (1, size), 1).reshape(1, *order.shape[1:])
        tied = jnp.where(equal, ids, jnp.iinfo(jnp.int32).max)
        last = _threshold(tied, equal.astype(jnp.int32), wanted, size.bit_length())
        return before | (equal & (ids <= last[:, None, None]))

    return lax.cond(jnp.any(too_many), lowest_ids, lambda: before | equal)


def position_keys(seeds: UInt32[Array, "R 2"], positions: Int32[Array, " R"]) -> Array:
    """[R] keys: the request's key folded with the position, so that no state is carried from token to token."""
    keys = jax.random.wrap_key_data(seeds, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in)(keys, positions.astype(jnp.uint32))


def uniforms(keys: Array, count: int) -> Float32[Array, "R count"]:
    """``count`` numbers in (0, 1) for each key. Small ones have all the digits of a float: they decide a race.

    Each is a hash of its index, so no flag of JAX's generators changes them.
    """
    folded = jax.vmap(lambda key: jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count, dtype=jnp.uint32)))
    words = (jax.random.key_data(folded(keys))[..., 0] >> 1).astype(jnp.int32)
    return jnp.minimum((words.astype(jnp.float32) + 0.5) * 2.0**-31, 1 - 2.0**-24)


def draw(weights: Int32[Array, "R lanes C"], keys: Array) -> Int32[Array, " R"]:
    """One token per row, with a probability proportional to its weight; 0 if no token weighs anything.

    An exponential race: of independent waiting times with these rates, each is the shortest with the wanted
    probability.
    It is run among the groups and then among the tokens of the winner.
    """
    _, lanes, groups = weights.shape
    times = -jnp.log1p(-uniforms(keys, groups + lanes))

    def winner(rates: Int32[Array, "R n"], times: Float32[Array, "R n"]) -> Int32[Array, " R"]:
        waits = jnp.where(rates > 0, times / jnp.maximum(rates, 1).astype(jnp.float32), jnp.inf)
        return argmax(-waits)

    group = winner(weights.sum(1, dtype=jnp.int32), times[:, :groups])
    inside = jnp.take_along_axis(weights, group[:, None, None], axis=2)[:, :, 0]
    return winner(inside, times[:, groups:]) * groups + group
