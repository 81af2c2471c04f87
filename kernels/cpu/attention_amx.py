"""C++ text of attention in bf16 by tiles of AMX (attention_amx.h), which a program has beside its other forms.

The steps are those of `attention`; products, softmax and the division of the work are functions of the header. A kernel
adds what depends on its operands: how keys and values are packed, and how scores are scaled and masked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qcompiler.kernels.cpu.attention_bf16 import row_columns
from qcompiler.kernels.cpu.attention_operands import (
    element_type,
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
from qcompiler.kernels.cpu.attention_tiles import ELEMENT_BYTES, LANES
from qcompiler.kernels.cpu.text import pointer, task_function
from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, indent, needed
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.attention import AttentionKernel

LEAST = 2
"""Rows of a key head (queries times the query heads that share it) from which tiles pay."""

ROWS, MOST_ROWS, STRIP = 32, 256, 16
"""Of attention_amx.h: rows that are multiplied together, rows of a task, rows of a tile."""


MOST_LINES = 8
"""Of a row of the result, that are asked for before it is written."""

_BYTES = {"char": 1, "uint16_t": 2, "float": 4, "int64_t": 8, "char*": 8}


@dataclass(frozen=True)
class Sizes:
    """Sizes of one kernel."""

    body: AttentionKernel

    @property
    def key_block(self) -> int:
        return 128

    @property
    def pitch(self) -> int:
        """Floats from one row of scores to the next."""
        return self.key_block + LANES

    @property
    def key_columns(self) -> int:
        return row_columns(self.body.head_dim)

    @property
    def value_columns(self) -> int:
        return -(-self.body.value_dim // LANES) * LANES

    @property
    def scaled(self) -> bool:
        """Whether scores are multiplied by the scale before the softmax, and not in its exponents."""
        body = self.body
        return body.softcap is not None or body.mask == "float" or not 2.0**-60 < body.scale < 2.0**60

    @property
    def bounded(self) -> bool:
        return self.body.causal or self.body.last

    @property
    def sections(self) -> dict[str, tuple[str, int]]:
        """The C++ type and the number of elements of each section of scratch, which has whole cache lines."""
        body, block = self.body, self.key_block
        columns = max(self.key_columns, self.value_columns)
        return {
            "queries": ("char", MOST_ROWS * 2 * self.key_columns),
            "keys": ("char", block * 2 * self.key_columns),
            "values": ("char", block * 2 * self.value_columns),
            "weights": ("char", 2 * ROWS * 2 * block),
            "rounded": ("uint16_t", STRIP * self.key_columns),
            "scores": ("float", 2 * ROWS * self.pitch),
            "best": ("float", STRIP * LANES),
            "key_scales": ("float", block if has_scales(body) else 0),
            "value_scales": ("float", block if has_scales(body) else 0),
            "unpacked": ("float", block * columns if unpacks(body) else 0),
            "sums": ("float", MOST_ROWS * self.value_columns),
            "top": ("float", MOST_ROWS),
            "total": ("float", MOST_ROWS),
            "out_at": ("char*", MOST_ROWS),
            "bound": ("int64_t", MOST_ROWS if self.bounded else 0),
        }

    @property
    def scratch(self) -> int:
        return sum(_BYTES[kind] * count for kind, count in self.sections.values())


def launch(spec: KernelSpec) -> list[str]:
    """Runs the tasks of this form if it pays and the context allows it."""
    body = spec.body
    assert isinstance(body, AttentionKernel)
    group = body.heads // body.kv_heads
    rows = f"{c_dim(body.q_len)} * {group}" if group > 1 else c_dim(body.q_len)
    sizes = f"{c_dim(body.batch)}, {body.kv_heads}, {group}, {c_dim(body.q_len)}, cost"
    return [
        "#if defined(QC_AVX512) && !defined(QB_NO_BF16)",
        f"if (ctx->bf16_units == QC_BF16_TILES && {rows} >= {LEAST})",
        f"    return qat_run(ctx, op, sym, {sizes}, qk_{spec.name}_amx_task);",
        "#endif",
    ]


def task(spec: KernelSpec) -> str:
    """The task function."""
    assert isinstance(spec.body, AttentionKernel)
    sizes = Sizes(spec.body)
    names = operand_names(spec)
    lines = [
        "const qat_rows task_rows(*(const qat_launch*)arg, task);",
        "const int64_t b = task_rows.b, kv_h = task_rows.kv_h, h0 = task_rows.h0;",
        "const int64_t q0 = task_rows.q0, q_count = task_rows.q_count, rows = task_rows.count();",
        *(pointer(o, i, name, "call->op") for i, (name, o) in enumerate(zip(names, spec.operands, strict=True))),
        f"const int64_t kv_len = {c_dim(spec.body.kv_len)};",
        *head_pointers(spec, ("k", "v")),
        *_sections(sizes),
        *_begin(spec, sizes),
        *seen_keys(spec, "q0", "q_count"),
        "qa_configure(qa_shape_for(rows));",
        # whole blocks from key 0 on: a row's bits do not depend on which rows share a task
        f"for (int64_t k0 = first / {sizes.key_block} * {sizes.key_block}; k0 < seen; k0 += {sizes.key_block}) {{",
        *indent(skips(spec, str(sizes.key_block))),
        *indent(_block(spec, sizes)),
        "}",
        "qa_release();",
        *_finish(spec, sizes),
    ]
    return task_function(spec, lines, "amx_task")


def _sections(sizes: Sizes) -> list[str]:
    lines, offset = [], 0
    for name, (kind, count) in sizes.sections.items():
        if count:
            lines.append(f"{kind}* const {name} = ({kind}*)(scratch + {offset});")
        offset += _BYTES[kind] * count
    return lines


def _row(number: str, lines: list[str]) -> list[str]:
    """In front of lines that may use the head `h` and the query `i` of a row of the task."""
    where = [f"const int64_t h = h0 + {number} / q_count;", f"const int64_t i = q0 + {number} % q_count;"]
    return [*needed(where, lines), *lines]


def _each_row(lines: list[str]) -> list[str]:
    return ["for (int64_t r = 0; r < rows; r++) {", *indent(_row("r", lines)), "}"]


def _out_lines(spec: KernelSpec) -> int:
    """Cache lines of a row of the result, of which at most `MOST_LINES` are asked for."""
    body = spec.body
    assert isinstance(body, AttentionKernel)
    return min(MOST_LINES, -(-body.value_dim * ELEMENT_BYTES[element_type(spec, "out")] // 64))


def _begin(spec: KernelSpec, sizes: Sizes) -> list[str]:
    """Rounds the queries; where rows of the result are, and what they have before they saw a key."""
    query = f"q_head + i * {c_dim(operand(spec, 'q').strides[2])}"
    rows = [
        *head_pointers(spec, ("q", "out", *(("sinks",) if sizes.body.sinks else ()))),
        f"qat_put_query({query}, {sizes.body.head_dim}, {sizes.key_columns}, r, queries);",
        f"out_at[r] = (char*)(out_head + i * {c_dim(operand(spec, 'out').strides[2])});",
        *([f"bound[r] = {number_of(spec, 'i')} + 1;"] if sizes.bounded else []),
        *_first_top(spec, sizes),
    ]
    return [
        f"for (int64_t r = 0; r < {MOST_ROWS}; r++) top[r] = -INFINITY, total[r] = 0.0f;",
        *_each_row(rows),
        f"memset(sums, 0, sizeof(float) * (size_t)rows * {sizes.value_columns});",
    ]


def _first_top(spec: KernelSpec, sizes: Sizes) -> list[str]:
    """The sink of a row, in the unit of scores that are not scaled before the softmax."""
    if not sizes.body.sinks:
        return []
    unit = "" if sizes.scaled else f" * {float_literal(1.0 / sizes.body.scale, 'f32')}"
    return [f"top[r] = {first_top(spec, 'i')}{unit};", "total[r] = qc_first_total(top[r]);"]


def _block(spec: KernelSpec, sizes: Sizes) -> list[str]:
    """A block of keys, for all rows."""
    visible = ["const int64_t visible = count;"]
    if sizes.bounded:
        visible = [
            "int64_t visible = 0;",
            "for (int64_t r = r0; r < r0 + live; r++) visible = qc_max(visible, bound[r] - k0);",
            "visible = qc_min(count, visible);",
            "if (visible <= 0) continue;",
        ]
    score = [
        f"{{queries + now.r0 * {2 * sizes.key_columns}, {STRIP * 2 * sizes.key_columns}}}",
        f"{{keys, {STRIP * 2 * sizes.key_columns}}}",
        f"now.live > {STRIP}, (visible + 15) / 16, {sizes.key_columns // 32}",
        f"scores + now.place * {ROWS * sizes.pitch}, {sizes.pitch}, false",
    ]
    return [
        f"const int64_t count = qc_min({sizes.key_block}, seen - k0);",
        *_pack(spec, sizes),
        "qat_queue queue;",
        "qat_group before = {0, 0, 0, 0};",
        "const auto weigh = [&](const qat_group& group) {",
        *indent(_weigh(spec, sizes)),
        "};",
        f"for (int64_t r0 = 0; r0 < rows; r0 += {ROWS}) {{",
        *indent([
            f"const int64_t live = qc_min({ROWS}, rows - r0);",
            *visible,
            "const qat_group now = {r0, live, visible, !before.place};",
            f"queue.push({{{', '.join(score)}}});",
            "if (before.live > 0) weigh(before);",
            "else queue.drain();",
            "before = now;",
        ]),
        "}",
        "if (before.live > 0) weigh(before);",
        "queue.drain();",
    ]  # fmt: skip


def _weigh(spec: KernelSpec, sizes: Sizes) -> list[str]:
    """Scores of a group become weights, while products of others run; then its own values are to be multiplied."""
    value = [
        f"{{weights + group.place * {ROWS * 2 * sizes.key_block}, {STRIP * 2 * sizes.key_block}}}",
        f"{{values, {sizes.key_block * 32}}}",
        f"group.live > {STRIP}, {sizes.value_columns // LANES}, (group.visible + 31) / 32",
        f"sums + group.r0 * {sizes.value_columns}, {sizes.value_columns}, true",
    ]
    return [
        f"for (int64_t s0 = 0; s0 < group.live; s0 += {STRIP}) {{",
        *indent(_strip(spec, sizes)),
        "}",
        "queue.drain();",
        f"queue.push({{{', '.join(value)}}});",
    ]


def _pack(spec: KernelSpec, sizes: Sizes) -> list[str]:
    """Keys and values as tiles. Codes with a scale for each row are packed as they are: bf16 has all of them."""
    body, columns = sizes.body, sizes.key_columns
    stride_k, stride_v = (c_dim(operand(spec, name).strides[2]) for name in ("k", "v"))
    keys, values = f"k_head + k0 * {stride_k}", f"v_head + k0 * {stride_v}"
    lines = list[str]()
    if has_scales(body):
        lines += [
            f"memset(value_scales, 0, sizeof(float) * {sizes.key_block});",
            f"qc_pack_scales({keys}, {stride_k}, count, {body.head_dim}, key_scales);",
            f"qc_pack_scales({values}, {stride_v}, count, {body.value_dim}, value_scales);",
        ]
    if unpacks(body):
        width = -(-body.head_dim // LANES) * LANES
        lines.append(f"qc_unpack_int4({keys}, {stride_k}, count, {body.head_dim}, {width}, unpacked);")
        keys, stride_k = "unpacked", str(width)
    lines.append(f"qat_put_keys({keys}, {stride_k}, count, {body.head_dim}, {columns}, rounded, keys);")
    if unpacks(body):
        width = sizes.value_columns
        lines.append(f"qc_unpack_int4({values}, {stride_v}, count, {body.value_dim}, {width}, unpacked);")
        values, stride_v = "unpacked", str(width)
    shape = f"{body.value_dim}, {sizes.value_columns}, {sizes.key_block * 32}"
    lines.append(f"qa_put_values({values}, {stride_v}, count, {shape}, values);")
    return lines


def _strip(spec: KernelSpec, sizes: Sizes) -> list[str]:
    """Scores of up to 16 rows become weights."""
    body, columns = sizes.body, sizes.value_columns
    factor = math.log2(math.e) * (1.0 if sizes.scaled else body.scale)
    limit = "qc_max(0, qc_min(group.visible, bound[row0 + r] - k0))" if sizes.bounded else "group.visible"
    block, place = sizes.key_block, f"(group.place * {ROWS} + s0)"
    return [
        "qat_strip strip;",
        f"strip.scores = scores + {place} * {sizes.pitch}, strip.pitch = {sizes.pitch}, strip.best = best;",
        f"strip.weights = weights + {place} * {2 * block}, strip.visible = group.visible;",
        f"strip.rows = qc_min({STRIP}, group.live - s0), strip.factor = {float_literal(factor, 'f32')};",
        "const int64_t row0 = group.r0 + s0;",
        f"strip.top = top + row0, strip.total = total + row0, strip.sums = sums + row0 * {columns};",
        f"strip.columns = {columns};",
        f"strip.written = k0 + count == seen ? out_at + row0 : nullptr, strip.lines = {_out_lines(spec)};",
        f"for (int64_t r = 0; r < strip.rows; r++) strip.limit[r] = {limit};",
        *_find_best(spec, sizes),
        f"qat_weigh(strip, {'value_scales' if has_scales(body) else 'nullptr'}, queue);",
    ]


def _find_best(spec: KernelSpec, sizes: Sizes) -> list[str]:
    """Scales and masks scores where that is needed, and finds the largest of each row."""
    body = sizes.body
    if not (sizes.scaled or has_scales(body) or body.mask != "none" or body.window is not None):
        return ["qat_find_best(strip);"]
    scales = "key_scales + j" if has_scales(body) else None
    lines = [
        *(head_pointers(spec, ("mask",)) if body.mask != "none" else []),
        "float* const row = strip.scores + r * strip.pitch;",
        "vf most = vset(-INFINITY);",
        "qc_columns(strip.limit[r], [&](int64_t j, int n) QC_BODY {",
        *indent(score_lines(spec, "row + j", "i", "k0 + j", scales, scaled=sizes.scaled)),
        "    s = vsel(vfirst(n), s, vset(-INFINITY));",
        "    vstore(row + j, s);",
        "    most = vmax(s, most);",
        "});",
        "qat_hide(strip, r);",
        "vstore(best + 16 * r, most);",
    ]
    return ["for (int64_t r = 0; r < strip.rows; r++) {", *indent(_row("(row0 + r)", lines)), "}"]


def _finish(spec: KernelSpec, sizes: Sizes) -> list[str]:
    out = STORAGE_TYPES[operand(spec, "out").dtype]
    return [
        "for (int64_t r = 0; r < rows; r++) {",
        "    const vf scale = vset(total[r] == 0.0f ? 0.0f : 1.0f / total[r]);  // no key seen: zeros",
        f"    const float* const row = sums + r * {sizes.value_columns};",
        f"    {out}* const out_row = ({out}*)out_at[r];",
        f"    qc_columns({sizes.body.value_dim}, [&](int64_t c, int n) QC_BODY {{",
        "        vstore_upto(out_row + c, vload(row + c) * scale, n);",
        "    });",
        "}",
    ]


__all__ = ["Sizes", "launch", "task"]
