"""Linears of many rows on Hopper's tensor cores: `linear` kernels of class "large" on sm_90a, over linear_wgmma.cuh.

The three pieces are those of linear_mma.py. A block's warpgroups multiply 64 rows of w each, and read x from a ring of
swizzled tiles in shared memory. `TILES` lists the sizes of a block; `tile_of` chooses by the sizes of the linear.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qcompiler.kernels.cuda import linear_statistics
from qcompiler.kernels.cuda.geometry import SHARED_LIMIT, CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.linear_finish import finish_of, linear_body
from qcompiler.kernels.cuda.linear_mma import CHUNK, REGISTERS, SUM_PAD, held_entries, lookup_table
from qcompiler.kernels.cuda.signature import arch_number, signature
from qcompiler.kernels.cuda.weights import Weight, weight_of
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.linear import LinearKernel

PASS = 64
"""linear_wgmma.cuh's qw_shared::PASS. Emitted kernels assert the shared bytes computed here."""

ALIGNMENT = 1024
"""Bytes. The pattern of swizzled tiles repeats after eight rows of 128 bytes."""


@dataclass(frozen=True)
class Tile:
    """Template arguments of `qw_linear`.

    A block computes tokens x (64 * groups_n) outputs, and `groups_k` warpgroups split the columns. x passes through a
    ring of `stages` tiles, and `depth` chunks of weights are prefetched into registers.
    """

    tokens: int
    groups_n: int
    groups_k: int
    stages: int
    depth: int

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


TILES = (Tile(256, 2, 1, 4, 1), Tile(128, 2, 1, 6, 2), Tile(128, 1, 2, 4, 2), Tile(64, 1, 4, 4, 2))
"""The sizes of a block, the largest first. 64 x 256 sums take 128 registers of a thread, and two warpgroups the others.

A product of 64 x 256 x 16 takes 128 cycles and reads 8 KiB of x from shared memory, half of what it delivers.
"""

MULTIPROCESSORS = 132
"""Of an H100 and an H200 (SXM)."""

PRODUCTS, BYTES = 2048, 40
"""Per clock and multiprocessor: products of 16-bit floats, and bytes from L2, of which all multiprocessors together get
about 6 TB/s."""

LIKELY_ROWS = 512
"""Rows of x that a kernel for any number of them is made for."""


def tile_of(body: LinearKernel, bits: int, entries: int = 1) -> Tile:
    """The tile for a linear whose weight stores `bits` bits per element, of which a lane keeps `entries` entries per
    chunk: that of the shortest time by products and bytes."""
    rows = body.m if isinstance(body.m, int) else LIKELY_ROWS

    def cycles(tile: Tile) -> float:
        blocks = -(-rows // tile.tokens) * -(-body.n // tile.rows)
        products, moved = tile.tokens * tile.rows, 2 * tile.tokens + bits * tile.rows / 8
        return -(-blocks // MULTIPROCESSORS) * max(products / PRODUCTS, moved / BYTES)

    tile = min(TILES, key=cycles)
    reach = tile.depth * REGISTERS // (3 * (bits + entries))
    return replace(tile, depth=max(1, min(tile.depth * 4 // bits, reach)))


def least_shared() -> int:
    """Bytes of shared memory of the largest ring, for any number of rows."""
    return max(tile.shared for tile in TILES)


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """Text and geometry of a linear that `linear.decision_of` gives to this engine."""
    body, (x, w) = linear_body(spec), spec.operands[:2]
    weight = weight_of(spec.name, w)
    tile = tile_of(body, weight.bits, held_entries(weight))
    finish, memory = finish_of(spec), SharedMemory()
    memory.add("shared", "qw_aligned", tile.shared // ALIGNMENT, ALIGNMENT)
    if body.given is not None:
        linear_statistics.room(memory, spec, tile.tokens, vectors=True)
    table = lookup_table(weight, memory, SHARED_LIMIT[arch_number(arch)], 1)
    grid = (_blocks(body.m, tile.tokens), -(-body.n // tile.rows), 1)
    note = (
        f"M class {body.m_class}, wgmma: {tile.tokens} tokens x {tile.rows} rows of w per block of {tile.groups_n} x "
        f"{tile.groups_k} warpgroups; {tile.stages} stages of x in {tile.shared} bytes, {tile.depth} chunks of w ahead"
    )
    where = f"table, (const uint8_t*){identifier(w.name)}, {identifier(x.name)}, {c_dim(x.strides[0])}, {c_dim(body.m)}"
    arguments = f"{weight.struct}, {tile.arguments}, {tile.depth}, {finish.group}, {str(body.pairs).lower()}"
    lines = [
        f'static_assert(qw_shared<{tile.arguments}>::BYTES == {tile.shared}, "shared memory");',
        *memory.declarations(),
        table,
        f"const auto finish = [&]({finish.arrays(finish.sums)}, int64_t m, int64_t n) QC_INLINED {{",
        f"    {finish.call_group(finish.sums, 'm', 'n')}",
        "};",
    ]
    before, notes = "", [note]
    if body.given is not None:
        before, notes = linear_statistics.definition(spec, in_pieces=True), [linear_statistics.note(spec), note]
        lines.append(linear_statistics.declaration(spec, in_pieces=True))
        lines += [f"qw_normed<{arguments}>(", f"    {where}, norm, shared, finish);"]
    else:
        lines += [f"qw_linear<{arguments}>(", f"    {where}, shared, finish);"]
    if body.statistics is not None:
        place = (f"(int64_t)token_block * {tile.tokens}", f"(int64_t)row_block * {tile.rows}")
        lines += [
            "uint32_t token_block, row_block;",
            "qm_block(token_block, row_block);",
            *linear_statistics.written(spec, tile.tokens, tile.rows, tile.threads, *place),
        ]
    head = weight.definitions + before + finish.definition + signature(spec, tile.threads, 1)
    text = "\n".join([header_comment(spec, *notes), head, *indent(lines), "}\n"])
    return CudaKernel(text, Geometry(grid, (tile.threads, 1, 1), memory.nbytes), "mma", tuple(notes))


def _blocks(m: Dim, tokens: int) -> Dim:
    return ((dim(m) + (tokens - 1)) // tokens).to_dim()
