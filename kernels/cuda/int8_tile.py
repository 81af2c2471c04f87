"""The tiles of int8_tiles.cuh: how the warps of a block share a product, and which tiles there are."""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.formats.integer_product import PIECE, IntegerProduct
from qcompiler.kernels.cuda.int8_product import engine_of, product_of
from qcompiler.kernels.cuda.weights import weight_of
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.linear import LinearKernel

CHUNK, PAD, SUM_PAD = 64, 16, 4
"""int8_tiles.cuh's QI_CHUNK, QI_PAD, QI_SUM_PAD. Emitted kernels assert the shared bytes computed here."""


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


Choice = tuple[Tile, ...]
"""Tiles in order of preference: the first that fits in shared memory is used."""

ONE_GROUP: dict[int, Choice] = {
    16: (Tile(2, 2, 1, 1, 8, 3),),
    32: (Tile(4, 2, 1, 1, 8, 3),),
    64: (Tile(8, 2, 1, 1, 8, 1), Tile(8, 1, 2, 1, 4, 1)),
}
"""By tokens, for up to 64 rows of x and rows of w that are one group. All have as many threads and rows of w, since a
kernel for any M holds one of each.

They keep 16 to 48 KiB of weights and as much of x under way per multiprocessor (an H200 needs about 25 KiB of the
former). 32 rows of w make 128 blocks for N = 4096.
"""

_UNSPLIT = Tile(2, 1, 2, 4, 1, 2)
GROUPED: dict[int, Choice] = {
    16: (Tile(2, 2, 1, 1, 8, 2), Tile(2, 1, 2, 1, 4, 2), _UNSPLIT),
    32: (Tile(4, 2, 1, 1, 8, 2), Tile(4, 1, 2, 1, 4, 2), Tile(2, 1, 2, 2, 2, 2), _UNSPLIT),
    64: (Tile(4, 2, 1, 2, 4, 2), Tile(4, 1, 2, 2, 2, 2), _UNSPLIT),
}
"""The same for groups with scales. Terms that warps hand over take shared memory and its bandwidth: the more tokens,
the fewer warps share the columns."""

LARGE_ONE: tuple[Choice, ...] = (
    (Tile(8, 2, 2, 1, 4, 2), Tile(4, 2, 2, 2, 2, 2)), (Tile(16, 1, 8, 1, 1, 2),), (Tile(16, 2, 8, 1, 1, 1),),
)  # fmt: skip
LARGE_GROUPED: tuple[Choice, ...] = (
    (Tile(4, 2, 2, 2, 2, 2), Tile(4, 1, 4, 2, 1, 2)), (Tile(8, 2, 4, 2, 1, 2),),
)  # fmt: skip
LARGE_SMALL_GROUPS: tuple[Choice, ...] = (
    (Tile(4, 2, 2, 2, 2, 2), Tile(4, 1, 4, 2, 1, 2)), (Tile(8, 2, 4, 2, 1, 1),),
)  # fmt: skip
LARGE_AFFINE: tuple[Choice, ...] = (
    (Tile(8, 2, 2, 1, 2, 1), Tile(4, 1, 4, 1, 1, 2)), (Tile(8, 2, 4, 1, 1, 1),),
)  # fmt: skip
"""For more rows of x, ever larger tiles: for rows of one group, for groups of chunks, for smaller groups, and for those
that also need sums of x. The largest that makes MIN_BLOCKS blocks is used, else the first. Tiles of a table have as
many threads."""


SPILLS = (75, 120)
"""Architectures for which ptxas spills with the larger tile of groups of 16 (q6_K), or of groups that need sums of x
(q4_K on sm_120)."""


SPILLS_BESIDE = (80, 4)
"""The architecture, and the groups of a chunk (q6_K), for which ptxas spills 16 bytes where a kernel for any number of
rows has the larger tile beside the smaller one."""


def few_rows(groups: Groups) -> dict[int, Choice]:
    """The table for up to 64 rows of x."""
    return ONE_GROUP if groups.one else GROUPED


def many_rows(groups: Groups, arch: int, rows: Dim) -> tuple[Choice, ...]:
    """The table for more `rows` of x, on an architecture."""
    if groups.one:
        return LARGE_ONE
    table = LARGE_AFFINE if groups.runs else LARGE_SMALL_GROUPS if groups.in_chunk > 1 else LARGE_GROUPED
    beside = not isinstance(rows, int) and (arch, groups.in_chunk) == SPILLS_BESIDE
    return table[:1] if beside or (arch in SPILLS and table is not LARGE_GROUPED) else table


def fitting(choice: Choice, groups: Groups, limit: int) -> Tile:
    """The first tile that fits in `limit` bytes of shared memory."""
    return next(tile for tile in choice if tile.shared(groups) <= limit)


ALONE: dict[Tile, Tile] = {
    Tile(16, 1, 8, 1, 1, 2): Tile(8, 2, 4, 1, 1, 2),
    Tile(8, 2, 4, 2, 1, 2): Tile(8, 2, 4, 1, 1, 2),
    Tile(8, 2, 4, 2, 1, 1): Tile(8, 2, 4, 1, 1, 1),
}
"""What replaces a tile in a kernel that has no other, and whose blocks may therefore have fewer threads: two of them
share a multiprocessor, and one multiplies while the other waits at its barrier."""

FEW_AHEAD = 2
"""Steps under way for up to eight rows of x: with eight warps, 16 KiB of bytes, or 8 KiB of 4-bit codes, per block, of
which three or four share a multiprocessor."""


def few_tile(warps: int) -> Tile:
    """The tile for up to eight rows of x: a panel, whose columns `warps` warps share."""
    return Tile(1, 1, 1, 1, warps, FEW_AHEAD)


RESERVED = 4096
"""Bytes of shared memory for the scales and sums of rows, and the places of windows."""


def takes(spec: KernelSpec, arch: str, cols: int) -> bool:
    """Whether tiles serve a product of rows of `cols` int8 on `arch`. Windows of an image are looked up code by code
    where 16 does not divide the channels; tiles would unroll too much of that."""
    if engine_of(arch) != "mma" or (isinstance(spec.body, LinearKernel) and spec.body.window is not None):
        return False
    group = product_of(spec).columns(cols)
    return cols <= group or group in (PIECE, CHUNK // 2) or group % CHUNK == 0


def groups_of(spec: KernelSpec) -> Groups:
    """How a linear's groups lie in chunks."""
    product, weight = product_of(spec), weight_of(spec.name, spec.operands[1])
    counts = product.intercept is not None or product.offset_of(weight.bits) != 0
    return Groups.of(product, weight.cols, counts=counts)
