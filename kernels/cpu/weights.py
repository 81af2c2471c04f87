"""Packed weights in C++: prints a format's declaration as a struct for decode.h, for panels and for rows.

A declaration has three parts (`Declaration.split`): the values of codes, what is computed once for elements that share
entries, and what is computed for each element. The struct contains exactly these, in the order of the equation, so that
kernels decode to the same bits as `Format.decode`:

    // q4_K in panels: d * scales * codes - dmin * mins
    struct qw_q4_K_1c0de5 {
        static constexpr int BITS = 4, GROUP = 8, COVERS = 32;
        typedef qg_counting<4, false, 0>::values values;
        vf g0, g1;
        QG_METHOD void load(const qg_packed& from, int64_t panel, int64_t k) {
            const auto d = qg_entries((const qc_f16*)from.part[1] + (panel * qg_up(from.k, 256) + k / 256) * 16);
            …
            g0 = (qg_float(d) * qg_float(scales));
            g1 = (qg_float(dmin) * qg_float(mins));
        }
        QG_METHOD vf element(vf code) const { return ((g0 * code) - g1); }
    };

The text does not depend on a weight's sizes, so all kernels of a program that read one format share the struct and its
instantiations. Its name ends in a checksum of the text, and a guard keeps only the first of equal structs.
"""

from __future__ import annotations

import functools
import math
import zlib
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from qcompiler.errors import KernelSelectionError
from qcompiler.formats import Field, Format, Section
from qcompiler.formats.equation import CStyle, Float32
from qcompiler.formats.integer_product import line_of
from qcompiler.kernels import layouts
from qcompiler.kernels.decoding import ends_inside_groups, first_of_integers, shared_columns
from qcompiler.kernels.layouts.panels import LANES, plane_name, planes
from qcompiler.kernels.text import identifier, indent
from qcompiler.plan.kernel import DType

PANEL_LAYOUTS = ("cpu_p16_v1", "cpu_p16_v2")
"""The layouts in panels that kernels read, oldest first: plans that were saved name them."""

ANY_PANELS = " or ".join(map(repr, PANEL_LAYOUTS))
"""They in an error message."""

MOST_PARTS = 12
"""The most sections that decode.h's `qg_packed` can point to."""

VECTORS = CStyle(entry="qg_float({entry})", number="vset({number})", lookup="qg_look_up({table}, {entry})")
"""Sixteen SIMD lanes at a time, with vec.h's operators."""

FLOAT_LANES = CStyle(entry="{entry}", number="vset({number})", lookup="{table}[{entry}]")
"""Sixteen SIMD lanes of entries that are already floats."""

_ENTRY_TYPES = {
    "f16": "qc_f16", "bf16": "qc_bf16", "f32": "float", "e4m3": "qc_e4m3", "e5m2": "qc_e5m2", "e8m0": "qc_e8m0",
    "uint": "uint8_t", "int": "int8_t",
}  # fmt: skip


def entry_type(field: Field) -> str:
    """The C++ type of a stored entry, as decode.h reads it."""
    return _ENTRY_TYPES[field.kind]


# --- what codes stand for --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodeValues:
    """The values of a format's codes: integers starting at `offset`, 8-bit floats, or elements of a table.

    `policy` is decode.h's class for panels. `scalar` is a text pattern that turns one integer code into a float.
    """

    policy: str
    scalar: str
    table: str | None


def code_values(fmt: Format, table: str) -> CodeValues:
    """How to read the codes of `fmt`. `table` is the name of the C++ array, if one is needed."""
    d = fmt.declaration
    codes, values = d.codes, d.code_values
    if d.trellis is not None:
        multiplier = f"0x{d.trellis.multiplier:08x}u"
        return CodeValues(f"qg_hashed<{multiplier}>", f"qg_hash_of<{multiplier}>({{code}})", None)
    if codes.kind in ("e4m3", "e5m2"):
        if d.split.of_code.text == codes.name:
            mantissa = 3 if codes.kind == "e4m3" else 2
            return CodeValues(f"qg_floats<{mantissa}>", f"qg_minifloat_of<{mantissa}>({{code}})", None)
    else:
        offset = first_of_integers(d)
        if offset is not None:
            signed = codes.kind == "int"
            offset += (1 << (codes.bits - 1)) * signed  # the value of code 0
            read = "(int8_t){code}" if signed else "{code}"
            scalar = f"(float)({read} + {offset})" if offset else f"(float){read}"
            return CodeValues(f"qg_counting<{codes.bits}, {str(signed).lower()}, {offset}>::values", scalar, None)
    repeated = np.tile(values, max(1, 16 // values.size))
    return CodeValues(f"qg_lookup<{codes.bits}, qg_printed<{table}>>", f"{table}[{{code}}]", c_table(table, repeated))


def c_table(name: str, values: Float32) -> str:
    """A C++ definition of an array of floats, exact (hexadecimal)."""
    literals = [_literal(float(value)) for value in values]
    lines = ",\n".join("    " + ", ".join(literals[i : i + 8]) for i in range(0, len(literals), 8))
    return f"alignas(64) static const float {name}[{len(literals)}] = {{\n{lines}}};\n"


def _literal(value: float) -> str:
    if math.isnan(value):
        return "NAN"
    return ("-INFINITY" if value < 0 else "INFINITY") if math.isinf(value) else f"{value.hex()}f"


# --- panels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PanelWeight:
    """How linear kernels read a packed weight: guarded definitions, and the decoder of gemm.h that walks its panels.

    `parts` are the byte offsets of the sections in the order of `qg_packed.part`: planes of codes, then entries.
    `struct` is the name of the format's struct, `group` the columns that a step of the decoder takes.
    """

    decoder: str
    group: int
    definitions: str
    parts: tuple[int, ...]
    struct: str


def panel_weight(fmt: Format, dtype: DType, rows: int, cols: int, layout: str) -> PanelWeight:
    """The decoder of a weight (rows, cols) of `fmt` in one of PANEL_LAYOUTS. `dtype` is the type that it stands for:
    elements are decoded to fp32, and no kernel of fp32 sums rounds them further."""
    panels = layouts.in_panels(layout)
    sections = sorted(panels.sections(fmt, dtype, rows, cols), key=lambda s: not _is_plane(fmt, s))
    if len(sections) > MOST_PARTS:
        raise KernelSelectionError(f"{fmt} has {len(sections)} sections; CPU kernels read at most {MOST_PARTS}")
    across = ends_inside_groups(fmt, cols)
    places = tuple(panels.place_of(fmt, f, cols) for f in fmt.declaration.fields)
    name, definitions = _panel_struct(fmt, across, places)
    walk = "qg_straddling" if across else "qg_coded"
    group = columns_at_a_time(fmt)
    return PanelWeight(f"{walk}<{name}>", group, definitions, tuple(s.offset for s in sections), name)


def _is_plane(fmt: Format, section: Section) -> bool:
    return section.name in {plane_name(shift) for shift, _ in planes(fmt.declaration.codes.bits)}


@functools.lru_cache(maxsize=256)
def _panel_struct(fmt: Format, across: bool, places: tuple[str, ...]) -> tuple[str, str]:
    """(name, text) of the struct for a format whose fields are stored as `places` says."""
    anonymous = _struct_text(fmt, across, places, "W", "T")
    name = f"{identifier(fmt.name)}_{zlib.crc32(anonymous.encode()):08x}"
    text = _struct_text(fmt, across, places, f"qw_{name}", f"qt_{name}")
    return f"qw_{name}", f"#ifndef QW_{name}\n#define QW_{name}\n{text}#endif\n"


def _struct_text(fmt: Format, across: bool, places: tuple[str, ...], name: str, table: str) -> str:
    d, covers = fmt.declaration, shared_columns(fmt)
    bits = d.codes.bits
    group = columns_at_a_time(fmt)
    values = code_values(fmt, f"{table}_codes")
    looked_up = {n: f"{table}_{identifier(n)}" for n in _tables_of_entries(fmt)}
    tables = [c_table(where, d.table_arrays[n]) for n, where in looked_up.items()]
    entries = {f.name: identifier(f.name) for f in d.fields}
    parts = list(d.split.per_entry)
    own, loads = _entry_reads(fmt, across, places, entries)
    members = [*([f"vf {', '.join(parts)};"] if parts else []), *own]
    where = "const int64_t (&at)[16]" if across else "int64_t panel, int64_t k"
    computed = [f"{g} = {eq.to_c(entries, looked_up, VECTORS)};" for g, eq in d.split.per_entry.items()]
    line = None if across else line_of(d)
    element = d.split.per_element.to_c({"code": "code", **{g: g for g in parts}}, style=FLOAT_LANES)
    lines = [
        f"// {fmt} in panels: {d.decode.text}",
        f"struct {name} {{",
        f"    static constexpr int BITS = {bits}, GROUP = {group}, COVERS = {covers};",
        f"    typedef {values.policy} values;",
        *([f"    typedef qg_sequences<{bits}> codes;"] if d.trellis is not None else []),
        *indent(members),
        f"    QG_METHOD void load(const qg_packed& from, {where}) {{",
        *indent([*loads, *computed], 2),
        "    }",
        *_asks(fmt, across, places),
        f"    QG_METHOD vf element(vf code) const {{ return {element}; }}",
        f"    static constexpr bool SCALED = {str(line is not None).lower()};",
        f"    static constexpr bool OFFSET = {str(line is not None and line[1] is not None).lower()};",
    ]
    if line is not None:
        if bits in (2, 3, 4, 5, 6) and d.trellis is None:
            halves = _halves(d.code_values)
            lines.append(f"    static constexpr uint16_t HALVES[{len(halves)}] = {{{', '.join(halves)}}};  // in bf16")
        rounded = d.code_values.astype(ml_dtypes.bfloat16)
        exact = d.trellis is None and np.array_equal(rounded, d.code_values, equal_nan=True)
        lines.append(f"    static constexpr bool EXACT = {str(exact).lower()};  // bf16 has these values unrounded")
    for what, equation in zip(("scale", "offset"), line or (), strict=False):
        if equation is not None:
            text = equation.to_c({g: g for g in parts}, style=FLOAT_LANES)
            lines.append(f"    QG_METHOD vf {what}() const {{ return {text}; }}")
    if across:
        picked = ", ".join(f"vsel(m, a.{g}, b.{g})" for g in parts)
        lines.append(
            f"    static QG_METHOD {name} pick(vm m, const {name}& a, const {name}& b) {{ return {{{picked}}}; }}"
        )
    return "".join([*([values.table] if values.table else []), *tables, *(f"{line}\n" for line in [*lines, "};"])])


def _entry_reads(
    fmt: Format, across: bool, places: tuple[str, ...], names: dict[str, str]
) -> tuple[list[str], list[str]]:
    """(members, statements): what a struct keeps to read entries by, and how `load` gives each its variable."""
    covers, of_tables = shared_columns(fmt), _fields_of_tables(fmt)
    number = fmt.declaration.codes.bits.bit_count()  # entries follow the planes of codes
    members, loads = list[str](), list[str]()
    longer: dict[int, list[str]] = {}  # what several steps of the decoder share, by their columns
    for field, place in zip(fmt.declaration.fields, places, strict=True):
        if place == "codes":
            continue
        kind, own = entry_type(field), f"{names[field.name]}_"
        columns = field.covers if isinstance(field.covers, int) and place == "panels" else 0
        if place == "joined" and field.bits == 6:
            columns = 4 * int(field.covers)
            members.append(f"qg_of_four {own};")
            begin = f"(const uint8_t*)from.part[{number}] + at{columns} * 48"
            longer.setdefault(columns, []).append(f"{own}.load({begin});")
            read = f"{own}.at(k / {field.covers})"
        elif across:
            read = _entries_across(field, place, number)
        elif covers and columns > covers and columns % covers == 0:
            members.append(f"decltype(qg_entries((const {kind}*)nullptr)) {own};")
            begin = f"(const {kind}*)from.part[{number}] + at{columns} * 16"
            longer.setdefault(columns, []).append(f"{own} = qg_entries({begin});")
            read = own
        elif place == "flat" and field.name not in of_tables:
            members.append(f"qg_stream<{kind}, {field.covers}> {own};")
            read = f"{own}.at(from, {number}, panel, k)"
        else:
            read = _entries(field, place, number)
        loads.append(f"const auto {names[field.name]} = {read};")
        number += 1
    for columns, read_once in longer.items():
        members.append(f"int64_t of{columns} = -1;  // where the entries of {columns} columns are from")
        begin = f"const int64_t at{columns} = panel * qg_up(from.k, {columns}) + k / {columns};"
        loads[:0] = [
            begin, f"if (at{columns} != of{columns}) {{", *indent([f"of{columns} = at{columns};", *read_once]), "}",
        ]  # fmt: skip
    return members, loads


def _asks(fmt: Format, across: bool, places: tuple[str, ...]) -> list[str]:
    """`ask`, which prefetches what `load` reads of a panel for column k; and SCATTERED, whether a walk over one panel
    after the other asks for the next one's: where fields of 6 bits share bytes (q4_K, q5_K, q3_K, iq4_xs), which takes
    0.8 to 0.87 of the time for one row on a Zen 5, and up to 1.1 for other formats (docs/performance.md)."""
    number = fmt.declaration.codes.bits.bit_count()
    lines = list[str]()
    scattered = False
    for field, place in zip(fmt.declaration.fields, places, strict=True):
        if place == "codes":
            continue
        if not across and place in ("panels", "joined") and isinstance(field.covers, int) and field.covers:
            joined = 1 if place == "panels" else 4 if field.bits == 6 else 2
            columns = joined * field.covers
            size = 16 * (joined * field.bits // 8 if joined > 1 else field.dtype.itemsize)
            scattered |= joined == 4
            place_of = f"panel * qg_up(from.k, {columns}) + (uint64_t)k / {columns}"
            lines.append(f"__builtin_prefetch((const char*)from.part[{number}] + ({place_of}) * {size});")
        number += 1
    given = "const qg_packed& from, int64_t panel, int64_t k" if lines else "const qg_packed&, int64_t, int64_t"
    return [
        f"    static constexpr bool SCATTERED = {str(scattered).lower()};",
        f"    static QG_METHOD void ask({given}) {{", *indent(lines, 2), "    }",
    ]  # fmt: skip


def _halves(values: Float32) -> list[str]:
    """The values of codes as the bits of bf16: 64 of them, or fewer repeated up to 32."""
    bits = np.resize(values, max(32, len(values))).astype(ml_dtypes.bfloat16).view(np.uint16)
    return [f"0x{number:04x}" for number in bits]


def _tables_of_entries(fmt: Format) -> list[str]:
    """The tables that entries index (as opposed to codes)."""
    return sorted({t for eq in fmt.declaration.split.per_entry.values() for t in eq.tables})


def _fields_of_tables(fmt: Format) -> set[str]:
    """The fields that index a table; their entries stay integers."""
    found: set[str] = set()
    for equation in fmt.declaration.split.per_entry.values():
        found |= equation.lookups
    return found


def columns_at_a_time(fmt: Format) -> int:
    """Columns per step of a decoder: a divisor of the columns that share entries, and whole words if possible."""
    bits, covers = fmt.declaration.codes.bits, shared_columns(fmt)
    if fmt.declaration.trellis is not None:
        return 16 if bits == 4 else 32  # decode.h's qg_sequences
    if bits == 8:
        return 4 if covers == 0 else math.gcd(8, covers)
    return math.gcd(16 if bits & 2 else 8, covers)


def _entries(field: Field, place: str, number: int) -> str:
    """The entries of sixteen rows for column k of a panel, if entries end only at steps of the decoder."""
    base = f"(const {entry_type(field)}*)from.part[{number}]"
    columns = field.covers if isinstance(field.covers, int) else 0
    if place == "once":
        return f"vset(qg_entry({base}))"
    if place == "panels":
        index = f"(panel * qg_up(from.k, {columns}) + k / {columns}) * 16" if columns else "panel * 16"
        return f"qg_entries({base} + {index})"
    row = "qc_min(panel * 16 + l, from.n - 1)"  # rows past the last one read the last row's entries
    if place == "joined":
        two = f"(const uint8_t*)from.part[{number}] + (panel * qg_up(from.k, {2 * columns}) + k / {2 * columns}) * 16"
        return f"qg_of_two({two}, k / {columns})"
    if place == "flat":
        return f"qg_lanes([&](int64_t l) {{ return qg_entry({base} + ({row} * from.k + k) / {columns}); }})"
    beside = f" * qg_up(from.k, {columns}) + k / {columns}" if columns else ""
    if field.rows % LANES == 0:
        return f"vset(qg_entry({base} + panel * 16 / {field.rows}{beside}))"
    return f"qg_lanes([&](int64_t l) {{ return qg_entry({base} + {row} / {field.rows}{beside}); }})"


def _entries_across(field: Field, place: str, number: int) -> str:
    """The entries of sixteen rows, where SIMD lane l reads the entry of element at[l] in flat storage."""
    base = f"(const {entry_type(field)}*)from.part[{number}]"
    if place == "once":
        return f"vset(qg_entry({base}))"
    assert place == "flat", "where rows do not hold whole entries of the finest level, they do of none"
    return f"qg_lanes([&](int64_t l) {{ return qg_entry({base} + at[l] / {field.covers}); }})"
