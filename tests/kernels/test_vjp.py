"""Derivatives of paged attention against those of the reference, through which JAX differentiates by itself."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pallas_kernels.kv_write.api import kv_write
from pallas_kernels.paged_attention.api import differentiable_paged_attention, paged_attention
from pallas_kernels.pages import PageFormat, dequantise
from tests.kernels.cases import DECODE, MIXED, OPTIONS, Case, build, sinks, slopes

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # times the largest derivative
KINDS = [  # as keys, and as values
    (("bfloat16", "none"), ("float16", "none")),
    (("float8_e4m3fn", "tensor"), ("int8", "token")),
    (("int4", "token"), ("int8", "head")),
]
EVERY = {"window": 9, "soft_cap": 1.1, "alibi_slopes": slopes(4), "sinks": sinks(4)}
OTHERS = {"causal": False, "soft_cap": 0.7, "scale": 0.9}
BFLOAT16 = ("bfloat16", "none")
CASES = {
    "plain": OPTIONS["plain"],
    "tree and all": OPTIONS["all"],
    "in order, all": Case(MIXED, options=EVERY),
    "not causal, multi-query": Case(MIXED, heads=5, kv_heads=1, size=8, v_size=24, options=OTHERS),
    "decode alone": Case(DECODE, options={"max_query_len": 1, "window": 70}),
    "a long prompt": dataclasses.replace(OPTIONS["a long prompt"], options={"window": 150}),
    "bfloat16": Case(MIXED, query_dtype="bfloat16", k_format=BFLOAT16, v_format=BFLOAT16),
}
# Of a compile: the level halves its time, and these programs run for milliseconds.
QUICK = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class Given:
    """A call and what its answer is weighed with.

    Attributes:
        inputs: what to differentiate by: q, k, v, and slopes and sinks if the case has them. The keys and values of
            padding and of rows without keys are zeros.
        pages: k_pages, v_pages, k_scale, v_scale.
        rows: block_tables, kv_lens, query_starts.
        slots: of each token; out of range for padding and rows without keys.
        extra: window and tree mask, if there are any.
        statics: all other options.
        d_out, d_lse: cotangents.
    """

    inputs: dict[str, jax.Array]
    pages: tuple[Any, ...]
    rows: tuple[jax.Array, ...]
    slots: jax.Array
    extra: dict[str, Any]
    statics: tuple
    d_out: np.ndarray
    d_lse: np.ndarray


def given(case: Case) -> Given:
    """The case, and what its pages hold for its own tokens."""
    built = build(case)
    q, k_pages, v_pages, *rows = built.arguments
    tables, lengths, starts = (np.asarray(x) for x in rows)
    tokens = np.arange(q.shape[0])
    row = np.minimum(np.searchsorted(starts[1:], tokens, side="right"), len(lengths) - 1)
    place = lengths[row] - starts[row + 1] + tokens
    held = (tokens < starts[-1]) & (place >= 0)
    place = np.where(held, place, 0)
    num_pages, _, page_size, _ = k_pages.shape
    slots = np.where(held, tables[row, place // page_size] * page_size + place % page_size, num_pages * page_size)
    options = dict(built.options)
    pages = (k_pages, v_pages, options.pop("k_scale"), options.pop("v_scale"))
    inputs = {"q": q}
    for name, stored in zip("kv", plain(pages)[:2], strict=True):
        flat = np.swapaxes(np.asarray(stored), 1, 2).reshape(num_pages * page_size, case.kv_heads, -1)
        flat = np.where(held[:, None, None], flat[np.where(held, slots, 0)], 0.0)
        inputs[name] = jnp.asarray(flat, case.query_dtype)
    inputs.update({name: options.pop(name) for name in ("alibi_slopes", "sinks") if name in options})
    extra = {name: options.pop(name) for name in ("tree_mask", "window") if name in options}
    extra = {name: jnp.int32(x) if name == "window" else x for name, x in extra.items()}
    rng = np.random.default_rng(case.seed + 1)
    d_out, d_lse = (rng.normal(size=x.shape).astype(np.float32) for x in (built.out, built.lse))
    statics = tuple(sorted(options.items()))
    return Given(inputs, pages, tuple(rows), jnp.asarray(slots, jnp.int32), extra, statics, d_out, d_lse)


def plain(pages: tuple) -> tuple[Any, ...]:
    """The same pages in float32, without scales."""
    k_pages, v_pages, k_scale, v_scale = pages
    return dequantise(k_pages, k_scale), dequantise(v_pages, v_scale), None, None


def weigh(answer: tuple[jax.Array, jax.Array], d_out: jax.Array, d_lse: jax.Array) -> jax.Array:
    """A number whose derivatives by the answer are these, where the log-sum-exp is finite."""
    out, lse = answer
    return jnp.sum(out.astype(jnp.float32) * d_out) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse) * d_lse)


def options_of(pages: tuple, extra: dict[str, Any], statics: tuple) -> dict[str, Any]:
    """Named arguments of both functions."""
    return dict(k_scale=pages[2], v_scale=pages[3], return_lse=True, **extra, **dict(statics))


@functools.cache
def ours(statics: tuple, implementation: str | None = None) -> jax.stages.Wrapped:
    """Derivatives of ``differentiable_paged_attention``; cases of the same shapes share a compile."""

    def loss(inputs, pages, rows, slots, extra, d_out, d_lse):
        del slots
        inputs, named = dict(inputs), options_of(pages, extra, statics)
        first = [inputs.pop(name) for name in "qkv"]
        answer = differentiable_paged_attention(
            *first, *pages[:2], *rows, **inputs, **named, implementation=implementation
        )
        return weigh(answer, d_out, d_lse)

    return jax.jit(jax.grad(loss), compiler_options=QUICK)


@functools.cache
def reference(statics: tuple) -> jax.stages.Wrapped:
    """The same of ``reference`` behind a write into pages, both differentiated by JAX, in float32."""

    def loss(inputs, pages, rows, slots, extra, d_out, d_lse):
        inputs, named = dict(inputs), options_of(pages, extra, statics)
        q, k, v = (inputs.pop(name) for name in "qkv")
        size = pages[0].shape[2]
        k_pages, v_pages = (
            x.at[slots // size, :, slots % size].set(y, mode="drop") for x, y in zip(pages[:2], (k, v), strict=True)
        )
        answer = paged_attention(q, k_pages, v_pages, *rows, **inputs, **named, implementation="reference")
        return weigh(answer, d_out, d_lse)

    return jax.jit(jax.grad(loss), compiler_options=QUICK)


def differentiate(of: Given, implementation: str | None = None) -> dict[str, np.ndarray]:
    """Our derivatives."""
    got = ours(of.statics, implementation)(of.inputs, of.pages, of.rows, of.slots, of.extra, of.d_out, of.d_lse)
    return {name: np.asarray(x) for name, x in got.items()}


def check(case: Case, implementation: str | None = None) -> dict[str, np.ndarray]:
    """Holds our derivatives of a case against the reference's at what the pages hold."""
    of = given(case)
    got = differentiate(of, implementation)
    exact = {name: x.astype(jnp.float32) for name, x in of.inputs.items()}
    want = reference(of.statics)(exact, plain(of.pages), of.rows, of.slots, of.extra, of.d_out, of.d_lse)
    padding = np.arange(of.d_out.shape[0]) >= int(of.rows[2][-1])
    for name, x in of.inputs.items():
        assert got[name].dtype == x.dtype
        right = np.asarray(want[name])
        assert np.abs(right).max() > 0.01
        difference = np.abs(got[name].astype(np.float32) - right).max()
        assert difference <= TOLERANCE[case.query_dtype] * np.abs(right).max(), name
        if name in "qkv":
            assert not got[name][padding].any()
    return got


def same_bits(got: dict[str, np.ndarray], want: dict[str, np.ndarray], chosen: Any = slice(None)) -> None:
    """Both agree bit for bit at the chosen tokens."""
    for name in want:
        np.testing.assert_array_equal(got[name][chosen], want[name][chosen], err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_options(name):
    check(CASES[name])


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_formats(kinds):
    """The derivative by what a page holds is handed straight to the key or value that was rounded to it."""
    check(Case(MIXED, k_format=kinds[0], v_format=kinds[1]))


def test_whatever_does_the_forward_pass():
    check(OPTIONS["plain"], "reference")


def test_nothing_leaks():
    """Neither unused slots, unowned pages and padding, whatever they hold, nor a row that is not finite."""
    case = OPTIONS["plain"]
    of = given(case)
    first = differentiate(of)
    for filler in (0.0, float("inf")):
        same_bits(differentiate(given(dataclasses.replace(case, filler=filler))), first)
    starts = np.asarray(of.rows[2])

    def spoiled(span: slice) -> Given:
        inputs = {name: x.at[span].set(jnp.nan) for name, x in of.inputs.items()}
        d_out, d_lse = of.d_out.copy(), of.d_lse.copy()
        d_out[span], d_lse[span] = np.nan, np.nan
        return dataclasses.replace(of, inputs=inputs, d_out=d_out, d_lse=d_lse)

    same_bits(differentiate(spoiled(slice(int(starts[-1]), None))), first)
    others = np.ones(len(of.d_out), bool)
    others[starts[5] : starts[6]] = False
    got = differentiate(spoiled(slice(int(starts[5]), int(starts[6]))))
    assert np.isnan(got["q"][~others]).all()
    same_bits(got, first, others)


def test_an_empty_call():
    of = given(OPTIONS["plain"])
    nothing = (of.rows[0], jnp.zeros_like(of.rows[1]), jnp.zeros_like(of.rows[2]))
    for x in differentiate(dataclasses.replace(of, rows=nothing)).values():
        assert not x.any()


def test_pages_that_a_window_has_left_may_be_freed():
    of = given(CASES["in order, all"])
    tables, lengths, _ = of.rows
    assert (lengths[5], lengths[6]) == (30, 70)  # whose first queries see the slots from 15 on, and from 61 on
    first = differentiate(of)
    tables = tables.at[5, :3].set(-1).at[6, :15].set(-1)
    same_bits(differentiate(dataclasses.replace(of, rows=(tables, *of.rows[1:]))), first)


# --- training ----------------------------------------------------------------------------------------------------

LAYERS, PAGES, SLOTS, HEADS, KV_HEADS, SIZE = 3, 12, 4, 4, 2, 8
TOKENS = 9  # two rows, of six tokens after five and of three without
ROWS = (jnp.array([[3, 5, 1], [0, 4, 2]], jnp.int32), jnp.array([11, 3], jnp.int32), jnp.array([0, 6, 9], jnp.int32))


def own_slots() -> jax.Array:
    """Where the rows' new tokens go."""
    tables = np.asarray(ROWS[0])
    places = [(0, place) for place in range(5, 11)] + [(1, place) for place in range(3)]
    return jnp.array([tables[row, place // SLOTS] * SLOTS + place % SLOTS for row, place in places], jnp.int32)


def small_model(params: dict[str, jax.Array], x: jax.Array, pool: tuple, ours: bool, recompute: bool) -> jax.Array:
    """Attention layers in a scan that carries their pool [L*N,K,B,D]; ``recompute``: in the backward pass once more."""

    def layer(carry: tuple, layer_input: tuple) -> tuple:
        x, pages = carry
        number, weights = layer_input
        qkv = (x @ weights).reshape(-1, HEADS + 2 * KV_HEADS, SIZE)
        q, k, v = qkv[:, :HEADS], qkv[:, HEADS:-KV_HEADS], qkv[:, -KV_HEADS:]
        written = jax.lax.stop_gradient((k, v)) if ours else (k, v)
        slots = own_slots() + number * PAGES * SLOTS
        k_pages, v_pages, _, _ = kv_write(*pages, *written, slots, k_format=PageFormat("float32"))
        rows = (ROWS[0] + number * PAGES, *ROWS[1:])
        if ours:
            out = differentiable_paged_attention(q, k, v, k_pages, v_pages, *rows, cached=(*pool, None, None))
        else:
            out = paged_attention(q, k_pages, v_pages, *rows, implementation="reference")
        return (x + out.reshape(x.shape), (k_pages, v_pages)), None

    layer = jax.checkpoint(layer) if recompute else layer
    (x, _), _ = jax.lax.scan(layer, (x, pool), (jnp.arange(LAYERS, dtype=jnp.int32), params["qkv"]))
    return x @ params["out"]


def small_inputs() -> tuple[dict[str, jax.Array], jax.Array, tuple, jax.Array]:
    """Parameters, inputs, pools and targets."""
    keys = jax.random.split(jax.random.key(0), 6)
    width = HEADS * SIZE
    params = {
        "qkv": jax.random.normal(keys[0], (LAYERS, width, (HEADS + 2 * KV_HEADS) * SIZE)) * width**-0.5,
        "out": jax.random.normal(keys[1], (width, 5)) * width**-0.5,
    }
    pool = tuple(jax.random.normal(key, (LAYERS * PAGES, KV_HEADS, SLOTS, SIZE)) for key in keys[2:4])
    x, target = jax.random.normal(keys[4], (TOKENS, width)), jax.random.normal(keys[5], (TOKENS, 5))
    return params, x, pool, target


def test_training_through_a_cache_lowers_a_loss():
    params, x, pool, target = small_inputs()

    def loss(params: dict, pool: tuple, ours: bool) -> jax.Array:
        return jnp.mean(jnp.square(small_model(params, x, pool, ours, recompute=True) - target))

    optimizer = optax.adam(1e-2)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(params: dict, state: Any) -> tuple:
        value, gradient = jax.value_and_grad(loss)(params, pool, True)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value, gradient

    want = jax.jit(jax.grad(loss), static_argnums=2, compiler_options=QUICK)(params, pool, False)
    state, losses = optimizer.init(params), []
    for number in range(8):
        params, state, value, gradient = step(params, state)
        losses.append(float(value))
        if number == 0:
            for name, right in want.items():
                assert jnp.abs(gradient[name] - right).max() <= 1e-5 * jnp.abs(right).max(), name
    assert losses[-1] < 0.7 * losses[0]
    assert all(after < before for before, after in zip(losses, losses[1:], strict=False))


# --- memory ------------------------------------------------------------------------------------------------------


def temporaries(function: Any, *shapes: Any) -> int:
    """Bytes that a function takes beside arguments and results, from its compile; it is never run."""
    compiled = jax.jit(function).lower(*shapes).compile(compiler_options=QUICK)
    return compiled.memory_analysis().temp_size_in_bytes


def of_shape(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_backward_pass_copies_neither_pool_nor_tables(dtype):
    tokens, rows, pages = 32, 4, of_shape(dtype, 40_000, 2, 16, 32)
    scale = of_shape("float32", *pages.shape[:3]) if dtype == "int8" else None

    def loss(q, k, v, k_pages, v_pages, k_scale, v_scale, *rows):
        named = dict(k_scale=k_scale, v_scale=v_scale, implementation="xla")
        return jnp.sum(differentiable_paged_attention(q, k, v, k_pages, v_pages, *rows, **named))

    q, k = of_shape("float32", tokens, 4, 32), of_shape("float32", tokens, 2, 32)
    # Tables as wide as the whole pool: a gather of one would be as large as it.
    call = (of_shape("int32", rows, 40_000), of_shape("int32", rows), of_shape("int32", rows + 1))
    taken = temporaries(jax.grad(loss, argnums=(0, 1, 2)), q, k, k, pages, pages, scale, scale, *call)
    assert taken < 0.05 * 2 * pages.size * pages.dtype.itemsize


def test_layers_that_write_one_pool_in_turn_keep_one():
    params, x, _, _ = small_inputs()
    pool = (of_shape("float32", LAYERS * 40_000, KV_HEADS, SLOTS, SIZE),) * 2

    def loss(params: dict, x: jax.Array, pool: tuple) -> jax.Array:
        return jnp.sum(small_model(params, x, pool, ours=True, recompute=False))

    size = sum(side.size * side.dtype.itemsize for side in pool)
    # Beside the pool given, the one written.
    assert temporaries(jax.grad(loss), params, x, pool) < 1.05 * size


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("q", lambda x: np.asarray(x, np.float64), TypeError, "q: dtype must be one of"),
        ("k", lambda x: x[:-1], ValueError, r"k: must be one vector per token of q and head of k_pages"),
        ("v", lambda x: x[..., :-1], ValueError, "v: must be one vector per token of q and head of v_pages"),
        ("v", lambda x: x.astype(jnp.int8), TypeError, "v: dtype must be one of"),
        ("k", lambda x: None, TypeError, "k: must be an array; got NoneType"),
        ("cached", lambda x: 1, TypeError, "cached: must be a tuple"),
        ("cached", lambda x: (None,) * 4, ValueError, "cached k_pages: must be like the call's"),
        ("window", lambda x: 0, ValueError, "window: must be at least 1"),
        ("scale", lambda x: "1", TypeError, "scale: must be a number"),
        ("soft_cap", lambda x: -1.0, ValueError, "soft_cap: must be above 0"),
        ("implementation", lambda x: "no", ValueError, "implementation: must be one of"),
        ("sinks", lambda x: jnp.zeros(3), ValueError, "sinks: must have one entry per query head"),
    ],
)
def test_bad_input(name, change, error, message):
    of = given(OPTIONS["plain"])
    named = {**of.inputs, "k_pages": of.pages[0], "v_pages": of.pages[1]}
    named |= dict(zip(("block_tables", "kv_lens", "query_starts"), of.rows, strict=True))
    named[name] = change(named.get(name))
    with pytest.raises(error, match=message):
        differentiable_paged_attention(**named)
