"""What each device can do: memory, bandwidth, arithmetic, links, and where every figure comes from.

This is the only place of the project where a device's numbers stand; sizing, the cost model and the roofline
plots read them from here. Every figure carries its public source and a confidence letter:

* ``A`` read in the vendor's documentation, two sources agreeing;
* ``B`` read in one source (a vendor's page, a driver's log, an artifact);
* ``C`` third-party summary only;
* ``M`` from memory or assumed, not confirmed: treat as unverified;
* ``measured`` timed on this machine by :func:`this_cpu`.

Conventions. Arithmetic is dense (sparsity never counted). Links count ONE direction: a vendor's "bidirectional"
or "total" figure is halved. A figure is for one package (a GPU card, a TPU chip); JAX shows a TPU 7x chip as two
devices of half of everything (``devices_per_chip``).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from typing import Literal

import numpy as np

from paxkv.config import require

DeviceKind = Literal["gpu", "tpu", "cpu"]
Confidence = Literal["A", "B", "C", "M", "measured"]
CONFIDENCES = ("A", "B", "C", "M", "measured")

GIB = 1 << 30
MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Source:
    """Where one figure of a device comes from.

    Attributes:
        figure: name of the field of :class:`Device` that it supports.
        title: the public document, or how it was measured.
        confidence: one of the letters of this module's docstring.
    """

    figure: str
    title: str
    confidence: Confidence

    def __post_init__(self) -> None:
        require(bool(self.title), f"the source of {self.figure!r} needs a title; name the public document")
        require(
            self.confidence in CONFIDENCES,
            f"confidence must be one of {', '.join(CONFIDENCES)}, got {self.confidence!r}",
        )


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator (or this CPU).

    Attributes:
        name: short name, such as ``a100-40gb``.
        kind: ``gpu``, ``tpu`` or ``cpu``.
        memory_bytes: memory as the driver reports it, which is less than the name on the box.
        memory_bytes_per_s: peak bandwidth of that memory, bytes/s.
        flops_per_s: peak dense 16-bit arithmetic (bf16 or fp16 with 32-bit sums), operations/s.
        flops_8bit_per_s: peak dense 8-bit arithmetic in ``format_8bit``; None where there is no faster 8-bit unit.
        format_8bit: ``fp8`` or ``int8``: the format that reaches ``flops_8bit_per_s``; None with it.
        host_link_bytes_per_s: host to device copies, one direction, bytes/s.
        interconnect_bytes_per_s: all links to other devices together, one direction, bytes/s; None for one alone.
        sources: one :class:`Source` for each figure that is not None.
        devices_per_chip: how many JAX devices the package shows (2 on TPU 7x).

    Raises:
        ValueError: a figure that is not positive, or without a source.
    """

    name: str
    kind: DeviceKind
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: float
    flops_8bit_per_s: float | None
    format_8bit: Literal["fp8", "int8"] | None
    host_link_bytes_per_s: float
    interconnect_bytes_per_s: float | None
    sources: tuple[Source, ...]
    devices_per_chip: int = 1

    def __post_init__(self) -> None:
        require(self.kind in ("gpu", "tpu", "cpu"), f"Device.kind must be gpu, tpu or cpu, got {self.kind!r}")
        known = {source.figure for source in self.sources}
        for figure in FIGURES:
            value = getattr(self, figure)
            if value is None:
                require(
                    figure in ("flops_8bit_per_s", "interconnect_bytes_per_s"),
                    f"{self.name}: {figure} is required; only 8-bit arithmetic and the interconnect may be None",
                )
                continue
            require(value > 0, f"{self.name}: {figure} must be positive, got {value!r}")
            require(figure in known, f"{self.name}: {figure} has no source; add a Source naming a public document")
        require(
            (self.flops_8bit_per_s is None) == (self.format_8bit is None),
            f"{self.name}: flops_8bit_per_s and format_8bit go together, got {self.flops_8bit_per_s!r} "
            f"and {self.format_8bit!r}",
        )

    def source_of(self, figure: str) -> Source:
        """The source of ``figure``; ``KeyError`` naming the known ones where there is none."""
        for source in self.sources:
            if source.figure == figure:
                return source
        raise KeyError(f"{self.name} has no source for {figure!r}; it has {[s.figure for s in self.sources]}")


FIGURES = (
    "memory_bytes",
    "memory_bytes_per_s",
    "flops_per_s",
    "flops_8bit_per_s",
    "host_link_bytes_per_s",
    "interconnect_bytes_per_s",
)

Figure = tuple[float | None, str, Confidence]


def _device(
    name: str,
    kind: DeviceKind,
    memory: Figure,
    bandwidth: Figure,
    flops: Figure,
    flops_8bit: Figure,
    format_8bit: Literal["fp8", "int8"] | None,
    host_link: Figure,
    interconnect: Figure,
    devices_per_chip: int = 1,
) -> Device:
    figures = (memory, bandwidth, flops, flops_8bit, host_link, interconnect)
    sources = tuple(
        Source(field, title, confidence)
        for field, (value, title, confidence) in zip(FIGURES, figures, strict=True)
        if value is not None
    )
    values = [value for value, _, _ in figures]
    assert values[0] is not None and values[1] is not None and values[2] is not None and values[4] is not None
    return Device(
        name,
        kind,
        int(values[0]),
        values[1],
        values[2],
        values[3],
        format_8bit,
        values[4],
        values[5],
        sources,
        devices_per_chip,
    )


_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet, SXM column (sparse figures halved)"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet, SXM column (sparse figures halved)"
_B200 = "NVIDIA Blackwell (HGX B200) datasheet, per GPU (sparse figures halved)"
_TPU = "Google Cloud TPU documentation, {} page"
_BOOK = "How to Scale Your Model (jax-ml/scaling-book), TPU tables"
_ICI = "Google Cloud TPU documentation, {} page: bidirectional ICI bandwidth per chip, halved"

A100_40GB = _device(
    "a100-40gb",
    "gpu",
    # 42,298,834,944 bytes: not 40 GB, not 40 GiB. The paper's pool of 15.7K slots follows from exactly this total.
    (40339.3125 * MIB, "deviceQuery of an A100-SXM4-40GB (bottlerocket-os/bottlerocket, pull request 3873)", "A"),
    (1.555e12, _A100, "A"),
    (312e12, _A100, "A"),
    (624e12, _A100, "A"),
    "int8",
    (31.5e9, "PCI Express 4.0 x16 rate (the A100 datasheet names the link)", "A"),
    (300e9, f"{_A100}: NVLink 600 GB/s in both directions, halved", "A"),
)
A100_80GB = _device(
    "a100-80gb",
    "gpu",
    (79.15 * GIB, "total capacity in public PyTorch messages from A100-SXM4-80GB (79.15 and 79.25 GiB seen)", "B"),
    (2.039e12, _A100, "A"),
    (312e12, _A100, "A"),
    (624e12, _A100, "A"),
    "int8",
    (31.5e9, "PCI Express 4.0 x16 rate (the A100 datasheet names the link)", "A"),
    (300e9, f"{_A100}: NVLink 600 GB/s in both directions, halved", "A"),
)
H100_SXM = _device(
    "h100-sxm",
    "gpu",
    (79.10 * GIB, "total GPU memory in a public vLLM log from H100 (huggingface/trl, issue 2688)", "B"),
    (3.35e12, _H100, "A"),
    (989.4e12, _H100, "A"),
    (1978.9e12, _H100, "A"),
    "fp8",
    (63e9, "PCI Express 5.0 x16 rate (the H100 datasheet names the link)", "A"),
    (450e9, f"{_H100}: NVLink 900 GB/s in both directions, halved", "A"),
)
H200 = _device(
    "h200",
    "gpu",
    (139.81 * GIB, "total capacity in public PyTorch and TensorRT-LLM messages from H200, many agreeing", "B"),
    (4.8e12, _H200, "A"),
    (989.4e12, _H200, "A"),
    (1978.9e12, _H200, "A"),
    "fp8",
    (63e9, "PCI Express 5.0 x16 rate (the H200 datasheet names the link)", "A"),
    (450e9, f"{_H200}: NVLink 900 GB/s in both directions, halved", "A"),
)
B200 = _device(
    "b200",
    "gpu",
    (178.35 * GIB, "total capacity in public PyTorch messages from B200 (datasheet: 180 GB)", "B"),
    (7.7e12, _B200, "B"),
    (2.25e15, _B200, "A"),
    (4.5e15, _B200, "A"),
    "fp8",
    (63e9, f"{_B200}: PCI Express 5.0, 128 GB/s in both directions", "B"),
    (900e9, f"{_B200}: NVLink 1.8 TB/s in both directions, halved", "A"),
)
TPU_V4 = _device(
    "tpu-v4",
    "tpu",
    (32 * GIB, f"{_TPU.format('v4')}; the compiler reserves 1.25 GiB of it (erfanzar/EasyDeL, issue 166)", "A"),
    (1.2e12, _TPU.format("v4"), "A"),
    (275e12, _TPU.format("v4"), "A"),
    (None, "275 TOPS in int8, no faster than bf16", "A"),
    None,
    (16e9, f"{_BOOK}: PCIe of TPU v4, each way", "B"),
    (270e9, f"{_BOOK}: 45 GB/s for each of six links", "B"),
)
TPU_V5E = _device(
    "tpu-v5e",
    "tpu",
    (16 * GIB, _TPU.format("v5e"), "A"),
    (819e9, _TPU.format("v5e"), "A"),
    (197e12, _TPU.format("v5e"), "A"),
    (393e12, _TPU.format("v5e"), "A"),
    "int8",
    (15e9, f"{_BOOK}: typical PCIe per chip", "B"),
    (200e9, _ICI.format("v5e"), "A"),
)
TPU_V5P = _device(
    "tpu-v5p",
    "tpu",
    (95 * GIB, _TPU.format("v5p"), "A"),
    (2.765e12, _TPU.format("v5p"), "A"),
    (459e12, _TPU.format("v5p"), "A"),
    (918e12, _BOOK, "B"),
    "int8",
    (15e9, f"{_BOOK}: typical PCIe per chip", "B"),
    (600e9, _ICI.format("v5p"), "A"),
)
TPU_V6E = _device(
    "tpu-v6e",
    "tpu",
    (32 * GIB, _TPU.format("v6e"), "A"),
    (1.638e12, _TPU.format("v6e"), "A"),
    (918e12, _TPU.format("v6e"), "A"),
    # int8 only: the TPU7x page gives 918 for fp8 on v6e, so fp8 runs at the rate of bf16.
    (1.836e15, _TPU.format("v6e"), "A"),
    "int8",
    (32e9, f"{_BOOK}: PCIe of Trillium", "B"),
    (400e9, _ICI.format("v6e"), "A"),
)
TPU_7X = _device(
    "tpu-7x",
    "tpu",
    (192 * GIB, _TPU.format("TPU7x"), "A"),
    (7.38e12, f"{_TPU.format('TPU7x')} (the compiler's own table gives 3.7 TB/s for each of two cores)", "B"),
    (2307e12, _TPU.format("TPU7x"), "A"),
    (4614e12, _TPU.format("TPU7x"), "A"),
    "fp8",
    (32e9, "assumed equal to Trillium; no public figure found", "M"),
    (600e9, _ICI.format("TPU7x"), "M"),
    devices_per_chip=2,
)

DEVICES = {
    device.name: device
    for device in (A100_40GB, A100_80GB, H100_SXM, H200, B200, TPU_V4, TPU_V5E, TPU_V5P, TPU_V6E, TPU_7X)
}


def device(name: str) -> Device:
    """The device called ``name``; ``cpu`` measures this machine.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if name == "cpu":
        return this_cpu()
    require(name in DEVICES, f"unknown device {name!r}; known: {', '.join([*DEVICES, 'cpu'])}")
    return DEVICES[name]


@functools.cache
def this_cpu(copy_bytes: int = 64 * MIB, matmul_size: int = 768, repeats: int = 3) -> Device:
    """This machine, measured now (well under a second) and remembered for the life of the process.

    Bandwidth is the best of ``repeats`` numpy copies, bytes read plus bytes written. Arithmetic is the best float32
    matrix product: numpy has no 16-bit one, so ``flops_per_s`` is a float32 rate here. The "host link" of a CPU is a
    copy inside its own memory. The figures vary from run to run, so no test or simulation of a figure uses them.
    """
    for name, value in (("copy_bytes", copy_bytes), ("matmul_size", matmul_size), ("repeats", repeats)):
        require(isinstance(value, int) and value > 0, f"this_cpu: {name} must be a positive integer, got {value!r}")
    source = np.ones(copy_bytes, np.uint8)
    target = np.zeros_like(source)
    matrix = np.ones((matmul_size, matmul_size), np.float32)
    product = np.empty_like(matrix)
    copy_s = _best_time(lambda: np.copyto(target, source), repeats)
    matmul_s = _best_time(lambda: np.matmul(matrix, matrix, out=product), repeats)
    moved = 2 * copy_bytes / copy_s
    note = f"best of {repeats}, numpy {np.__version__}, {os.cpu_count()} logical CPUs"
    return _device(
        "cpu",
        "cpu",
        (_memory_of_this_machine(), "physical memory reported by the operating system", "measured"),
        (moved, f"copy of {copy_bytes} bytes, {note}", "measured"),
        (2 * matmul_size**3 / matmul_s, f"float32 product of size {matmul_size}, {note}", "measured"),
        (None, "numpy has no 8-bit product", "measured"),
        None,
        (moved / 2, f"copy of {copy_bytes} bytes, {note}", "measured"),
        (None, "one machine", "measured"),
    )


def _best_time(work, repeats: int) -> float:
    work()  # touches the pages and starts the thread pool; not timed
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return max(best, 1e-9)  # a clock too coarse to see the work must not divide by zero


def _memory_of_this_machine() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError) as error:  # no sysconf on Windows
        raise OSError("this_cpu needs os.sysconf to read the memory size; build a Device by hand here") from error
