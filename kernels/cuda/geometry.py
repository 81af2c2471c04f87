"""How a kernel is launched: grid, block and shared memory, as expressions of its spec's symbols.

Every number here is computed from the spec (shapes, the format's declaration, the layout's tile). None is stored in a
plan or declared per format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from qcompiler.errors import KernelSelectionError
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import KernelSpec, Operand

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_THREADS = 1024

MAX_EXTENT = 2**31 - 2**13
"""The most rows or columns of a weight. Kernels count them in 32 bits, up to the end of the last tile."""

WAY_OUT = "Split it in the model, or compile for the CPU, whose kernels count in 64 bits"

SHARED_LIMIT: dict[int, int] = {
    70: 98304,
    75: 65536,
    80: 166912,
    86: 101376,
    89: 101376,
    90: 232448,
    100: 232448,
    120: 101376,
}
"""Maximum bytes of shared memory per block (CUDA C++ Programming Guide, compute capabilities), by arch number."""


MIN_BLOCKS = 96
"""With fewer blocks than this, a GPU of 108 to 148 multiprocessors is mostly idle."""

PAIR_TABLE = 256 * 16 * 8
"""Bytes of a table of pairs of codes in shared memory: linear.cuh's `qc_table256`."""


@dataclass(frozen=True)
class Geometry:
    """`grid` (x, y, z) in blocks over the spec's symbols, `block` (x, y, z) in threads, `shared` in dynamic bytes."""

    grid: tuple[Dim, Dim, Dim]
    block: tuple[int, int, int]
    shared: int = 0

    def at(self, symbols: Mapping[str, int]) -> tuple[int, int, int]:
        """The grid for these values of the symbols. A grid with a 0 means that there is nothing to launch."""
        x, y, z = (each if isinstance(each, int) else dim(each).evaluate(symbols) for each in self.grid)
        for axis, (blocks, limit) in enumerate(zip((x, y, z), MAX_GRID, strict=True)):
            if blocks > limit:
                raise KernelSelectionError(f"a grid of {blocks} blocks along {'xyz'[axis]} exceeds CUDA's {limit}")
        return x, y, z

    @property
    def threads(self) -> int:
        x, y, z = self.block
        return x * y * z


def check_grid(spec: KernelSpec, geometry: Geometry) -> None:
    """KernelSelectionError if a launch needs more blocks than CUDA allows, for any symbols."""
    for axis, blocks, limit in zip("xyz", geometry.grid, MAX_GRID, strict=True):
        if isinstance(blocks, int) and blocks > limit:
            raise KernelSelectionError(
                f"kernel '{spec.name}' ({spec.serves}) needs {blocks:,} blocks along {axis}, and CUDA launches at most "
                f"{limit:,}: its operands are {_shapes(spec)}. {WAY_OUT}"
            )


def check_extent(spec: KernelSpec, weight: Operand, axis: Literal[0, 1]) -> None:
    """KernelSelectionError for a weight with more rows (axis 0) or columns (axis 1) than its kernel can count."""
    size = weight.shape[axis]
    if isinstance(size, int) and size > MAX_EXTENT:
        what = ("rows", "columns")[axis]
        raise KernelSelectionError(
            f"kernel '{spec.name}' ({spec.serves}): the weight '{weight.name}' has {size:,} {what}, and CUDA kernels "
            f"count at most {MAX_EXTENT:,} of them. {WAY_OUT}"
        )


def _shapes(spec: KernelSpec) -> str:
    return ", ".join(f"{operand.name} {list(operand.shape)}" for operand in spec.operands)


@dataclass(frozen=True)
class CudaKernel:
    """One emitted kernel: its text (helpers and ``qk_<name>``), how to launch it, and its engine.

    The kernel's parameters are one pointer per operand of the spec, in order, then one `int64_t` per symbol, in order.
    `engine` is "fma" (fp32 on the CUDA cores) or "mma" (tensor cores); `notes` are for the reader.
    """

    text: str
    geometry: Geometry
    engine: str = "fma"
    notes: tuple[str, ...] = ()


@dataclass
class SharedMemory:
    """Lays out a kernel's dynamic shared memory: named ranges, 128-byte aligned, without overlap."""

    ranges: list[tuple[str, str, int, int]] = field(default_factory=list)
    nbytes: int = 0

    def add(self, name: str, ctype: str, count: int, itemsize: int) -> None:
        """Adds `count` items of the C type `ctype` (`itemsize` bytes each) under `name`."""
        offset = -(-self.nbytes // 128) * 128
        self.ranges.append((ctype, name, offset, count))
        self.nbytes = offset + count * itemsize

    def declarations(self) -> list[str]:
        """The statements that declare the ranges at the start of the kernel."""
        return [f"QC_SHARED({ctype}, {name}, {offset}, {count});" for ctype, name, offset, count in self.ranges]
