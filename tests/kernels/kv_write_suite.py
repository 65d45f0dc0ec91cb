"""What every implementation of kv_write must do, as one class that each of them subclasses."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes  # what jax's small floats are
import numpy as np
import pytest

from pallas_kernels.kv_write.api import kv_write
from pallas_kernels.pages import PageFormat, dequantise

NONE = "none"
OUTSIDE = (-1, -(2**31), 2**31 - 1)
SLOTS = (37, 5, 6, 7, -1, 8, 38, 0, 79, -80, 80, 2**31 - 1, 60, 39, 23, -(2**31), 21, 22)
"""In a pool of 80: runs, several in one page, alone, at both ends, and outside."""
FORMATS = [
    ("float32", NONE),
    ("bfloat16", NONE),
    ("float16", NONE),
    ("float8_e4m3fn", NONE),
    ("float8_e4m3fn", "tensor"),
    ("float8_e4m3fn", "head"),
    ("float8_e4m3fn", "token"),
    ("float8_e5m2", NONE),
    ("float8_e5m2", "token"),
    ("int8", "tensor"),
    ("int8", "head"),
    ("int8", "token"),
    ("int4", "head"),
    ("int4", "token"),
]
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float16": 65504.0, "int8": 127.0, "int4": 7.0}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call to make.

    Attributes:
        slots: of each token; those inside the pool are distinct.
        pages, kv_heads, page_size, size: N, K, B, D.
        v_size: Dv; 0 for pages without values.
        k_format, v_format: (dtype, scale kind).
        dtype: of the new rows.
        spread: standard deviation of the rows; with 1000, most formats saturate.
        wild: rows with zeros, NaN, infinities and very large and small numbers among them.
    """

    slots: tuple[int, ...] = SLOTS
    pages: int = 5
    kv_heads: int = 2
    page_size: int = 16
    size: int = 16
    v_size: int = 16
    k_format: tuple[str, str] = ("float32", NONE)
    v_format: tuple[str, str] = ("float32", NONE)
    dtype: str = "float32"
    spread: float = 1.0
    wild: bool = False
    seed: int = 0


@dataclasses.dataclass
class Built:
    """A side of a call: pages, scale and rows as numpy arrays, and their format."""

    pages: np.ndarray
    scale: np.ndarray | None
    rows: np.ndarray
    fmt: PageFormat


def build(case: Case) -> list[Built]:
    """Random bytes for pages, so that every bit that may not change is seen to."""
    rng = np.random.default_rng(case.seed)
    sides = []
    for kind, size in ((case.k_format, case.size), (case.v_format, case.v_size)):
        if not size:
            continue
        fmt = PageFormat(*kind)
        shape = case.pages, case.kv_heads, case.page_size, fmt.width(size)
        pages = rng.integers(0, 256, (*shape[:3], shape[3] * fmt.storage_dtype.itemsize), np.uint8)
        scale = None
        if fmt.quantised:
            scale = rng.uniform(0.5, 1.5, fmt.scale_shape(*shape[:3])).astype(np.float32) * 3 / LARGEST[fmt.dtype]
            scale = scale.astype(np.float32)
        rows = rng.normal(size=(len(case.slots), case.kv_heads, size)).astype(np.float32) * case.spread
        if case.wild:
            rows[0] = 0.0
            for t, number in enumerate((np.nan, np.inf, -np.inf, 3e38, 2e-38, -0.0), 1):
                rows[t, :, t % size] = number
        with np.errstate(over="ignore"):
            rows = rows.astype(np.dtype(getattr(ml_dtypes, case.dtype, case.dtype)))
        sides.append(Built(pages.view(fmt.storage_dtype), scale, rows, fmt))
    return sides


def written(side: Built, slots: tuple[int, ...]) -> dict[tuple[int, int, int], np.ndarray]:
    """The rows that are stored, as float32, by page, head and offset."""
    count, kv_heads, page_size, _ = side.pages.shape
    return {
        (slot // page_size, head, slot % page_size): side.rows[t, head].astype(np.float32)
        for t, slot in enumerate(slots)
        if 0 <= slot < count * page_size
        for head in range(kv_heads)
    }


def token_scale(row: np.ndarray, dtype: str) -> np.float32:
    largest = np.abs(row).max()
    if largest == 0 or not np.isfinite(largest):
        return np.float32(largest or 1)
    most = np.finfo(np.float32).max / np.float32(LARGEST[dtype])
    return np.clip(largest / np.float32(LARGEST[dtype]), np.finfo(np.float32).tiny, np.nextafter(most, np.float32(0)))


def stored(row: np.ndarray, fmt: PageFormat, scale: np.float32 | None) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        x = row if scale is None else row / scale
        if fmt.dtype in ("int8", "int4"):
            most = int(LARGEST[fmt.dtype])
            codes = np.clip(np.nan_to_num(np.rint(x), nan=0.0), -most - 1, most).astype(np.int8)
            return (codes[::2] & 15 | codes[1::2] << 4).astype(np.uint8) if fmt.packed else codes
        if fmt.dtype == "float32":
            return x
        kept = fmt.storage_dtype.type
        rounded = x.astype(fmt.storage_dtype)
        most = kept(ml_dtypes.finfo(fmt.storage_dtype).max)
        saturates = ~np.isnan(x) & (np.abs(x) > np.float32(most)) & (np.isfinite(x) | (fmt.bits == 8))
        return np.where(saturates, np.where(x > 0, most, -most), rounded).astype(fmt.storage_dtype)


@functools.cache
def compiled(implementation: str | None, k_format: PageFormat, v_format: PageFormat | None):
    """The op under jit; cases of the same shapes share one."""

    def run(k_pages, v_pages, k, v, slots, k_scale, v_scale):
        return kv_write(
            *(k_pages, v_pages, k, v, slots),
            **dict(k_format=k_format, v_format=v_format, k_scale=k_scale, v_scale=v_scale),
            implementation=implementation,
        )

    return jax.jit(run)


def same(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Where codes are the same; any NaN is like any other."""
    nan = np.isnan(one.astype(np.float32)) & np.isnan(other.astype(np.float32))
    bits = f"u{one.dtype.itemsize}"
    return nan | (one.view(bits) == other.view(bits))


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(*(np.ascontiguousarray(x).view(np.uint8) for x in (got, want)))


class KvWriteSuite:
    """Every test of the op. A subclass named ``Test...`` sets ``implementation`` and overrides only what it must."""

    implementation: str | None = None

    def fit(self, case: Case) -> Case:
        """The case in a shape that this implementation does natively."""
        return case

    def run(self, sides: list[Built], slots: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Pages and scale of each side. An interpreter wraps this."""
        k, v = (*sides, None)[:2]
        step = compiled(self.implementation, k.fmt, v and v.fmt)
        out = step(
            *(k.pages, v and v.pages, k.rows, v and v.rows, np.asarray(slots, np.int32), k.scale, v and v.scale),
        )
        k_pages, v_pages, k_scale, v_scale = (None if x is None else np.asarray(x) for x in out)
        return [(k_pages, k_scale), (v_pages, v_scale)][: len(sides)]

    def check(self, case: Case) -> None:
        """Runs a case; every bit of the pool must be the oracle's."""
        case = self.fit(case)
        sides = build(case)
        for side, (pages, scale) in zip(sides, self.run(sides, case.slots), strict=True):
            rows = written(side, case.slots)
            if side.fmt.scale == "token":
                self.compare_scales(side, scale, rows)
            self.compare_pages(side, pages, scale, rows)

    def compare_scales(self, side: Built, scale: np.ndarray, rows: dict) -> None:
        """Compilers turn a division by a constant into a product, so the last bits of a scale are free."""
        want = side.scale.copy()
        for place, row in rows.items():
            want[place] = token_scale(row, side.fmt.dtype)
            np.testing.assert_allclose(scale[place], want[place], rtol=3e-7)
            want[place] = scale[place]
        assert_same_bits(scale, want)

    def compare_pages(self, side: Built, pages: np.ndarray, scale: np.ndarray | None, rows: dict) -> None:
        want = side.pages.copy()
        for place, row in rows.items():
            one = None if scale is None else np.broadcast_to(scale, pages.shape[:3])[place]
            if one is not None and not np.isfinite(one):  # no code is like another then: all must read as NaN
                assert np.isnan(dequantise(jnp.asarray(pages[place]), jnp.asarray(one))).all()
                want[place] = pages[place]
                continue
            want[place] = stored(row, side.fmt, one)
            # A quotient may be off by its last bit, which shows where it lies between two codes.
            near = (
                [want[place]]
                if one is None
                else [stored(row, side.fmt, np.float32(one * (1 + e))) for e in (0, 2e-7, -2e-7)]
            )
            right = functools.reduce(np.logical_or, [same(pages[place], codes) for codes in near])
            want[place] = np.where(right, pages[place], want[place])
        assert_same_bits(pages, want)

    # --- against the oracle ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", FORMATS, ids=str)
    def test_formats(self, kind):
        """Each format as keys, and the one after it in the list as values."""
        self.check(Case(k_format=kind, v_format=FORMATS[(FORMATS.index(kind) + 1) % len(FORMATS)]))

    @pytest.mark.parametrize("kind", [x for x in FORMATS if x[1] != "tensor"], ids=str)
    def test_what_does_not_fit_saturates(self, kind):
        self.check(Case(k_format=kind, v_format=kind, wild=True, spread=1000.0))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_rows_of_16_bits(self, dtype):
        for kind in (("bfloat16", NONE), ("int8", "token")):
            self.check(Case(k_format=kind, v_format=("float32", NONE), dtype=dtype))

    @pytest.mark.parametrize(("size", "page_size"), [(64, 16), (128, 16), (128, 128)])
    def test_shapes(self, size, page_size):
        slots = (*range(40, 75), 3, -1, 2, page_size * 5 - 1, page_size * 5)
        kind = ("float8_e4m3fn", "token")
        self.check(Case(slots, page_size=page_size, size=size, v_size=size, k_format=kind, v_format=("bfloat16", NONE)))

    def test_a_latent_has_no_values(self):
        self.check(Case(v_size=0, kv_heads=1, size=64, k_format=("bfloat16", NONE)))

    def test_values_of_another_size(self):
        self.check(Case(size=64, v_size=32, k_format=("bfloat16", NONE), v_format=("int8", "head")))

    # --- which slots -----------------------------------------------------------------------------------------------

    def test_slots_out_of_range_are_dropped(self):
        """Public fault B24: a pool of 4 pages of 2; -1, 3 and 8 are padding, real and past the end."""
        case = self.fit(Case(pages=4, page_size=2))
        last = case.pages * case.page_size
        self.check(dataclasses.replace(case, slots=(-1, 3, last, *OUTSIDE, -last, last + 3)))
        for outside in (-1, last, *OUTSIDE):
            self.check(dataclasses.replace(case, slots=(outside,) * 8))

    @pytest.mark.parametrize("slots", [(9,), (15, 16), tuple(range(80)), tuple(range(79, -1, -1)), ()], ids=len)
    def test_any_number_of_tokens(self, slots):
        kind = ("float8_e4m3fn", "token")
        self.check(Case(slots, k_format=kind, v_format=kind))

    def test_a_random_order(self):
        rng = np.random.default_rng(0)
        for seed in range(3):
            slots = np.concatenate([rng.permutation(80)[:50], rng.integers(80, 2**31, 6), -rng.integers(1, 2**31, 6)])
            slots = tuple(int(slot) for slot in rng.permutation(slots))
            self.check(Case(slots, k_format=("bfloat16", NONE), v_format=("int8", "token"), seed=seed))
