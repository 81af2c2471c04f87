"""Linears of nine rows of int8 and more, on tensor cores that multiply bytes: the tiles of int8_tiles.cuh.

    "9-64"     16, 32 or 64 tokens by 32 rows of w; warps share the columns
    "large"    up to 128 tokens by 256 rows of w; smaller tiles where these would be few blocks

A kernel for any number of rows has the tiles of its class, and takes one of them when it starts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qcompiler.kernels.cuda import int8_tile
from qcompiler.kernels.cuda.geometry import MIN_BLOCKS, SHARED_LIMIT, CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.int8_tile import RESERVED, Choice, Groups, Tile, fitting, groups_of
from qcompiler.kernels.cuda.linear_finish import Finish, finish_of, linear_body
from qcompiler.kernels.cuda.linear_int8 import ROWS_OF_MANY, MadeRows, RowsOfX, add_room, definitions_of, struct_name
from qcompiler.kernels.cuda.signature import arch_number, signature
from qcompiler.kernels.cuda.weights import weight_of
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.linear import LinearKernel


@dataclass(frozen=True)
class Case:
    """A tile for up to `most` rows of x; None: for any number."""

    tile: Tile
    most: int | None


def takes(spec: KernelSpec, arch: str) -> bool:
    """Whether tiles serve a linear of many rows of int8 on `arch`."""
    return int8_tile.takes(spec, arch, linear_body(spec).k) and bool(cases_of(spec, arch))


def cases_of(spec: KernelSpec, arch: str) -> tuple[Case, ...]:
    """The tiles of a kernel, for ever more rows of x: one if their number is known, none if shared memory has no room
    for a tile beside the rows that a block makes."""
    body, groups, limit = linear_body(spec), groups_of(spec), SHARED_LIMIT[arch_number(arch)] - RESERVED
    if body.rows is not None:
        return _made(spec, groups, limit)
    choices = int8_tile.many_rows(groups, arch_number(arch), body.m)
    cases = _many(body, groups, limit, choices) if body.m_class == "large" else _few(groups, limit)
    if isinstance(body.m, int):
        known = body.m
        cases = (next(case for case in cases if case.most is None or known <= case.most),)
    if len(cases) == 1:
        (case,) = cases
        return (replace(case, tile=int8_tile.ALONE.get(case.tile, case.tile)),)
    return cases


def _made(spec: KernelSpec, groups: Groups, limit: int) -> tuple[Case, ...]:
    """The tile of a kernel that makes its rows: up to 32 tokens, whatever their number."""
    memory, m = SharedMemory(), linear_body(spec).m
    made = _rows_made(spec, int8_tile.few_rows(groups)[ROWS_OF_MANY][0])
    assert made is not None and isinstance(m, int)
    made.room(memory)
    table, size = int8_tile.few_rows(groups), next(size for size in (16, ROWS_OF_MANY) if min(m, ROWS_OF_MANY) <= size)
    room = [tile for tile in table[size] if tile.tokens == size and tile.shared(groups) <= limit - memory.nbytes]
    return (Case(room[0], None),) if room else ()


def _rows_made(spec: KernelSpec, tile: Tile) -> MadeRows | None:
    blocks = -(-linear_body(spec).n // tile.rows)
    return MadeRows.of(spec, tile.threads // 32, blocks, many=True, rows_of_tile=tile.rows)


def _few(groups: Groups, limit: int) -> tuple[Case, ...]:
    table = int8_tile.few_rows(groups)
    tiles = dict.fromkeys(fitting(table[size], groups, limit) for size in sorted(table))
    *others, last = tiles
    return (*(Case(tile, tile.tokens) for tile in others), Case(last, None))


def _many(body: LinearKernel, groups: Groups, limit: int, choices: tuple[Choice, ...]) -> tuple[Case, ...]:
    tiles = [fitting(choice, groups, limit) for choice in choices]
    cases = list[Case]()
    for tile, larger in zip(tiles, [*tiles[1:], None], strict=True):
        # the larger one begins where it makes MIN_BLOCKS blocks
        most = None if larger is None else (-(-MIN_BLOCKS // -(-body.n // larger.rows)) - 1) * larger.tokens
        if most != 0:
            cases.append(Case(tile, most))
    return tuple(cases)


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """Text and geometry. KernelSelectionError for unsupported operands."""
    body, weight = linear_body(spec), weight_of(spec.name, spec.operands[1])
    cases, groups = cases_of(spec, arch), groups_of(spec)
    tokens, (threads,) = max(case.tile.tokens for case in cases), {case.tile.threads for case in cases}
    memory, finish = SharedMemory(), finish_of(spec)
    x = RowsOfX(spec, _rows_made(spec, cases[0].tile), "m0", tokens)
    x.room(memory)
    add_room(memory, max(case.tile.shared(groups) for case in cases), tokens)
    lines = [*memory.declarations(), *finish.by_groups()]
    for i, case in enumerate(cases):
        call = _call(spec, case.tile, groups, x, finish)
        if len(cases) > 1:
            head = "{" if case.most is None else f"if ({c_dim(body.m)} <= {case.most}) {{"
            call = [f"}} else {head}" if i else head, *indent(call), *(["}"] if case.most is None else [])]
        lines += call
    notes = x.notes(*(_note(body, case.tile, groups) for case in cases))
    geometry = Geometry((_grid(body, cases), 1, 1), (threads, 1, 1), memory.nbytes)
    opened = definitions_of(spec, weight, x) + signature(spec, threads, 1)
    text = "\n".join([header_comment(spec, *notes), opened, *indent(lines), "}\n"])
    return CudaKernel(text, geometry, "mma", notes)


def _call(spec: KernelSpec, tile: Tile, groups: Groups, x: RowsOfX, finish: Finish) -> list[str]:
    """The statements of a block of `tile`; a block that this tile does not need ends at once."""
    body, struct = linear_body(spec), struct_name(spec)
    given = f"(const uint8_t*){identifier(spec.operands[1].name)}, {x.rows}, {c_dim(body.m)}, m0, n0"
    return [
        f"typedef qi_tile<{tile.arguments}> tile;",
        f'static_assert(qi_tile_shared<{struct}, tile>::BYTES == {tile.shared(groups)}, "shared memory");',
        "int64_t m0, n0;",
        f"if (!qi_place_of<tile>({c_dim(body.m)}, {body.n}, m0, n0)) return;",
        *x.statements(),
        f"qi_linear_tiles<{struct}, tile, {finish.group}>(",
        f"    {given}, shared, scales, row_ones, finish{x.make});",
    ]


def _note(body: LinearKernel, tile: Tile, groups: Groups) -> str:
    return (
        f"M class {body.m_class}, int8 mma: {tile.tokens} tokens x {tile.rows} rows of w per block of {tile.wn} x "
        f"{tile.wt} x {tile.wk} warps, {tile.ahead} steps ahead; {tile.shared(groups)} bytes of shared memory"
    )


def _grid(body: LinearKernel, cases: tuple[Case, ...]) -> Dim:
    """Blocks: as many as the tile that needs most of them for this number of rows."""
    found = []
    for case in cases:
        along = (dim(body.m) + (case.tile.tokens - 1)) // case.tile.tokens
        if case.most is not None:
            along = along.minimum(-(-case.most // case.tile.tokens))
        found.append(along * -(-body.n // case.tile.rows))
    most = found[0]
    for each in found[1:]:
        most = most.maximum(each)
    return most.to_dim()
