"""Attention of one to four queries: keys and values are read once, in place.

A block owns up to `ROWS` of the *rows* (query head, query) that share a key head, so grouped-query attention reads the
cache once. Its warps take turns at strips of 32 keys: dot products with 8 warp lanes per key, the online softmax with
one lane per key, then the weighted values with a few lanes per value row. A lane asks for several vectors of keys,
and of values, before it uses the first one. At the end the results of the warps are merged in the order of the
warps, so every run gives the same bits.

With `parts`, the keys that the queries of a batch see are divided into equal runs, at least `PART_KEYS` long, and a
block takes one of them: it writes what it has summed, and `join_attention` joins the parts (flash-decoding). A part
that is left without keys writes that it has none and ends.
"""

from __future__ import annotations

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
    rows_aligned,
    seen_keys,
    stride,
)
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.signature import signature
from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, header_comment, indent
from qcompiler.plan.attention_parts import COLUMNS_BEHIND
from qcompiler.plan.dims import dim
from qcompiler.plan.kernel import ITEMSIZE, DType, KernelSpec
from qcompiler.plan.kinds.attention import AttentionKernel

ROWS = 8
KEYS_IN_FLIGHT = 4
VALUES_IN_FLIGHT = 8
"""Vectors of 16 bytes of keys, and of values, that a lane asks for at once: 2 and 4 KiB a warp. Bandwidth is limited by
bytes in flight divided by latency (Little's law): the 16 warps of a multiprocessor have 32 KiB of keys in flight, with
which 132 of them reach the 4.8 TB/s of an H200 at a latency of up to 0.9 us (idle memory: 0.25 us, kernels/cost.py).
More would cost registers, and with them warps."""

_PART_WARPS = 8
"""Two blocks of 8 warps share a multiprocessor, and one can read while the other merges its warps."""

PART_SUMS = 32
"""Sums of a lane that takes a part: with the loads in flight they fit 128 registers, so that two blocks of a part's
threads are resident."""

_SUMS_OF_16_WARPS = PART_SUMS + PART_SUMS // 2
"""The most sums of a lane with 16 warps. With more, kernels spilled: tests/cuda/test_attention.py compiles groups of
1 to 8 heads, heads of 16 to 128 columns and all types of cache."""

PART_KEYS = 32 * _PART_WARPS
"""The fewest keys of a part: a strip for each warp. Fewer leave warps idle, and the part ends no sooner."""

STRIP = 32
_KEY_LANES = 8
_SHARED = 48 * 1024
"""Bytes of shared memory that a block may use on every architecture without opting in."""


def value_width(dtype: DType, cache: str | None) -> int:
    """Elements of a value that a lane reads at once: 16 bytes, or 8 codes."""
    return 16 // ITEMSIZE[dtype] if cache is None else 8


def lanes_of_value(value_dim: int, width: int) -> int:
    """Warp lanes that share a value row, a power of two."""
    return min(32, 1 << (-(-value_dim // width) - 1).bit_length())


def rows_of_part(value_dim: int, width: int) -> int:
    """The most rows of a block that takes a part. A row also has a maximum and a total in registers."""
    lanes = lanes_of_value(value_dim, width)
    return max(1, min(ROWS // 2, PART_SUMS // (width * -(-value_dim // (width * lanes)))))


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
        """Rows per block, whose sums stay in registers: 64 per lane, or 32 where two blocks share a multiprocessor."""
        if self.body.parts is not None:
            return min(self.all_rows, rows_of_part(self.body.value_dim, self.v_width))
        return min(self.all_rows, max(1, ROWS // self.v_groups))

    @property
    def row_blocks(self) -> int:
        return -(-self.all_rows // self.rows)

    @property
    def turn(self) -> int:
        """Columns of a key that 8 lanes read with one load each."""
        return _KEY_LANES * self.k_width

    @property
    def turns(self) -> int:
        """Loads of a key per lane that are in flight together."""
        return min(-(-self.body.head_dim // self.turn), KEYS_IN_FLIGHT // 2)

    @property
    def depth(self) -> int:
        """Columns of q in shared memory, rounded up to a multiple of what 8 lanes ask for at once."""
        at_once = self.turn * self.turns
        return -(-self.body.head_dim // at_once) * at_once

    @property
    def keys_ahead(self) -> int:
        """Keys that a lane asks for at once: their 16-byte vectors, or 32 numbers, since codes take more registers as
        numbers than as codes."""
        return min(KEYS_IN_FLIGHT // self.turns, 32 // self.k_width)

    @property
    def values_ahead(self) -> int:
        """Rows of values that a lane asks for at once: as many as its sums leave registers for, and at most a strip's
        share of a lane."""
        loads = VALUES_IN_FLIGHT if self.rows * self.v_groups * self.v_width <= PART_SUMS else VALUES_IN_FLIGHT // 2
        return min(max(1, loads // self.v_groups), self.value_lanes)

    @property
    def fits_few_registers(self) -> bool:
        """Whether the sums of a lane, of values and of scores, leave room in the 128 registers that 16 warps allow."""
        return self.rows * (self.v_groups * self.v_width + self.keys_ahead) <= _SUMS_OF_16_WARPS

    @property
    def parts(self) -> int:
        return self.body.parts or 1

    @property
    def value_lanes(self) -> int:
        """Warp lanes that share a value row, a power of two."""
        return lanes_of_value(self.body.value_dim, self.v_width)

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
        memory.add("scores", "float", self.warps * self.rows * STRIP, 4)
        memory.add("sums", "float", self.warps * self.rows * self.columns, 4)
        memory.add("tops", "float", self.warps * self.rows, 4)
        memory.add("totals", "float", self.warps * self.rows, 4)
        return memory

    @staticmethod
    def of(spec: KernelSpec) -> Share:
        """16 warps, or 8 for a part of the keys and where 16 would leave a thread too few registers, or as many as
        shared memory allows."""
        body = body_of(spec)
        k_width, v_width = 16 // ITEMSIZE[operand(spec, "k").dtype], value_width(operand(spec, "v").dtype, body.cache)
        if body.cache is not None:  # eight codes where sixteen would leave lanes idle, or take more registers
            k_width = 16 if body.head_dim > 64 and body.cache != "int4" else 8
        whole = Share(body, k_width, v_width, 16)
        warps = whole.warps if body.parts is None and whole.fits_few_registers else _PART_WARPS
        while warps > 1 and Share(body, k_width, v_width, warps).shared().nbytes > _SHARED:
            warps //= 2
        return Share(body, k_width, v_width, warps)


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """The kernel, the same for every architecture."""
    del arch
    body = body_of(spec)
    share = Share.of(spec)
    threads, memory = 32 * share.warps, share.shared()
    blocks = dim(body.batch) * body.kv_heads * share.row_blocks * share.parts
    note = (
        f"{share.rows} (head, query) rows share a block of {share.warps} warps; a warp takes {STRIP} keys at a time, "
        f"{32 // share.value_lanes} value rows at once"
    )
    if body.parts is not None:
        note += f"; a block takes one of {body.parts} parts of the keys"
    turn = STRIP * share.warps
    begin = next_keys(spec, f"{'first_key' if body.parts is None else 'begin'} + {STRIP} * warp", STRIP, turn)
    after = next_keys(spec, f"k0 + {turn}", STRIP, turn)
    lines = [
        *memory.declarations(),
        *_place(spec, share),
        *(_part(spec, share) if body.parts is not None else ["const int64_t end = seen;"]),
        *_start(spec, share),
        *_stage_queries(spec, share),
        f"for (int64_t k0 = {begin}; k0 < end; k0 = {after}) {{",
        *indent([*_scores(spec, share), *_softmax(spec, share), *_values(spec, share)]),
        "}",
        *_publish(share),
        *_merge(spec, share),
    ]
    text = "\n".join(
        [header_comment(spec, note), signature(spec, threads, 1 if body.parts is None else 2), *indent(lines), "}\n"]
    )
    geometry = Geometry((blocks.to_dim(), 1, 1), (threads, 1, 1), memory.nbytes)
    return CudaKernel(text, geometry, "fma", (note,))


def _place(spec: KernelSpec, share: Share) -> list[str]:
    """Declares the head, the rows and the part of this block, and the keys that its queries see."""
    body = body_of(spec)
    whole = "(int64_t)blockIdx.x" if share.parts == 1 else f"(int64_t)blockIdx.x / {share.parts}"
    rest = whole if share.row_blocks == 1 else f"{whole} / {share.row_blocks}"
    first = "0" if share.row_blocks == 1 else f"(int)({whole} % {share.row_blocks}) * {share.rows}"
    return [
        "const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;",
        f"const int64_t b = {rest} / {body.kv_heads}, kv_h = {rest} % {body.kv_heads};",
        f"const int first_row = {first};",
        *seen_keys(spec, "0", str(body.q_len), STRIP),
    ]


def _part(spec: KernelSpec, share: Share) -> list[str]:
    """Declares `begin` and `end`, the keys of this block's part. A block without keys writes so and ends."""
    lines = [
        *_out_row(spec, share),
        f"qc_store(out_row + c, c == {body_of(spec).value_dim} ? -INFINITY : 0.0f);",
    ]
    return [
        f"const int part = (int)(blockIdx.x % {share.parts});",
        f"const int64_t share = (qc_max(0, seen - first_key) + {share.parts * STRIP - 1}) / {share.parts * STRIP} "
        f"* {STRIP};",
        f"const int64_t part_keys = qc_max({PART_KEYS}, share), begin = first_key + part * part_keys;",
        "const int64_t end = qc_min(seen, begin + part_keys);",
        "if (begin >= end) {",
        *indent(_each_column(share, lines)),
        "    return;",
        "}",
    ]


def _start(spec: KernelSpec, share: Share) -> list[str]:
    """Declares where keys and values begin, and the sums of a lane."""
    return [
        *head_pointers(spec, ("k", "v")),
        *rows_aligned(spec),
        f"float top[{share.rows}], total[{share.rows}], sum[{share.rows}][{share.v_groups}][{share.v_width}];",
        "#pragma unroll",
        f"for (int r = 0; r < {share.rows}; r++) {{",
        *indent(_first_top(spec, share)),
        "#pragma unroll",
        f"    for (int g = 0; g < {share.v_groups}; g++) {{",
        "#pragma unroll",
        f"        for (int e = 0; e < {share.v_width}; e++) sum[r][g][e] = 0.0f;",
        "    }",
        "}",
    ]


def _first_top(spec: KernelSpec, share: Share) -> list[str]:
    """What row `r` has before it sees a key: its sink, in one warp of one part."""
    if not share.body.sinks:
        return ["top[r] = -INFINITY, total[r] = 0.0f;"]
    once = "warp == 0" if share.parts == 1 else "warp == 0 && part == 0"
    return [
        *_row(spec, share, "r"),
        *head_pointers(spec, ("sinks",)),
        *(["(void)i;"] if operand(spec, "sinks").strides[2] == 0 else []),
        f"top[r] = {once} ? {first_top(spec, 'i')} : -INFINITY;",
        f"total[r] = {first_total(spec, 'top[r]', 'lane == 0')};",
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
        f"float* const mine = scores + warp * {share.rows * STRIP};  // of this warp: [row][key]",
    ]


def _rows_of(spec: KernelSpec, share: Share, role: str) -> str:
    """The C++ type that reads rows of keys or values."""
    body = body_of(spec)
    columns, width = (body.head_dim, share.k_width) if role == "k" else (body.value_dim, share.v_width)
    if body.cache is not None:
        return f"qc_code_rows<qc_code_{body.cache}, {columns}, {width}>"
    return f"qc_float_rows<{STORAGE_TYPES[operand(spec, role).dtype]}, {columns}>"


def _aligned(spec: KernelSpec, role: str) -> str:
    return "true" if body_of(spec).cache is not None else f"{role}_aligned"


def _scores(spec: KernelSpec, share: Share) -> list[str]:
    """Dot products of 4 times `keys_ahead` keys at a time: a lane takes every fourth of them."""
    ahead, turn, turns = share.keys_ahead, share.turn, share.turns
    step, pieces = stride(spec, "k"), share.depth // (turn * turns)
    products = [
        f"const int c = {'d + ' if pieces > 1 else ''}lane % {_KEY_LANES} * {share.k_width};",
        f"keys::raw raw[{ahead}][{turns}];",
        f"qc_load_rows<keys, {ahead}, {turns}, {turn}>(raw, key_row, 4 * {step}, c, left, {_aligned(spec, 'k')});",
        *_dots(share),
    ]
    if pieces > 1:
        products = [f"for (int d = 0; d < {share.depth}; d += {turn * turns}) {{", *indent(products), "}"]
    return [
        f"using keys = {_rows_of(spec, share, 'k')};",
        f"const int count = (int)qc_min({STRIP}, end - k0);",
        "#pragma unroll 1",
        f"for (int strip = 0; strip < count; strip += {4 * ahead}) {{",
        f"    const int j = strip + lane / {_KEY_LANES}, left = (count - j + 3) / 4;  // keys j, j + 4, …",
        f"    const auto key_row = k_head + (k0 + j) * {step};",
        f"    float dot[{share.rows}][{ahead}] = {{}};",
        *indent(products),
        "#pragma unroll",
        f"    for (int r = 0; r < {share.rows}; r++) {{",
        "#pragma unroll",
        f"        for (int i = 0; i < {ahead}; i++) {{",
        "            float s = dot[r][i];",
        f"            for (int step = {_KEY_LANES // 2}; step > 0; step >>= 1)",
        "                s += __shfl_xor_sync(QC_ALL_LANES, s, step);",
        f"            if (lane % {_KEY_LANES} == 0) mine[r * {STRIP} + j + 4 * i] = s;",
        "        }",
        "    }",
        "}",
        "__syncwarp();",
    ]


def _dots(share: Share) -> list[str]:
    """Adds the products of a lane's columns of its keys."""
    ahead = share.keys_ahead
    products = [f"dot[r][i] = fmaf(query.{x}, key[i][e + {n}], dot[r][i]);" for n, x in enumerate("xyzw")]
    return [
        "#pragma unroll",
        f"for (int t = 0; t < {share.turns}; t++) {{",
        f"    float key[{ahead}][{share.k_width}];",
        "#pragma unroll",
        f"    for (int i = 0; i < {ahead}; i++) keys::unpack(key[i], raw[i][t], c + t * {share.turn});",
        "#pragma unroll",
        f"    for (int r = 0; r < {share.rows}; r++) {{",
        "#pragma unroll",
        f"        for (int e = 0; e < {share.k_width}; e += 4) {{",
        f"            const float4 query = *(const float4*)(q_rows + r * {share.depth} + c + t * {share.turn} + e);",
        "#pragma unroll",
        f"            for (int i = 0; i < {ahead}; i++) {{",
        *indent(products, 4),
        "            }",
        "        }",
        "    }",
        "}",
    ]


def _softmax(spec: KernelSpec, share: Share) -> list[str]:
    """One lane per key: turns scores into weights in place, and rescales the sums to the new maximum."""
    body = body_of(spec)
    reads_row = body.causal or body.last or body.window is not None
    needs_row = reads_row or body.mask != "none"
    unseen = hidden(spec, "number" if body.last else "i", "k0 + lane", "lane >= count")
    codes = body.cache is not None and body.cache != "int4"  # whose values are whole
    score = f"mine[r * {STRIP} + lane] * {float_literal(body.scale, 'f32')}{' * key_scale' if codes else ''}"
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
        f"mine[r * {STRIP} + lane] = weight{' * value_scale' if codes else ''};",
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
    """Adds the weighted values, of which a lane takes `values_ahead` rows at a time."""
    lanes, ahead, groups, width = share.value_lanes, share.values_ahead, share.v_groups, share.v_width
    step, at_once = stride(spec, "v"), 32 // lanes
    left = f"(count - j + {at_once - 1}) / {at_once}" if at_once > 1 else "count - j"
    use = [
        "#pragma unroll",
        f"for (int g = 0; g < {groups}; g++) {{",
        f"    float value[{width}];",
        f"    values::unpack(value, raw[n][g], (g * {lanes} + lane % {lanes}) * {width});",
        "#pragma unroll",
        f"    for (int r = 0; r < {share.rows}; r++) {{",
        f"        const float weight = mine[r * {STRIP} + j + n * {at_once}];",
        "#pragma unroll",
        f"        for (int e = 0; e < {width}; e++) sum[r][g][e] = fmaf(weight, value[e], sum[r][g][e]);",
        "    }",
        "}",
    ]
    return [
        f"using values = {_rows_of(spec, share, 'v')};",
        "#pragma unroll 1",
        f"for (int strip = 0; strip < count; strip += {ahead * at_once}) {{",
        f"    const int j = strip + lane / {lanes}, left = {left};  // value rows j, j + {at_once}, …",
        f"    values::raw raw[{ahead}][{groups}];",
        f"    qc_load_rows<values, {ahead}, {groups}, {lanes * width}>(",
        f"        raw, v_head + (k0 + j) * {step}, {at_once} * {step}, lane % {lanes} * {width}, left, "
        f"{_aligned(spec, 'v')});",
        "#pragma unroll",
        f"    for (int n = 0; n < {ahead}; n++) {{",
        *indent(use, 2),
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


def _each_column(share: Share, lines: list[str]) -> list[str]:
    """A loop of the block's threads over row `r` and column `c` of what it writes."""
    rows, columns = share.rows, share.body.value_dim + (COLUMNS_BEHIND if share.body.parts is not None else 0)
    live = f"{rows}" if share.all_rows % rows == 0 else f"qc_min({rows}, {share.all_rows} - first_row)"
    return [
        f"for (int e = (int)threadIdx.x; e < {live} * {columns}; e += {32 * share.warps}) {{",
        f"    const int r = e / {columns}, c = e % {columns};",
        *indent(lines),
        "}",
    ]


def _out_row(spec: KernelSpec, share: Share) -> list[str]:
    """Declares `out_row`, where the block's row `r` is written."""
    place = f"out_head + i * {stride(spec, 'out')}"
    if share.body.parts is not None:
        place += f" + (int64_t)part * {c_dim(operand(spec, 'out').strides[3])}"
    return [*_row(spec, share, "r"), *head_pointers(spec, ("out",)), f"const auto out_row = {place};"]


def _merge(spec: KernelSpec, share: Share) -> list[str]:
    """Joins what the warps have summed, in the order of the warps."""
    body, rows = body_of(spec), share.rows
    column = "c" if body.parts is None else f"qc_min(c, {body.value_dim - 1})"
    stored = "all == 0.0f ? 0.0f : value / all);  // no key: zeros"
    if body.parts is not None:
        stored = f"c < {body.value_dim} ? value : c == {body.value_dim} ? best : all);"
    return _each_column(share, [
        "float best = -INFINITY;",
        f"for (int w = 0; w < {share.warps}; w++) best = fmaxf(best, tops[w * {rows} + r]);",
        "const float shift = best == -INFINITY ? 0.0f : best;",
        "float all = 0.0f, value = 0.0f;",
        f"for (int w = 0; w < {share.warps}; w++) {{",
        f"    const float fade = expf(tops[w * {rows} + r] - shift);",
        f"    all = fmaf(totals[w * {rows} + r], fade, all);",
        f"    value = fmaf(sums[(w * {rows} + r) * {share.columns} + {column}], fade, value);",
        "}",
        *_out_row(spec, share),
        f"qc_store(out_row + c, {stored}",
    ])  # fmt: skip
