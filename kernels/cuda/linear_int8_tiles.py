"""Linears of nine rows of int8 and more, on tensor cores that multiply bytes: the tiles of int8_tiles.cuh.

    "9-64"     16, 32 or 64 tokens by 32 rows of w. Warps share the columns where rows are one group; where groups have
               scales, they do so up to 32 tokens
    "large"    128 tokens by 256 or 128 rows of w, or 64 by 64 where these would be few blocks

A kernel for any number of rows up to 64 has all three tiles of its class and takes one of them when it starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.formats.integer_product import PIECE, IntegerProduct
from qcompiler.kernels.cuda.geometry import SHARED_LIMIT, CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.linear_finish import finish_of, linear_body
from qcompiler.kernels.cuda.linear_int8 import RowsOfX, definitions_of, engine_of, product_of, struct_name
from qcompiler.kernels.cuda.signature import arch_number, signature
from qcompiler.kernels.cuda.weights import weight_of
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.linear import LinearKernel

CHUNK, PAD, SUM_PAD = 64, 16, 4
"""int8_tiles.cuh's QI_CHUNK, QI_PAD, QI_SUM_PAD. Emitted kernels assert the shared bytes computed here."""

MIN_BLOCKS = 96
"""With fewer blocks than this, a GPU of 108 to 148 multiprocessors is mostly idle."""


@dataclass(frozen=True)
class Groups:
    """What tiles ask of a product: whether rows are one group, groups that end in a chunk, sums of x staged of each."""

    one: bool
    in_chunk: int
    runs: int

    @classmethod
    def of(cls, product: IntegerProduct, cols: int, *, counts: bool) -> Groups:
        """`counts`: whether terms need sums of the codes of x."""
        group = product.columns(cols)
        one = cols <= group
        in_chunk = 1 if one else max(1, CHUNK // group)
        return cls(one, in_chunk, 0 if one or not counts else max(2, in_chunk))


@dataclass(frozen=True)
class Tile:
    """Template arguments of `qi_tile`: a warp has 16 * `panels` rows of w by 8 * `blocks` tokens; `wn` warps lie along
    the rows of w, `wt` along the tokens, `wk` along the columns. `ahead` steps are under way in registers."""

    blocks: int
    panels: int
    wn: int
    wt: int
    wk: int
    ahead: int

    @property
    def threads(self) -> int:
        return 32 * self.wn * self.wt * self.wk

    @property
    def tokens(self) -> int:
        return 8 * self.blocks * self.wt

    @property
    def rows(self) -> int:
        """Rows of w per block."""
        return 16 * self.panels * self.wn

    def shared(self, groups: Groups) -> int:
        """Bytes of shared memory, as in qi_tile_shared."""
        elements, splits = self.rows * self.tokens, self.wk > 1
        loop = 2 * self.tokens * (CHUNK * self.wk + PAD) + 2 * self.tokens * self.wk * groups.runs * 4
        if splits and not groups.one:
            loop += 2 * self.wk * groups.in_chunk * elements * 4
        sums = self.wk * elements * 4 if splits and groups.one else 0
        stored = 8 * (self.blocks if splits else 2) * self.wt * (self.rows + SUM_PAD) * 4
        return max(loop, sums, stored)

    @property
    def arguments(self) -> str:
        return f"{self.blocks}, {self.panels}, {self.wn}, {self.wt}, {self.wk}, {self.ahead}"


ONE_GROUP: dict[int, tuple[Tile, ...]] = {
    16: (Tile(2, 2, 1, 1, 8, 3),),
    32: (Tile(4, 2, 1, 1, 8, 2),),
    64: (Tile(8, 2, 1, 1, 8, 1), Tile(8, 1, 2, 1, 4, 1)),
}
"""Tiles of class "9-64" by tokens, for rows that are one group. The first that fits in shared memory is used.

All have 256 threads and as many rows of w, since a kernel for any M holds one of each.

They keep 16 to 48 KiB of weights and as much of x under way per multiprocessor (an H200 needs about 25 KiB of the
former). 32 rows of w make 128 blocks for N = 4096.
"""

UNSPLIT = Tile(2, 1, 2, 4, 1, 2)
GROUPED: dict[int, tuple[Tile, ...]] = {
    16: (Tile(2, 2, 1, 1, 8, 2), Tile(2, 1, 2, 1, 4, 2), UNSPLIT),
    32: (Tile(4, 2, 1, 1, 8, 2), Tile(4, 1, 2, 1, 4, 2), Tile(2, 1, 2, 2, 2, 2), UNSPLIT),
    64: (UNSPLIT,),
}
"""The same for groups with scales. Terms that warps hand over cost shared memory and its bandwidth: at 64 tokens, warps
share the weight's rows and the tokens instead."""

LARGE_ONE = (Tile(16, 2, 8, 1, 1, 1), Tile(8, 2, 4, 2, 1, 1), Tile(4, 2, 2, 2, 2, 1))
LARGE_GROUPED = (Tile(8, 2, 4, 2, 1, 1), Tile(4, 1, 4, 2, 1, 2))
LARGE_AFFINE = (Tile(8, 1, 8, 1, 1, 1), Tile(4, 1, 4, 2, 1, 2))
"""Tiles of class "large", the largest first. The first that makes MIN_BLOCKS blocks is used, else the last."""


def takes(spec: KernelSpec, arch: str) -> bool:
    """Whether tiles serve a linear of rows of int8 on `arch`."""
    body = linear_body(spec)
    if engine_of(arch) != "mma" or body.m_class not in ("9-64", "large") or body.rows is not None:
        return False
    group = product_of(spec).columns(body.k)
    return body.k <= group or group in (PIECE, CHUNK // 2) or group % CHUNK == 0


def tiles_of(spec: KernelSpec, arch: str) -> tuple[Tile, ...]:
    """The tiles of a kernel, for ever more tokens: one, unless it takes any number of rows up to 64."""
    body, groups, limit = linear_body(spec), groups_of(spec), SHARED_LIMIT[arch_number(arch)] - RESERVED
    if body.m_class == "large":
        return (_large(body, groups),)
    table = ONE_GROUP if groups.one else GROUPED
    sizes = [size for size in sorted(table) if not isinstance(body.m, int) or body.m <= size]
    if isinstance(body.m, int):
        sizes = sizes[:1]
    fitting = (next(tile for tile in table[size] if tile.shared(groups) <= limit) for size in sizes)
    return tuple(dict.fromkeys(fitting))


RESERVED = 4096
"""Bytes of shared memory for the scales and sums of rows, and the places of windows."""


def groups_of(spec: KernelSpec) -> Groups:
    """How a linear's groups lie in chunks."""
    product, weight = product_of(spec), weight_of(spec.name, spec.operands[1])
    counts = product.intercept is not None or product.offset_of(weight.bits) != 0
    return Groups.of(product, weight.cols, counts=counts)


def _large(body: LinearKernel, groups: Groups) -> Tile:
    tiles = LARGE_ONE if groups.one else LARGE_AFFINE if groups.runs else LARGE_GROUPED
    known = body.m if isinstance(body.m, int) else None
    if known is None:
        return next(tile for tile in tiles if tile.rows <= 128 and (body.n >= 32 * tile.rows or tile is tiles[-1]))
    enough = (tile for tile in tiles if -(-known // tile.tokens) * -(-body.n // tile.rows) >= MIN_BLOCKS)
    return next(enough, tiles[-1])


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """Text and geometry. KernelSelectionError for unsupported operands."""
    body, weight, groups, tiles = linear_body(spec), weight_of(spec.name, spec.operands[1]), groups_of(spec), tiles_of(spec, arch)
    last, memory, finish = tiles[-1], SharedMemory(), finish_of(spec)
    x = RowsOfX(spec, None, "m0", last.tokens)
    x.room(memory)
    memory.add("shared", "uint8_t", max(tile.shared(groups) for tile in tiles), 1)
    memory.add("scales", "float", last.tokens, 4)
    memory.add("row_ones", "int", last.tokens, 4)
    struct = struct_name(spec)
    lines = [
        *memory.declarations(),
        "uint32_t token_block, row_block;",
        "qm_block(token_block, row_block);",
        f"const int64_t m0 = (int64_t)token_block * {last.tokens}, n0 = (int64_t)row_block * {last.rows};",
        f"const auto finish = [&]({finish.arrays(finish.sums)}, int64_t m, int64_t n) QC_INLINED {{",
        f"    {finish.call_group(finish.sums, 'm', 'n')}",
        "};",
        *x.statements(),
    ]
    notes = []
    for i, tile in enumerate(tiles):
        given = f"(const uint8_t*){identifier(spec.operands[1].name)}, {x.rows}, {c_dim(body.m)}, m0, n0"
        call = [
            f"typedef qi_tile<{tile.arguments}> tile;",
            f'static_assert(qi_tile_shared<{struct}, tile>::BYTES == {tile.shared(groups)}, "shared memory");',
            f"qi_linear_tiles<{struct}, tile, {finish.group}>(",
            f"    {given}, shared, scales, row_ones, finish{x.make});",
        ]
        if len(tiles) > 1:
            head = "} else {" if tile is last else f"{'} else ' if i else ''}if ({c_dim(body.m)} <= {tile.tokens}) {{"
            call = [head, *indent(call), *(["}"] if tile is last else [])]
        lines += call
        notes.append(
            f"M class {body.m_class}, int8 mma: {tile.tokens} tokens x {tile.rows} rows of w per block of {tile.wn} x "
            f"{tile.wt} x {tile.wk} warps, {tile.ahead} steps ahead; {tile.shared(groups)} bytes of shared memory"
        )
    geometry = Geometry((_blocks(body.m, last.tokens), -(-body.n // last.rows), 1), (last.threads, 1, 1), memory.nbytes)
    opened = definitions_of(spec, weight) + signature(spec, last.threads, 1)
    text = "\n".join([header_comment(spec, *notes), opened, *indent(lines), "}\n"])
    return CudaKernel(text, geometry, "mma", tuple(notes))


def _blocks(m: Dim, tokens: int) -> Dim:
    return ((dim(m) + (tokens - 1)) // tokens).to_dim()
