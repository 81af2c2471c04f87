"""Attention on tensor cores, for 16-bit operands: tiles of 64 queries x 64 keys, fp32 accumulation.

A warp owns 16 queries and keeps them in registers as mma operands. Keys and values alternate in shared memory: the
values of a tile are copied while its scores are computed, and the keys of the next tile while these values are
multiplied. The softmax works on the accumulators' fragments. As in other such kernels, the weights are rounded to the
operands' type before the product with the values, while their sum is taken in fp32 before that rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    rows_aligned,
    seen_keys,
    stride,
)
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, header_comment, indent
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.attention import AttentionKernel

_KEYS = 64
_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class MmaAttentionTile:
    """`warps` of 16 queries each against 64 keys."""

    body: AttentionKernel
    warps: int

    @property
    def queries(self) -> int:
        return 16 * self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def k_row(self) -> int:
        """Elements of a staged key: an odd number of 16-byte units, so that 8 rows of ldmatrix hit 8 bank groups."""
        return self.body.head_dim + 8

    @property
    def v_row(self) -> int:
        return self.body.value_dim + 8

    @property
    def min_blocks(self) -> int:
        """Minimum blocks per multiprocessor, which limits registers: 170 per thread with three, 255 with two.

        A thread keeps head_dim / 4 registers of queries, value_dim / 2 of sums and 32 of scores. The limit is always
        given: without it ptxas aims at more blocks, and spills on some architectures.
        """
        return 3 if self.body.head_dim // 4 + self.body.value_dim // 2 <= 72 else 2

    def shared(self, ctype: str) -> SharedMemory:
        memory = SharedMemory()
        memory.add("k_tile", ctype, _KEYS * self.k_row, 2)
        memory.add("v_tile", ctype, _KEYS * self.v_row, 2)
        return memory


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """The kernel, for a spec that attention.ENGINES give to tensor cores."""
    del arch
    body = body_of(spec)
    few = isinstance(body.q_len, int) and body.q_len <= 32
    tile = MmaAttentionTile(body, -(-int(body.q_len) // 16) if few else 4)
    memory = tile.shared(STORAGE_TYPES[operand(spec, "q").dtype])
    blocks = (dim(body.q_len) + (tile.queries - 1)) // tile.queries * body.heads * dim(body.batch)
    kind = operand(spec, "q").dtype
    values = "" if body.cache is None else f"keys and values of {body.cache} and "
    notes = (
        f"tensor cores: {tile.warps} warps of 16 queries, tiles of {_KEYS} keys",
        f"{values}weights rounded to {kind} before the product with the values",
    )
    lines = [
        *memory.declarations(),
        *_place(spec, tile),
        "for (int64_t k0 = first_key, next; k0 < seen; k0 = next) {"
        if body.ring
        else f"for (int64_t k0 = first_key; k0 < seen; k0 += {_KEYS}) {{",
        *indent(_keys(spec, tile)),
        "}",
        *_finish(spec, tile),
    ]
    text = "\n".join(
        [header_comment(spec, *notes), signature(spec, tile.threads, tile.min_blocks), *indent(lines), "}\n"]
    )
    return CudaKernel(text, Geometry((blocks.to_dim(), 1, 1), (tile.threads, 1, 1), memory.nbytes), "mma", notes)


def _stage(spec: KernelSpec, tile: MmaAttentionTile, role: str, start: str) -> list[str]:
    """Starts the copy of the keys or values from key `start` on."""
    size, row = (tile.body.head_dim, tile.k_row) if role == "k" else (tile.body.value_dim, tile.v_row)
    step = stride(spec, role)
    if tile.body.cache is not None:
        rows = f"{role}_head + ({start}) * {step}, {step}, (int)qc_min({_KEYS}, seen - ({start}))"
        return [
            f"qc_stage_cache<qc_code_{tile.body.cache}, {size}, {_KEYS}, {row}, {tile.threads}>({role}_tile, {rows});"
        ]
    return [
        f"qc_stage_tile<{_KEYS}, {size}, {row}, {tile.threads}>({role}_tile, {role}_head + ({start}) * {step}, {step}, "
        f"(int)qc_min({_KEYS}, seen - ({start})), {role}_aligned);",
        "qc_cp_async_commit();",
    ]


def _place(spec: KernelSpec, tile: MmaAttentionTile) -> list[str]:
    body = tile.body
    steps = body.head_dim // 16
    count = f"qc_min({tile.queries}, q_len - q0)" if body.last else str(tile.queries)
    return [
        "const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;",
        f"const int64_t q_len = {c_dim(body.q_len)}, blocks = (q_len + {tile.queries - 1}) / {tile.queries};",
        "int64_t rest = blockIdx.x;",
        f"const int64_t q0 = (blocks - 1 - rest % blocks) * {tile.queries}, first = q0 + 16 * warp;",
        "rest /= blocks;",
        f"const int64_t h = rest % {body.heads}, b = rest / {body.heads}, kv_h = h / {body.heads // body.kv_heads};",
        *head_pointers(spec, roles(spec)),
        *seen_keys(spec, "q0", count, _KEYS),
        *_numbers(spec),
        *rows_aligned(spec),
        f"uint32_t queries[{steps}][4];",
        f"qc_load_fragments(queries, q_head + first * {stride(spec, 'q')}, {stride(spec, 'q')}, q_len - first, lane);",
        *_first_tops(spec),
        f"float sum[{body.value_dim // 8}][4] = {{}};",
        "if (first_key < seen) {",
        *indent(_stage(spec, tile, "k", "first_key")),
        "}",
    ]


def _first_tops(spec: KernelSpec) -> list[str]:
    """Declares what the two queries of a thread have before they see a key. Four lanes share a query's total."""
    if not body_of(spec).sinks:
        return ["float top[2] = {-INFINITY, -INFINITY}, total[2] = {};  // of queries first + lane / 4 and that + 8"]
    unit = f" * {float_literal(_LOG2E, 'f32')}" if _in_log2(spec) else ""
    tops = (f"{first_top(spec, f'qc_min(first + lane / 4 + {rows}, q_len - 1)')}{unit}" for rows in (0, 8))
    totals = (first_total(spec, f"top[{half}]", "lane % 4 == 0") for half in (0, 1))
    return [
        f"float top[2] = {{{', '.join(tops)}}};  // of queries first + lane / 4 and that + 8",
        f"float total[2] = {{{', '.join(totals)}}};",
    ]


def _keys(spec: KernelSpec, tile: MmaAttentionTile) -> list[str]:
    body = tile.body
    following = f"k0 + {_KEYS}"
    return [
        *([f"next = {next_keys(spec, following, _KEYS)};"] if body.ring else []),
        f"float score[{_KEYS // 8}][4] = {{}};",
        "qc_cp_async_wait<0>();",
        "__syncthreads();  // the keys are there, the last values are used",
        *_stage(spec, tile, "v", "k0"),
        f"qc_dot_mma<{body.head_dim // 16}, {_KEYS // 8}, {tile.k_row}>(score, queries, k_tile, lane);",
        *_scale(spec, tile),
        "#pragma unroll",
        "for (int half = 0; half < 2; half++) {",
        *indent(_softmax(spec)),
        "}",
        "qc_cp_async_wait<0>();",
        "__syncthreads();  // the values are there, the keys are used",
        f"if ({'next' if body.ring else following} < seen) {{",
        *indent(_stage(spec, tile, "k", "next" if body.ring else following)),
        "}",
        f"qc_weigh_mma<{_KEYS // 8}, {body.value_dim // 8}, {tile.v_row}>(sum, score, v_tile, lane);",
    ]


def _in_log2(spec: KernelSpec) -> bool:
    """Whether scores are scaled by log2(e) from the start. Not with a float mask: its -3.4e38 would overflow."""
    return body_of(spec).mask != "float"


def _scale(spec: KernelSpec, tile: MmaAttentionTile) -> list[str]:
    """Scales the scores, and sets -inf where a query does not see a key. Whole tiles without masks need no test."""
    body = tile.body
    scaled = _scaled(spec)
    rule = masked(spec, "qc_min(i, q_len - 1)", "j")
    unseen = hidden(spec, "number[e / 2]" if body.last else "i", "j", "j >= seen")
    number = "const int64_t i = first + lane / 4 + e / 2 * 8, j = k0 + 8 * n + lane % 4 * 2 + e % 2;"
    if not rule and (body.last or not (body.causal or body.window is not None)):
        number = "const int64_t j = k0 + 8 * n + lane % 4 * 2 + e % 2;"
    if rule:
        lines = [
            number,
            f"float s = {scaled};",
            f"if ({unseen}) {{",
            "    s = -INFINITY;",
            "} else {",
            *indent(rule),
            "}",
            "score[n][e] = s;",
        ]
        return _fragments(lines)
    limit = "qc_min(seen, first + 1)" if body.causal else "seen"
    behind = "" if body.window is None else f" || k0 <= first + 15 - {body.window}"
    if body.last:  # decided per thread: no collective operation is inside
        limit = "qc_min(seen, qc_min(number[0], number[1]) + 1)"
        behind = "" if body.window is None else f" || k0 <= qc_max(number[0], number[1]) - {body.window}"
    if body.ring:
        whole = f"qc_ring_tile({{}} - k0, {_KEYS}, {body.window}, {c_dim(body.kv_len)})"
        behind = f" || !{whole.format('number[0]')} || !{whole.format('number[1]')}"
    return [
        *_fragments([f"score[n][e] = {scaled};"]),
        f"if (k0 + {_KEYS} > {limit}{behind}) {{",
        *indent(_fragments([number, f"if ({unseen}) score[n][e] = -INFINITY;"])),
        "}",
    ]


def _numbers(spec: KernelSpec) -> list[str]:
    """The positions among the keys of the two queries of a thread. A query past the end repeats the last one."""
    if not body_of(spec).last:
        return []
    numbers = (number_of(spec, f"qc_min(first + lane / 4 + {rows}, q_len - 1)") for rows in (0, 8))
    return [f"const int64_t number[2] = {{{', '.join(numbers)}}};"]


def _scaled(spec: KernelSpec) -> str:
    """A score, scaled and soft-capped, in units of log 2 if `_in_log2`."""
    body = body_of(spec)
    if body.softcap is None:
        factor = body.scale * _LOG2E if _in_log2(spec) else body.scale
        return f"score[n][e] * {float_literal(factor, 'f32')}"
    score = capped(spec, f"score[n][e] * {float_literal(body.scale, 'f32')}")
    return f"{score} * {float_literal(_LOG2E, 'f32')}" if _in_log2(spec) else score


def _fragments(lines: list[str]) -> list[str]:
    """A loop over the scores of a thread."""
    return [
        "#pragma unroll",
        f"for (int n = 0; n < {_KEYS // 8}; n++) {{",
        "#pragma unroll",
        "    for (int e = 0; e < 4; e++) {",
        *indent(lines, 2),
        "    }",
        "}",
    ]


def _softmax(spec: KernelSpec) -> list[str]:
    """Turns the scores of the query in `half` into weights. Four lanes share a query."""
    power = "qc_exp2_fast({})" if _in_log2(spec) else f"qc_exp2_fast(({{}}) * {float_literal(_LOG2E, 'f32')})"
    tiles, columns = _KEYS // 8, body_of(spec).value_dim // 8
    pair = "score[n][2 * half], score[n][2 * half + 1]"
    return [
        "float best = top[half];",
        "#pragma unroll",
        f"for (int n = 0; n < {tiles}; n++) best = fmaxf(best, fmaxf({pair}));",
        "best = fmaxf(best, __shfl_xor_sync(QC_ALL_LANES, best, 1));",
        "best = fmaxf(best, __shfl_xor_sync(QC_ALL_LANES, best, 2));",
        "const float shift = best == -INFINITY ? 0.0f : best;  // nothing seen yet: all weights are exp(-inf) = 0",
        f"const float fade = {power.format('top[half] - shift')};",
        "float part = 0.0f;",
        "#pragma unroll",
        f"for (int n = 0; n < {tiles}; n++) {{",
        "#pragma unroll",
        "    for (int e = 2 * half; e < 2 * half + 2; e++) {",
        f"        score[n][e] = {power.format('score[n][e] - shift')};",
        "        part += score[n][e];",
        "    }",
        "}",
        "top[half] = best;",
        "total[half] = fmaf(total[half], fade, part);",
        "#pragma unroll",
        f"for (int c = 0; c < {columns}; c++) sum[c][2 * half] *= fade, sum[c][2 * half + 1] *= fade;",
    ]


def _finish(spec: KernelSpec, tile: MmaAttentionTile) -> list[str]:
    return [
        "#pragma unroll",
        "for (int half = 0; half < 2; half++) {",
        "    float all = total[half] + __shfl_xor_sync(QC_ALL_LANES, total[half], 1);",
        "    all += __shfl_xor_sync(QC_ALL_LANES, all, 2);",
        "    const float scale = all == 0.0f ? 0.0f : 1.0f / all;  // no key seen: zeros",
        "    const int64_t i = first + lane / 4 + 8 * half;",
        "    if (i < q_len) {",
        f"        const auto row = out_head + i * {stride(spec, 'out')} + lane % 4 * 2;",
        "#pragma unroll",
        f"        for (int c = 0; c < {tile.body.value_dim // 8}; c++) {{",
        "            qc_store(row + 8 * c, sum[c][2 * half] * scale);",
        "            qc_store(row + 8 * c + 1, sum[c][2 * half + 1] * scale);",
        "        }",
        "    }",
        "}",
    ]
