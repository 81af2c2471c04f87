"""Linears that multiply integers: int8 rows by the integer codes of packed weights (int8.h).

The struct of a packed weight (weights.py) is extended by what its integer product needs (formats/integer_product.py):

    struct qi_int4_1c0de5 : qw_int4_1c0de5 {
        static constexpr int LOWEST = -8;
        static constexpr int64_t SHARED = 32;
        static constexpr bool FLIP = false, AFFINE = false, LISTED = false, NESTED = false;
        QG_METHOD vf slope() const { return g0; }
        QG_METHOD vf intercept() const { return vzero(); }
    };

One kernel serves any number of rows. The instruction set decides which instruction multiplies; for AVX-512 VNNI the
processor decides at run time. Integer sums are exact, so the bits are the same either way.
"""

from __future__ import annotations

from qcompiler.errors import KernelSelectionError
from qcompiler.formats.int8_rows import padded
from qcompiler.formats.integer_product import IntegerProduct, integer_product
from qcompiler.kernels import text as shared
from qcompiler.kernels.cpu import linear_norm, text
from qcompiler.kernels.cpu.linear import finish_of, packed_format, tile_of, used_symbols
from qcompiler.kernels.cpu.weights import ANY_PANELS, FLOAT_LANES, PANEL_LAYOUTS, panel_weight
from qcompiler.kernels.text import c_dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.linear import LinearKernel

CHUNK, BLOCKS, SPARE = 458752, 8, 4
"""int8.h's QI_CHUNK, QI_BLOCKS and QI_SPARE."""

_ROWS = {"x86-64-v4": 12, "x86-64-v3": 4}


def passed_over(isa: str) -> list[tuple[str, str]]:
    """The ways to multiply that kernels for `isa` do not use, best first, each with the reason."""
    if isa == "x86-64-v4":
        why = "only where the processor lacks AVX-512 VNNI or VBMI, which are asked for when the kernel runs"
        return [("pairs", why)]
    why = "needs x86-64-v4 and a processor with AVX-512 VNNI and VBMI"
    return [("vnni", why)] if isa.startswith("x86-64") else [("vnni", why), ("pairs", "needs x86-64")]


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """Scratch bytes per thread."""
    return linear_norm.scratch_with_rows(spec, _own_scratch(spec, isa))


def _own_scratch(spec: KernelSpec, isa: str) -> int:
    """What the product itself needs of it: int8.h's `qi_scratch_for`."""
    body, product = _body(spec), _product(spec)
    rows = _ROWS.get(isa, 2)
    groups = -(-body.k // product.columns(body.k))
    stride = 2 * padded(body.k) | 64
    chunk = rows * max(1, min(BLOCKS, CHUNK // (rows * stride)))
    entries = 4 * _entries_of_group(spec, isa) * groups
    w = spec.operands[1].format
    assert w is not None
    bits = packed_format(w).declaration.codes.bits
    in_planes = bits not in (1, 2, 4, 8)
    # int8.h's `qi_unpacked_of`: four steps for 16 columns, each a pair of vectors, since a CPU without VNNI needs those
    codes = -(-body.k // 16) * 4 * tile_of(isa).panels * 128 * in_planes
    return 64 * rows * tile_of(isa).panels + entries + codes + (chunk + SPARE) * (stride + 8 * groups + 4)


def _entries_of_group(spec: KernelSpec, isa: str) -> int:
    """Floats of a group that are computed once for all rows of x: int8.h's `qi_entries_of`, for formats that nest."""
    product = _product(spec)
    return 16 * tile_of(isa).panels * (1 + (product.intercept is not None)) * _nested(spec)


def _nested(spec: KernelSpec) -> bool:
    """Whether the scale of a group is made of several entries, which costs as much as a few rows of products."""
    w = spec.operands[1]
    assert w.format is not None
    fields = packed_format(w.format).declaration.fields
    return _product(spec).group != 0 and len({f.covers for f in fields if f.covers != 1}) > 1


def _bytes_of_codes(product: IntegerProduct) -> list[str]:
    """The member function that looks up four codes at once, for a list of integers."""
    if product.listed is None:
        return []
    bytes_ = ", ".join(str(integer - product.first) for integer in product.listed)
    return [
        "    static QG_METHOD qu bytes(qu codes) {",
        f"        alignas(16) static constexpr uint8_t of_code[16] = {{{bytes_}}};",
        "        return qi_look_up(of_code, codes);",
        "    }",
    ]


def _body(spec: KernelSpec) -> LinearKernel:
    assert isinstance(spec.body, LinearKernel)
    return spec.body


def _product(spec: KernelSpec) -> IntegerProduct:
    """The integer product of the weight's format. KernelSelectionError if its codes cannot be multiplied."""
    w = spec.operands[1]
    where = f"kernel '{spec.name}'"
    if w.format is None or w.layout not in PANEL_LAYOUTS:
        raise KernelSelectionError(f"{where}: integers are multiplied with packed weights in layout {ANY_PANELS}")
    product = integer_product(packed_format(w.format))
    if isinstance(product, str):
        raise KernelSelectionError(f"{where}: {w.format.name} has no integer product: {product}")
    return product


def emit(spec: KernelSpec, isa: str) -> str:
    """C++ text of one kernel. KernelSelectionError for unsupported operands."""
    body, product, w = _body(spec), _product(spec), spec.operands[1]
    assert w.format is not None and w.layout is not None
    fmt = packed_format(w.format)
    made = panel_weight(fmt, w.dtype, body.n, body.k, w.layout)
    name = made.struct.replace("qw_", "qi_", 1)
    parts = {g: g for g in fmt.declaration.split.per_entry}
    flip = fmt.declaration.codes.kind == "int"
    zero = "vzero()" if product.intercept is None else product.intercept.to_c(parts, style=FLOAT_LANES)
    struct = [
        f"#ifndef {name.upper()}",
        f"#define {name.upper()}",
        f"struct {name} : {made.struct} {{",
        f"    static constexpr int LOWEST = {product.first};",
        f"    static constexpr int64_t SHARED = {product.group};",
        f"    static constexpr bool FLIP = {str(flip).lower()}, AFFINE = {str(product.intercept is not None).lower()};",
        f"    static constexpr bool LISTED = {str(product.listed is not None).lower()}, "
        f"NESTED = {str(_nested(spec)).lower()};",
        *_bytes_of_codes(product),
        f"    QG_METHOD vf slope() const {{ return {product.slope.to_c(parts, style=FLOAT_LANES)}; }}",
        f"    QG_METHOD vf intercept() const {{ return {zero}; }}",
        "};",
        "#endif",
        "",
    ]
    groups = -(-body.k // product.columns(body.k))
    scratch = _own_scratch(spec, isa)
    source = [f"job.x = (const char*)op[0], job.x_row = {c_dim(spec.operands[0].strides[0])}, job.x_col = 1;"]
    if body.rows is not None:
        source = linear_norm.source(spec, scratch)
    lines = [
        "qg_job job = {};",
        f"job.m = {c_dim(body.m)}, job.n = {body.n}, job.k = {body.k};",
        *source,
        "const char* const w = (const char*)op[1];",
        f"job.packed.n = {body.n}, job.packed.k = {body.k};",
        *(f"job.packed.part[{i}] = w + {offset};" for i, offset in enumerate(made.parts)),
        f"job.finish = qk_{spec.name}_finish;",
        "job.op = op, job.sym = sym;",
        f"qi_run<{name}>(ctx, &job);",
    ]
    lines = [*used_symbols(spec, lines, "sym"), *lines]
    needed = f"qi_scratch_for<{name}>({body.k}, {groups}, QI_ROWS, {_entries_of_group(spec, isa)})"
    lines.insert(0, f'static_assert({needed} <= {scratch}, "scratch");')
    total = scratch_bytes(spec, isa)
    header = shared.header_comment(
        spec,
        f"codes times codes, {groups} group(s) of columns; {name}; {total} bytes of scratch per thread",
    )
    definitions = made.definitions + "\n".join(struct)
    definitions += linear_norm.rows_functions(spec)
    return "\n".join([header, definitions + finish_of(spec, body), text.entry_function(spec, lines)])
