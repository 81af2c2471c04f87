"""Attention of a single query: keys and values are read once for all query heads that share them.

A *unit* is one key/value head of one batch entry with up to `HEADS` of the query heads that share it. Its keys are
processed in blocks of `BLOCK`. A block is packed as `attention` packs it (transposed, widened to float), so that the
query heads are the rows of a register tile; one or two heads read the keys in place instead, one dot product each.
Values are widened where they are multiplied.

The seen keys of a unit are cut into pieces: `PIECE` keys or more, at most `PIECES` of them. Each piece has a maximum, a
total and sums of its own (the online softmax of `attention`), and the pieces are joined in ascending order. Where the
units are fewer than two for each thread, a task computes one piece, else a whole unit. How keys are cut depends on
their number alone, so the bits do not depend on the threads. An attention to few keys runs on the calling thread.

Units of three heads or more have two more forms for processors that multiply in bf16, where the kernel may. By dot
products (attention_bf16) keys are packed as words, and values become words where they are multiplied. By tiles of AMX
(attention_decode_amx.h) sixteen keys are the rows of a tile as they lie, rounded, and the heads its columns; the
softmax is that of the other forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qcompiler.kernels.cpu import attention_bf16, attention_tiles
from qcompiler.kernels.cpu.attention_operands import (
    element_type,
    first_top,
    has_scales,
    head_pointers,
    operand,
    operand_names,
    score_lines,
    seen_keys,
    skips,
    unpacks,
)
from qcompiler.kernels.cpu.attention_tiles import (
    LANES,
    Ahead,
    RegisterTile,
    Weighing,
    weigh_values,
)
from qcompiler.kernels.cpu.text import entry_function, pointer, symbol_declarations, task_function
from qcompiler.kernels.text import c_dim, header_comment, indent, needed
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.attention import AttentionKernel

Form = Literal["", "bf16", "amx"]
"""In fp32, by dot products of bf16, or by tiles of it: also the end of the names of a form's functions."""

BLOCK = 64
HEADS = 16
IN_PLACE = 2
"""The most heads of a unit that read keys in place: to transpose a block takes as long as the dot products of three
(head size 64, fp16, AVX-512)."""

PIECE, PIECES = 256, 16

STATES = 128
STATE_BYTES = 1 << 19
"""The pieces of all units are shared among tasks if there are at most `STATES` of them, whose results take at most
`STATE_BYTES`: 16 pieces of 8 units are two tasks for each of 64 threads."""

_TILES = {"x86-64-v4": (8, 16), "x86-64-v3": (6, 6), "x86-64": (2, 2), "generic": (4, 4)}
"""The most rows of a tile, and the most accumulators (in logical vectors) that leave registers for the operands."""


def fits(body: AttentionKernel) -> bool:
    return body.q_len == 1


@dataclass(frozen=True)
class Sizes:
    """Sizes of one kernel, in query heads and floats."""

    body: AttentionKernel
    isa: str
    form: Form = ""

    @property
    def bf16(self) -> bool:
        return self.form != ""

    @property
    def by_tiles(self) -> bool:
        return self.form == "amx"

    @property
    def end(self) -> str:
        """The end of the names of the form's functions."""
        return f"_{self.form}" if self.form else ""

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.body.heads // self.body.kv_heads

    @property
    def units(self) -> int:
        """Units of one group."""
        return -(-self.group // HEADS)

    @property
    def heads(self) -> int:
        """Query heads of a unit; the last unit of a group may have fewer."""
        return -(-self.group // self.units)

    @property
    def packs(self) -> bool:
        return self.heads > IN_PLACE

    @property
    def tiles(self) -> int:
        return -(-self.heads // _TILES[self.isa][0])

    @property
    def tile(self) -> RegisterTile:
        """Heads in equal tiles, with as many panels (1, 2 or 4) as the accumulators allow."""
        rows = -(-self.heads // self.tiles)
        return RegisterTile(rows, max(p for p in (1, 2, 4) if p == 1 or p * rows <= _TILES[self.isa][1]))

    @property
    def rows(self) -> int:
        """Rows of all tiles: those behind the last head have queries of zero, and their results are not used."""
        return self.tiles * self.tile.rows

    @property
    def key_columns(self) -> int:
        return -(-self.body.head_dim // LANES) * LANES

    @property
    def columns(self) -> int:
        return -(-self.body.value_dim // LANES) * LANES

    @property
    def state(self) -> int:
        """The result of a piece: sums, maximum and total of each row, in whole cache lines."""
        return -(-self.rows * (self.columns + 2) // LANES) * LANES

    @property
    def sections(self) -> dict[str, int]:
        """A task's sections of scratch, each a multiple of 16 floats."""
        body, words = self.body, attention_bf16.row_columns(self.body.head_dim) // 2
        if self.by_tiles:
            return self._sections_of_tiles
        queries = words * self.rows if self.bf16 else -(-self.rows * body.head_dim // LANES) * LANES
        return {
            "keys": BLOCK * (words if self.bf16 else body.head_dim) if self.packs else 0,
            "rounded": BLOCK * words if self.bf16 else 0,
            "queries": queries,
            "scores": self.tile.rows * BLOCK,
            "key_scales": BLOCK if has_scales(body) else 0,
            "value_scales": BLOCK if has_scales(body) else 0,
            "key_rows": BLOCK * self.key_columns if unpacks(body) else 0,
            "value_rows": BLOCK * self.columns if unpacks(body) else 0,
            "whole": self.state,
            "part": self.state,
        }

    @property
    def _sections_of_tiles(self) -> dict[str, int]:
        body, words = self.body, attention_bf16.row_columns(self.body.head_dim) // 2
        return {
            "queries": 16 * words,
            "rounded": 16 * words,
            "turned": BLOCK * 16,
            "scores": 16 * BLOCK,
            "values": 16 * BLOCK,
            "key_scales": BLOCK if has_scales(body) else 0,
            "value_scales": BLOCK if has_scales(body) else 0,
            "whole": self.state,
            "part": self.state,
        }

    @property
    def own(self) -> int:
        """Floats of a task's scratch; results that tasks share lie behind those of the largest form."""
        return sum(self.sections.values())

    @property
    def shared(self) -> int:
        """How many pieces' results the caller's scratch holds, behind its sections."""
        return min(STATES, STATE_BYTES // (4 * self.state))


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """The sections of a task, and the results of pieces that tasks share."""
    forms = _forms(spec, isa)
    return 4 * (max(form.own for form in forms) + forms[0].shared * forms[0].state)


def _forms(spec: KernelSpec, isa: str) -> list[Sizes]:
    """The forms of a kernel: in fp32, and the two in bf16 where it may multiply so and packs its keys."""
    assert isinstance(spec.body, AttentionKernel)
    plain = Sizes(spec.body, isa)
    if not plain.packs or not attention_bf16.chosen(spec.body, isa):
        return [plain]
    return [plain, Sizes(spec.body, isa, "bf16"), Sizes(spec.body, isa, "amx")]


def emit(spec: KernelSpec, isa: str) -> str:
    forms = _forms(spec, isa)
    sizes, tile = forms[0], forms[0].tile
    head = header_comment(
        spec, f"one query: keys {BLOCK} at a time for {sizes.heads} query heads, tile {tile.rows} x {tile.width}"
    )
    cut = [
        f"struct qk_{spec.name}_cut {{",
        "    qc_call call;",
        "    int64_t pieces;  // of each unit, a task for each; 0: a task is a whole unit",
        "    float* states;   // the results of pieces",
        "};",
        "",
    ]
    parts = [head, *cut, *_products(spec, sizes), _store(spec, sizes)]
    for form in forms:
        text = "\n".join([
            *(_products(spec, form) if form.form == "bf16" else ()),
            _piece(spec, form),
            task_function(spec, _task(spec, form), f"{form.form}_task" if form.bf16 else "task"),
        ])  # fmt: skip
        parts.append(attention_bf16.guarded(text) if form.bf16 else text)
    return "\n".join([*parts, entry_function(spec, _launch(spec, forms))])


def _ahead(spec: KernelSpec, body: AttentionKernel) -> tuple[Ahead | None, Ahead | None]:
    """What products fetch meanwhile, for the next block: its keys beside scores, its values beside values."""
    next_keys, next_values = (
        None if unpacks(body) else Ahead(element_type(spec, name), columns)
        for name, columns in (("k", body.head_dim), ("v", body.value_dim))
    )
    return next_keys, next_values


def _value_type(spec: KernelSpec, body: AttentionKernel) -> str:
    return "float" if unpacks(body) else element_type(spec, "v")


def _products(spec: KernelSpec, sizes: Sizes) -> list[str]:
    body, tile, kind = sizes.body, sizes.tile, _value_type(spec, sizes.body)
    tiles = attention_bf16 if sizes.bf16 else attention_tiles
    next_keys, next_values = _ahead(spec, body)
    return [
        *([tiles.scores_function(spec.name, tile, body.head_dim, BLOCK, next_keys)] if sizes.packs else []),
        tiles.values_functions(spec.name, tile, BLOCK, sizes.columns, kind, body.value_dim, next_values),
    ]


# --- one unit --------------------------------------------------------------------------------------------------------


def _unit_function(spec: KernelSpec, sizes: Sizes, signature: str, body: list[str]) -> str:
    """A function of a unit, with its operands, batch entry, heads and symbols declared."""
    names, per_entry = operand_names(spec), sizes.body.kv_heads * sizes.units
    first = f" + unit % {sizes.units} * {sizes.heads}" if sizes.units > 1 else ""
    declarations = [
        *symbol_declarations(spec.symbols, "call->sym"),
        *(pointer(o, i, name, "call->op") for i, (name, o) in enumerate(zip(names, spec.operands, strict=True))),
        f"const int64_t b = unit / {per_entry};",
        f"const int64_t kv_h = unit % {per_entry}{f' / {sizes.units}' if sizes.units > 1 else ''};",
        f"const int64_t h0 = kv_h * {sizes.group}{first};",
        f"const int64_t heads = qc_min({sizes.heads}, (kv_h + 1) * {sizes.group} - h0);",
    ]
    return "\n".join([f"static {signature} {{", *indent([*needed(declarations, body), *body]), "}", ""])


def _state(sizes: Sizes) -> list[str]:
    """Declares the parts of `state`."""
    sums = sizes.rows * sizes.columns
    return [f"float* const top = state + {sums};", f"float* const total = state + {sums + sizes.rows};"]


def _piece(spec: KernelSpec, sizes: Sizes) -> str:
    """The function that computes one piece into `state`; false if the unit has fewer pieces."""
    body, tile = sizes.body, sizes.tile
    stride_v = c_dim(operand(spec, "v").strides[2])
    sections, offset = [], 0
    for name, size in sizes.sections.items():
        if size and name not in ("whole", "part"):
            sections.append(f"float* const {name} = (float*)scratch + {offset};")
        offset += size
    mask = ["const int64_t h = h0 + g;", *head_pointers(spec, ("mask",))] if body.mask != "none" else []
    row = [
        "const int64_t g = i + r;",
        *mask,
        f"float* const row = scores + r * {BLOCK};",
        *_softmax(spec, sizes),
    ]
    name = spec.name + sizes.end
    tile_lines = [
        *_scores(spec, sizes),
        f"for (int64_t r = 0; r < qc_min({tile.rows}, heads - i); r++) {{",
        *indent(row),
        "}",
        *weigh_values(
            name, tile, body.value_dim,
            Weighing(
                *_block(spec, sizes, "v"), "count", f"state + i * {sizes.columns}",
                None if unpacks(body) else (f"v_head + (k0 + {BLOCK}) * {stride_v}", stride_v),
            ),
            weights="(const qb_word*)scores" if sizes.bf16 else "scores",
        ),
    ]  # fmt: skip
    query = ["const int64_t h = h0 + g;", *head_pointers(spec, ("q",))]
    copy = f"qc_pack_queries(q_head, {body.head_dim}, 1, 1, {body.head_dim}, queries + g * {body.head_dim});"
    if sizes.bf16:
        columns = attention_bf16.row_columns(body.head_dim)
        to = f"(uint16_t*){'rounded' if sizes.by_tiles else 'queries'} + g * {columns}"
        copy = f"qa_round_rows(q_head, {body.head_dim}, 1, 1, {body.head_dim}, {columns}, {to});"
    products = [
        *_pack_keys(spec, sizes),
        *_pack_scales(spec, sizes),
        f"for (int64_t i = 0; i < {sizes.rows}; i += {tile.rows}) {{",
        *indent(tile_lines),
        "}",
    ]
    if sizes.by_tiles:
        products = _by_tiles(spec, sizes, row[1:])
    lines = [
        f"const int64_t kv_len = {c_dim(body.kv_len)};",
        *seen_keys(spec, "0", "1"),
        f"const qc_pieces cut = qc_cut_keys(seen - first, {PIECE}, {PIECES}, {BLOCK});",
        "if (number >= cut.count) return false;",
        "const int64_t begin = first + number * cut.length, end = qc_min(seen, begin + cut.length);",
        *head_pointers(spec, ("k", "v")),
        *sections,
        *_state(sizes),
        f"memset(state, 0, sizeof(float) * {sizes.state});",
        f"for (int64_t g = 0; g < {sizes.rows}; g++) top[g] = -INFINITY;",
        *_first_tops(spec, sizes),
        *([] if sizes.by_tiles else [f"memset(queries, 0, sizeof(float) * {sizes.sections['queries']});"]),
        "for (int64_t g = 0; g < heads; g++) {",
        *indent([*query, copy]),
        "}",
        *(_begin_tiles(sizes) if sizes.by_tiles else ()),
        f"for (int64_t k0 = begin; k0 < end; k0 += {BLOCK}) {{",
        *indent(skips(spec, str(BLOCK))),
        f"    const int64_t count = qc_min({BLOCK}, end - k0);",
        *indent(_unpack(spec, sizes)),
        *indent(products),
        "}",
        *(["qa_release();"] if sizes.by_tiles else []),
        "return true;",
    ]
    signature = f"bool qk_{name}_piece(const qc_call* call, int64_t unit, int64_t number, char* scratch, float* state)"
    return _unit_function(spec, sizes, signature, lines)


def _first_tops(spec: KernelSpec, sizes: Sizes) -> list[str]:
    """The first piece of a unit has the sinks."""
    if not sizes.body.sinks:
        return []
    return [
        "for (int64_t g = 0; number == 0 && g < heads; g++) {",
        "    const int64_t h = h0 + g;",
        *indent(head_pointers(spec, ("sinks",))),
        f"    top[g] = {first_top(spec, '0')};",
        "    total[g] = qc_first_total(top[g]);",
        "}",
    ]


def _begin_tiles(sizes: Sizes) -> list[str]:
    """Queries as tiles, zeros for heads that the unit lacks. Nothing that a tile reads later is uninitialised."""
    columns = attention_bf16.row_columns(sizes.body.head_dim)
    return [
        f"qad_put_queries((const uint16_t*)rounded, heads, {columns}, (char*)queries);",
        f"memset(scores, 0, sizeof(float) * {16 * BLOCK});",
        *([f"memset(value_scales, 0, sizeof(float) * {BLOCK});"] if has_scales(sizes.body) else []),
        f"qa_configure(qad_shape({sizes.heads}));",
    ]


def _by_tiles(spec: KernelSpec, sizes: Sizes, softmax: list[str]) -> list[str]:
    """A block of keys: scores 16 keys at a time, the weights of each head, sums 32 keys at a time. Meanwhile the next
    block comes, and no pause between products is long (attention_amx.h)."""
    body = sizes.body
    kind = "(const qc_code_int4*)" if unpacks(body) else ""
    (keys, key_stride), (values, value_stride) = (
        (f"{kind}({rows})" if kind else rows, stride)
        for rows, stride in (_block(spec, sizes, name) for name in ("k", "v"))
    )
    next_keys, next_values = (
        f"{BLOCK} * {stride} * sizeof(*{name}_head)" for name, stride in (("k", key_stride), ("v", value_stride))
    )
    live = "qc_min(QAD_KEYS, count - j)"
    return [
        *_pack_scales(spec, sizes),
        "for (int64_t j = 0; j < count; j += QAD_KEYS) {",
        *indent([
            f"qad_scores({keys} + j * {key_stride}, {key_stride}, {live}, {body.head_dim}, (const char*)queries, "
            f"(char*)rounded, turned + j * 16, {next_keys});",
        ]),
        "}",
        "for (int64_t j = 0; j < count; j += QAD_KEYS)",
        f"    vtranspose(turned + j * 16, 16, scores + j, {BLOCK});",
        "for (int64_t g = 0; g < heads; g++) {",
        *indent([line.replace("scores + r *", "scores + g *") for line in softmax]),
        "}",
        f"qad_values((const char*)scores, {4 * BLOCK}, {values}, {value_stride}, count, {body.value_dim}, "
        f"(char*)values, state, {sizes.columns}, {next_values});",
    ]  # fmt: skip


def _pack_keys(spec: KernelSpec, sizes: Sizes) -> list[str]:
    """A block of keys in panels, if queries are the rows of a tile."""
    if not sizes.packs:
        return []
    rows, depth, width = ", ".join(_block(spec, sizes, "k")), sizes.body.head_dim, sizes.tile.width
    if not sizes.bf16:
        return [f"qc_pack_keys({rows}, count, {depth}, {width}, keys);"]
    columns = attention_bf16.row_columns(depth)
    return [
        f"const int64_t panels = (count + {width - 1}) / {width} * {width};",
        f"qa_round_rows({rows}, count, panels, {depth}, {columns}, (uint16_t*)rounded);",
        f"qa_pack_keys((const uint16_t*)rounded, panels, {columns // 2}, {width}, keys);",
    ]


def _block(spec: KernelSpec, sizes: Sizes, name: str) -> tuple[str, str]:
    """The first row of a block of keys or values, and the stride of its rows."""
    if unpacks(sizes.body) and not sizes.by_tiles:
        return ("key_rows", str(sizes.key_columns)) if name == "k" else ("value_rows", str(sizes.columns))
    stride = c_dim(operand(spec, name).strides[2])
    return f"{name}_head + k0 * {stride}", stride


def _unpack(spec: KernelSpec, sizes: Sizes) -> list[str]:
    """Makes the rows of a block floats, if they have codes with a step for each group of columns."""
    if not unpacks(sizes.body) or sizes.by_tiles:
        return []
    found = []
    for name, cols in (("k", sizes.body.head_dim), ("v", sizes.body.value_dim)):
        (rows, columns), stride = _block(spec, sizes, name), c_dim(operand(spec, name).strides[2])
        found.append(f"qc_unpack_int4({name}_head + k0 * {stride}, {stride}, count, {cols}, {columns}, {rows});")
    return found


def _pack_scales(spec: KernelSpec, sizes: Sizes) -> list[str]:
    """The scales of a block's rows, if keys and values are codes: they scale the scores and the weights."""
    if not has_scales(sizes.body):
        return []
    found = []
    for name, section, cols in (("k", "key", sizes.body.head_dim), ("v", "value", sizes.body.value_dim)):
        stride = c_dim(operand(spec, name).strides[2])
        rows = f"{name}_head + k0 * {stride}, {stride}, count, {cols}"
        found.append(f"qc_pack_scales({rows}, {section}_scales);")
    return found


def _scores(spec: KernelSpec, sizes: Sizes) -> list[str]:
    """The products of the tile's queries, from row `i` on, with the keys of the block. Meanwhile the next keys come."""
    depth = sizes.body.head_dim
    if sizes.packs:
        stride = c_dim(operand(spec, "k").strides[2])
        ahead = "" if unpacks(sizes.body) else f", k_head + (k0 + {BLOCK} + j) * {stride}, {stride}"
        pitch = attention_bf16.row_columns(depth) // 2 if sizes.bf16 else depth
        name, queries = (f"{spec.name}_bf16", "(const qb_word*)queries") if sizes.bf16 else (spec.name, "queries")
        return [
            f"for (int64_t j = 0; j < count; j += {sizes.tile.width})",
            f"    qk_{name}_scores({queries} + i * {pitch}, keys + j * {pitch}, scores + j{ahead});",
        ]
    key = f"k_head + (k0 + j) * {c_dim(operand(spec, 'k').strides[2])}"
    if unpacks(sizes.body):
        key = f"key_rows + j * {sizes.key_columns}"
    dot = [
        f"const auto key = {key};",
        f"scores[r * {BLOCK} + j] = qc_sum_columns({depth}, [&](int64_t d, int n) QC_BODY {{",
        f"    return vload_upto(queries + (i + r) * {depth} + d, n) * vload_upto(key + d, n);",
        "});",
    ]
    return [
        "for (int64_t j = 0; j < count; j++)",
        f"    for (int64_t r = 0; r < {sizes.tile.rows}; r++) {{",
        *indent(dot, 2),
        "    }",
    ]


def _softmax(spec: KernelSpec, sizes: Sizes) -> list[str]:
    """Turns the scores of head `g` into weights, updates its maximum and total, and rescales its earlier sums."""
    assert isinstance(spec.body, AttentionKernel)
    codes, columns = has_scales(spec.body), sizes.columns
    weight = f"w{' * vload(value_scales + j)' if codes else ''}"
    exp, count = "qa_exp" if sizes.bf16 else "vexp", "count"
    tail: list[str] = []
    if sizes.by_tiles:  # a tile has weights of 32 keys
        count = "(count + 31) / 32 * 32"
        tail = [
            f"if (count % 32 > 0 && count % 32 <= {LANES}) vstore(row + count / 32 * 32 + {LANES}, vset(-INFINITY));"
        ]
    store = f"qb_store((qb_word*)row + j / 2, {weight});" if sizes.bf16 else f"vstore(row + j, {weight});"
    return [
        "vf best = vset(-INFINITY);",
        "qc_columns(count, [&](int64_t j, int n) QC_BODY {",
        *indent(score_lines(spec, "row + j", "0", "k0 + j", "key_scales + j" if codes else None)),
        "    s = vsel(vfirst(n), s, vset(-INFINITY));",
        "    vstore(row + j, s);",
        "    best = vmax(s, best);",
        "});",
        "const float before = top[g], now = fmaxf(before, vmaxlane(best));",
        "const vf shift = vset(now == -INFINITY ? 0.0f : now);  // nothing seen yet: all weights are exp(-inf) = 0",
        "vf part = vzero();",
        *tail,
        f"for (int64_t j = 0; j < {count}; j += {LANES}) {{",
        f"    const vf w = {exp}(vload(row + j) - shift);",
        f"    {store}",
        "    part = part + w;",
        "}",
        "if (now != before && before != -INFINITY) {",
        "    const float fade = qc_exp(before - now);",
        "    total[g] *= fade;",
        f"    float* const old = state + g * {columns};",
        f"    for (int64_t c = 0; c < {columns}; c += {LANES}) vstore(old + c, vload(old + c) * vset(fade));",
        "}",
        "top[g] = now;",
        "total[g] += vsum(part);",
    ]


def _store(spec: KernelSpec, sizes: Sizes) -> str:
    """The function that writes the results of a unit from the joined `state`."""
    per_head = [
        "const int64_t h = h0 + g;",
        *head_pointers(spec, ("out",)),
        "const vf scale = vset(total[g] == 0.0f ? 0.0f : 1.0f / total[g]);  // no key seen: zeros",
        f"qc_columns({sizes.body.value_dim}, [&](int64_t c, int n) QC_BODY {{",
        f"    vstore_upto(out_head + c, vload(state + g * {sizes.columns} + c) * scale, n);",
        "});",
    ]
    lines = [_state(sizes)[1], "for (int64_t g = 0; g < heads; g++) {", *indent(per_head), "}"]
    return _unit_function(
        spec, sizes, f"void qk_{spec.name}_store(const qc_call* call, int64_t unit, float* state)", lines
    )


# --- the work --------------------------------------------------------------------------------------------------------


def _task(spec: KernelSpec, sizes: Sizes) -> list[str]:
    whole = sum(size for name, size in sizes.sections.items() if name not in ("whole", "part"))
    piece = f"qk_{spec.name}{sizes.end}_piece"
    join = f"qc_join_pieces({sizes.rows}, {sizes.columns}, whole, part);"
    return [
        f"const qk_{spec.name}_cut* const cut = (const qk_{spec.name}_cut*)arg;",
        "if (cut->pieces) {",
        f"    {piece}(call, task / cut->pieces, task % cut->pieces, scratch, cut->states + task * {sizes.state});",
        "    return;",
        "}",
        f"float* const whole = (float*)scratch + {whole};",
        f"float* const part = whole + {sizes.state};",
        f"{piece}(call, task, 0, scratch, whole);",
        f"for (int64_t number = 1; {piece}(call, task, number, scratch, part); number++)",
        f"    {join}",
        f"qk_{spec.name}_store(call, task, whole);",
    ]


def _launch(spec: KernelSpec, forms: Sequence[Sizes]) -> list[str]:
    """Cuts the work: whole units, or pieces if the units are fewer than two for each thread."""
    sizes, states = forms[0], max(form.own for form in forms)
    body, cut = sizes.body, f"qk_{spec.name}_cut"
    task = "task_of" if len(forms) > 1 else f"qk_{spec.name}_task"
    per_entry = body.kv_heads * sizes.units
    last = [pointer(operand(spec, "last"), operand_names(spec).index("last"), "last")] if body.last else []
    dims = body.head_dim + body.value_dim
    count = f"qc_cut_keys(seen - first, {PIECE}, {PIECES}, {BLOCK}).count"
    return [
        *(attention_bf16.choose_task(spec.name, by_tiles=True) if len(forms) > 1 else ()),
        *last,
        f"const int64_t kv_len = {c_dim(body.kv_len)}, batch = {c_dim(body.batch)};",
        f"const int64_t units = batch * {per_entry};",
        "double keys = 0;",
        "int64_t pieces = 1;",
        "for (int64_t b = 0; b < batch; b++) {",
        *indent([*seen_keys(spec, "0", "1"), "keys += (double)qc_max(0, seen - first);"]),
        f"    pieces = qc_max(pieces, {count});",
        "}",
        f"{cut} cut = {{{{ctx, op, sym}}, 0, (float*)ctx->scratch + {states}}};",
        f"const bool worth = keys * {body.heads} * {dims} >= 2.0 * QC_TASK_COST && ctx->num_threads > 1;",
        f"if (worth && units < 2 * (int64_t)ctx->num_threads && pieces > 1 && units * pieces <= {sizes.shared}) {{",
        "    cut.pieces = pieces;",
        f"    ctx->parallel(ctx, units * pieces, {task}, &cut);",
        "    for (int64_t b = 0; b < batch; b++) {",
        *indent(seen_keys(spec, "0", "1"), 2),
        f"        const int64_t count = {count};",
        f"        for (int64_t unit = b * {per_entry}; unit < (b + 1) * {per_entry}; unit++) {{",
        f"            float* const state = cut.states + unit * pieces * {sizes.state};",
        "            for (int64_t number = 1; number < count; number++)",
        f"                qc_join_pieces({sizes.rows}, {sizes.columns}, state, state + number * {sizes.state});",
        f"            qk_{spec.name}_store(&cut.call, unit, state);",
        "        }",
        "    }",
        "    return;",
        "}",
        f"if (worth && units > 1) return ctx->parallel(ctx, units, {task}, &cut);",
        f"for (int64_t task = 0; task < units; task++) {task}(&cut, task, ctx->scratch);",
    ]
