"""Weights as CUDA kernels read them: prints a format's declaration as the struct `qk_<name>_w`.

A declaration has three parts (`Declaration.split`): the values of codes, what is computed once for elements that share
entries, and what is computed for each element. The struct contains exactly these, operation by operation, so that both
engines decode to the same bits as `Format.decode`:

    // q4_K in cuda_t16_v1: d * scales * codes - dmin * mins
    struct qk_l0_w {
        …                                                  // sizes, where sections begin, what codes stand for
        struct entry { qc_f16 d; qc_f16 dmin; uint8_t scales; uint8_t mins; };
        static QC_DEVICE entry load(const uint8_t* w, int64_t row, int64_t k) { … }
        struct parts { float of[2]; };
        static QC_DEVICE parts make(const entry& e) {
            return {{(qc_float(e.d) * qc_float(e.scales)), (qc_float(e.dmin) * qc_float(e.mins))}};
        }
        static QC_DEVICE float element(float code, const parts& p) { return ((p.of[0] * code) - p.of[1]); }
    };

linear.cuh documents what kernels expect of the struct.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from qcompiler import formats
from qcompiler.errors import KernelSelectionError
from qcompiler.formats import Field, Format, Section
from qcompiler.formats.base import Declaration
from qcompiler.formats.equation import CStyle, Float32
from qcompiler.kernels import layouts
from qcompiler.kernels.decoding import ends_inside_groups, first_of_integers, shared_columns
from qcompiler.kernels.layouts.cuda import tile_columns
from qcompiler.kernels.layouts.panels import LANES, packed_name, per_row, place_of, plane_name, planes
from qcompiler.kernels.text import STORAGE_TYPES, identifier, indent
from qcompiler.plan.kernel import ITEMSIZE, DType, Operand

FLOATS: tuple[DType, ...] = ("f32", "bf16", "f16")
LAYOUT = "cuda_t16_v1"
PIECE = 16
"""Columns of a piece: the depth of one `mma`."""

Codes = Literal["counts", "sixteen", "e4m3", "e5m2", "values", "windows"]

ENTRY_TYPES = {
    "f16": "qc_f16", "bf16": "qc_bf16", "f32": "float", "e4m3": "qc_e4m3", "e5m2": "qc_e5m2", "e8m0": "qc_e8m0",
    "uint": "uint8_t", "int": "int8_t",
}  # fmt: skip
"""The C++ type of a stored entry, as decode.cuh reads it."""

ENTRIES = CStyle(entry="qc_float({entry})")
AS_THEY_ARE = CStyle(entry="{entry}")


@dataclass(frozen=True)
class Weight:
    """How a kernel reads its weight of `rows` x `cols`.

    `storage`: "codes" (packed) and "values" (plain) are in cuda_t16_v1, "strided" is plain memory with any strides.
    `struct` is the name of the generated C++ struct in `definitions`. `bits` are those of one stored element. A tile is
    16 rows by `tile` columns, and a panel has `tiles` of them. `codes` says what the codes of a packed weight stand
    for. Entries change every `covers` columns: of the row, or of the flat tensor if blocks straddle rows. If `covers`
    >= `cols`, each row has its own entries. A lane that prefetches a tile keeps its entries in `entry_registers`.
    `late`: whether products of few rows on tensor cores multiply its integers and scale the sums of a group, and add
    what an offset makes of x.
    """

    storage: Literal["codes", "values", "strided"]
    dtype: DType
    rows: int
    cols: int
    bits: int
    struct: str
    definitions: str
    codes: Codes | None = None
    covers: int = 0
    straddles: bool = False
    fields: int = 0
    late: Literal["no", "scales", "adds"] = "no"

    @property
    def tile(self) -> int:
        return tile_columns(self.bits)

    @property
    def tiles(self) -> int:
        return -(-self.cols // self.tile)

    @property
    def panels(self) -> int:
        return -(-self.rows // LANES)

    @property
    def lookup(self) -> bool:
        """Whether codes index a table, in shared memory or in the lanes of a warp."""
        return self.codes == "sixteen"

    @property
    def scattered(self) -> bool:
        """Whether entries are read piece by piece when they are needed: linear.cuh's `qc_tile_of` has no groups."""
        whole = self.covers >= self.cols or self.covers % PIECE == 0
        return self.storage == "codes" and (self.straddles or not whole)

    @property
    def entry_registers(self) -> int:
        """As in linear.cuh's `qc_entries`: entries of two rows per group of a tile, or a quarter of that."""
        pieces = max(1, self.tile // PIECE)
        if self.storage != "codes" or self.scattered:
            return 0
        if self.covers >= self.cols or self.covers % self.tile == 0:
            groups = 1
        else:
            groups = self.tile // self.covers if self.tile % self.covers == 0 else pieces
        each = 2 * groups * self.fields
        return each if groups == 1 else each // 4


def weight_of(name: str, operand: Operand) -> Weight:
    """How kernel `name` reads the weight `operand` (n, k). KernelSelectionError if it cannot."""
    where = f"kernel '{name}': weight '{operand.name}'"
    if operand.dtype not in FLOATS:
        raise KernelSelectionError(f"{where} decodes to {operand.dtype}; linears take {', '.join(FLOATS)}")
    if operand.format is not None:
        if operand.layout != LAYOUT:
            raise KernelSelectionError(f"{where} is packed in layout '{operand.layout}'; CUDA reads '{LAYOUT}'")
        return _packed_weight(name, operand, formats.get(operand.format.name, **operand.format.params))
    if operand.layout not in (None, "canonical", LAYOUT):
        raise KernelSelectionError(f"{where} lies in layout '{operand.layout}'; CUDA reads '{LAYOUT}' or plain rows")
    rows, cols = (int(d) for d in operand.shape)
    bits, struct, kind = 8 * ITEMSIZE[operand.dtype], f"qk_{name}_w", STORAGE_TYPES[operand.dtype]
    in_tiles = operand.layout == LAYOUT
    lines = [
        f"// The weight of qk_{name}: plain {operand.dtype}{f' in {LAYOUT}' if in_tiles else ''}.",
        f"struct {struct} {{",
        f"    typedef {kind} type;",
        f"    static constexpr int bits = {bits}, fields = 0;",
        "    static constexpr bool packed = false, lookup = false, straddles = false;",
        f"    static constexpr int64_t rows = {rows}, cols = {cols}, tiles = {-(-cols // tile_columns(bits))};",
        f"    static constexpr int64_t covers = {max(cols, 1)};",
        "    static QC_DEVICE constexpr int64_t plane(int) { return 0; }",
        "    struct entry {};",
        "    struct parts {};",
        "    struct mma_parts {};",
        "    static constexpr bool pairs = false, movable = false;",
        "};",
    ]
    return Weight("values" if in_tiles else "strided", operand.dtype, rows, cols, bits, struct, block(lines))


def _packed_weight(name: str, operand: Operand, fmt: Format) -> Weight:
    d, (rows, cols) = fmt.declaration, (int(n) for n in operand.shape)
    sections = {s.name: s for s in layouts.get(LAYOUT).sections(fmt, operand.dtype, rows, cols)}
    straddles, bits, kind = ends_inside_groups(fmt, cols), d.codes.bits, codes_of(d)
    covers = shared_columns(fmt) or max(cols, 1)
    entries = [f for f in d.fields if f.covers != 1]
    whole_pieces = not straddles and (covers % PIECE == 0 or covers >= cols)
    late = _late_form(d, kind, operand.dtype) if whole_pieces else None
    struct = f"qk_{name}_w"
    tables, looked_up = entry_tables(d, f"qk_{name}")
    code_table, code_value = _code_values(name, d, kind)
    offsets = [sections[plane_name(shift)].offset for shift, _ in planes(bits)]
    lines = [
        f"// The weight of qk_{name}: {fmt} in {LAYOUT}; an element is {d.decode.text}, rounded to {operand.dtype}.",
        f"struct {struct} {{",
        f"    typedef {STORAGE_TYPES[operand.dtype]} type;",
        f"    static constexpr int bits = {bits}, fields = {len(entries)};",
        f"    static constexpr bool packed = true, straddles = {_bool(straddles)};",
        f"    static constexpr bool lookup = {_bool(kind == 'sixteen')}, flips_sign = {_bool(d.codes.kind == 'int')};",
        f"    static constexpr int64_t rows = {rows}, cols = {cols}, tiles = {-(-cols // tile_columns(bits))};",
        f"    static constexpr int64_t covers = {covers};",
        f"    static constexpr qc_codes codes = QC_{kind.upper()};",
        f"    static QC_DEVICE constexpr int64_t plane(int i) {{ return {_chosen(offsets)}; }}",
        *indent(code_value),
        *indent(_entries(fmt, entries, sections, rows, cols, straddles=straddles)),
        *indent(_arithmetic(d, entries, looked_up)),
        *indent(_decoding(d, kind, operand.dtype, whole_pieces=whole_pieces)),
        *indent(_scaled_late(d, late, operand.dtype)),
        "};",
    ]
    definitions = "".join([*code_table, *tables]) + block(lines)
    return Weight(
        "codes", operand.dtype, rows, cols, bits, struct, definitions, kind, covers, straddles, len(entries),
        "no" if late is None else "adds" if late.adds else "scales",
    )  # fmt: skip


# --- what codes stand for --------------------------------------------------------------------------------------------


def codes_of(declaration: Declaration) -> Codes:
    """What the codes of a declaration stand for, as kernels compute it."""
    codes = declaration.codes
    if declaration.trellis is not None:
        return "windows"
    if first_of_integers(declaration) is not None:
        return "counts"
    if declaration.split.of_code.text == codes.name:
        return "e4m3" if codes.kind == "e4m3" else "e5m2"
    return "sixteen" if codes.bits == 4 else "values"


def _code_values(name: str, declaration: Declaration, kind: Codes) -> tuple[list[str], list[str]]:
    """(definitions before the struct, members) for the values of codes."""
    text = declaration.split.of_code.text
    if declaration.trellis is not None:
        return [], [
            f"static constexpr int window = {declaration.trellis.codes};  // codes",
            f"static QC_DEVICE float code_value(uint32_t window) {{ return {hashed(declaration, 'window')}; }}",
        ]
    if kind == "counts":
        what = "a code, its sign bit flipped," if declaration.codes.kind == "int" else "a code"
        first = first_of_integers(declaration)
        return [], [f"static constexpr int first = {first};  // {what} stands for code + first: {text}"]
    if kind not in ("sixteen", "values"):
        return [], [f"// A code is a float: {text}"]
    table = f"qk_{name}_codes"
    member = f"static QC_DEVICE float code_value(uint32_t code) {{ return {table}[code]; }}"
    return [f"// What a code stands for: {text}\n", device_table(table, declaration.code_values)], [member]


def hashed(declaration: Declaration, window: str) -> str:
    """The C++ expression for the value of a trellis's window."""
    assert declaration.trellis is not None
    return f"qc_hashed<0x{declaration.trellis.multiplier:08x}u>({window})"


def device_table(name: str, values: Float32) -> str:
    """A C++ definition of an array of floats in global memory, exact (hexadecimal)."""
    literals = [_literal(float(value)) for value in np.asarray(values, np.float32)]
    lines = ",\n".join("    " + ", ".join(literals[i : i + 8]) for i in range(0, len(literals), 8))
    return f"__device__ const float {name}[{len(literals)}] = {{\n{lines}}};\n"


def _literal(value: float) -> str:
    if math.isnan(value):
        return "NAN"
    return ("-INFINITY" if value < 0 else "INFINITY") if math.isinf(value) else f"{value.hex()}f"


# --- entries ---------------------------------------------------------------------------------------------------------


def entry_tables(declaration: Declaration, prefix: str) -> tuple[list[str], dict[str, str]]:
    """(definitions, C++ name by table) of the tables that entries index (as opposed to codes)."""
    names = sorted({t for eq in declaration.split.per_entry.values() for t in eq.tables})
    looked_up = {name: f"{prefix}_{identifier(name)}" for name in names}
    return [device_table(where, declaration.table_arrays[name]) for name, where in looked_up.items()], looked_up


def _entries(
    fmt: Format, entries: list[Field], sections: dict[str, Section], rows: int, cols: int, *, straddles: bool
) -> list[str]:
    """Members: the stored entries of every field, and how to read them."""
    declared = " ".join(f"{ENTRY_TYPES[f.kind]} {identifier(f.name)};" for f in entries)
    reads = []
    for field in entries:
        section = sections[packed_name(fmt, field, cols)]
        index = _index_in_stream(fmt, field, cols) if straddles else entry_index(fmt, field, rows, cols)
        reads.append(f"((const {ENTRY_TYPES[field.kind]}*)(w + {section.offset}))[{index}]")
    at = "int64_t element" if straddles else "int64_t row, uint32_t k"
    where = "element `element` of the tensor" if straddles else "row `row`, column `k`; rows of whole panels exist"
    lines = [
        f"struct entry {{ {declared} }};  // as stored",
        f"// What serves {where}.",
        f"static QC_DEVICE entry load(const uint8_t* w, {at}) {{",
        f"    return entry{{{', '.join(reads)}}};",
        "}",
    ]
    if straddles:
        return [*lines, "static constexpr bool movable = false;"]
    return [*lines, *_entries_of_units(fmt, entries, sections, rows, cols)]


def _entries_of_units(
    fmt: Format, entries: list[Field], sections: dict[str, Section], rows: int, cols: int
) -> list[str]:
    """Members: the same for row `r` of a panel. What does not change in a loop over units is computed before it."""
    lines, reads, moved = [], [], "w"
    for field in entries:
        start = f"(const {ENTRY_TYPES[field.kind]}*)(w + {sections[packed_name(fmt, field, cols)].offset})"
        place, count = place_of(fmt, field, cols), per_row(field, cols)
        if place in ("once", "flat", "row_blocks"):
            reads.append(f"({start})[{entry_index(fmt, field, rows, cols)}]")
            continue
        wide = "(int64_t)" if 16 * count >= 1 << 31 else ""
        covers = field.covers if isinstance(field.covers, int) else cols
        column = f"{wide}qc_entry_column<{covers}, UNIT, {count}>(unit, offset) * 16"
        reads.append(f"({start} + (panel * {count * 16} + r))[{column}]")
        if len(entries) == 1:
            moved = f"w + (panel * {count * 16} + r) * (int64_t)sizeof({ENTRY_TYPES[field.kind]})"
    if any(re.search(r"\b(row|k)\b", read) for read in reads):
        lines += [
            "    const int64_t row = panel * 16 + r;",
            f"    const uint32_t k = (uint32_t)qc_min((int64_t)unit * UNIT + offset, {cols - 1});",
        ]
    listed = ",\n            ".join(reads)
    return [
        "// For a `w` that a loop keeps: load_unit from `moved(w, panel, r)` for panel 0 and row 0 is that of `w` for",
        "// panel and r.",
        f"static constexpr bool movable = {_bool(moved != 'w')};",
        f"static QC_DEVICE const uint8_t* moved(const uint8_t* w, int64_t panel, int r) {{ return {moved}; }}",
        "template <int UNIT>",
        "static QC_DEVICE entry load_unit(const uint8_t* w, int64_t panel, int r, int unit, int offset) {",
        *lines,
        f"    return entry{{{listed}}};",
        "}",
    ]


def _index_in_stream(fmt: Format, field: Field, cols: int) -> str:
    place = place_of(fmt, field, cols)
    if place == "once":
        return "0"
    assert place == "flat", "where rows do not hold whole entries of the finest level, they do of none"
    return f"element / {field.covers}"


def entry_index(fmt: Format, field: Field, rows: int, cols: int) -> str:
    """The index, in its section of cuda_t16_v1, of the entry for `row` (of a whole panel) and column `k`."""
    place, count = place_of(fmt, field, cols), per_row(field, cols)
    column = f"k / {field.covers}" if isinstance(field.covers, int) else "0"
    if place == "once":
        return "0"
    if place == "flat":
        return f"(qc_min(row, {rows - 1}) * {cols} + k) / {field.covers}"
    if place == "row_blocks":
        return f"qc_min(row, {rows - 1}) / {field.rows} * {count} + {column}"
    if count == 1:
        return "row"
    small = -(-rows // LANES) * LANES * count < 1 << 31
    panel, lane = ("(uint32_t)row / 16", "(uint32_t)row % 16") if small else ("row / 16", "row % 16")
    return f"({panel} * {count} + {column}) * 16 + {lane}"


# --- arithmetic ------------------------------------------------------------------------------------------------------


def _arithmetic(declaration: Declaration, entries: list[Field], looked_up: dict[str, str]) -> list[str]:
    """Members: what is computed once per entry, and what is computed for each element."""
    split, names = declaration.split, {f.name: f"e.{identifier(f.name)}" for f in entries}
    computed = [eq.to_c(names, looked_up, ENTRIES) for eq in split.per_entry.values()]
    element = split.per_element.to_c({"code": "code", **_parts(declaration)}, style=AS_THEY_ARE)
    return [
        f"struct parts {{ float of[{max(1, len(computed))}]; }};",
        "static QC_DEVICE parts make(const entry& e) {  // once per entry",
        f"    return {{{{{', '.join(computed) or '0.0f'}}}}};",
        "}",
        f"static QC_DEVICE float element(float code, const parts& p) {{ return {element}; }}  // before rounding",
    ]


def _parts(declaration: Declaration) -> dict[str, str]:
    return {name: f"p.of[{i}]" for i, name in enumerate(declaration.split.per_entry)}


def _decoding(declaration: Declaration, kind: Codes, dtype: DType, *, whole_pieces: bool) -> list[str]:
    """Members: an element from the code that linear.cuh's `qc_piece_codes` returns, with the fewest operations that
    keep the equation's bits.

    An integer code arrives exactly as the float `biased` = bias + code. The bias is 128 for codes of fewer than 8 bits,
    else 2^23 (2^23 + 128 if signs are flipped). `whole_pieces`: all 16 columns of a piece share a row's entries.
    """
    lines = _one_by_one(declaration, kind)
    pairs = _in_pairs(declaration, kind, dtype) if whole_pieces else None
    if pairs is None:
        return [*lines, "static constexpr bool pairs = false;"]
    if dtype == "f16":
        return pairs
    return ["#if __CUDA_ARCH__ >= 800", *pairs, "#else", *lines, "static constexpr bool pairs = false;", "#endif"]


def _one_by_one(declaration: Declaration, kind: Codes) -> list[str]:
    """Members: an element in fp32, before rounding."""
    parts = list(declaration.split.per_entry)
    if kind != "counts":
        return [*_AS_THEY_ARE, *_mma_value("return element(biased, p);  // the code's value")]
    first = first_of_integers(declaration)
    assert first is not None
    bias = (128 if declaration.codes.bits < 8 else 1 << 23) - first
    folded = _folds(declaration, bias)
    if folded is not None:
        scale, zero = (None if g is None else f"p.of[{parts.index(g)}]" for g in folded)
        return [
            "struct mma_parts { float of[2]; };",
            "static QC_DEVICE mma_parts fold(const parts& p) {",
            f"    return {{{{{scale}, -({bias}.0f{f' + {zero}' if zero else ''}) * {scale}}}}};",
            "}",
            "// The equation in one step, and exact: no product has more than fp32's 24 bits.",
            *_mma_value("return fmaf(biased, p.of[0], p.of[1]);"),
        ]
    if (sign := _exact_product(declaration)) is not None:
        value = f"fmaf(biased - {bias}.0f, p.of[0], {sign}p.of[1])"
        return [*_AS_THEY_ARE, *_mma_value(f"return {value};  // the product is exact: one rounding, as in `element`")]
    return [*_AS_THEY_ARE, *_mma_value(f"return element(biased - {bias}.0f, p);")]


_AS_THEY_ARE = ("typedef parts mma_parts;", "static QC_DEVICE mma_parts fold(const parts& p) { return p; }")


def _mma_value(statement: str) -> list[str]:
    return ["static QC_DEVICE float mma_value(float biased, const mma_parts& p) {", *indent([statement]), "}"]


def _in_pairs(declaration: Declaration, kind: Codes, dtype: DType) -> list[str] | None:
    """Two elements at once by fused multiply-adds in the weight's own type; None if that is not exact.

    With the integer q = code - zero and an f16 scale, this is `(q * scale)` rounded once, as in the equation:

        f16     q * scale, with the scale unchanged
        bf16    q * high + (q * low), rounded once: high has the scale's first 8 digits, low the rest.  q * low is exact
                if the digits of q and of low are at most 8 together

    bf16 has the range of fp32, so low and q * low do not underflow.
    """
    split, first = declaration.split, first_of_integers(declaration)
    form = _FORMS.get(split.per_element.text)
    if kind != "counts" or form is None or first is None or dtype == "f32" or declaration.codes.bits > 7:
        return None
    scale, zero = form
    field = next((f for f in declaration.fields if f.name == split.per_entry[scale].text), None)
    zeros = _zeros(declaration, zero)
    if field is None or field.kind != "f16" or zeros is None:
        return None
    digits, one, bias = (11, 0x3C00, 1024) if dtype == "f16" else (8, 0x3F80, 128)
    codes, shifts = _spans(declaration, zeros, bias - first)
    if _widest(shifts) > digits or _widest(codes) + (0 if dtype == "f16" else _F16_DIGITS - digits) > digits:
        return None
    names = list(split.per_entry)
    of, tag = f"p.of[{names.index(scale)}]", "type()"
    minus = f"{bias - first}.0f" + (f" + p.of[{names.index(zero)}]" if zero else "")
    words = [f"qc_pack({of}, {of}, {tag})"] if dtype == "f16" else ["qc_first_digits(scale)", "qc_last_digits(scale)"]
    if zero:
        words.append(f"qc_pack(-({minus}), -({minus}), {tag})")
    half = _half_bits(first - bias, dtype)
    shift = f"p.of[{len(words) - 1}]" if zero else f"0x{half:04x}{half:04x}u"
    product = (
        f"qc_fma2(q, p.of[0], 0x80008000u, {tag})"
        if dtype == "f16"
        else f"qc_fma2(q, p.of[0], qc_fma2(q, p.of[1], 0x80008000u, {tag}), {tag})"
    )
    return [
        "static constexpr bool pairs = true;",
        f"struct mma_parts {{ uint32_t of[{len(words)}]; }};",
        "static QC_DEVICE mma_parts fold(const parts& p) {",
        *([] if dtype == "f16" else [f"    const float scale = {of};"]),
        f"    return {{{{{', '.join(words)}}}}};",
        "}",
        f"// Two elements, rounded once each: {bias} + code in the halves of `biased`.",
        "static QC_DEVICE uint32_t mma_pair(uint32_t biased, const mma_parts& p) {",
        f"    const uint32_t q = qc_fma2(biased, 0x{one:04x}{one:04x}u, {shift}, {tag});  // exact",
        f"    return {product};",
        "}",
    ]


_SIGNS = {"g0 * code + g1": "", "g0 * code - g1": "-"}


@dataclass(frozen=True)
class _LateForm:
    """The names of the parts in scale * (code - zero), or in scale * code and an offset that `adds`; `bias` is what a
    biased code has too much."""

    scale: str
    zero: str | None
    adds: bool
    bias: int


def _late_form(declaration: Declaration, kind: Codes, dtype: DType) -> _LateForm | None:
    """None if an element has no such form, or if its integers have more digits than the weight's type."""
    first, text = first_of_integers(declaration), declaration.split.per_element.text
    if kind != "counts" or first is None or dtype == "f32" or declaration.codes.bits > 7:
        return None
    digits, bias = (11, 1024 - first) if dtype == "f16" else (8, 128 - first)
    adds = text in _SIGNS
    if not adds and text not in _FORMS:
        return None
    scale, zero = ("g0", None) if adds else _FORMS[text]
    zeros = _zeros(declaration, zero)
    if zeros is None or max(map(_widest, _spans(declaration, zeros, bias))) > digits:
        return None
    return _LateForm(scale, zero, adds, bias)


def _scaled_late(declaration: Declaration, form: _LateForm | None, dtype: DType) -> list[str]:
    """Members for products of integers whose sums are scaled afterwards: one rounding less of each element, and two
    thirds of the instructions.

    `late_shift` is added to 128 (f16: 1024) + code and gives, exactly, the integer that the scale multiplies; with
    `late_adds` an element is scale * integer + offset.
    """
    if form is None:
        return ["static constexpr bool late = false;"]
    names, bias = list(declaration.split.per_entry), form.bias
    words, shift = [f"p.of[{names.index(form.scale)}]"], f"0x{2 * f'{_half_bits(-bias, dtype):04x}'}u"
    if form.adds:
        words.append(f"{_SIGNS[declaration.split.per_element.text]}p.of[{names.index('g1')}]")
    elif form.zero is not None:
        minus = f"-({bias}.0f + p.of[{names.index(form.zero)}])"
        words.append(f"__uint_as_float(qc_pack({minus}, {minus}, type()))")
        shift = "__float_as_uint(p.of[1])"
    return [
        f"static constexpr bool late = true, late_adds = {_bool(form.adds)};",
        f"struct late_parts {{ float of[{len(words)}]; }};  // scale, then offset or shift",
        f"static QC_DEVICE late_parts late_of(const parts& p) {{ return {{{{{', '.join(words)}}}}}; }}",
        f"static QC_DEVICE uint32_t late_shift(const late_parts& p) {{ return {shift}; }}",
    ]


def _half_bits(value: int, dtype: DType) -> int:
    """The bits of an integer in f16 or bf16, both of which hold it exactly."""
    if dtype == "f16":
        return int(np.float16(value).view(np.uint16))
    return int(np.float32(value).view(np.uint32)) >> 16


# --- exact products --------------------------------------------------------------------------------------------------

_FORMS = {
    "code * g0": ("g0", None), "g0 * code": ("g0", None),
    "(code - g0) * g1": ("g1", "g0"), "g1 * (code - g0)": ("g1", "g0"),
}  # fmt: skip
_MANTISSA = 24
_F16_DIGITS = 11


def _folds(declaration: Declaration, bias: int) -> tuple[str, str | None] | None:
    """(scale, zero point or None) if ``fmaf(bias + code, scale, -(bias + zero) * scale)`` is exact, else None.

    It is exact if scale * (code - zero) and scale * (bias + zero) have at most 24 bits. An f16 scale has 11; an integer
    has as many as from its first to its last set bit. The sums of the fma are then multiples of the scale's last place.
    A zero may lose its sign. An infinite scale, which no encoder writes, gives NaN for every code.
    """
    form = _FORMS.get(declaration.split.per_element.text)
    if form is None or declaration.codes.bits >= 8:
        return None
    scale, zero = form
    digits, zeros = digits_of(declaration, scale), _zeros(declaration, zero)
    if digits is None or zeros is None:
        return None
    fits = digits + max(_widest(each) for each in _spans(declaration, zeros, bias)) <= _MANTISSA
    return (scale, zero) if fits else None


def _exact_product(declaration: Declaration) -> str | None:
    """The sign of the second term, if an element is a product of at most 24 bits plus or minus another part."""
    sign, digits = _SIGNS.get(declaration.split.per_element.text), None
    if sign is not None:
        digits = digits_of(declaration, "g0")
    (codes, _) = _spans(declaration, range(1), 0)
    return sign if digits is not None and digits + _widest(codes) <= _MANTISSA else None


def digits_of(declaration: Declaration, part: str) -> int | None:
    """The most binary digits of a part of an element's equation that is a product of f16 entries and integers; None for
    any other."""
    return _digits(ast.parse(declaration.split.per_entry[part].text, mode="eval").body, declaration)


def _zeros(declaration: Declaration, part: str | None) -> range | None:
    """The integers that a zero point can be; only 0 without a zero point."""
    if part is None:
        return range(1)
    return _integers(ast.parse(declaration.split.per_entry[part].text, mode="eval").body, declaration)


def _spans(declaration: Declaration, zeros: range, bias: int) -> tuple[range, range]:
    """The possible values of code - zero and of bias + zero."""
    first = first_of_integers(declaration)
    assert first is not None
    last = first + (1 << declaration.codes.bits) - 1
    return range(first - zeros[-1], last - zeros[0] + 1), range(bias + zeros[0], bias + zeros[-1] + 1)


def _widest(numbers: range) -> int:
    """The most binary digits, from the first to the last set bit, of any of these integers."""
    return max((abs(n) // (n & -n)).bit_length() if n else 0 for n in numbers)


def _integers(node: ast.expr, declaration: Declaration) -> range | None:
    """The integers that an expression of entries can be; None if it may be another number."""
    match node:
        case ast.Constant(value=int(value)):
            return range(value, value + 1)
        case ast.Name(name):
            field = next(f for f in declaration.fields if f.name == name)
            half = 1 << (field.bits - 1)
            return {"uint": range(2 * half), "int": range(-half, half)}.get(field.kind)
        case ast.BinOp(left, ast.Add() | ast.Sub() as op, right):
            a, b = _integers(left, declaration), _integers(right, declaration)
            if a is None or b is None:
                return None
            if isinstance(op, ast.Add):
                return range(a[0] + b[0], a[-1] + b[-1] + 1)
            return range(a[0] - b[-1], a[-1] - b[0] + 1)
        case _:
            return None


def _digits(node: ast.expr, declaration: Declaration) -> int | None:
    """The most binary digits of a product of f16 entries and integers; None for anything else.

    bf16 and e8m0 have the range of fp32: a multiple of such an entry may overflow when the element would not.
    """
    integers = _integers(node, declaration)
    if integers is not None:
        return _widest(integers)
    match node:
        case ast.Name(name):
            return 11 if next(f for f in declaration.fields if f.name == name).kind == "f16" else None
        case ast.BinOp(left, ast.Mult(), right):
            a, b = _digits(left, declaration), _digits(right, declaration)
            return None if a is None or b is None else a + b
        case _:
            return None


# --- text ------------------------------------------------------------------------------------------------------------


def _chosen(offsets: list[int]) -> str:
    """An expression of `i` that gives the i-th offset."""
    return "".join(f"i == {i} ? {offset} : " for i, offset in enumerate(offsets[:-1])) + f"{offsets[-1]}"


def _bool(value: bool) -> str:
    return "true" if value else "false"


def block(lines: list[str]) -> str:
    """Joins lines to a text that ends with a newline."""
    return "\n".join(lines) + "\n"
