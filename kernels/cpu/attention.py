"""Attention: one task per block of queries, online softmax over blocks of keys, fp32 inside.

A task owns up to `QUERY_BLOCK` queries of one head. For each block of `KEY_BLOCK` keys it packs the keys transposed
into scratch (16 keys per vector). It then takes `rows` queries at a time: scores from a register tile of fused
multiply-adds, the running maximum and sum (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018),
and the product with the values from a second register tile. The size of scratch does not depend on the lengths. Blocks
of keys that no query of the task sees (after it, or before the window) are skipped. `attention_decode` serves a single
query.

Where the kernel may multiply in bf16, there is a second task function for processors that can (attention_bf16): the
same steps, with keys, values, queries and weights as words of two bf16 numbers. A third one multiplies by tiles of AMX,
where the context allows it (attention_amx).
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.errors import KernelSelectionError
from qcompiler.kernels.cpu import attention_amx, attention_bf16, attention_decode
from qcompiler.kernels.cpu.attention_operands import (
    first_top,
    has_scales,
    head_pointers,
    number_of,
    operand,
    operand_names,
    score_lines,
    seen_keys,
    skips,
    unpacks,
)
from qcompiler.kernels.cpu.attention_tiles import (
    LANES,
    RegisterTile,
    Weighing,
    scores_function,
    values_functions,
    weigh_values,
)
from qcompiler.kernels.cpu.text import entry_function, pointer, task_function
from qcompiler.kernels.text import c_dim, header_comment, indent
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.attention import AttentionKernel

QUERY_BLOCK = 128


_TILES = {
    "x86-64-v4": RegisterTile(8, 2),
    "x86-64-v3": RegisterTile(6, 1),
    "x86-64": RegisterTile(2, 1),
    "generic": RegisterTile(4, 1),
}
"""Accumulators, operands and one broadcast fit the registers: 8 x 2 zmm of 32, 6 x 1 pairs of ymm (12 of 16), 2 x 1
groups of four xmm (8 of 16)."""


@dataclass(frozen=True)
class ScratchSizes:
    """Sizes, in floats, of a task's sections in scratch. Each section starts at a multiple of 16 floats."""

    body: AttentionKernel
    tile: RegisterTile
    packs_values: bool
    bf16: bool = False

    @property
    def query_block(self) -> int:
        """Queries per task, a whole number of tiles."""
        return QUERY_BLOCK // self.tile.rows * self.tile.rows

    @property
    def key_block(self) -> int:
        """Keys per block: 256, or 128 if 256 packed keys would exceed half of a 256 KiB cache."""
        return 256 if self.body.head_dim <= 96 else 128

    @property
    def key_columns(self) -> int:
        return -(-self.body.head_dim // LANES) * LANES

    @property
    def value_columns(self) -> int:
        return -(-self.body.value_dim // LANES) * LANES

    @property
    def sections(self) -> dict[str, int]:
        blocks = self._bf16_blocks if self.bf16 else self._blocks
        return {
            **blocks,
            "scores": self.tile.rows * self.key_block,
            "sums": self.query_block * self.value_columns,
            "top": self.query_block,
            "total": self.query_block,
        }

    @property
    def _blocks(self) -> dict[str, int]:
        return {
            "keys": self.key_block * self.body.head_dim,
            "values": self.key_block * self.value_columns if self.packs_values else 0,
            "scales": self.key_block if has_scales(self.body) else 0,
            "rows": self.key_block * self.key_columns if unpacks(self.body) else 0,
            "queries": -(-self.tile.rows * self.body.head_dim // LANES) * LANES,
        }

    @property
    def _bf16_blocks(self) -> dict[str, int]:
        words = attention_bf16.row_columns(self.body.head_dim) // 2
        return {
            "keys": self.key_block * words,
            "rounded": self.key_block * words,
            "values": self.key_block // 2 * self.value_columns,
            "key_scales": self.key_block if has_scales(self.body) else 0,
            "value_scales": self.key_block if has_scales(self.body) else 0,
            "rows": self.key_block * max(self.key_columns, self.value_columns) if unpacks(self.body) else 0,
            "queries": self.tile.rows * words,
        }


def _geometry(spec: KernelSpec, isa: str, *, bf16: bool = False) -> ScratchSizes:
    assert isinstance(spec.body, AttentionKernel)
    value = spec.operands[2]
    packs_values = bf16 or value.dtype != "f32" or spec.body.value_dim % LANES != 0
    return ScratchSizes(spec.body, _TILES[isa], packs_values, bf16)


def headers(spec: KernelSpec) -> tuple[str, ...]:
    assert isinstance(spec.body, AttentionKernel)
    if spec.body.compute != "bf16":
        return (*(("cache.h",) if spec.body.cache is not None else ()), "attention.h")
    tiles = "attention_decode_amx.h" if attention_decode.fits(spec.body) else "attention_amx.h"
    return ("cache.h", "attention.h", "bf16.h", "attention_bf16.h", "amx.h", tiles)


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """Packed keys (and values), one tile of queries and scores, and the running sums of a block of queries."""
    assert isinstance(spec.body, AttentionKernel)
    if attention_decode.fits(spec.body):
        return attention_decode.scratch_bytes(spec, isa)
    both = attention_bf16.chosen(spec.body, isa)
    sizes = [
        4 * sum(_geometry(spec, isa, bf16=bf16).sections.values()) for bf16 in ((False, True) if both else (False,))
    ]
    return max(*sizes, attention_amx.Sizes(spec.body).scratch) if both else max(sizes)


def emit(spec: KernelSpec, isa: str) -> str:
    """Tasks are (batch, head, block of queries), with the block as the fastest index."""
    body = spec.body
    assert isinstance(body, AttentionKernel)
    if body.parts is not None:
        raise KernelSelectionError(
            f"kernel '{spec.name}' ({spec.serves}) divides the keys into parts; only GPUs have kernels that do, and "
            "the threads of a CPU share one attention: compile the model for the CPU"
        )
    if attention_decode.fits(body):
        return attention_decode.emit(spec, isa)
    geometry = _geometry(spec, isa)
    head = header_comment(
        spec,
        f"blocks of {geometry.query_block} queries x {geometry.key_block} keys, "
        f"tile {geometry.tile.rows} x {geometry.tile.width}",
    )
    size = geometry.query_block
    blocks = f"qc_floordiv({c_dim(body.q_len)} + {size - 1}, {size})"
    both = attention_bf16.chosen(body, isa)
    launch = [
        f"const int64_t tasks = {c_dim(body.batch)} * {body.heads} * {blocks};",
        f"const double rows = (double){c_dim(body.batch)} * {body.heads} * {c_dim(body.q_len)};",
        f"const double cost = rows * {c_dim(body.kv_len)} * {body.head_dim + body.value_dim};",
        *((*attention_amx.launch(spec), *attention_bf16.choose_task(spec.name)) if both else ()),
        f"qc_run_if_worth(ctx, op, sym, tasks, cost, {'task_of' if both else f'qk_{spec.name}_task'});",
    ]
    parts = [
        head,
        scores_function(spec.name, geometry.tile, body.head_dim, geometry.key_block),
        values_functions(
            spec.name, geometry.tile, geometry.key_block, geometry.value_columns, "float", geometry.value_columns
        ),
        task_function(spec, _task(spec, geometry, blocks)),
        *([_bf16_functions(spec, _geometry(spec, isa, bf16=True), blocks)] if both else []),
        entry_function(spec, launch),
    ]
    return "\n".join(parts)


def _bf16_functions(spec: KernelSpec, geometry: ScratchSizes, blocks: str) -> str:
    sizes = geometry.tile, geometry.key_block
    parts = [
        attention_bf16.scores_function(spec.name, geometry.tile, geometry.body.head_dim, geometry.key_block),
        attention_bf16.values_functions(spec.name, *sizes, geometry.value_columns, "qb_word", geometry.value_columns),
        task_function(spec, _task(spec, geometry, blocks), "bf16_task"),
        attention_amx.task(spec),
    ]
    return attention_bf16.guarded("\n".join(parts))


# --- one task --------------------------------------------------------------------------------------------------------


def _task(spec: KernelSpec, geometry: ScratchSizes, blocks: str) -> list[str]:
    body = geometry.body
    names = operand_names(spec)
    sections, offset = [], 0
    for name, size in geometry.sections.items():
        if size:
            sections.append(f"float* const {name} = (float*)scratch + {offset};")
        offset += size
    return [
        *(pointer(o, i, name, "call->op") for i, (name, o) in enumerate(zip(names, spec.operands, strict=True))),
        f"const int64_t q_len = {c_dim(body.q_len)}, kv_len = {c_dim(body.kv_len)}, blocks = {blocks};",
        f"const int64_t b = task / (blocks * {body.heads}), h = task / blocks % {body.heads};",
        f"const int64_t kv_h = h / {body.heads // body.kv_heads};",
        f"const int64_t q0 = task % blocks * {geometry.query_block};",
        f"const int64_t q_count = qc_min({geometry.query_block}, q_len - q0);",
        *head_pointers(spec, names),
        *sections,
        *_start(spec, geometry),
        f"memset(sums, 0, sizeof(float) * {geometry.query_block * geometry.value_columns});",
        *seen_keys(spec, "q0", "q_count"),
        f"for (int64_t k0 = first; k0 < seen; k0 += {geometry.key_block}) {{",
        *indent(skips(spec, str(geometry.key_block))),
        *indent(_key_block(spec, geometry)),
        "}",
        *_finish(spec, geometry),
    ]


def _start(spec: KernelSpec, geometry: ScratchSizes) -> list[str]:
    """What queries have before they see a key; a block's rows without a query have no sink."""
    if not geometry.body.sinks:
        return [f"for (int64_t i = 0; i < {geometry.query_block}; i++) top[i] = -INFINITY, total[i] = 0.0f;"]
    return [
        f"for (int64_t i = 0; i < {geometry.query_block}; i++) {{",
        f"    top[i] = i < q_count ? {first_top(spec, 'q0 + i')} : -INFINITY;",
        "    total[i] = qc_first_total(top[i]);",
        "}",
    ]


def _key_block(spec: KernelSpec, geometry: ScratchSizes) -> list[str]:
    pack = _pack_bf16_block if geometry.bf16 else _pack_block
    lines, block = pack(spec, geometry)
    name, tile = f"{spec.name}_bf16" if geometry.bf16 else spec.name, geometry.tile
    depth = attention_bf16.row_columns(geometry.body.head_dim) // 2 if geometry.bf16 else geometry.body.head_dim
    words = "(const qb_word*)" if geometry.bf16 else ""
    tile_lines = [
        f"const int64_t live = qc_min({tile.rows}, q_count - i);",
        _pack_queries(spec, geometry),
        *_visible(spec, geometry),
        f"for (int64_t j = 0; j < visible; j += {tile.width})",
        f"    qk_{name}_scores({words}queries, keys + j * {depth}, scores + j);",
        f"for (int64_t r = 0; r < {tile.rows}; r++) {{",
        *indent(_softmax_row(spec, geometry)),
        "}",
        *weigh_values(name, tile, geometry.value_columns, block, weights=f"{words}scores"),
    ]
    return [
        f"const int64_t count = qc_min({geometry.key_block}, seen - k0);",
        *lines,
        f"for (int64_t i = 0; i < q_count; i += {tile.rows}) {{",
        *indent(tile_lines),
        "}",
    ]


def _pack_block(spec: KernelSpec, geometry: ScratchSizes) -> tuple[list[str], Weighing]:
    """Packs a block of keys, and of values where these are not read in place."""
    tile, body = geometry.tile, geometry.body
    stride_k, stride_v = (c_dim(operand(spec, name).strides[2]) for name in ("k", "v"))
    keys, columns, lines = f"k_head + k0 * {stride_k}, {stride_k}", geometry.key_columns, list[str]()
    if unpacks(body):
        lines.append(f"qc_unpack_int4({keys}, count, {body.head_dim}, {columns}, rows);")
        keys = f"rows, {columns}"
    lines.append(f"qc_pack_keys({keys}, count, {body.head_dim}, {tile.width}, keys);")
    if has_scales(body):
        lines += [
            f"qc_pack_scales(k_head + k0 * {stride_k}, {stride_k}, count, {body.head_dim}, scales);",
            f"qc_scale_keys(keys, scales, count, {body.head_dim}, {tile.width});",
        ]
    values, stride = f"v_head + k0 * {stride_v}", stride_v
    if geometry.packs_values:
        pack = "qc_unpack_int4" if unpacks(body) else "qc_pack_values"
        lines.append(f"{pack}({values}, {stride}, count, {body.value_dim}, {geometry.value_columns}, values);")
        if has_scales(body):
            lines += [
                f"qc_pack_scales({values}, {stride}, count, {body.value_dim}, scales);",
                f"qc_scale_values(values, scales, count, {geometry.value_columns});",
            ]
        values, stride = "values", str(geometry.value_columns)
    return lines, Weighing(values, stride, "visible", f"sums + i * {geometry.value_columns}")


def _pack_bf16_block(spec: KernelSpec, geometry: ScratchSizes) -> tuple[list[str], Weighing]:
    """The same as words of bf16. Codes with a scale for each row are packed as they are: bf16 has all of them."""
    body, width = geometry.body, geometry.tile.width
    columns = attention_bf16.row_columns(body.head_dim)
    stride_k, stride_v = (c_dim(operand(spec, name).strides[2]) for name in ("k", "v"))
    keys, values = f"k_head + k0 * {stride_k}", f"v_head + k0 * {stride_v}"
    lines = [f"const int64_t panels = (count + {width - 1}) / {width} * {width};"]
    if has_scales(body):
        lines += [
            f"qc_pack_scales({keys}, {stride_k}, count, {body.head_dim}, key_scales);",
            f"qc_pack_scales({values}, {stride_v}, count, {body.value_dim}, value_scales);",
        ]
    if unpacks(body):
        lines.append(f"qc_unpack_int4({keys}, {stride_k}, count, {body.head_dim}, {geometry.key_columns}, rows);")
        keys, stride_k = "rows", str(geometry.key_columns)
    lines += [
        f"qa_round_rows({keys}, {stride_k}, count, panels, {body.head_dim}, {columns}, (uint16_t*)rounded);",
        f"qa_pack_keys((const uint16_t*)rounded, panels, {columns // 2}, {width}, keys);",
    ]
    if unpacks(body):
        lines.append(f"qc_unpack_int4({values}, {stride_v}, count, {body.value_dim}, {geometry.value_columns}, rows);")
        values, stride_v = "rows", str(geometry.value_columns)
    lines.append(f"qa_pack_values({values}, {stride_v}, count, {body.value_dim}, {geometry.value_columns}, values);")
    sums = f"sums + i * {geometry.value_columns}"
    return lines, Weighing("(const qb_word*)values", str(geometry.value_columns), "visible", sums)


def _pack_queries(spec: KernelSpec, geometry: ScratchSizes) -> str:
    stride, depth, rows = c_dim(operand(spec, "q").strides[2]), geometry.body.head_dim, geometry.tile.rows
    first = f"q_head + (q0 + i) * {stride}, {stride}, live, {rows}, {depth}"
    if not geometry.bf16:
        return f"qc_pack_queries({first}, queries);"
    return f"qa_round_rows({first}, {attention_bf16.row_columns(depth)}, (uint16_t*)queries);"


def _visible(spec: KernelSpec, geometry: ScratchSizes) -> list[str]:
    """How many keys of this block, counted from its first key, some query of the tile sees."""
    if geometry.body.last:
        return [
            "int64_t visible = 0;",
            f"for (int64_t r = 0; r < live; r++) visible = qc_max(visible, {number_of(spec, 'q0 + i + r')} + 1 - k0);",
            "visible = qc_min(count, visible);",
            "if (visible <= 0) continue;",
        ]
    if not geometry.body.causal:
        return ["const int64_t visible = count;"]
    return [
        f"const int64_t visible = qc_min(count, q0 + i + {geometry.tile.rows} - k0);  // keys its last query sees",
        "if (visible <= 0) continue;",
    ]


def _softmax_row(spec: KernelSpec, geometry: ScratchSizes) -> list[str]:
    """Turns the scores of row `r` into weights, updates its running maximum and sum, and rescales its earlier sums."""
    columns, scaled = geometry.value_columns, geometry.bf16 and has_scales(geometry.body)
    bounded = geometry.body.causal or geometry.body.last
    number = number_of(spec, "qc_min(q0 + i + r, q_len - 1)" if geometry.body.last else "q0 + i + r")
    limit = f"qc_max(0, qc_min(visible, {number} + 1 - k0))" if bounded else "visible"
    scales = "key_scales + j" if scaled else None
    exp, store = ("qa_exp", "qb_store((qb_word*)row + j / 2, {})") if geometry.bf16 else ("vexp", "vstore(row + j, {})")
    weight = "w * vload(value_scales + j)" if scaled else "w"
    return [
        f"float* const row = scores + r * {geometry.key_block};",
        f"const int64_t limit = {limit};",
        "vf best = vset(-INFINITY);",
        "qc_columns(limit, [&](int64_t j, int n) QC_BODY {",
        *indent(score_lines(spec, "row + j", "qc_min(q0 + i + r, q_len - 1)", "k0 + j", scales)),
        "    s = vsel(vfirst(n), s, vset(-INFINITY));",
        "    vstore(row + j, s);",
        "    best = vmax(s, best);",
        "});",
        "const float before = top[i + r], now = fmaxf(before, vmaxlane(best));",
        "const vf shift = vset(now == -INFINITY ? 0.0f : now);  // nothing seen yet: all weights are exp(-inf) = 0",
        "vf sum = vzero();",
        "int64_t j = 0;",
        f"for (; j < limit; j += {LANES}) {{",
        f"    const vf w = {exp}(vload(row + j) - shift);",
        f"    {store.format(weight)};",
        "    sum = sum + w;",
        "}",
        *([f"for (; j < visible; j += {LANES}) {store.format('vzero()')};"] if bounded else ()),
        "if (now != before && before != -INFINITY) {",
        "    const float fade = qc_exp(before - now);",
        "    total[i + r] *= fade;",
        f"    float* const old = sums + (i + r) * {columns};",
        f"    for (int64_t c = 0; c < {columns}; c += {LANES}) vstore(old + c, vload(old + c) * vset(fade));",
        "}",
        "top[i + r] = now;",
        "total[i + r] += vsum(sum);",
    ]


def _finish(spec: KernelSpec, geometry: ScratchSizes) -> list[str]:
    columns = geometry.value_columns
    return [
        "for (int64_t i = 0; i < q_count; i++) {",
        "    const vf scale = vset(total[i] == 0.0f ? 0.0f : 1.0f / total[i]);  // no key seen: zeros",
        f"    const float* const row = sums + i * {columns};",
        f"    const auto out_row = out_head + (q0 + i) * {c_dim(operand(spec, 'out').strides[2])};",
        f"    qc_columns({geometry.body.value_dim}, [&](int64_t c, int n) QC_BODY {{",
        "        vstore_upto(out_row + c, vload(row + c) * scale, n);",
        "    });",
        "}",
    ]
