"""Linears on tensor cores: `linear` kernels for 9 or more rows of x, over linear_mma.cuh.

A kernel becomes three pieces of CUDA C++: a struct that describes the weight (weights.py), a function that finishes an
element (bias, epilogue, one rounding), and the kernel, which instantiates `qm_linear` with the tile chosen here.

    "9-64"    16, 32 or 64 tokens; the columns of a block are split over its warps
    "large"   128 tokens by 128 rows of w, no split; smaller tiles if the output has few such tiles
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qcompiler.kernels.cuda import linear_statistics
from qcompiler.kernels.cuda.geometry import MIN_BLOCKS, PAIR_TABLE, SHARED_LIMIT, CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.im2col import PLACE_BYTES, declaration
from qcompiler.kernels.cuda.linear_finish import finish_of, linear_body
from qcompiler.kernels.cuda.signature import arch_number, signature
from qcompiler.kernels.cuda.weights import Weight, weight_of
from qcompiler.kernels.layouts.panels import LANES as PANEL
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.linear import LinearKernel

CHUNK, PAD, SUM_PAD, PASS = 64, 8, 4, 32
"""linear_mma.cuh's QM_CHUNK, QM_PAD, QM_SUM_PAD, QM_PASS. Emitted kernels assert the shared bytes computed here."""


# --- tiles ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """Template arguments of `qm_linear`: what a block computes and how its warps share it.

    A block computes tokens x (16 * panels * warps_n) outputs. `warps_k` warps split the columns. x passes through a
    ring of `stages` tiles, and `depth` chunks of weights are prefetched into registers.
    """

    tokens: int
    warps_n: int
    warps_k: int
    panels: int
    stages: int
    depth: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_k

    @property
    def rows(self) -> int:
        """Rows of w per block."""
        return PANEL * self.panels * self.warps_n

    @property
    def shared(self) -> int:
        """Bytes of shared memory, as in qm_shared."""
        ring = self.stages * self.tokens * (CHUNK * self.warps_k + PAD) * 2
        sums = self.warps_k * min(self.tokens, PASS) * (self.rows + SUM_PAD) * 4
        return max(ring, sums)

    def resident(self, limit: int, *, straddles: bool) -> int:
        """Minimum blocks per multiprocessor, which limits registers. `limit` is the multiprocessor's shared memory.

        Two if the rings fit and 65536 registers suffice: not for 256 threads with more than 16 tokens, nor if blocks
        straddle rows. One is stated explicitly, too: without it ptxas aims at more blocks than shared memory allows,
        and spills on sm_75.
        """
        small = self.threads <= 128 or (self.tokens <= 16 and not straddles)
        return 2 if small and 2 * self.shared <= limit else 1

    @property
    def arguments(self) -> str:
        """Tokens, warps along n and k, panels, stages: the template arguments that decide the shared bytes."""
        return f"{self.tokens}, {self.warps_n}, {self.warps_k}, {self.panels}, {self.stages}"


SMALL_M_TILES: dict[int, tuple[Tile, ...]] = {
    16: (Tile(16, 1, 8, 2, 3, 3), Tile(16, 1, 4, 2, 3, 3)),
    32: (Tile(32, 1, 8, 2, 3, 3), Tile(32, 1, 4, 2, 3, 3)),
    64: (Tile(64, 1, 8, 2, 2, 3), Tile(64, 2, 4, 1, 3, 3), Tile(64, 2, 2, 1, 3, 3)),
}
"""Tiles of class "9-64" by tokens. The first whose ring fits the architecture's shared memory is used.

Bandwidth decides here. Eight warps with 16 * panels * depth = 64 to 128 bytes in flight per lane keep 16 to 32 KiB in
flight per block (an H200 needs about 25 KiB per multiprocessor: 4.8 TB/s times 700 ns, over 132 multiprocessors). 32
rows of w per block make 128 blocks for N = 4096. Up to 32 tokens, a warp reads the columns of its x once for two
panels. At 64 tokens that tile of x would not fit, and two warps share the columns instead.
"""

LARGE = Tile(128, 4, 1, 2, 3, 1)
"""Each warp computes 32 x 128 outputs (128 accumulators): every fragment of x serves two products, and every weight is
decoded once per block. With a ring of 55 KiB, two blocks share a multiprocessor."""

LARGE_SPLIT = Tile(64, 2, 2, 2, 3, 1)
"""For outputs with few 128 x 128 tiles: 64 x 64 outputs, and the columns split in two."""

REGISTERS = 18
"""Prefetched words of codes and entries per lane and panel: three chunks of 4 bits with two entries."""


SPILL_BITS, SPILL_ARCH = 6, 100
"""The code bits for which the large tile has no register left, and the architecture (sm_100) from which on ptxas then
spills: two planes, of 4 and 2 bits, and 128 sums."""


def tile_of(body: LinearKernel, bits: int, limit: int, entries: int = 1, arch: int = 0) -> Tile:
    """The tile for a linear whose weight stores `bits` bits per element, with `limit` bytes of shared memory per
    block."""
    tile = _tile_of(body, limit)
    if tile == LARGE and bits == SPILL_BITS and arch >= SPILL_ARCH:
        tile = LARGE_SPLIT
    return ahead(tile, bits, entries)


def ahead(tile: Tile, bits: int, entries: int) -> Tile:
    """The tile with its depth adapted to a weight of `bits` bits, of which a lane keeps `entries` entries per panel and
    chunk.

    The depths above are for 4 bits and up to two entries. Other weights prefetch the same number of bytes, as far as
    the registers allow.
    """
    reach = tile.depth * REGISTERS // (3 * (bits + entries))
    return replace(tile, depth=max(1, min(tile.depth * 4 // bits, reach)))


def _tile_of(body: LinearKernel, limit: int) -> Tile:
    known = body.m if isinstance(body.m, int) else None
    if body.m_class == "large":
        blocks = -(-body.n // LARGE.rows) * -(-(known or 512) // LARGE.tokens)
        return LARGE if blocks >= MIN_BLOCKS or (known is None and body.n >= 32 * LARGE.rows) else LARGE_SPLIT
    tokens = next((t for t in sorted(SMALL_M_TILES) if known is not None and known <= t), max(SMALL_M_TILES))
    return few_tile(tokens, limit - places_bytes(body, tokens))


def few_tile(tokens: int, limit: int) -> Tile:
    """The first tile for this many tokens whose ring fits `limit` bytes."""
    return next(tile for tile in SMALL_M_TILES[tokens] if tile.shared <= limit)


def places_bytes(body: LinearKernel, tokens: int) -> int:
    """Shared memory before the ring: the positions of the block's im2col windows, if x is an image."""
    return 0 if body.window is None else -(-tokens * PLACE_BYTES // 128) * 128


def least_shared(m_class: str, *, windows: bool) -> int:
    """Bytes of shared memory of the smallest tile of an M class, for any M."""
    tiles = [min(each, key=lambda tile: tile.shared) for each in SMALL_M_TILES.values()]
    most = max((LARGE, LARGE_SPLIT) if m_class == "large" else tiles, key=lambda tile: tile.shared)
    return most.shared + (-(-most.tokens * PLACE_BYTES // 128) * 128 if windows else 0)


# --- the weight -------------------------------------------------------------------------------------------------------


def takes(weight: Weight) -> bool:
    """Whether the weight's groups of entries align with linear_mma.cuh's chunks: see its `qm_groups`."""
    if weight.storage != "codes":
        return weight.storage == "values"
    if weight.straddles:
        return weight.covers >= CHUNK // 2 and weight.covers & (weight.covers - 1) == 0
    whole = weight.covers >= weight.cols or weight.covers % CHUNK == 0
    return whole or weight.covers in (CHUNK // 2, CHUNK // 4)


def held_entries(weight: Weight) -> int:
    """Entries that a lane keeps per panel and chunk: `qm_groups::held` times the fields."""
    if weight.storage != "codes":
        return 0
    many = weight.covers < (CHUNK if weight.straddles else min(CHUNK // 2, weight.cols))
    return weight.fields * (2 if many else 1)


# --- the kernel -------------------------------------------------------------------------------------------------------


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """Text and geometry of a linear that `linear.engine_of` gives to tensor cores."""
    body, (x, w) = linear_body(spec), spec.operands[:2]
    weight = weight_of(spec.name, w)
    limit, entries = SHARED_LIMIT[arch_number(arch)], held_entries(weight)
    reserved = linear_statistics.reserved_by(spec)
    tile = tile_of(body, weight.bits, limit - reserved, entries, arch_number(arch))
    finish = finish_of(spec)
    memory = SharedMemory()
    if body.window is not None:
        memory.add("places", "qc_window_place", tile.tokens, PLACE_BYTES)
    memory.add("shared", "uint4", tile.shared // 16, 16)
    if body.given is not None:
        linear_statistics.room(memory, spec, tile.tokens, vectors=True)
    blocks = tile.resident(limit - 2 * reserved, straddles=weight.straddles or entries > 2)
    table = lookup_table(weight, memory, limit, blocks)
    grid = (_blocks(body.m, tile.tokens), -(-body.n // tile.rows), 1)
    geometry = Geometry(grid, (tile.threads, 1, 1), memory.nbytes)
    note = (
        f"M class {body.m_class}, mma: {tile.tokens} tokens x {tile.rows} rows of w per block of {tile.warps_n} x "
        f"{tile.warps_k} warps; {tile.stages} stages of x in {tile.shared} bytes, {tile.depth} chunks of w ahead"
    )
    where = f"table, (const uint8_t*){identifier(w.name)}, {identifier(x.name)}"
    arguments = f"{weight.struct}, {tile.arguments}, {tile.depth}, {finish.group}"
    lines = [
        *tile_declarations(tile, memory, table),
        *finish.by_groups(),
    ]
    before, notes = "", [note]
    if body.given is not None:
        before, notes = linear_statistics.definition(spec, in_pieces=True), [linear_statistics.note(spec), note]
        lines += [
            linear_statistics.declaration(spec, in_pieces=True),
            f"qm_normed<{arguments}, {str(body.pairs).lower()}>(",
            f"    {where}, {c_dim(x.strides[0])}, {c_dim(body.m)}, norm, shared, finish);",
        ]
    elif body.window is None:
        lines += [
            f"qm_linear<{arguments}, {str(body.pairs).lower()}>(",
            f"    {where}, {c_dim(x.strides[0])}, {c_dim(body.m)}, shared, finish);",
        ]
    else:
        lines += [
            declaration(x, body.window),
            f"qm_windows<{arguments}>(",
            f"    {where}, window, {c_dim(body.m)}, places, shared, finish);",
        ]
    if body.statistics is not None:
        place = (f"(int64_t)token_block * {tile.tokens}", f"(int64_t)row_block * {tile.rows}")
        lines += [
            "uint32_t token_block, row_block;",
            "qm_block(token_block, row_block);",
            *linear_statistics.written(spec, tile.tokens, tile.rows, tile.threads, *place),
        ]
    head = weight.definitions + before + finish.definition + signature(spec, tile.threads, blocks)
    text = "\n".join([header_comment(spec, *notes), head, *indent(lines), "}\n"])
    return CudaKernel(text, geometry, "mma", tuple(notes))


def lookup_table(weight: Weight, memory: SharedMemory, limit: int, blocks: int) -> str:
    """The declaration of `table`: of pairs of codes, if `blocks` blocks per multiprocessor have room for one each.

    A lookup of two codes is then a shift, an and-or and a load. With the table in warp lanes, each code is a shift and
    a shuffle.
    """
    if not weight.lookup:
        return "const qc_no_table table;"
    if blocks * (memory.nbytes + 128 + PAIR_TABLE + 1024) <= limit + 1024:
        memory.add("pairs", "float2", 256 * 16, 8)
        return "const qc_table256 table = qc_pairs(pairs);"
    return lane_table(weight)


def lane_table(weight: Weight) -> str:
    """The declaration of `table`, held in the lanes of a warp."""
    if not weight.lookup:
        return "const qc_no_table table;"
    return f"const qc_lane_table table = {{{weight.struct}::code_value(threadIdx.x % 16)}};"


def tile_declarations(tile: Tile, memory: SharedMemory, table: str) -> list[str]:
    """The start of a kernel: its shared memory, and the table of 16 values."""
    return [
        f'static_assert(qm_shared<{tile.arguments}>::BYTES == {tile.shared}, "shared memory");',
        *memory.declarations(),
        table,
    ]


def _blocks(m: Dim, tokens: int) -> Dim:
    return ((dim(m) + (tokens - 1)) // tokens).to_dim()
