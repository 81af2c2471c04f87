"""Grouped linears on tensor cores: a block per expert and rows of its weight, for all pairs that chose the expert.

The block lists its expert's pairs in ascending order (grouped.cuh), one tile of pairs at a time. It multiplies their
rows of x, wherever these are stored, like linears do: weights are decoded in registers from cuda_t16_v1, and x passes
through the ring in shared memory (linear_mma.cuh). The number of pairs per expert is known only at run time: a tile of
64 tokens multiplies only 16 or 32 if it holds fewer, and blocks of experts without pairs return without reading a
weight.
"""

from __future__ import annotations

from qcompiler.kernels.cuda import linear_mma
from qcompiler.kernels.cuda.geometry import SHARED_LIMIT, CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.grouped_pairs import chosen, most_tiles
from qcompiler.kernels.cuda.linear_mma import LARGE, LARGE_SPLIT, SMALL_M_TILES, Tile
from qcompiler.kernels.cuda.signature import arch_number, signature
from qcompiler.kernels.cuda.weights import Weight
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel

MANY = 256
"""Average pairs per expert from which tiles of 128 are full often enough to pay off."""

LISTS = 512
"""The most bytes of the list's counters and the padding between ranges of shared memory."""


def tile_for(body: GroupedLinearKernel, limit: int) -> Tile:
    """The tile, if `limit` bytes of shared memory are left for its ring.

    If an expert is known to have few rows, its weight's bytes decide the time: eight warps split the columns and keep
    many loads in flight. If it has many or an unknown number, the tiles are those of large linears.
    """
    pairs = dim(body.rows) * body.repeat
    each = pairs.value // body.experts if pairs.is_static else None
    if each is None:
        return LARGE_SPLIT
    if each <= max(SMALL_M_TILES):
        return linear_mma.few_tile(max(SMALL_M_TILES), limit)
    return LARGE if each >= MANY else LARGE_SPLIT


def least_shared(body: GroupedLinearKernel) -> int:
    """Bytes of shared memory of the smallest tile that the body may get."""
    few = min(SMALL_M_TILES[max(SMALL_M_TILES)], key=lambda tile: tile.shared)
    return max(few, LARGE, LARGE_SPLIT, key=lambda tile: tile.shared).shared + LISTS + 4 * LARGE.tokens


def emit(spec: KernelSpec, weight: Weight, arch: str) -> CudaKernel:
    """Text and geometry of a grouped linear that grouped_linear.ENGINES give to tensor cores."""
    body = spec.body
    assert isinstance(body, GroupedLinearKernel)
    limit, entries = SHARED_LIMIT[arch_number(arch)], linear_mma.held_entries(weight)
    tile = linear_mma.ahead(tile_for(body, limit - LISTS - 4 * LARGE.tokens), weight.bits, entries)
    memory = SharedMemory()
    memory.add("listed", "int", tile.tokens, 4)
    memory.add("counts", "int", tile.threads // 32, 4)
    memory.add("next", "int", 1, 4)
    memory.add("shared", "uint4", tile.shared // 16, 16)
    x, w, _, out = spec.operands
    pairs, row = c_dim((dim(body.rows) * body.repeat).to_dim()), c_dim(x.strides[0])
    place = f"{identifier(out.name)} + (int64_t)listed[place] * {c_dim(out.strides[0])}"
    lines = [
        *linear_mma.tile_declarations(tile, memory, linear_mma.lane_table(weight)),
        f"const int64_t expert = blockIdx.y, first = expert * {body.n};  // the last one: pairs without an expert",
        f"const int64_t n0 = first / 16 * 16 + (int64_t)blockIdx.x * {tile.rows};",
        f"if (n0 >= first + {body.n}) return;",
        *chosen(spec),
        "const auto finish = [&](const float (&sums)[1], int64_t place, int64_t n) QC_INLINED {",
        f"    if (n >= first && n < first + {body.n}) qc_store({place} + (n - first), sums[0]);",
        "};",
        "int64_t from = 0;",
        f"while (const int live = qc_list_pairs<{tile.tokens}, {tile.threads}>(",
        f"           {pairs}, from, chosen, {{listed, counts, next}})) {{",
        f"    if (expert < {body.experts}) {{",
        f"        qm_listed<{weight.struct}, {tile.arguments}, {tile.depth}>(",
        f"            table, (const uint8_t*){identifier(w.name)}, {identifier(x.name)}, {{listed, {row}, "
        f"{body.repeat}}},",
        "            live, n0, shared, finish);",
        "    } else {",
        "        const float none[1] = {NAN};",
        f"        for (int i = (int)threadIdx.x; i < live * {tile.rows}; i += {tile.threads})",
        f"            finish(none, i / {tile.rows}, n0 + i % {tile.rows});",
        "    }",
        "}",
    ]
    note = (
        f"mma: {tile.rows} columns of an expert for {tile.tokens} of its pairs at a time, {tile.warps_n} x "
        f"{tile.warps_k} warps; {memory.nbytes} bytes of shared memory, {tile.depth} chunks of w ahead"
    )
    head = [header_comment(spec, note, "an index out of range gives NaN"), weight.definitions]
    bound = tile.resident(limit, straddles=weight.straddles or entries > 2)
    text = "\n".join([*head, signature(spec, tile.threads, bound), *indent(lines), "}\n"])
    grid = (most_tiles(body, tile.rows), body.experts + 1, 1)
    return CudaKernel(text, Geometry(grid, (tile.threads, 1, 1), memory.nbytes), "mma", (note,))
