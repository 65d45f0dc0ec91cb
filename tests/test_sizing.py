"""Pool sizing: the artifact's pools (Table 1), cases B04, B22, B23, B27."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv import sizing
from paxkv.config import LLAMA_13B, OPT_13B, OPT_66B, OPT_175B
from paxkv.sim.hardware import A100_40GB, A100_80GB, TPU_7X
from paxkv.sizing import GIB, KVLayout, MemoryPlan


def memory_plan(total_gib=80, utilization=0.9, weights_gib=16, activations_gib=4, bits=16, **options) -> MemoryPlan:
    """The device of case B23: 131,072 bytes a token at 16 bits."""
    layout = KVLayout(32, 8, 128, 16, bits=bits, scales=options.pop("scales", "none"))
    sizes = [int(size * GIB) for size in (weights_gib, activations_gib)]
    return MemoryPlan(int(total_gib * GIB), utilization, sizes[0], sizes[1], 0, layout, **options)


# -- the paper's pools (Table 1) -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "device", "tensor_parallel", "pages", "slots"),
    [
        (OPT_13B, A100_40GB, 1, 983, 15_728),  # Table 1: 15.7K
        (OPT_66B, A100_40GB, 4, 603, 9_648),  # Table 1: 9.7K
        (OPT_175B, A100_80GB, 8, 3_753, 60_048),  # Table 1: 60.1K
        (LLAMA_13B, A100_40GB, 1, 966, 15_456),  # not in Table 1; its rotary buffers count as weights
    ],
)
def test_pools_of_the_paper(shape, device, tensor_parallel, pages, slots):
    plan = sizing.artifact_plan(shape, device.memory_bytes, tensor_parallel=tensor_parallel)
    assert plan.num_pages == pages
    assert plan.num_tokens == slots
    assert plan.limited_by == "memory"
    assert plan.longest_request == 2048
    assert plan.fits


def test_the_items_of_opt_13b():
    plan = sizing.artifact_plan(OPT_13B, A100_40GB.memory_bytes)
    assert dict(plan.items) == {
        "total": 42_298_834_944,
        "other processes": 0,
        "weights": 25_706_946_560,
        "activations": 514_785_280,
        "workspace": 1_073_741_824,
        "page pool": 983 * 16 * 819_200,
        "unused": 2_118_983_680,
    }
    assert sum(size for _, size in plan.items[1:]) == plan.items[0][1]
    assert plan.kv_bytes / GIB == pytest.approx(12.00, abs=0.005)


def test_rotary_buffers_are_what_llama_lacks():
    plan = sizing.artifact_plan(LLAMA_13B, A100_40GB.memory_bytes)
    assert plan.weight_bytes - sizing.weight_bytes(LLAMA_13B) == 40 * 8192 * 128 * 2


def test_page_size_changes_the_pages_not_the_memory():
    pools = {size: sizing.artifact_plan(OPT_13B, A100_40GB.memory_bytes, page_size=size) for size in (1, 8, 32, 256)}
    assert {size: plan.num_pages for size, plan in pools.items()} == {1: 15_732, 8: 1_966, 32: 491, 256: 61}


def test_parameter_counts_of_the_presets():
    counts = {name: shape.num_params for name, shape in sizing.PRESETS.items()}
    assert counts == {
        "opt-13b": 12_853_473_280,
        "opt-66b": 65_719_701_504,
        "opt-175b": 174_604_468_224,
        "llama-13b": 13_015_864_320,
        "llama-3-8b": 8_030_261_248,
        "llama-3-70b": 70_553_706_496,
    }


@pytest.mark.parametrize("name", sorted(sizing.PRESETS))
def test_one_device_holds_every_weight(name):
    shape = sizing.PRESETS[name]
    assert sizing.weight_bytes(shape) == 2 * shape.num_params


def test_weights_split_and_replicate():
    # llama-3-8b on 16 devices: each KV head lies on two, so KV projections shrink by 8 only.
    whole, split = sizing.weight_bytes(sizing.LLAMA_3_8B), sizing.weight_bytes(sizing.LLAMA_3_8B, 16)
    kv = 2 * (2 * 32 * 4096 * 1024)
    norms = 2 * (2 * 32 + 1) * 4096
    assert split == (whole - kv - norms) // 16 + kv // 8 + norms


# -- B22: bytes per token ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_size", "expected"),
    [
        (32, 8, 128, 131_072),
        (28, 4, 128, 57_344),
        (80, 8, 128, 327_680),
        (12, 12, 64, 36_864),
        (32, 1, 64, 8_192),
        (60, 8, 64, 122_880),
        (36, 8, 128, 147_456),  # hidden 2560 and 32 heads: a derived head size of 80 would give 92,160
    ],
)
def test_bytes_per_token(layers, kv_heads, head_size, expected):
    assert KVLayout(layers, kv_heads, head_size).bytes_per_token == expected


def test_bytes_per_token_takes_the_declared_head_size():
    shape = dataclasses.replace(
        sizing.LLAMA_3_8B, num_layers=36, num_heads=32, num_kv_heads=8, hidden_size=2560, head_size=128
    )
    assert KVLayout.of(shape).bytes_per_token == 147_456 == shape.kv_bytes_per_token


@pytest.mark.parametrize(
    ("shape", "expected"),
    [(OPT_13B, 819_200), (OPT_66B, 2_359_296), (OPT_175B, 4_718_592), (LLAMA_13B, 819_200)],
)
def test_bytes_per_token_of_the_paper(shape, expected):
    assert KVLayout.of(shape).bytes_per_token == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"bits": 32}, 262_144),
        ({"bits": 8}, 65_536),
        ({"bits": 4}, 32_768),
        ({"bits": 8, "scales": "token_head"}, 65_536 + 2 * 32 * 8 * 4),
        ({"bits": 8, "scales": "token_head", "scale_bytes": 2}, 65_536 + 2 * 32 * 8 * 2),
        ({"bits": 8, "scales": "head"}, 65_536),
        ({"tensor_parallel": 4}, 32_768),
        ({"tensor_parallel": 16}, 16_384),  # one replicated KV head per device
        ({"lane": 128}, 131_072),
        ({"page_size": 8, "sublane": 16}, 262_144),  # 16-bit tiles are 16 rows high: pages of 8 double
    ],
)
def test_bytes_per_token_with_options(options, expected):
    assert KVLayout(32, 8, 128, **options).bytes_per_token == expected


def test_padded_head_sizes_count():
    assert KVLayout(1, 1, 96, lane=128).bytes_per_token == 2 * 128 * 2
    assert KVLayout(1, 1, 64, lane=128, page_size=128).page_bytes == 2 * 128 * 128 * 2


def test_fixed_scales():
    assert KVLayout(32, 8, 128, bits=8, scales="tensor").fixed_bytes == 2 * 32 * 4
    assert KVLayout(32, 8, 128, bits=8, scales="head").fixed_bytes == 2 * 32 * 8 * 4
    assert KVLayout(32, 8, 128, bits=8, scales="head", tensor_parallel=4).fixed_bytes == 2 * 32 * 2 * 4
    assert KVLayout(32, 8, 128, bits=8, scales="token_head").fixed_bytes == 0


def test_latent_pages():
    assert KVLayout.mla(61).bytes_per_token == 61 * 576 * 2 == 70_272  # DeepSeek V3
    assert KVLayout.mla(27).bytes_per_token == 31_104  # DeepSeek V2 Lite
    assert KVLayout.mla(61, bits=8).bytes_per_token == 35_136
    assert KVLayout.mla(61, tensor_parallel=8).bytes_per_token == 70_272  # the latent is whole on every device


@pytest.mark.parametrize(("kv_heads", "tensor_parallel", "here"), [(8, 1, 8), (8, 4, 2), (8, 8, 1), (2, 8, 1)])
def test_kv_heads_per_device(kv_heads, tensor_parallel, here):
    assert sizing.kv_heads_per_device(kv_heads, tensor_parallel) == here


# -- B23: from memory to capacity ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "scales", "by_bytes", "pages"),
    [
        (16, "none", 65_536, 4_096),
        (8, "none", 131_072, 8_192),
        (8, "token_head", 127_100, 7_943),
        (4, "none", 262_144, 16_384),
    ],
)
def test_eight_gib_of_pages(bits, scales, by_bytes, pages):
    plan = memory_plan(total_gib=8, utilization=1.0, weights_gib=0, activations_gib=0, bits=bits, scales=scales)
    assert plan.kv_bytes == 8 * GIB
    assert int(plan.kv_bytes // plan.layout.bytes_per_token) == by_bytes
    assert plan.num_pages == pages  # only whole pages can be used
    assert plan.num_tokens == plan.longest_request == pages * 16


def test_the_fraction_is_of_total_memory():
    plan = memory_plan()
    assert plan.kv_bytes == 52 * GIB
    assert plan.num_pages == 26_624
    assert plan.num_tokens == 425_984


@pytest.mark.parametrize(
    ("other_gib", "kv_gib", "pages"),
    [
        (0, 52, 26_624),
        (8, 52, 26_624),  # they fit in the 10% that is not ours
        (20, 40, 20_480),  # 12 GiB of our share are not there
        (60, 0, 0),  # nothing is left for the pool, and nothing is negative
        (80, 0, 0),
        (90, 0, 0),
    ],
)
def test_other_processes_are_never_overcommitted(other_gib, kv_gib, pages):
    plan = memory_plan(other_bytes=other_gib * GIB)
    assert plan.kv_bytes == kv_gib * GIB
    assert plan.num_pages == pages
    assert plan.pool_bytes == pages * 2 * 2**20
    assert all(size >= 0 for _, size in plan.items)
    assert plan.fits is (other_gib <= 60)  # weights and activations alone need 20


def test_an_explicit_page_count_wins():
    small, large = memory_plan(explicit_pages=100), memory_plan(explicit_pages=30_000)
    assert (small.num_pages, small.limited_by, small.fits) == (100, "explicit", True)
    assert (large.num_pages, large.fits) == (30_000, True)  # beyond 90% of the device, not beyond the device
    assert memory_plan(explicit_pages=31_000).fits is False  # 60.5 GiB beside 20 GiB on 80 GiB


def test_too_little_memory_says_how_much_is_missing():
    plan = memory_plan(total_gib=20)
    assert (plan.num_pages, plan.kv_bytes, plan.longest_request) == (0, 0, 0)
    assert plan.shortfall_bytes == 2 * GIB + 2 * 2**20  # 18 GiB for 20 GiB of needs and one page
    with pytest.raises(ValueError, match=r"at least 1 pages are needed, the plan has 0 .*weights 16.00 GiB"):
        plan.require_pages()
    assert memory_plan().require_pages(26_624).num_pages == 26_624
    with pytest.raises(ValueError, match="at least 26625 pages are needed, the plan has 26624"):
        memory_plan().require_pages(26_625)


def test_longest_request_is_what_the_model_allows():
    assert memory_plan(max_model_len=8_192).longest_request == 8_192
    assert memory_plan(explicit_pages=3, max_model_len=8_192).longest_request == 48


@given(
    st.integers(1, 200), st.floats(0.05, 1.0), st.integers(0, 100), st.integers(0, 50), st.sampled_from([4, 8, 16, 32])
)
def test_plans_are_never_negative_and_add_up(total, utilization, weights, other, bits):
    plan = memory_plan(total, utilization, weights, 1, bits, scales="head", other_bytes=other * GIB)
    assert plan.num_pages >= 0 and plan.kv_bytes >= 0 and plan.shortfall_bytes >= 0
    assert (plan.num_pages == 0) == (plan.shortfall_bytes > 0)
    assert plan.pool_bytes <= plan.kv_bytes
    if plan.num_pages:
        assert plan.fits
        assert sum(size for _, size in plan.items[1:]) == plan.total_bytes
        # One page more would not have fitted.
        assert plan.pool_bytes + plan.layout.page_bytes > plan.kv_bytes or plan.limited_by == "index width"


# -- B04: 32-bit offsets -------------------------------------------------------------------------------------------


def test_first_page_whose_offset_wraps():
    layout = KVLayout(1, 8, 128, 16, bits=8)
    assert layout.page_elements == 16_384
    assert layout.max_pages == 131_072  # page 131,072 is the first whose offset wraps: one page more than this pool
    layout.check_pages(131_072)
    with pytest.raises(ValueError, match=r"131073 pages has 2147500032 elements.*at most 131072 pages"):
        layout.check_pages(131_073)


def test_a_shared_buffer_wraps_at_half():
    assert KVLayout(1, 8, 128, 16, fused=True).max_pages == 65_536
    assert KVLayout(1, 8, 128, 16, bits=4).max_pages == 262_144  # two values to a byte
    assert KVLayout(1, 8, 128, 16, tensor_parallel=2).max_pages == 262_144
    assert KVLayout(1, 8, 64, 16, lane=128).max_pages == 131_072  # padding counts


def test_plans_stop_at_the_index_width():
    layout = KVLayout(1, 8, 128, 16, bits=8)
    plan = MemoryPlan(80 * GIB, 1.0, 0, 0, 0, layout)
    assert (plan.num_pages, plan.limited_by) == (131_072, "index width")
    with pytest.raises(ValueError, match="32-bit offsets would wrap"):
        MemoryPlan(80 * GIB, 1.0, 0, 0, 0, layout, explicit_pages=131_073)


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: KVLayout(0, 8, 128), "num_layers must be a positive integer, got 0"),
        (lambda: KVLayout(1, 8, 128.0), "head_size must be a positive integer, got 128.0"),  # pyright: ignore
        (lambda: KVLayout(1, 8, 128, bits=2), "bits must be 4, 8, 16 or 32, got 2"),
        (lambda: KVLayout(1, 1, 65, bits=4), "even head size, got 65; pad it"),
        (lambda: KVLayout(1, 8, 128, arrays=3), "arrays is 2"),
        (lambda: KVLayout(1, 8, 128, scales="row"), "scales must be none"),  # pyright: ignore
        (lambda: KVLayout(1, 3, 128, tensor_parallel=2), "must divide one another, got 3 and 2"),
        (lambda: KVLayout(1, 8, 128, tensor_parallel=0), "tensor_parallel must be a positive integer, got 0"),
        (lambda: KVLayout(1, 8, 128).check_pages(0), "number of pages must be a positive integer, got 0"),
        (lambda: memory_plan(utilization=0.0), r"share of total memory in \(0, 1\], got 0.0"),
        (lambda: memory_plan(utilization=90), "got 90; 0.9 means 90%"),
        (lambda: memory_plan(other_bytes=-1), "other_bytes must be an integer of at least 0 bytes, got -1"),
        (lambda: memory_plan(explicit_pages=0), "number of pages must be a positive integer, got 0"),
        (lambda: MemoryPlan(0, 0.9, 0, 0, 0, KVLayout(1, 1, 1)), "total_bytes must be an integer of at least 1"),
        (lambda: sizing.activation_bytes(OPT_13B, 0), "batched_tokens must be positive, got 0"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -- the command ---------------------------------------------------------------------------------------------------


def size(repo_root, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.size", *flags]
    return subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=120)


def test_command_prints_the_papers_pool(repo_root):
    result = size(repo_root, "--model=opt-13b", "--device=a100-40gb", "--artifact", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["num_pages"] == 983 and found["bytes_per_token"] == 819_200
    assert found["items_bytes"]["total"] == 42_298_834_944


def test_command_prints_a_table_for_any_shape(repo_root):
    shape = ("--layers=28", "--heads=28", "--kv_heads=4", "--head_size=128", "--hidden=3584", "--ffn=18944")
    result = size(repo_root, *shape, "--vocab=152064", "--device=tpu-7x", "--kv_bits=8")
    assert result.returncode == 0, result.stderr
    assert "28,672" in result.stdout  # bytes per token
    assert f"{TPU_7X.memory_bytes / 2 / GIB:.3f}" == "96.000" and "96.000" in result.stdout  # one of the chip's two


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--model=opt-7b",), 2, "unknown model 'opt-7b'; known: opt-13b"),
        (("--layers=2",), 2, "missing: --heads --kv_heads"),
        (("--model=opt-13b", "--artifact", "--kv_bits=8"), 2, "--artifact fixes the formula; leave out --kv_bits"),
        (("--model=opt-13b", "--utilization=1.5"), 2, "share of total memory"),
        (("--model=opt-175b",), 1, "does not fit"),
    ],
)
def test_command_refuses(repo_root, flags, code, message):
    result = size(repo_root, *flags)
    assert result.returncode == code
    assert message in result.stderr and "Traceback" not in result.stderr
