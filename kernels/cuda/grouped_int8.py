"""The `grouped_linear` template for int8 rows: codes times the codes of the chosen experts (int8.cuh).

    few pairs     (at most 64, known at compile time) a block per panel and pair: a tile (int8_tiles.cuh), or
                  qi_linear_few
    any number    qi_grouped_many: a block per expert and four of its panels, for all rows that chose the expert

The products are those of linears of int8 rows (linear_int8.py): by tensor cores from sm_75 on, by `dp4a` before, with
the same bits. An index outside [0, experts) gives a row of NaN.
"""

from __future__ import annotations

from qcompiler.kernels.cuda import int8_tile
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.grouped_pairs import chosen, expert_of, grouped_body, most_tiles
from qcompiler.kernels.cuda.int8_product import engine_of, product_of, struct_of
from qcompiler.kernels.cuda.int8_tile import groups_of
from qcompiler.kernels.cuda.linear_int8 import (
    SEGMENTS,
    WARPS,
    add_few,
    add_staged,
    add_tile,
    struct_name,
    warps_of_few,
)
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.cuda.weights import weight_of
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import KernelSpec

MOST_PAIRS = 64
"""The most pairs that have blocks of their own."""

TOKENS = 32
"""Pairs of an expert that a block multiplies at a time."""


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """Text and geometry on `arch`. KernelSelectionError for a weight without an integer product."""
    body = grouped_body(spec)
    pairs = (dim(body.rows) * body.repeat).to_dim()
    return _few(spec, arch, pairs) if isinstance(pairs, int) and pairs <= MOST_PAIRS else _many(spec, arch)


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
