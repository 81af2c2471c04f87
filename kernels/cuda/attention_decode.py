"""Attention of one to four queries: keys and values are read once, in place.

A block owns up to `ROWS` of the *rows* (query head, query) that share a key head, so grouped-query attention reads the
cache once. Its warps take turns at strips of 32 keys: dot products with 8 warp lanes per key, the online softmax with
one lane per key, then the weighted values with a few lanes per value row. At the end the results of the warps are
merged in the order of the warps, so every run gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.kernels.cuda.attention_operands import (
    body_of,
    capped,
    head_pointers,
    hidden,
    masked,
    next_keys,
    number_of,
    operand,
    rows_aligned,
    seen_keys,
    stride,
)
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import header_comment, indent
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import ITEMSIZE, KernelSpec
from qcompiler.plan.kinds.attention import AttentionKernel

ROWS = 8
_STRIP = 32
_KEY_LANES = 8
_XYZW = tuple(enumerate("xyzw"))
_SHARED = 48 * 1024
"""Bytes of shared memory that a block may use on every architecture without opting in."""


@dataclass(frozen=True)
class Share:
    """How a block's warp lanes share keys and values. `k_width` and `v_width` are the elements of one
    load: 16 bytes, or 8 or 16 codes."""

    body: AttentionKernel
    k_width: int
    v_width: int
    warps: int

    @property
    def all_rows(self) -> int:
        """Rows that share a key head."""
        assert isinstance(self.body.q_len, int)
        return self.body.heads // self.body.kv_heads * self.body.q_len

    @property
    def rows(self) -> int:
        """Rows per block; at most 64 sums per lane stay in registers."""
        return min(self.all_rows, max(1, ROWS // self.v_groups))

    @property
    def row_blocks(self) -> int:
        return -(-self.all_rows // self.rows)

    @property
    def depth(self) -> int:
        """Columns of q in shared memory, rounded up to a multiple of what 8 lanes read at once."""
        turn = _KEY_LANES * self.k_width
        return -(-self.body.head_dim // turn) * turn

    @property
    def value_lanes(self) -> int:
        """Warp lanes that share a value row, a power of two."""
        return min(32, 1 << (-(-self.body.value_dim // self.v_width) - 1).bit_length())

    @property
    def v_groups(self) -> int:
        """Vectors of a value row per lane."""
        return -(-self.body.value_dim // (self.v_width * self.value_lanes))

    @property
    def columns(self) -> int:
        return self.v_groups * self.value_lanes * self.v_width

    def shared(self) -> SharedMemory:
        memory = SharedMemory()
        memory.add("q_rows", "float", self.rows * self.depth, 4)
        memory.add("scores", "float", self.warps * self.rows * _STRIP, 4)
        memory.add("sums", "float", self.warps * self.rows * self.columns, 4)
        memory.add("tops", "float", self.warps * self.rows, 4)
        memory.add("totals", "float", self.warps * self.rows, 4)
        return memory

    @staticmethod
    def of(spec: KernelSpec) -> Share:
        """16 warps, or as many as shared memory allows."""
        k_width, v_width = (16 // ITEMSIZE[operand(spec, role).dtype] for role in "kv")
        if body_of(spec).cache is not None:  # eight codes where sixteen would leave lanes idle, or take more registers
            k_width, v_width = 16 if body_of(spec).head_dim > 64 else 8, 8
        warps = 16
        while warps > 1 and Share(body_of(spec), k_width, v_width, warps).shared().nbytes > _SHARED:
            warps //= 2
        return Share(body_of(spec), k_width, v_width, warps)


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """The kernel, the same for every architecture."""
    del arch
    body = body_of(spec)
    share = Share.of(spec)
    threads, memory = 32 * share.warps, share.shared()
    blocks = dim(body.batch) * body.kv_heads * share.row_blocks
    note = (
        f"{share.rows} (head, query) rows share a block of {share.warps} warps; a warp takes {_STRIP} keys at a time, "
        f"{32 // share.value_lanes} value rows at once"
    )
    turn = _STRIP * share.warps
    begin = next_keys(spec, f"first_key + {_STRIP} * warp", _STRIP, turn)
    after = next_keys(spec, f"k0 + {turn}", _STRIP, turn)
    lines = [
        *memory.declarations(),
        *_place(spec, share),
        *_stage_queries(spec, share),
        f"for (int64_t k0 = {begin}; k0 < seen; k0 = {after}) {{",
        *indent([*_scores(spec, share), *_softmax(spec, share), *_values(spec, share)]),
        "}",
        *_publish(share),
        *_merge(spec, share),
    ]
    text = "\n".join([header_comment(spec, note), signature(spec, threads, 1), *indent(lines), "}\n"])
    geometry = Geometry((blocks.to_dim(), 1, 1), (threads, 1, 1), memory.nbytes)
    return CudaKernel(text, geometry, "fma", (note,))


def _place(spec: KernelSpec, share: Share) -> list[str]:
    body = body_of(spec)
    rest = "blockIdx.x" if share.row_blocks == 1 else f"blockIdx.x / {share.row_blocks}"
    first = "0" if share.row_blocks == 1 else f"(int)(blockIdx.x % {share.row_blocks}) * {share.rows}"
    return [
        "const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;",
        f"const int64_t b = ({rest}) / {body.kv_heads}, kv_h = ({rest}) % {body.kv_heads};",
        f"const int first_row = {first};",
        *seen_keys(spec, "0", str(body.q_len), _STRIP),
        *head_pointers(spec, ("k", "v")),
        *rows_aligned(spec),
        f"float top[{share.rows}], total[{share.rows}], sum[{share.rows}][{share.v_groups}][{share.v_width}];",
        "#pragma unroll",
        f"for (int r = 0; r < {share.rows}; r++) {{",
        "    top[r] = -INFINITY, total[r] = 0.0f;",
        "#pragma unroll",
        f"    for (int g = 0; g < {share.v_groups}; g++) {{",
        "#pragma unroll",
        f"        for (int e = 0; e < {share.v_width}; e++) sum[r][g][e] = 0.0f;",
        "    }",
        "}",
    ]


def _row(spec: KernelSpec, share: Share, name: str) -> list[str]:
    """Declares `h` and `i`, the head and the query of row `name` of this block (past the end, of the last row)."""
    body = body_of(spec)
    row = f"first_row + {name}"
    if share.all_rows % share.rows:
        row = f"qc_min({row}, {share.all_rows - 1})"
    group = body.heads // body.kv_heads
    if body.q_len == 1:
        return [f"const int64_t h = kv_h * {group} + {row}, i = 0;"]
    return [
        f"const int64_t h = kv_h * {group} + ({row}) / {body.q_len}, i = ({row}) % {body.q_len};",
    ]


def _stage_queries(spec: KernelSpec, share: Share) -> list[str]:
    body = body_of(spec)
    lines = [
        f"const int r = e / {share.depth}, d = e % {share.depth};",
        *_row(spec, share, "r"),
        *head_pointers(spec, ("q",)),
        f"q_rows[e] = d < {body.head_dim} ? qc_load(q_head + i * {stride(spec, 'q')} + d) : 0.0f;",
    ]
    return [
        f"for (int e = (int)threadIdx.x; e < {share.rows * share.depth}; e += {32 * share.warps}) {{",
        *indent(lines),
        "}",
        "__syncthreads();",
        f"float* const mine = scores + warp * {share.rows * _STRIP};  // of this warp: [row][key]",
    ]


def _read(spec: KernelSpec, role: str, to: str, row: str, there: str) -> str:
    """The statement that reads the columns from `c` on of a row of keys or values."""
    body = body_of(spec)
    columns = body.head_dim if role == "k" else body.value_dim
    if body.cache is not None:
        return f"qc_read_codes<qc_code_{body.cache}, {columns}>({to}, {row}, c, {there});"
    return f"qc_read_columns<{columns}>({to}, {row}, c, {there}, {role}_aligned);"


def _scores(spec: KernelSpec, share: Share) -> list[str]:
    """Dot products of 8 keys at a time, two keys per group of 8 lanes."""
    width = share.k_width
    turn = _KEY_LANES * width
    dots = [
        f"const int c = d + lane % {_KEY_LANES} * {width};",
        f"float key[2][{width}];",
        _read(spec, "k", "key[0]", "key_row", "j < seen"),
        _read(spec, "k", "key[1]", f"key_row + 4 * {stride(spec, 'k')}", "j + 4 < seen"),
        "#pragma unroll",
        f"for (int r = 0; r < {share.rows}; r++) {{",
        "#pragma unroll",
        f"    for (int e = 0; e < {width}; e += 4) {{",
        f"        const float4 query = *(const float4*)(q_rows + r * {share.depth} + c + e);",
        "#pragma unroll",
        "        for (int pair = 0; pair < 2; pair++) {",
        *indent(
            [f"dot[r][pair] = fmaf(query.{x}, key[pair][e + {n}], dot[r][pair]);" for n, x in enumerate("xyzw")], 3
        ),
        "        }",
        "    }",
        "}",
    ]
    if share.depth == turn:
        product = ["const int d = 0;", *dots]
    else:
        product = [f"for (int d = 0; d < {share.depth}; d += {turn}) {{", *indent(dots), "}"]
    return [
        f"const int count = (int)qc_min({_STRIP}, seen - k0);",
        "for (int strip = 0; strip < count; strip += 8) {",
        f"    const int64_t j = k0 + strip + lane / {_KEY_LANES};  // and j + 4",
        f"    const auto key_row = k_head + j * {stride(spec, 'k')};",
        f"    float dot[{share.rows}][2] = {{}};",
        *indent(product),
        "#pragma unroll",
        f"    for (int r = 0; r < {share.rows}; r++) {{",
        "#pragma unroll",
        "        for (int pair = 0; pair < 2; pair++) {",
        "            float s = dot[r][pair];",
        f"            for (int step = {_KEY_LANES // 2}; step > 0; step >>= 1)",
        "                s += __shfl_xor_sync(QC_ALL_LANES, s, step);",
        f"            if (lane % {_KEY_LANES} == 0) mine[r * {_STRIP} + strip + lane / {_KEY_LANES} + 4 * pair] = s;",
        "        }",
        "    }",
        "}",
        "__syncwarp();",
    ]


def _softmax(spec: KernelSpec, share: Share) -> list[str]:
    """One lane per key: turns scores into weights in place, and rescales the sums to the new maximum."""
    body = body_of(spec)
    reads_row = body.causal or body.last or body.window is not None
    needs_row = reads_row or body.mask != "none"
    unseen = hidden(spec, "number" if body.last else "i", "k0 + lane", "lane >= count")
    codes = body.cache is not None and body.cache != "int4"  # whose values are whole
    score = f"mine[r * {_STRIP} + lane] * {float_literal(body.scale, 'f32')}{' * key_scale' if codes else ''}"
    rule = masked(spec, "i", "(k0 + lane)")
    lines = [
        *(_row(spec, share, "r") if needs_row else []),
        *(head_pointers(spec, ("mask",)) if rule else []),
        *([f"const int64_t number = {number_of(spec, 'i')};"] if body.last else []),
        "float s = -INFINITY;",
        f"if (!({unseen})) {{",
        f"    s = {capped(spec, score)};",
        *indent(rule),
        "}",
        "const float best = fmaxf(top[r], qc_warp_max(s));",
        "const float shift = best == -INFINITY ? 0.0f : best;  // nothing seen yet: all weights are exp(-inf) = 0",
        "const float fade = expf(top[r] - shift), weight = expf(s - shift);",
        f"mine[r * {_STRIP} + lane] = weight{' * value_scale' if codes else ''};",
        "top[r] = best;",
        "total[r] = fmaf(total[r], fade, weight);",
        "#pragma unroll",
        f"for (int g = 0; g < {share.v_groups}; g++) {{",
        "#pragma unroll",
        f"    for (int e = 0; e < {share.v_width}; e++) sum[r][g][e] *= fade;",
        "}",
    ]
    if reads_row and body.mask == "none" and body.q_len == 1:
        lines[0] = "const int64_t i = 0;"
    elif needs_row and not rule:
        lines.insert(1, "(void)h;")
    elif needs_row and not reads_row and operand(spec, "mask").strides[2] == 0:
        lines.insert(1, "(void)i;")
    return [
        *(_row_scales(spec) if codes else []),
        "#pragma unroll",
        f"for (int r = 0; r < {share.rows}; r++) {{",
        *indent(lines),
        "}",
        "__syncwarp();",
    ]


def _row_scales(spec: KernelSpec) -> list[str]:
    """Declares the scales of the key and of the value of a lane: they scale scores and weights."""
    body = body_of(spec)
    return [
        f"const float {name}_scale = lane < count ? "
        f"qc_row_scale<qc_code_{body.cache}, {columns}>({role}_head + (k0 + lane) * {stride(spec, role)}) : 0.0f;"
        for name, role, columns in (("key", "k", body.head_dim), ("value", "v", body.value_dim))
    ]


def _values(spec: KernelSpec, share: Share) -> list[str]:
    lanes = share.value_lanes
    at_once = 32 // lanes
    group = [
        f"float value[{share.v_width}];",
        f"const int c = (g * {lanes} + lane % {lanes}) * {share.v_width};",
        _read(spec, "v", "value", "value_row", "j < count"),
        "#pragma unroll",
        f"for (int r = 0; r < {share.rows}; r++) {{",
        f"    const float weight = mine[r * {_STRIP} + j];",
        "#pragma unroll",
        f"    for (int e = 0; e < {share.v_width}; e++) sum[r][g][e] = fmaf(weight, value[e], sum[r][g][e]);",
        "}",
    ]
    return [
        "#pragma unroll 2",
        f"for (int strip = 0; strip < count; strip += {at_once}) {{",
        f"    const int j = strip + lane / {lanes};",
        f"    const auto value_row = v_head + (k0 + j) * {stride(spec, 'v')};",
        "#pragma unroll",
        f"    for (int g = 0; g < {share.v_groups}; g++) {{",
        *indent(group, 2),
        "    }",
        "}",
        "__syncwarp();",
    ]


def _publish(share: Share) -> list[str]:
    """Writes each warp's maxima, totals and sums to shared memory."""
    lines = [
        "const float all = qc_warp_sum(total[r]);",
        f"if (lane == 0) tops[warp * {share.rows} + r] = top[r], totals[warp * {share.rows} + r] = all;",
        "#pragma unroll",
        f"for (int g = 0; g < {share.v_groups}; g++) {{",
        "#pragma unroll",
        f"    for (int e = 0; e < {share.v_width}; e++) {{",
        "        float part = sum[r][g][e];",
        f"        for (int step = {share.value_lanes}; step < 32; step <<= 1)",
        "            part += __shfl_xor_sync(QC_ALL_LANES, part, step);",
        f"        if (lane < {share.value_lanes})",
        f"            sums[(warp * {share.rows} + r) * {share.columns} + (g * {share.value_lanes} + lane) * "
        f"{share.v_width} + e] = part;",
        "    }",
        "}",
    ]
    return ["#pragma unroll", f"for (int r = 0; r < {share.rows}; r++) {{", *indent(lines), "}", "__syncthreads();"]


def _merge(spec: KernelSpec, share: Share) -> list[str]:
    body, rows = body_of(spec), share.rows
    live = f"{rows}" if share.all_rows % rows == 0 else f"qc_min({rows}, {share.all_rows} - first_row)"
    lines = [
        f"const int r = e / {body.value_dim}, c = e % {body.value_dim};",
        "float best = -INFINITY;",
        f"for (int w = 0; w < {share.warps}; w++) best = fmaxf(best, tops[w * {rows} + r]);",
        "const float shift = best == -INFINITY ? 0.0f : best;",
        "float all = 0.0f, value = 0.0f;",
        f"for (int w = 0; w < {share.warps}; w++) {{",
        f"    const float fade = expf(tops[w * {rows} + r] - shift);",
        f"    all = fmaf(totals[w * {rows} + r], fade, all);",
        f"    value = fmaf(sums[(w * {rows} + r) * {share.columns} + c], fade, value);",
        "}",
        *_row(spec, share, "r"),
        *head_pointers(spec, ("out",)),
        f"qc_store(out_head + i * {stride(spec, 'out')} + c, all == 0.0f ? 0.0f : value / all);  // no key: zeros",
    ]
    return [
        f"for (int e = (int)threadIdx.x; e < {live} * {body.value_dim}; e += {32 * share.warps}) {{",
        *indent(lines),
        "}",
    ]
