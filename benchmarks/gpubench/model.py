"""Predicted time of each cell on an H200, and its reason: a range from counted work, fixed before any measurement.

    predict(cell, count)   Prediction(low_us, high_us, bound, terms)

A kernel's time is modelled as a fixed cost per launch (`fixed`) plus the slowest of its necessary activities, each of
them a counted amount divided by a known rate:

    dram    bytes of weights, inputs and outputs, once      / bandwidth of a device-to-device copy
    flight  the same bytes / the rate of the bytes in flight (Little's law: bytes in flight / latency, on the
            multiprocessors that have a block)
    issue   instructions of the hot loop, from SASS (runtime/sass.py) / four per clock and multiprocessor
    alu     those of them that only the integer pipe executes / two per clock and multiprocessor
    tensor  operations, rows of x padded to the tile        / rate of `mma.sync`, or of `wgmma`
    l2      x once per block, weights once per tile of rows / bandwidth of the L2 cache
    shared  accesses of the hot loop to shared memory       / 128 bytes per clock and multiprocessor

`low` is the largest term at the best rate seen for such code, and nothing else.  `high` is the largest term at a poor
rate, plus a third of the second largest, since they overlap badly.  If the grid spreads work unevenly, the fullest
multiprocessor's share scales it.  So a measurement outside the range means that a term is missing or counted wrong, and
the report names the nearest term.

The figures of the device are published ones or, where marked, leads; the first visit measures some of them (copies,
launch gaps), and the report shows both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from gpubench import layer, ours
from gpubench.cells import EXPERTS, SHAPES, Cell, sizes
from gpubench.occupancy import blocks_per_multiprocessor
from qcompiler.kernels.cost import bytes_moved, operations_of, stored_bytes
from qcompiler.kernels.cuda import (
    emit,
    grouped_linear,
    grouped_mma,
    int8_tile,
    linear,
    linear_fma,
    linear_int8_tiles,
    linear_mma,
    linear_wgmma,
    signature,
)
from qcompiler.kernels.cuda.geometry import SHARED_LIMIT
from qcompiler.kernels.cuda.weights import weight_of
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel
from qcompiler.plan.kinds.linear import LinearKernel

VERSION = 1
"""Grows when the model changes: predictions of different versions are not comparable."""

ARCH = "sm_90a"


@dataclass(frozen=True)
class Range:
    """A quantity at its best and at its worst."""

    best: float
    worst: float


@dataclass(frozen=True)
class Gpu:
    """An H200 in figures: microseconds, bytes and operations per microsecond."""

    name: str = "NVIDIA H200"
    multiprocessors: int = 132
    clock: Range = Range(1980.0, 1755.0)
    """MHz, boost and base of the SXM part's data sheet: cycles per microsecond."""

    copy: float = 4.3e6
    """A device-to-device copy, read plus written; the data sheet says 4.8."""

    copy_share: Range = Range(0.95, 0.75)
    """The share of a copy's rate that a kernel reaches which only streams."""

    latency: Range = Range(0.55, 0.85)
    """Device memory under load. Chips and Cheese measured about 0.5 idle on an H100 ("Nvidia's H100", 2023)."""

    tensor: float = 989e6
    """Dense bf16 with `wgmma`, from the data sheet: the reference for shares of peak."""

    mma_sync: Range = Range(0.65, 0.45)
    """The share of it that `mma.sync` reaches on Hopper: 62 % measured by arXiv 2402.13499, table 8."""

    wgmma: Range = Range(0.79, 0.5)
    """The share of it that `wgmma` reaches: cuBLAS 780 TFLOP/s of bf16 on the first visit's H200."""

    l2: Range = Range(7.0e6, 3.5e6)
    """Reads that hit: a lead. A multiprocessor takes at most 64 bytes per clock, all of them together 15 TB/s;
    published measurements of an H100 are between 5.5 and 7."""

    shared: Range = Range(0.9, 0.7)
    """The share of 128 bytes per clock and multiprocessor."""

    issue: Range = Range(0.9, 0.6)
    """The share of four instructions per clock and multiprocessor, with enough warps."""

    warp_issue: Range = Range(0.4, 0.2)
    """The share of a scheduler's slots that one warp alone fills: dependent arithmetic takes four cycles and more."""

    fixed: Range = Range(1.3, 3.2)
    """A node of a chain graph (0.6 to 1.4), then the first loads, the last sums and the store, one after another: two
    to three trips to memory."""

    table: Range = Range(0.2, 0.7)
    """Filling 32 KiB of shared memory with pairs of code values before the first product."""


H200 = Gpu()
PEER_BF16 = Range(0.80, 0.45)
"""The share of the data sheet's rate that cuBLAS reaches with many rows."""

PEER_FIXED = Range(1.5, 6.0)


@dataclass(frozen=True)
class Count:
    """For a kernel: registers, and the instructions of a warp lane per weight of its hot loop, also by opcode.

    `per_weight` is None if there is no such loop; `reason` says why.
    """

    registers: int
    per_weight: float | None = None
    opcodes: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    def wavefronts(self, wide: float, product: float = 0.0) -> float:
        """Cycles of shared memory per weight and lane's share of a warp: one for 4 bytes of 32 lanes, `wide` for plain
        loads and stores, four for `ldmatrix` of four tiles and for asynchronous copies of 16 bytes, `product` for
        `wgmma`."""
        of = self.opcodes.get
        copied = 4 * (of("LDSM", 0.0) + of("LDGSTS", 0.0)) + product * of("HGMMA", 0.0)
        return wide * (of("LDS", 0.0) + of("STS", 0.0)) + copied

    @property
    def alu(self) -> float:
        """Instructions of the integer pipe per weight."""
        return sum(self.opcodes.get(name, 0.0) for name in ALU)


ALU = (
    "LOP3", "PLOP3", "SHF", "PRMT", "LEA", "BFE", "SGXT", "IADD3", "VIADD", "ISETP", "IMNMX", "VIMNMX", "SEL", "F2FP",
    "FSEL", "FSETP", "FMNMX",
)  # fmt: skip
"""Instructions at half the rate on Hopper: 64 lanes per clock and multiprocessor for 32-bit integer and logical
operations, comparisons and packed conversions (CUDA C++ Programming Guide, "Arithmetic Instructions")."""

Counter = Callable[[KernelSpec, int, Fraction], Count]
"""(spec, bits of a weight, products per weight) -> Count; gpu_predict.py uses runtime/sass.py."""


@dataclass(frozen=True)
class Prediction:
    """Microseconds of a call. `terms` are (best, worst) of each; `bound` is the term whose best is largest."""

    low_us: float
    high_us: float
    bound: str
    terms: Mapping[str, tuple[float, float]]
    facts: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        terms = {name: [round(low, 3), round(high, 3)] for name, (low, high) in self.terms.items()}
        return {
            "low_us": round(self.low_us, 2), "high_us": round(self.high_us, 2), "bound": self.bound, "terms": terms,
            **self.facts,
        }  # fmt: skip


def predict(cell: Cell, count: Counter, gpu: Gpu = H200) -> Prediction | None:
    """The range of a cell; None for peers that are not modelled."""
    if cell.is_peer:
        return _torch_linear(cell, gpu) if cell.engine == "torch" and cell.kind == "linear" else None
    if cell.kind == "layer":
        return _layer(count, gpu)
    spec = ours.spec_of(cell, sizes(cell, "full"))
    if isinstance(spec.body, LinearKernel | GroupedLinearKernel):
        return _product(spec, cell, count, gpu)
    return _other(spec, count, gpu)


def combined(terms: dict[str, tuple[float, float]], gpu: Gpu, facts: dict[str, Any]) -> Prediction:
    """`fixed`, the largest term, and for the worst case a third of the second largest."""
    working = {name: term for name, term in terms.items() if name not in ("fixed", "table")}
    bound = max(working, key=lambda name: working[name][0])
    worst = sorted((high for _, high in working.values()), reverse=True)
    fixed = [sum(terms[name][i] for name in ("fixed", "table") if name in terms) for i in (0, 1)]
    low, high = fixed[0] + working[bound][0], fixed[1] + worst[0] + (worst[1] / 3 if len(worst) > 1 else 0.0)
    if fixed[0] > working[bound][0]:
        bound = "fixed"
    return Prediction(low, high, bound, terms, facts)


# --- products --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """How a product is divided: blocks, threads, rows of x per block (`tokens`, as multiplied), bytes in flight per
    warp lane, and how often the weights are read."""

    blocks: int
    threads: int
    shared: int
    tokens: int
    flight: int
    passes: int
    few: bool
    wgmma: bool = False

    @property
    def wavefronts(self) -> float:
        """Cycles in which a product of a warpgroup reads x in shared memory, for each of its four warps: `tokens` rows
        of 32 bytes, once for the four."""
        return self.tokens * 32 / 128 / 4 if self.wgmma else 0.0


def _product(spec: KernelSpec, cell: Cell, count: Counter, gpu: Gpu) -> Prediction:
    body, weight = spec.body, weight_of(spec.name, spec.operands[1])
    assert isinstance(body, LinearKernel | GroupedLinearKernel)
    pairs = cell.m if isinstance(body, LinearKernel) else 2 * cell.m
    launch = _launch(spec, cell.m)
    symbols = dict.fromkeys(spec.symbols, cell.m)
    nbytes = bytes_moved(spec.operands, body, symbols)
    if isinstance(body, LinearKernel):
        weights = launch.passes * weight.panels * 16 * body.k
    else:  # one pair per block, or the pairs of an expert, tile by tile
        tiles = pairs if launch.few else min(EXPERTS, pairs) * max(1, -(-pairs // EXPERTS // launch.tokens))
        weights = tiles * body.n * body.k
    bits = weight.bits if weight.bits > 8 else 8 if weight.bits == 8 else 4  # of a load: planes of codes are 4 wide
    found = count(spec, bits, _products(spec, launch))
    counted_in = spec.name
    if found.per_weight is None and cell.kind == "linear" and (cell.n, cell.k) != SHAPES[0]:
        # ptxas unrolled the few rounds of a small weight; use the loop of the same kernel for a larger weight
        other = ours.linear_spec(cell.engine, *SHAPES[0], cell.m, symbolic=cell.symbolic)
        loop, counted_in = count(other, bits, _products(other, launch)), other.name
        found = replace(loop, registers=found.registers)
    held = blocks_per_multiprocessor(ARCH, launch.threads, found.registers, launch.shared) or 1
    uneven, busy = _spread(launch.blocks, gpu)
    resident = min(held, -(-launch.blocks // gpu.multiprocessors))
    warps = resident * launch.threads / 32 / 4
    working = min(launch.blocks, pairs * weight.panels) if launch.few else launch.blocks  # others have no pair
    item = 1 if isinstance(body, LinearKernel) and body.codes else 2
    rows = pairs if isinstance(body, LinearKernel) else -(-pairs // min(EXPERTS, pairs))  # that meet one weight
    again = working * min(launch.tokens, rows) * body.k * item
    again += (launch.passes - 1) * stored_bytes(spec.operands[1], {})
    terms: dict[str, tuple[float, float]] = {
        "fixed": (gpu.fixed.best, gpu.fixed.worst),
        "dram": _over(nbytes, gpu.copy, gpu.copy_share),
        "flight": tuple(  # type: ignore[dict-item]
            nbytes * latency / (busy * resident * launch.threads * launch.flight)
            for latency in (gpu.latency.best, gpu.latency.worst)
        ),
        "l2": (again / gpu.l2.best, again / gpu.l2.worst),
    }
    if weight.lookup and launch.few:
        terms["table"] = (gpu.table.best, gpu.table.worst)
    if emit.emit_kernel(spec, ARCH).engine == "mma":
        operations, shares = 2 * weights * launch.tokens, gpu.wgmma if launch.wgmma else gpu.mma_sync
        terms["tensor"] = tuple(  # type: ignore[assignment]
            uneven * operations / (gpu.tensor * share * (3 - item)) for share in (shares.best, shares.worst)
        )
    if found.per_weight is not None:
        slots = found.per_weight * weights / 32 * uneven / (4 * gpu.multiprocessors)
        best = min(gpu.issue.best, warps * gpu.warp_issue.best)
        worst = min(gpu.issue.worst, warps * gpu.warp_issue.worst)
        terms["issue"] = (slots / gpu.clock.best / best, slots / gpu.clock.worst / worst)
        half = found.alu * weights / 32 * uneven / (2 * gpu.multiprocessors)
        terms["alu"] = (half / gpu.clock.best / gpu.issue.best, half / gpu.clock.worst / gpu.issue.worst)
        turns = weights / 32 * uneven / gpu.multiprocessors
        terms["shared"] = (
            turns * found.wavefronts(1, launch.wavefronts) / gpu.clock.best / gpu.shared.best,
            turns * found.wavefronts(2, launch.wavefronts) / gpu.clock.worst / gpu.shared.worst,
        )
    facts = {
        "bytes": nbytes, "operations": operations_of(body, spec.operands, symbols), "blocks": launch.blocks,
        "threads": launch.threads, "blocks_per_sm": held, "per_weight": found.per_weight, "uneven": round(uneven, 3),
        "counted_in": counted_in,
    }  # fmt: skip
    if found.reason:
        facts["not_counted"] = found.reason
    return combined(terms, gpu, facts)


def _launch(spec: KernelSpec, m: int) -> Launch:
    """Computed by the functions that emit the kernel, not from its text."""
    kernel = emit.emit_kernel(spec, ARCH)
    x, y, z = kernel.geometry.at(dict.fromkeys(spec.symbols, m))
    blocks, threads, shared = x * y * z, kernel.geometry.threads, kernel.geometry.shared
    weight, number = weight_of(spec.name, spec.operands[1]), signature.arch_number(ARCH)
    body = spec.body
    if isinstance(body, LinearKernel) and body.codes:
        return _integers(spec, m, Launch(blocks, threads, shared, 8, 0, y, True))
    if isinstance(body, LinearKernel) and body.m_class in ("1", "2-8"):
        shape = linear_fma.few_shape(spec, weight, mma=linear.decision_of(spec, ARCH).key == "few_mma")
        tokens = 8 if shape.mma else shape.rows
        return Launch(blocks, threads, shared, tokens, 16 * shape.depth, y, True)
    if isinstance(body, LinearKernel) and linear.decision_of(spec, ARCH).key == "wgmma":
        of = linear_wgmma.tile_for(linear_wgmma.tiles_of(spec, ARCH), m)
        along_m = -(-m // of.tokens)
        blocks = along_m * -(-body.n // of.rows)
        return Launch(blocks, threads, shared, of.tokens, 16 * (of.depth - 1), along_m, False, wgmma=True)
    if isinstance(body, LinearKernel):
        entries = linear_mma.held_entries(weight)
        tile = linear_mma.tile_of(body, weight.bits, SHARED_LIMIT[number], entries, number)
        return Launch(blocks, threads, shared, tile.tokens, 16 * tile.panels * tile.depth, x, False)
    assert isinstance(body, GroupedLinearKernel)
    if grouped_linear.decision_of(spec, ARCH).key == "mma":
        tile = linear_mma.ahead(
            grouped_mma.tile_for(body, SHARED_LIMIT[number]), weight.bits, linear_mma.held_entries(weight)
        )
        return Launch(blocks, threads, shared, tile.tokens, 16 * tile.panels * tile.depth, 1, False)
    return Launch(blocks, threads, shared, 8, 16 * linear_fma.RING, 1, True)


def _integers(spec: KernelSpec, m: int, few: Launch) -> Launch:
    """Of a product of rows of int8, given what it is for few rows. A kernel for any number of rows is launched with
    more blocks than the tile that it takes has use for."""
    body, weight = spec.body, weight_of(spec.name, spec.operands[1])
    assert isinstance(body, LinearKernel)
    each = 32 if weight.bits == 8 else 4 * weight.bits  # bytes of a lane in 64 columns of a panel
    if body.m_class in ("1", "2-8"):
        return replace(few, flight=each * int8_tile.few_tile(few.threads // 32).ahead)
    cases = linear_int8_tiles.cases_of(spec, ARCH)
    tile = next(case.tile for case in cases if case.most is None or m <= case.most)
    rows, flight = -(-m // tile.tokens), each * tile.panels * tile.ahead
    return Launch(rows * -(-body.n // tile.rows), few.threads, few.shared, tile.tokens, flight, rows, False)


def _products(spec: KernelSpec, launch: Launch) -> Fraction:
    """Products that a warp lane executes per weight: `mma` 16 x 8 x 16 over 32 lanes, for bytes 16 x 8 x 32; of a
    warpgroup 64 x tokens x 16."""
    if emit.emit_kernel(spec, ARCH).engine != "mma":
        return Fraction(launch.tokens)
    if launch.wgmma:  # 64 rows by 16 columns, over 128 lanes
        return Fraction(1, 8)
    codes = isinstance(spec.body, LinearKernel) and spec.body.codes
    known = isinstance(spec.body, LinearKernel) and isinstance(spec.body.m, int)
    sums = launch.tokens <= 8 and known and not codes and weight_of(spec.name, spec.operands[1]).late == "adds"
    return Fraction(launch.tokens * (2 if sums else 1), 128 if codes else 64)


def _spread(blocks: int, gpu: Gpu) -> tuple[float, int]:
    """(the fullest multiprocessor's share over the average, the number of multiprocessors with a block)."""
    return -(-blocks // gpu.multiprocessors) * gpu.multiprocessors / blocks, min(blocks, gpu.multiprocessors)


def _over(nbytes: int, rate: float, shares: Range) -> tuple[float, float]:
    return nbytes / (rate * shares.best), nbytes / (rate * shares.worst)


# --- the others ------------------------------------------------------------------------------------------------------

FLIGHT = Range(40, 24)
"""Bytes in flight per warp lane in kernels whose loops are not counted: about two loads of 16 bytes."""

TILED_ATTENTION = Range(0.40, 0.12)
"""The share of the data sheet's rate: flash attention by `mma.sync` reaches 35 to 40 % on an H100 (arXiv
2407.08608)."""


def _other(spec: KernelSpec, count: Counter, gpu: Gpu) -> Prediction:
    """Attention and norms: bytes, bytes in flight of the present blocks, operations on tensor cores."""
    kernel = emit.emit_kernel(spec, ARCH)
    x, y, z = kernel.geometry.at({})
    blocks, threads = x * y * z, kernel.geometry.threads
    nbytes, operations = bytes_moved(spec.operands, spec.body, {}), operations_of(spec.body, spec.operands, {})
    found = count(spec, 16, Fraction(1))
    held = blocks_per_multiprocessor(ARCH, threads, found.registers, kernel.geometry.shared) or 1
    uneven, busy = _spread(blocks, gpu)
    resident = min(held, -(-blocks // gpu.multiprocessors))
    terms: dict[str, tuple[float, float]] = {
        "fixed": (gpu.fixed.best, gpu.fixed.worst),
        "dram": _over(nbytes, gpu.copy, gpu.copy_share),
        "flight": (
            nbytes * gpu.latency.best / (busy * resident * threads * FLIGHT.best),
            nbytes * gpu.latency.worst / (busy * resident * threads * FLIGHT.worst),
        ),
    }
    if kernel.engine == "mma":
        terms["tensor"] = (
            uneven * operations / (gpu.tensor * TILED_ATTENTION.best),
            uneven * operations / (gpu.tensor * TILED_ATTENTION.worst),
        )
    facts = {"bytes": nbytes, "operations": operations, "blocks": blocks, "threads": threads, "blocks_per_sm": held}
    return combined(terms, gpu, facts)


def _torch_linear(cell: Cell, gpu: Gpu) -> Prediction:
    """cuBLAS: bytes at a copy's rate, operations at 45 to 80 % of the data sheet's rate."""
    nbytes = 2 * (cell.n * cell.k + cell.m * (cell.n + cell.k))
    operations = 2 * cell.m * cell.n * cell.k
    terms = {
        "fixed": (PEER_FIXED.best, PEER_FIXED.worst),
        "dram": _over(nbytes, gpu.copy, Range(0.95, 0.65)),
        "tensor": (operations / (gpu.tensor * PEER_BF16.best), operations / (gpu.tensor * PEER_BF16.worst)),
    }
    return combined(terms, gpu, {"bytes": nbytes, "operations": operations})


SMALL_LAUNCHES = 10
"""Small launches of a layer: rotary tables and rotations, norms, the two writes into the cache."""

SMALL = Range(1.2, 3.5)


def _layer(count: Counter, gpu: Gpu) -> Prediction:
    """The sum over a layer's launches; at best, streams hide half of the small ones."""
    shape = layer.FULL
    hidden, inner, keys = shape.hidden, shape.inner, shape.kv_heads * shape.dim
    linears = [(hidden, hidden, 2), (keys, hidden, 2), (inner, hidden, 2), (hidden, inner, 1)]
    parts = [(predict(Cell("linear", "nf4", n=n, k=k, m=1), count, gpu), times) for n, k, times in linears]
    parts.append((predict(Cell("attention_decode", "ours", n=shape.keys, m=1), count, gpu), 1))
    low = sum(each.low_us * times for each, times in parts if each is not None)
    high = sum(each.high_us * times for each, times in parts if each is not None)
    small = SMALL_LAUNCHES * SMALL.best / 2, SMALL_LAUNCHES * SMALL.worst
    attention = parts[-1][0]
    assert attention is not None
    terms = {
        "linears": (low - attention.low_us, high - attention.high_us),
        "attention": (attention.low_us, attention.high_us),
        "small launches": small,
    }
    bound = max(terms, key=lambda name: terms[name][0])
    return Prediction(low + small[0], high + small[1], bound, terms, {"launches": 8 + SMALL_LAUNCHES + 1})
