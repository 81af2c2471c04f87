"""Linears of many rows on Hopper's tensor cores: `linear` kernels of class "large" on sm_90a, over linear_wgmma.cuh.

The three pieces are those of linear_mma.py. A block's warpgroups multiply 64 rows of w each, and read x from a ring of
swizzled tiles in shared memory. `TILES` lists the sizes of a block; `tile_of` chooses by the sizes of the linear.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qcompiler.kernels.cuda import linear_statistics
from qcompiler.kernels.cuda.geometry import PAIR_TABLE, SHARED_LIMIT, CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.linear_finish import Finish, finish_of, linear_body
from qcompiler.kernels.cuda.linear_mma import CHUNK, SUM_PAD, held_entries, lookup_table
from qcompiler.kernels.cuda.signature import arch_number, signature
from qcompiler.kernels.cuda.weights import Weight, weight_of
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.linear import LinearKernel

PASS = 128
"""linear_wgmma.cuh's qw_shared::PASS. Emitted kernels assert the shared bytes computed here."""

ALIGNMENT = 1024
"""Bytes. The pattern of swizzled tiles repeats after eight rows of 128 bytes."""


@dataclass(frozen=True)
class Tile:
    """Template arguments of `qw_linear`.

    A block computes tokens x (64 * groups_n) outputs, and `groups_k` warpgroups split the columns. x passes through a
    ring of `stages` tiles, and registers hold `depth` chunks of weights: the present one and those ahead. `time` is
    what a block took on an H200 per 1000 columns, in microseconds, with 4-bit weights and one block per multiprocessor.
    """

    tokens: int
    groups_n: int
    groups_k: int
    stages: int
    depth: int
    time: float

    @property
    def threads(self) -> int:
        return 128 * self.groups_n * self.groups_k

    @property
    def rows(self) -> int:
        """Rows of w per block."""
        return 64 * self.groups_n

    @property
    def shared(self) -> int:
        """Bytes of shared memory, as in qw_shared."""
        ring = self.stages * self.tokens * CHUNK * self.groups_k * 2
        sums = self.groups_k * min(self.tokens, PASS) * (self.rows + SUM_PAD) * 4
        return max(ring, sums)

    @property
    def arguments(self) -> str:
        """Tokens, warpgroups along n and k, stages: the template arguments that decide the shared bytes."""
        return f"{self.tokens}, {self.groups_n}, {self.groups_k}, {self.stages}"


TALL = Tile(256, 1, 2, 3, 4, 8.5)
TILES = (Tile(256, 2, 1, 5, 4, 14.6), TALL, Tile(128, 1, 2, 4, 4, 6.6), Tile(64, 1, 4, 4, 4, 4.3))
"""The sizes of a block, the largest first. 64 x 256 sums take 128 registers of a thread, and two warpgroups the others.

A product of 64 x 256 x 16 takes 128 cycles and reads 8 KiB of x from shared memory, half of what it delivers.
"""

SHORT = Tile(64, 1, 2, 4, 4, 5.4)
"""The tile of few rows of x (`short_rows`) where their number is not known, beside `TALL` with as many threads."""

MULTIPROCESSORS = 132
"""Of an H100 and an H200 (SXM)."""

NORM_ROWS = 1024
"""Bytes that the values of a given norm take beyond what linear_statistics.py reserves: of 256 rows instead of 128."""


def tiles_of(spec: KernelSpec, arch: str) -> tuple[Tile, ...]:
    """The tiles of a kernel. For a known number of rows of x one, that of the shortest time. Else one for many rows, and
    before it one for up to `short_rows` of them, if that is more than the class begins with."""
    body, weight = linear_body(spec), weight_of(spec.name, spec.operands[1])
    room = SHARED_LIMIT[arch_number(arch)] - linear_statistics.reserved_by(spec) - PAIR_TABLE * weight.lookup
    fitting = tuple(tile for tile in TILES if tile.shared + NORM_ROWS <= room) or TILES[-1:]

    def time(tile: Tile, rows: int) -> float:
        blocks = -(-rows // tile.tokens) * -(-body.n // tile.rows)
        return -(-blocks // MULTIPROCESSORS) * tile.time

    if isinstance(body.m, int):
        rows = body.m
        return (ahead(min(fitting, key=lambda tile: time(tile, rows)), weight),)
    if TALL not in fitting:
        return (ahead(fitting[0], weight),)
    few = (SHORT,) if short_rows(body.n) > 64 else ()
    return tuple(ahead(tile, weight) for tile in (*few, TALL))


def short_rows(n: int) -> int:
    """The most rows of x for which blocks of `SHORT` all run at the same time."""
    return MULTIPROCESSORS // -(-n // SHORT.rows) * SHORT.tokens


def ahead(tile: Tile, weight: Weight) -> Tile:
    """The tile with its depth adapted to the weight: two chunks where four would take too many registers."""
    registers = min(255, 65536 // tile.threads) - tile.tokens // 2 - OTHER_REGISTERS
    words = tile.depth * (weight.bits + held_entries(weight))
    return tile if words <= registers else replace(tile, depth=2)


OTHER_REGISTERS = 60
"""Registers of a thread beside sums and prefetched words: fragments, addresses, what decoding keeps. Seen in compiled
kernels; tests see to it that none spills."""


def least_shared() -> int:
    """Bytes of shared memory of the smallest ring."""
    return min(tile.shared for tile in TILES) + NORM_ROWS


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """Text and geometry of a linear that `linear.decision_of` gives to this engine."""
    body, weight, tiles = linear_body(spec), weight_of(spec.name, spec.operands[1]), tiles_of(spec, arch)
    finish, memory, last = finish_of(spec), SharedMemory(), tiles[-1]
    memory.add("shared", "qw_aligned", max(tile.shared for tile in tiles) // ALIGNMENT, ALIGNMENT)
    if body.given is not None:
        linear_statistics.room(memory, spec, last.tokens, vectors=True)
    table = lookup_table(weight, memory, SHARED_LIMIT[arch_number(arch)], 1)
    notes = tuple(map(_note, tiles))
    lines = [
        *memory.declarations(),
        table,
        f"const auto finish = [&]({finish.arrays(finish.sums)}, int64_t m, int64_t n) QC_INLINED {{",
        f"    {finish.call_group(finish.sums, 'm', 'n')}",
        "};",
    ]
    before = ""
    if body.given is not None:
        before, notes = linear_statistics.definition(spec, in_pieces=True), (linear_statistics.note(spec), *notes)
        lines.append(linear_statistics.declaration(spec, in_pieces=True))
    if len(tiles) == 1:
        lines += _product(spec, weight, last, finish)
    else:
        few, many = (indent(_product(spec, weight, tile, finish)) for tile in tiles)
        lines += [f"if ({c_dim(body.m)} <= {short_rows(body.n)}) {{", *few, "} else {", *many, "}"]
    head = weight.definitions + before + finish.definition + signature(spec, last.threads, 1)
    text = "\n".join([header_comment(spec, *notes), head, *indent(lines), "}\n"])
    return CudaKernel(text, Geometry(_grid(body, tiles), (last.threads, 1, 1), memory.nbytes), "mma", notes)


def _product(spec: KernelSpec, weight: Weight, tile: Tile, finish: Finish) -> list[str]:
    """The statements of a block of one size."""
    body, (x, w) = linear_body(spec), spec.operands[:2]
    where = f"table, (const uint8_t*){identifier(w.name)}, {identifier(x.name)}, {c_dim(x.strides[0])}, {c_dim(body.m)}"
    arguments = f"{weight.struct}, {tile.arguments}, {tile.depth}, {finish.group}, {str(body.pairs).lower()}"
    function, norm = ("qw_linear", "") if body.given is None else ("qw_normed", "norm, ")
    lines = [
        f'static_assert(qw_shared<{tile.arguments}>::BYTES == {tile.shared}, "shared memory");',
        f"{function}<{arguments}>(",
        f"    {where}, {norm}shared, finish);",
    ]
    if body.statistics is not None:
        place = (f"(int64_t)token_block * {tile.tokens}", f"(int64_t)row_block * {tile.rows}")
        lines += [
            "uint32_t token_block, row_block;",
            "qm_block(token_block, row_block);",
            *linear_statistics.written(spec, tile.tokens, tile.rows, tile.threads, *place),
        ]
    return lines


def _note(tile: Tile) -> str:
    """For a comment."""
    return (
        f"M class large, wgmma: {tile.tokens} tokens x {tile.rows} rows of w per block of {tile.groups_n} x "
        f"{tile.groups_k} warpgroups; {tile.stages} stages of x in {tile.shared} bytes, {tile.depth - 1} chunks of w "
        "ahead"
    )


def _grid(body: LinearKernel, tiles: tuple[Tile, ...]) -> tuple[Dim, Dim, Dim]:
    """(blocks along m, along n, 1). With two tiles there are as many along m as either needs; some then return at
    once."""
    along_m = (dim(body.m) + (tiles[-1].tokens - 1)) // tiles[-1].tokens
    if len(tiles) > 1:
        short, most = tiles[0].tokens, short_rows(body.n)
        along_m = along_m.maximum(((dim(body.m) + (short - 1)) // short).minimum(most // short))
    return along_m.to_dim(), -(-body.n // tiles[-1].rows), 1

