"""The device table: every figure is there once, is plausible, and has a source."""

from __future__ import annotations

import dataclasses

import pytest

from paxkv.sim import hardware
from paxkv.sim.hardware import A100_40GB, DEVICES, TPU_7X, Device, Source, device

NAMES = [
    "a100-40gb",
    "a100-80gb",
    "h100-sxm",
    "h200",
    "b200",
    "tpu-v4",
    "tpu-v5e",
    "tpu-v5p",
    "tpu-v6e",
    "tpu-7x",
]


def test_all_devices_are_there():
    assert list(DEVICES) == NAMES
    assert all(device(name).name == name for name in NAMES)


def test_memory_is_what_the_driver_reports():
    assert A100_40GB.memory_bytes == 42_298_834_944
    assert A100_40GB.memory_bytes / 2**20 == 40_339.3125
    assert device("a100-80gb").memory_bytes == int(79.15 * 2**30)


@pytest.mark.parametrize(
    ("name", "bandwidth", "flops", "flops_8bit", "format_8bit"),
    [
        ("a100-40gb", 1.555e12, 312e12, 624e12, "int8"),
        ("a100-80gb", 2.039e12, 312e12, 624e12, "int8"),
        ("h100-sxm", 3.35e12, 989.4e12, 1978.9e12, "fp8"),
        ("h200", 4.8e12, 989.4e12, 1978.9e12, "fp8"),
        ("b200", 7.7e12, 2.25e15, 4.5e15, "fp8"),
        ("tpu-v4", 1.2e12, 275e12, None, None),
        ("tpu-v5e", 819e9, 197e12, 393e12, "int8"),
        ("tpu-v5p", 2.765e12, 459e12, 918e12, "int8"),
        ("tpu-v6e", 1.638e12, 918e12, 1.836e15, "int8"),
        ("tpu-7x", 7.38e12, 2.307e15, 4.614e15, "fp8"),
    ],
)
def test_published_figures(name, bandwidth, flops, flops_8bit, format_8bit):
    found = device(name)
    assert found.memory_bytes_per_s == bandwidth
    assert found.flops_per_s == flops
    assert found.flops_8bit_per_s == flops_8bit
    assert found.format_8bit == format_8bit


def test_links_count_one_direction():
    assert A100_40GB.interconnect_bytes_per_s == 300e9  # NVLink 600 GB/s in both directions
    assert A100_40GB.host_link_bytes_per_s == 31.5e9
    assert device("tpu-v5e").interconnect_bytes_per_s == 200e9  # ICI 400 GB/s bidirectional


def test_only_the_newest_tpu_shows_two_devices_per_chip():
    assert [name for name in NAMES if device(name).devices_per_chip != 1] == ["tpu-7x"]
    assert TPU_7X.devices_per_chip == 2


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name):
    found = device(name)
    figures = [figure for figure in hardware.FIGURES if getattr(found, figure) is not None]
    assert [source.figure for source in found.sources] == figures
    assert len(figures) >= 5
    assert all(len(source.title) > 10 and source.confidence in "ABCM" for source in found.sources)
    assert found.source_of("memory_bytes").figure == "memory_bytes"


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown device 'a100'.*a100-40gb.*cpu"):
        device("a100")
    with pytest.raises(KeyError, match="no source for 'weight'"):
        A100_40GB.source_of("weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "npu"}, "must be gpu, tpu or cpu"),
        ({"memory_bytes": 0}, "memory_bytes must be positive, got 0"),
        ({"flops_per_s": None}, "flops_per_s is required"),
        ({"flops_per_s": float("nan")}, "flops_per_s must be positive"),
        ({"sources": A100_40GB.sources[1:]}, "memory_bytes has no source"),
        ({"format_8bit": None}, "go together"),
    ],
)
def test_bad_devices_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(A100_40GB, **change)


def test_bad_sources_are_refused():
    with pytest.raises(ValueError, match="needs a title"):
        Source("memory_bytes", "", "A")
    with pytest.raises(ValueError, match="confidence must be one of"):
        Source("memory_bytes", "datasheet", "D")  # pyright: ignore[reportArgumentType]


def test_this_cpu_is_measured_and_says_so():
    cpu = hardware.this_cpu(copy_bytes=1 << 20, matmul_size=64, repeats=1)
    assert isinstance(cpu, Device) and cpu.kind == "cpu"
    assert {source.confidence for source in cpu.sources} == {"measured"}
    assert cpu.memory_bytes > 1 << 28  # any machine that runs the tests has more than 256 MiB
    assert 1e7 < cpu.memory_bytes_per_s < 1e14 and 1e7 < cpu.flops_per_s < 1e15
    assert cpu.flops_8bit_per_s is None and cpu.interconnect_bytes_per_s is None
    assert hardware.this_cpu(copy_bytes=1 << 20, matmul_size=64, repeats=1) is cpu  # measured once per process
    with pytest.raises(ValueError, match="repeats must be a positive integer, got 0"):
        hardware.this_cpu(repeats=0)
