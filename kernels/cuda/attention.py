"""Attention as CUDA C++: which kernel serves a spec, and the kernel on the CUDA cores.

    attention_decode   up to 4 queries: warps share the keys, all query heads of a key head share a block
    attention_mma      f16, bf16 with head sizes in multiples of 16 up to 128: tensor cores
    this module        everything else: tiles of queries x keys in shared memory, fp32

All keep a running maximum and sum per query (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018), so no memory grows with the lengths. Here a thread owns 4 queries x (keys / 16) scores, and the same 4 queries x
4 of every 64 value columns. The 16 threads of half a warp share the statistics of their queries through shuffles. Head
sizes over 128 are multiplied in pieces of 64 columns. Value sizes over 256 are split over blocks, each of which
computes the scores again.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.kernels.cuda import attention_decode, attention_mma, engines
from qcompiler.kernels.cuda.attention_operands import (
    body_of,
    capped,
    first_top,
    first_total,
    head_pointers,
    hidden,
    masked,
    next_keys,
    number_of,
    operand,
    roles,
    seen_keys,
    stride,
)
from qcompiler.kernels.cuda.engines import AtMost, Engine, Mma, MultipleOf
from qcompiler.kernels.cuda.geometry import SHARED_LIMIT, CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.signature import arch_number, signature
from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import c_dim, header_comment, indent
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.attention import AttentionKernel

ENGINES = (
    Engine("decode", "few queries", (AtMost("queries", 4),)),
    Engine("mma", "tensor cores", (
        Mma(), MultipleOf("head_dim", 16), AtMost("head_dim", 128), MultipleOf("value_dim", 16),
        AtMost("value_dim", 128),
    )),
    Engine("fma", "CUDA cores"),
)  # fmt: skip

_TILES = ((64, 64), (64, 32), (32, 32), (16, 32), (16, 16))
"""(queries, keys) of a block, in order of preference."""

_LANES = 16
"""Threads that share a query."""


@dataclass(frozen=True)
class AttentionTile:
    """A block's tile and its shared memory; sizes in fp32 elements."""

    body: AttentionKernel
    queries: int
    keys: int

    @property
    def threads(self) -> int:
        return self.queries // 4 * _LANES

    @property
    def depth(self) -> int:
        """Columns of q and k per piece, a multiple of 4."""
        return 64 if self.body.head_dim > 128 else -(-self.body.head_dim // 4) * 4

    @property
    def pieces(self) -> int:
        return -(-self.body.head_dim // self.depth)

    @property
    def row(self) -> int:
        """Elements of a staged row of q or k: its columns plus 4, so that rows start in different banks."""
        return self.depth + 4

    @property
    def value_groups(self) -> int:
        """Groups of 64 value columns per block."""
        return -(-min(self.body.value_dim, 256) // 64)

    @property
    def value_blocks(self) -> int:
        return -(-self.body.value_dim // 256)

    def shared(self) -> SharedMemory:
        memory = SharedMemory()
        memory.add("q_tile", "float", self.queries * self.row, 4)
        memory.add("kv_tile", "float", self.keys * max(self.row, 64 * self.value_groups), 4)
        memory.add("weights", "float", self.queries * (self.keys + 4), 4)
        return memory

    @staticmethod
    def of(body: AttentionKernel, number: int) -> AttentionTile:
        """The first of `_TILES` that leaves part of the SM's shared memory to L1 or a second block and is not mostly
        empty."""
        wanted = body.q_len if isinstance(body.q_len, int) else _TILES[0][0]
        for queries, keys in _TILES:
            tile = AttentionTile(body, queries, keys)
            if tile.shared().nbytes <= SHARED_LIMIT[number] * 3 // 5 and (queries < 2 * wanted or queries == 16):
                return tile
        return AttentionTile(body, *_TILES[-1])  # at most 26 KiB


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """The kernel for `arch`. KernelSelectionError for operands that `AttentionKernel` does not allow."""
    decision = decision_of(spec, arch)
    if decision.key == "decode":
        return attention_decode.emit(spec, arch)
    if decision.key == "mma":
        return attention_mma.emit(spec, arch)
    return _emit(spec, arch_number(arch), dict(decision.rejected)["tensor cores"])


def decision_of(spec: KernelSpec, arch: str) -> engines.EngineChoice:
    """The engine of an attention on `arch`, and why not the others."""
    body = body_of(spec)
    types = (operand(spec, "q").dtype, operand(spec, "k").dtype, operand(spec, "v").dtype)
    facts = engines.attention_facts(types, body.q_len, body.head_dim, body.value_dim, body.cache)
    return engines.choose(ENGINES, facts, arch_number(arch))


def _emit(spec: KernelSpec, number: int, refusal: str) -> CudaKernel:
    body = body_of(spec)
    tile = AttentionTile.of(body, number)
    memory = tile.shared()
    blocks = (dim(body.q_len) + (tile.queries - 1)) // tile.queries * body.heads * dim(body.batch) * tile.value_blocks
    geometry = Geometry((blocks.to_dim(), 1, 1), (tile.threads, 1, 1), memory.nbytes)
    notes = (
        f"tiles of {tile.queries} queries x {tile.keys} keys in fp32, {tile.threads} threads",
        f"not on tensor cores: {refusal}",
    )
    lines = [
        *memory.declarations(),
        *_place(spec, tile),
        *_stage_queries(spec, tile, when=tile.pieces == 1),
        f"for (int64_t k0 = first_key; k0 < seen; k0 = {next_keys(spec, f'k0 + {tile.keys}', tile.keys)}) {{",
        *indent(_keys(spec, tile)),
        "}",
        *_finish(spec, tile),
    ]
    text = "\n".join([header_comment(spec, *notes), signature(spec, tile.threads, 1), *indent(lines), "}\n"])
    return CudaKernel(text, geometry, "fma", notes)


def _place(spec: KernelSpec, tile: AttentionTile) -> list[str]:
    """Declares the queries and the head of this block and thread. Causal blocks with the most keys go first."""
    body = body_of(spec)
    return [
        f"const int lane = (int)threadIdx.x % {_LANES}, first = (int)threadIdx.x / {_LANES} * 4;  // of its 4 queries",
        f"const int64_t q_len = {c_dim(body.q_len)}, blocks = (q_len + {tile.queries - 1}) / {tile.queries};",
        "int64_t rest = blockIdx.x;",
        f"const int64_t q0 = (blocks - 1 - rest % blocks) * {tile.queries};",
        "rest /= blocks;",
        *([f"const int c0 = (int)(rest % {tile.value_blocks}) * 256;", f"rest /= {tile.value_blocks};"]
          if tile.value_blocks > 1 else []),
        f"const int64_t h = rest % {body.heads}, b = rest / {body.heads}, kv_h = h / {body.heads // body.kv_heads};",
        *head_pointers(spec, roles(spec)),
        f"const int q_count = (int)qc_min({tile.queries}, q_len - q0);",
        *seen_keys(spec, "q0", "q_count", tile.keys),
        "float top[4], total[4];",
        f"float sum[4][{tile.value_groups}][4];",
        "#pragma unroll",
        "for (int r = 0; r < 4; r++) {",
        f"    top[r] = {first_top(spec, 'qc_min(q0 + first + r, q_len - 1)')};",
        f"    total[r] = {first_total(spec, 'top[r]', 'lane == 0')};",
        "#pragma unroll",
        f"    for (int g = 0; g < {tile.value_groups}; g++) {{",
        "#pragma unroll",
        "        for (int e = 0; e < 4; e++) sum[r][g][e] = 0.0f;",
        "    }",
        "}",
    ]  # fmt: skip


def _columns(total: int, start: str, most: int, *, one: bool) -> str:
    """The number of columns left from `start` on, of `total`, at most `most`."""
    return str(total) if one else f"(int)qc_min({most}, {total} - {start})"


def _stage_queries(spec: KernelSpec, tile: AttentionTile, *, when: bool) -> list[str]:
    if not when:
        return []
    one = tile.pieces == 1
    step, columns = stride(spec, "q"), _columns(tile.body.head_dim, "d0", tile.depth, one=one)
    return [
        f"qc_stage_floats<{tile.queries}, {tile.depth}, {tile.row}, {tile.threads}>("
        f"q_tile, q_head + q0 * {step}{'' if one else ' + d0'}, {step}, q_count, {columns});"
    ]


def _keys(spec: KernelSpec, tile: AttentionTile) -> list[str]:
    """One tile of keys: scores, softmax, values."""
    body, one = tile.body, tile.pieces == 1
    piece = [
        "__syncthreads();  // the tile's readers are done",
        *_stage_queries(spec, tile, when=not one),
        _stage_keys(spec, tile),
        "__syncthreads();",
        f"qc_dot_tile<{tile.depth}, {tile.row}>(score, q_tile + first * {tile.row}, kv_tile + lane * {tile.row});",
    ]
    if not one:
        piece = [f"for (int d0 = 0; d0 < {body.head_dim}; d0 += {tile.depth}) {{", *indent(piece), "}"]
    width = 64 * tile.value_groups
    return [
        f"const int count = (int)qc_min({tile.keys}, seen - k0);",
        f"float score[4][{tile.keys // _LANES}] = {{}};",
        *piece,
        "#pragma unroll",
        "for (int r = 0; r < 4; r++) {",
        *indent(_softmax(spec, tile)),
        "}",
        "__syncthreads();  // the keys are used",
        _stage_values(spec, tile),
        "__syncthreads();",
        f"qc_weigh_tile<{tile.keys}, {tile.keys + 4}, {width}>("
        f"sum, weights + first * {tile.keys + 4}, kv_tile + 4 * lane);",
    ]


def _stage_keys(spec: KernelSpec, tile: AttentionTile) -> str:
    """Keys k0 and after, from column d0 on, as fp32."""
    body, one, step = tile.body, tile.pieces == 1, stride(spec, "k")
    if body.cache is not None:
        sizes = f"qc_code_{body.cache}, {body.head_dim}, {tile.keys}, {tile.depth}, {tile.row}, {tile.threads}"
        return f"qc_stage_cache<{sizes}>(kv_tile, k_head + k0 * {step}, {step}, {'0' if one else 'd0'}, count);"
    columns = _columns(body.head_dim, "d0", tile.depth, one=one)
    return (
        f"qc_stage_floats<{tile.keys}, {tile.depth}, {tile.row}, {tile.threads}>("
        f"kv_tile, k_head + k0 * {step}{'' if one else ' + d0'}, {step}, count, {columns});"
    )


def _stage_values(spec: KernelSpec, tile: AttentionTile) -> str:
    """Values k0 and after, from column c0 on, as fp32."""
    body, one, step, width = tile.body, tile.value_blocks == 1, stride(spec, "v"), 64 * tile.value_groups
    if body.cache is not None:
        sizes = f"qc_code_{body.cache}, {body.value_dim}, {tile.keys}, {width}, {width}, {tile.threads}"
        return f"qc_stage_cache<{sizes}>(kv_tile, v_head + k0 * {step}, {step}, {'0' if one else 'c0'}, count);"
    columns = _columns(body.value_dim, "c0", 256, one=one)
    return (
        f"qc_stage_floats<{tile.keys}, {width}, {width}, {tile.threads}>("
        f"kv_tile, v_head + k0 * {step}{'' if one else ' + c0'}, {step}, count, {columns});"
    )


def _softmax(spec: KernelSpec, tile: AttentionTile) -> list[str]:
    """Turns the scores of query `r` into weights, and rescales its earlier sums to the new maximum."""
    body, columns = tile.body, tile.keys // _LANES
    rule = masked(spec, "qc_min(i, q_len - 1)", "j")
    unseen = hidden(spec, "number" if body.last else "i", "j", "j >= seen")
    score = f"score[r][c] * {float_literal(body.scale, 'f32')}"
    return [
        "const int64_t i = q0 + first + r;",
        *([f"const int64_t number = {number_of(spec, 'qc_min(i, q_len - 1)')};"] if body.last else []),
        "float best = top[r];",
        "#pragma unroll",
        f"for (int c = 0; c < {columns}; c++) {{",
        f"    const int64_t j = k0 + lane + {_LANES} * c;",
        f"    float s = {capped(spec, score)};",
        *(indent([f"if ({unseen}) {{", "    s = -INFINITY;", "} else {", *indent(rule), "}"])
          if rule else [f"    if ({unseen}) s = -INFINITY;"]),
        "    score[r][c] = s;",
        "    best = fmaxf(best, s);",
        "}",
        "best = qc_row16_max(best);",
        "const float shift = best == -INFINITY ? 0.0f : best;  // nothing seen yet: all weights are exp(-inf) = 0",
        "const float fade = expf(top[r] - shift);",
        "float part = 0.0f;",
        "#pragma unroll",
        f"for (int c = 0; c < {columns}; c++) {{",
        "    const float weight = expf(score[r][c] - shift);",
        f"    weights[(first + r) * {tile.keys + 4} + lane + {_LANES} * c] = weight;",
        "    part += weight;",
        "}",
        "top[r] = best;",
        "total[r] = fmaf(total[r], fade, part);",
        "#pragma unroll",
        f"for (int g = 0; g < {tile.value_groups}; g++) {{",
        "#pragma unroll",
        "    for (int e = 0; e < 4; e++) sum[r][g][e] *= fade;",
        "}",
    ]  # fmt: skip


def _finish(spec: KernelSpec, tile: AttentionTile) -> list[str]:
    body = tile.body
    c0 = "" if tile.value_blocks == 1 else "c0 + "
    return [
        "#pragma unroll",
        "for (int r = 0; r < 4; r++) {",
        "    const float all = qc_row16_sum(total[r]);",
        "    const float scale = all == 0.0f ? 0.0f : 1.0f / all;  // no key seen: zeros",
        "    if (first + r < q_count) {",
        f"        const auto row = out_head + (q0 + first + r) * {stride(spec, 'out')};",
        "#pragma unroll",
        f"        for (int g = 0; g < {tile.value_groups}; g++) {{",
        "#pragma unroll",
        "            for (int e = 0; e < 4; e++) {",
        f"                const int c = {c0}64 * g + 4 * lane + e;",
        f"                if (c < {body.value_dim}) qc_store(row + c, sum[r][g][e] * scale);",
        "            }",
        "        }",
        "    }",
        "}",
    ]
