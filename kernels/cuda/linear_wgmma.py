"""Linears of many rows on Hopper's tensor cores: `linear` kernels of class "large" on sm_90a, over linear_wgmma.cuh.

The three pieces are those of linear_mma.py. A block's warpgroups multiply 64 rows of w each, and read x from a ring of
swizzled tiles in shared memory. `TILES` lists the sizes of a block; `tiles_of` chooses by the sizes of the linear.
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
class Choice:
    """A tile of a kernel, for up to `most` rows of x (None: any number)."""

    tile: Tile
    most: int | None = None


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


LARGE, TALL = Tile(256, 2, 1, 5, 4, 14.6), Tile(256, 1, 2, 3, 4, 8.5)
TILES = (LARGE, TALL, Tile(128, 1, 2, 4, 4, 6.6), Tile(64, 1, 4, 4, 4, 4.3))
"""The sizes of a block, the largest first. 64 x 256 sums take 128 registers of a thread, and two warpgroups the others.

A product of 64 x 256 x 16 takes 128 cycles and reads 8 KiB of x from shared memory, half of what it delivers.
"""

SHORT = Tile(64, 1, 2, 4, 4, 5.4)
"""The smallest tile with as many threads as `LARGE` and `TALL`, beside which it serves where the number of rows of x is
not known."""

MULTIPROCESSORS = 132
"""Of an H100 and an H200 (SXM)."""

NORM_ROWS = 1024
"""Bytes that the values of a given norm take beyond what linear_statistics.py reserves: of 256 rows instead of 128."""


def tiles_of(spec: KernelSpec, arch: str) -> tuple[Choice, ...]:
    """The tiles of a kernel, each with the most rows of x that it serves; the last one serves any.

    For a known number of rows of x that is one tile, that of the shortest time. Else it is the largest one, and before
    it smaller ones of as many threads, as long as all their blocks run at the same time.
    """
    body, weight = linear_body(spec), weight_of(spec.name, spec.operands[1])
    room = SHARED_LIMIT[arch_number(arch)] - linear_statistics.reserved_by(spec) - PAIR_TABLE * weight.lookup
    fitting = tuple(tile for tile in TILES if tile.shared + NORM_ROWS <= room) or TILES[-1:]
    rows = body.m

    def time(tile: Tile) -> float:
        assert isinstance(rows, int)
        blocks = -(-rows // tile.tokens) * -(-body.n // tile.rows)
        return -(-blocks // MULTIPROCESSORS) * tile.time

    if isinstance(rows, int):
        return (Choice(ahead(min(fitting, key=time), weight)),)
    few, most = list[Choice](), LEAST_ROWS
    for tile in (each for each in (SHORT, TALL) if each.threads == fitting[0].threads):
        at_once = MULTIPROCESSORS // -(-body.n // tile.rows) * tile.tokens
        if at_once > most and (tile is SHORT or tile in fitting):
            few.append(Choice(ahead(tile, weight), at_once))
            most = at_once
    return (*few, Choice(ahead(fitting[0], weight)))


LEAST_ROWS = 64
"""Fewer rows of x have other kernels."""


def tile_for(choices: tuple[Choice, ...], m: int) -> Tile:
    """The tile that serves `m` rows of x."""
    return next(choice.tile for choice in choices if choice.most is None or m <= choice.most)


def ahead(tile: Tile, weight: Weight) -> Tile:
    """The tile with its depth adapted to the weight: two chunks where four would take too many registers."""
    registers = min(255, 65536 // tile.threads) - tile.tokens // 2 - OTHER_REGISTERS
    words = tile.depth * (weight.bits + held_entries(weight)) + PLANE_REGISTERS * (weight.bits.bit_count() - 1)
    return tile if words <= registers else replace(tile, depth=2)


OTHER_REGISTERS, PLANE_REGISTERS = 63, 16
"""Registers of a thread beside sums and prefetched words: fragments, addresses, what decoding keeps; and for each plane
of codes but the first. Seen in compiled kernels; tests see to it that none spills."""


def least_shared() -> int:
    """Bytes of shared memory of the smallest ring."""
    return min(tile.shared for tile in TILES) + NORM_ROWS


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """Text and geometry of a linear that `linear.decision_of` gives to this engine."""
    body, weight, choices = linear_body(spec), weight_of(spec.name, spec.operands[1]), tiles_of(spec, arch)
    tiles = [choice.tile for choice in choices]
    finish, memory, threads = finish_of(spec), SharedMemory(), tiles[-1].threads
    memory.add("shared", "qw_aligned", max(tile.shared for tile in tiles) // ALIGNMENT, ALIGNMENT)
    if body.given is not None:
        linear_statistics.room(memory, spec, max(tile.tokens for tile in tiles), vectors=True)
    table = lookup_table(weight, memory, SHARED_LIMIT[arch_number(arch)], 1)
    notes = tuple(map(_note, choices))
    lines = [
        *memory.declarations(),
        table,
        *finish.by_groups(),
    ]
    before = ""
    if body.given is not None:
        before, notes = linear_statistics.definition(spec, in_pieces=True), (linear_statistics.note(spec), *notes)
        lines.append(linear_statistics.declaration(spec, in_pieces=True))
    for choice in choices:
        product = _product(spec, weight, choice.tile, tiles[-1].rows // choice.tile.rows, finish)
        if choice.most is None:
            lines += product
        else:
            lines += [f"if ({c_dim(body.m)} <= {choice.most}) {{", *indent([*product, "return;"]), "}"]
    head = weight.definitions + before + finish.definition + signature(spec, threads, 1)
    text = "\n".join([header_comment(spec, *notes), head, *indent(lines), "}\n"])
    return CudaKernel(text, Geometry(_grid(body, choices), (threads, 1, 1), memory.nbytes), "mma", notes)


def _product(spec: KernelSpec, weight: Weight, tile: Tile, halves: int, finish: Finish) -> list[str]:
    """The statements of a block of one size, of which `halves` share a row of the grid."""
    body, (x, w) = linear_body(spec), spec.operands[:2]
    where = f"table, (const uint8_t*){identifier(w.name)}, {identifier(x.name)}, {c_dim(x.strides[0])}, {c_dim(body.m)}"
    arguments = f"{weight.struct}, {tile.arguments}, {tile.depth}, {halves}, {finish.group}, {str(body.pairs).lower()}"
    lines = [
        f'static_assert(qw_shared<{tile.arguments}>::BYTES == {tile.shared}, "shared memory");',
        f"qw_linear<{arguments}>(",
        f"    {where}, shared, finish{'' if body.given is None else ', norm'});",
    ]
    if body.statistics is not None:
        place = (f"(int64_t)token_block * {tile.tokens}", f"(int64_t)row_block * {tile.rows}")
        lines += [
            "uint32_t token_block, row_block;",
            f"qw_block<{halves}>(token_block, row_block);",
            *linear_statistics.written(spec, tile.tokens, tile.rows, tile.threads, *place),
        ]
    return lines


def _note(choice: Choice) -> str:
    """For a comment."""
    tile, most = choice.tile, "" if choice.most is None else f", up to {choice.most} rows of x"
    return (
        f"M class large, wgmma{most}: {tile.tokens} tokens x {tile.rows} rows of w per block of {tile.groups_n} x "
        f"{tile.groups_k} warpgroups; {tile.stages} stages of x in {tile.shared} bytes, {tile.depth - 1} chunks of w "
        "ahead"
    )


def _grid(body: LinearKernel, choices: tuple[Choice, ...]) -> tuple[Dim, Dim, Dim]:
    """(blocks along m, along n, 1). With several tiles there are as many as any of them needs; the others return at
    once."""
    last, m = choices[-1].tile, dim(body.m)
    along_m = (m + (last.tokens - 1)) // last.tokens
    for choice in choices[:-1]:
        assert choice.most is not None
        tokens, halves = choice.tile.tokens, last.rows // choice.tile.rows
        blocks = ((m + (tokens - 1)) // tokens).minimum(choice.most // tokens)
        along_m = along_m.maximum(blocks * halves)
    return along_m.to_dim(), -(-body.n // last.rows), 1
