"""The `grouped_linear` template for int8 rows: codes times the codes of the chosen experts (int8.cuh).

    few pairs     (at most 64, known at compile time) a block per panel and pair: a tile (int8_tiles.cuh), or
                  qi_linear_few
    combined      (of as few pairs) the same in groups of warps: a block per panel and row of the result has a group for
                  each sum that a column needs, the two halves of an expert or a row's experts, or a group multiplies
                  several of them in turns; 16 threads combine the sums in their order (grouped_combined.py)
    any number    qi_grouped_many: a block per expert and four of its panels, for all rows that chose the expert

The products are those of linears of int8 rows (linear_int8.py): by tensor cores from sm_75 on, by `dp4a` before, with
the same bits. An index outside [0, experts) gives a row of NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cuda import int8_tile
from qcompiler.kernels.cuda.geometry import SHARED_LIMIT, CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.grouped_combined import Sums, combined
from qcompiler.kernels.cuda.grouped_pairs import chosen, expert_of, grouped_body, most_tiles
from qcompiler.kernels.cuda.int8_product import engine_of, product_of, struct_of
from qcompiler.kernels.cuda.int8_tile import groups_of
from qcompiler.kernels.cuda.linear_int8 import (
    LEAST_WARPS,
    SEGMENTS,
    WARPS,
    add_few,
    add_staged,
    add_tile,
    struct_name,
    warps_of_few,
)
from qcompiler.kernels.cuda.signature import arch_number, signature
from qcompiler.kernels.cuda.weights import weight_of
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.grouped_linear import PANEL

MOST_PAIRS = 64
"""The most pairs that have blocks of their own."""

MOST_GROUPS, MOST_THREADS = 4, 512
"""The most groups of warps, and threads, of a block that combines sums. With 1,024 threads, which have 64 registers
each, ptxas spills for q4_K."""

RESERVED = 1024
"""Bytes of shared memory that the driver takes of each block (CUDA C++ Programming Guide, from sm_80 on)."""

ALIGNMENT = 128
"""Of a range of shared memory (geometry.py)."""

TOKENS = 32
"""Pairs of an expert that a block multiplies at a time."""


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """Text and geometry on `arch`. KernelSelectionError for a weight without an integer product."""
    body = grouped_body(spec)
    pairs = (dim(body.rows) * body.repeat).to_dim()
    few = isinstance(pairs, int) and pairs <= MOST_PAIRS
    if body.combines:
        if not few or body.top > MOST_PAIRS:
            raise KernelSelectionError(
                f"kernel '{spec.name}' ({spec.serves}): experts are combined where at most {MOST_PAIRS} pairs are "
                f"known at compile time, not {pairs}, {body.top} of them a row"
            )
        return _combined(spec, arch, int(pairs) // max(body.top, 1))
    return _few(spec, arch, int(pairs)) if few else _many(spec, arch)


def _few(spec: KernelSpec, arch: str, pairs: int) -> CudaKernel:
    body, product, engine = grouped_body(spec), product_of(spec), engine_of(arch)
    x, w, _, out = spec.operands
    warps, panels = warps_of_few(body.k), most_tiles(body, 16)
    shared = SharedMemory()
    tiles = int8_tile.takes(spec, arch, body.k)
    if tiles:
        add_tile(shared, int8_tile.few_tile(warps), groups_of(spec))
    else:
        add_few(shared, product, body.k, warps)
    row = "pair" if body.repeat == 1 else f"pair / {body.repeat}"
    lines = [
        *shared.declarations(),
        f"const int64_t pair = blockIdx.z;  // at most {MOST_PAIRS}",
        f"const int64_t expert = {expert_of(spec, 'pair')};",
        f"const bool there = expert >= 0 && expert < {body.experts};",
        f"const int64_t first = there ? expert * {body.n} : 0, panel = first / 16 + blockIdx.x;",
        f"if (panel * 16 >= first + {body.n}) return;",
        "const auto finish = [&](float sum, int64_t, int64_t n) {",
        "    const int64_t column = n - first;",
        f"    if (column >= 0 && column < {body.n})",
        f"        qc_store({identifier(out.name)} + pair * {c_dim(out.strides[0])} + column, there ? sum : NAN);",
        "};",
    ]
    weight = f"(const uint8_t*){identifier(w.name)}"
    rows = f"qi_rows{{{{{identifier(x.name)} + {row} * {c_dim(x.strides[0])}, 0}}}}"
    if tiles:
        lines += [
            "const auto finish_group = [&](const float (&sums)[1], int64_t m, int64_t n) { finish(sums[0], m, n); };",
            f"qi_linear_tiles<{struct_name(spec)}, qi_tile<{int8_tile.few_tile(warps).arguments}>, 1>(",
            f"    {weight}, {rows}, 1, 0, panel * 16, shared, scales, row_ones, finish_group);",
        ]
    else:
        lines += [
            f"qi_linear_few<{struct_name(spec)}, QI_{engine.upper()}, {warps}>(",
            f"    {weight}, {rows}, 1, panel, staged, runs, sums_of, finish);",
        ]
    note = (
        f"int8 {engine}: a block per panel and pair, {warps} warps share the columns; {shared.nbytes} bytes of shared "
        "memory"
    )
    return _kernel(spec, Geometry((panels, 1, pairs), (32 * warps, 1, 1), shared.nbytes), lines, note, engine)


@dataclass(frozen=True)
class _Share:
    """How a block that combines sums is cut up: `groups` of `warps` warps, the room of one group, and whether it
    multiplies by tiles."""

    groups: int
    warps: int
    room: SharedMemory
    tiles: bool

    @property
    def pitch(self) -> int:
        """Bytes from one group's room to the next."""
        return -(-self.room.nbytes // ALIGNMENT) * ALIGNMENT


def _share(spec: KernelSpec, arch: str, sums: int) -> _Share:
    """The most groups that divide the sums of a column and leave room for a second block; one, if none does."""
    body, product = grouped_body(spec), product_of(spec)
    limit, tiles = SHARED_LIMIT[arch_number(arch)], int8_tile.takes(spec, arch, body.k)
    for groups in (each for each in range(min(sums, MOST_GROUPS), 0, -1) if sums % each == 0):
        warps = max(LEAST_WARPS, min(warps_of_few(body.k), MOST_THREADS // 32 // groups))
        room = SharedMemory()
        if tiles:
            add_tile(room, int8_tile.few_tile(warps), groups_of(spec))
        else:
            add_few(room, product, body.k, warps)
        share = _Share(groups, warps, room, tiles)
        if groups == 1 or 2 * (groups * share.pitch + 4 * PANEL * sums + RESERVED) <= limit:
            return share
    raise AssertionError("one group has room")


def _combined(spec: KernelSpec, arch: str, rows: int) -> CudaKernel:
    """`rows`: of the result."""
    body, engine = grouped_body(spec), engine_of(arch)
    x, w = spec.operands[:2]
    sums = 2 if body.pairs else body.top
    share = _share(spec, arch, sums)
    shared, threads = SharedMemory(), 32 * share.warps
    shared.add("rooms", "unsigned char", share.groups * share.pitch, 1)
    shared.add("sums", "float", sums * PANEL, 4)
    pair = "row" if body.pairs else f"row * {body.top} + place"
    of_x = f"({pair})" if body.repeat == 1 else f"({pair}) / {body.repeat}"
    half = f" + place * {body.columns // PANEL}" if body.pairs else ""
    product = [
        f"const int64_t expert = {expert_of(spec, pair)};",
        f"const bool exists = expert >= 0 && expert < {body.experts};",
        f"const int64_t panel = (exists ? expert : 0) * {body.n // PANEL}{half} + blockIdx.x;",
        f"const qi_rows own = {{{{{identifier(x.name)} + {of_x} * {c_dim(x.strides[0])}, 0}}}};",
    ]
    weight, struct = f"(const uint8_t*){identifier(w.name)}", struct_name(spec)
    if share.tiles:
        tile = f"qi_tile<{int8_tile.few_tile(share.warps).arguments}>"
        product += [
            f"const auto finish = [&](const float (&sum)[1], int64_t, int64_t n) {{ {_KEPT} = sum[0]; }};",
            f"qi_linear_tiles<{struct}, {tile}, 1>(",
            f"    {weight}, own, 1, 0, panel * 16, shared, scales, row_ones, finish);",
        ]
    else:
        product += [
            f"const auto finish = [&](float sum, int64_t, int64_t n) {{ {_KEPT} = sum; }};",
            f"qi_linear_few<{struct}, QI_{engine.upper()}, {share.warps}>(",
            f"    {weight}, own, 1, panel, staged, runs, sums_of, finish);",
        ]
    turns = sums > share.groups
    lines = [
        *shared.declarations(),
        f"const int64_t row = blockIdx.z;  // at most {MOST_PAIRS}",
        f"unsigned char* const room = rooms + threadIdx.y * {share.pitch};",
        *(
            f"{ctype}* const {name} = ({ctype}*)(room + {offset});"
            for ctype, name, offset, _ in share.room.ranges
        ),
        *(["#pragma unroll 1"] if turns else []),
        f"for (int place = threadIdx.y; place < {sums}; place += {share.groups}) {{" if turns else
        "{  // each group has a sum",
        *([] if turns else ["    const int place = threadIdx.y;"]),
        *indent(product),
        *(["    __syncthreads();"] if turns else []),
        "}",
        "__syncthreads();",
        f"if (threadIdx.y == 0 && threadIdx.x < {PANEL}) {{",
        f"    const int64_t column = (int64_t)blockIdx.x * {PANEL} + threadIdx.x;",
        *([f"    const int64_t chosen = {expert_of(spec, 'row')};",
           f"    const bool there = chosen >= 0 && chosen < {body.experts};"] if body.pairs else []),
        *indent(combined(spec, body, FINISHED)),
        "}",
    ]  # fmt: skip
    how = f", which take {sums} sums in turns" if turns else ""
    note = (
        f"int8 {engine}: a block per panel and row, {share.groups} groups of {share.warps} warps share the "
        f"columns{how}; {shared.nbytes} bytes of shared memory"
    )
    geometry = Geometry((body.columns // PANEL, 1, rows), (threads, share.groups, 1), shared.nbytes)
    return _kernel(spec, geometry, lines, note, engine)


_KEPT = f"sums[place * {PANEL} + n % {PANEL}]"
"""Where a group leaves the sum of row n of the weight."""

FINISHED = Sums(
    [f"const float sum = sums[threadIdx.x], other = sums[{PANEL} + threadIdx.x];"],
    lambda there: [f"const float sum = {there} ? sums[place * {PANEL} + threadIdx.x] : NAN;"],
)


def _many(spec: KernelSpec, arch: str) -> CudaKernel:
    body, engine = grouped_body(spec), engine_of(arch)
    x, w, _, out = spec.operands
    blocks = -(-most_tiles(body, 16) // WARPS)
    shared = SharedMemory()
    add_staged(shared, TOKENS, SEGMENTS, product_of(spec))
    shared.add("listed", "int", TOKENS, 4)
    shared.add("counts", "int", WARPS, 4)
    shared.add("next", "int", 1, 4)
    pairs = c_dim((dim(body.rows) * body.repeat).to_dim())
    lines = [
        *shared.declarations(),
        f"const int64_t expert = blockIdx.y, first = expert * {body.n};  // the last one: pairs without an expert",
        f"if ((first / 16 + (int64_t)blockIdx.x * {WARPS}) * 16 >= first + {body.n}) return;",
        *chosen(spec),
        f"qi_grouped_many<{struct_name(spec)}, QI_{engine.upper()}, {TOKENS // 8}, {WARPS}>(",
        f"    (const uint8_t*){identifier(w.name)}, {identifier(x.name)}, {c_dim(x.strides[0])}, {pairs},",
        f"    {body.repeat}, first, {body.n}, expert < {body.experts}, chosen, {{listed, counts, next}}, staged, runs,",
        f"    {identifier(out.name)}, {c_dim(out.strides[0])});",
    ]
    note = (
        f"int8 {engine}: {WARPS} panels of an expert for {TOKENS} of its rows at a time; {shared.nbytes} bytes of "
        "shared memory"
    )
    geometry = Geometry((blocks, body.experts + 1, 1), (32 * WARPS, 1, 1), shared.nbytes)
    return _kernel(spec, geometry, lines, note, engine)


def _kernel(spec: KernelSpec, geometry: Geometry, lines: list[str], note: str, engine: str) -> CudaKernel:
    weight = weight_of(spec.name, spec.operands[1])
    head = header_comment(spec, note, "an index out of range gives NaN")
    definitions = weight.definitions + struct_of(struct_name(spec), weight, spec)
    text = [head, definitions + signature(spec, geometry.threads, 1), *indent(lines), "}\n"]
    return CudaKernel("\n".join(text), geometry, engine, (note,))
