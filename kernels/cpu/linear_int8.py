"""Linears that multiply integers: int8 rows by the integer codes of packed weights (int8.h).

The struct of a packed weight (weights.py) is extended by what its integer product needs (formats/integer_product.py):

    struct qi_int4_1c0de5 : qw_int4_1c0de5 {
        static constexpr int LOWEST = -8, HIGHEST = 7;
        static constexpr int64_t SHARED = 32;
        static constexpr bool FLIP = false, AFFINE = false, LISTED = false, NESTED = false;
        QG_METHOD vf slope() const { return g0; }
        QG_METHOD vf intercept() const { return vzero(); }
    };

One kernel serves any number of rows. The instruction set decides which instruction multiplies; for AVX-512 VNNI and
AVX-VNNI the processor decides at run time, for AMX the runtime, which asks the system (runtime/amx.py). Integer
sums are exact, so the bits are the same either way.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from qcompiler.errors import KernelSelectionError
from qcompiler.formats import Format
from qcompiler.formats.int8_rows import padded, row_bytes
from qcompiler.formats.integer_product import IntegerProduct, integer_product
from qcompiler.kernels import text as shared
from qcompiler.kernels.cpu import linear_norm, text
from qcompiler.kernels.cpu.linear import finish_of, packed_format, source_of, targets_of, tile_of, used_symbols
from qcompiler.kernels.cpu.weights import ANY_PANELS, FLOAT_LANES, PANEL_LAYOUTS, PanelWeight, panel_weight
from qcompiler.kernels.text import c_dim
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel

SPARE = 4
"""int8.h's QI_SPARE."""

_LARGE_CHUNK, _CHUNK = (589824, 11), (458752, 8)
"""int8.h's QI_CHUNK and QI_BLOCKS for AVX-512, and for other instruction sets."""

HEADERS = ("amx.h", "int8_rows.h", "int8.h", "int8_tiles.h", "int8_run.h")

LINE = 64
"""im2col_int8.h's QI_LINE."""

_ROWS = {"x86-64-v4": (12,), "x86-64-v3": (4, 6)}
"""int8.h's ROWS of the engines of an instruction set; the others have 2."""

_TILES, _TILES_CHUNK = 32, (1048576, 16)
"""int8_tiles.h's rows of a block, QT_CHUNK and QT_BLOCKS."""


def passed_over(isa: str) -> list[tuple[str, str]]:
    """The ways to multiply that kernels for `isa` do not use, best first, each with the reason."""
    asked = "which is asked for when the kernel runs"
    if isa == "x86-64-v4":
        tiles = ("tiles", f"only from 8 to 14 rows on, where the processor and the system have AMX, {asked}")
        return [tiles, ("pairs", f"only where the processor lacks AVX-512 VNNI or VBMI, {asked}")]
    vnni = ("vnni", "needs x86-64-v4 and a processor with AVX-512 VNNI and VBMI")
    if isa == "x86-64-v3":
        return [vnni, ("pairs", f"only where the processor lacks AVX-VNNI, {asked}")]
    vex = ("vex", "needs x86-64-v3 and a processor with AVX-VNNI")
    return [vnni, vex] if isa.startswith("x86-64") else [vnni, vex, ("pairs", "needs x86-64")]


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """Scratch bytes per thread."""
    product = _text(spec).scratch(isa)
    return linear_norm.scratch_with_rows(spec, product) + _window_room(spec)


def _window_room(spec: KernelSpec) -> int:
    """Bytes for the window that a thread reads from an image of int8 rows: im2col_int8.h's `qi_window_room`."""
    return 0 if _body(spec).window is None else row_bytes(_body(spec).k) + LINE


@dataclass(frozen=True)
class ProductText:
    """What the text of a kernel says of the integer product with its packed weight, the operand `w` (n, k)."""

    name: str
    """Of the kernel, for errors."""
    w: Operand
    n: int
    k: int

    @functools.cached_property
    def format(self) -> Format:
        return packed_format(self._reference)

    @property
    def _reference(self) -> FormatRef:
        if self.w.format is None or self.w.layout not in PANEL_LAYOUTS:
            raise KernelSelectionError(
                f"kernel '{self.name}': integers are multiplied with packed weights in layout {ANY_PANELS}"
            )
        return self.w.format

    @functools.cached_property
    def product(self) -> IntegerProduct:
        """KernelSelectionError if the format's codes cannot be multiplied."""
        found = integer_product(self.format)
        if isinstance(found, str):
            raise KernelSelectionError(f"kernel '{self.name}': {self._reference.name} has no integer product: {found}")
        return found

    @property
    def groups(self) -> int:
        """Groups of columns that share a scale."""
        return -(-self.k // self.product.columns(self.k))

    def scratch(self, isa: str) -> int:
        """Scratch bytes per thread, for any engine."""
        needed = [self._scratch(isa, rows) for rows in _ROWS.get(isa, (2,))]
        return max(*needed, self._scratch_of_tiles(isa)) if isa == "x86-64-v4" else max(needed)

    def _scratch(self, isa: str, rows: int) -> int:
        """int8.h's `qi_scratch_for`."""
        groups, panels = self.groups, tile_of(isa).panels
        prepared = max(self._prepared(_chunk(isa, rows, stride), stride) for stride in self._strides)
        entries = 4 * self._entries_of_group(isa) * groups
        in_planes = self.format.declaration.codes.bits not in (1, 2, 4, 8)
        # int8.h's `qi_unpacked_of`: four steps for 16 columns, each a pair of vectors, as a CPU without VNNI needs
        codes = -(-self.k // 16) * 4 * panels * 128 * in_planes
        return 64 * rows * panels + entries + codes + prepared

    @property
    def _strides(self) -> list[int]:
        """Bytes between prepared rows: engines take four bytes, or eight, for four columns."""
        return [width * padded(self.k) | 64 for width in (1, 2)]

    def _prepared(self, rows: int, stride: int) -> int:
        """int8.h's `qi_prepared_bytes`."""
        return (rows + SPARE) * (stride + 8 * self.groups + 4)

    def prepared(self, rows: int) -> int:
        """Scratch bytes of `rows` prepared rows, for any engine."""
        return max(self._prepared(rows, stride) for stride in self._strides)

    def _scratch_of_tiles(self, isa: str) -> int:
        """int8_tiles.h's `qt_scratch_for`."""
        panels, width, shared = tile_of(isa).panels, padded(self.k), self.product.group
        block = width // 64 * (64 * _TILES + 64)
        size, most = _TILES_CHUNK
        blocks = max(1, min(most, size // block))
        codes = _piece(shared) * panels * 16
        of_row = 64 * panels + 8 * (self.groups + 1) + 4
        return 3 * 4096 + 2 * 64 * panels * (self.groups + 1) + codes + blocks * (block + _TILES * of_row)

    def assertion(self, isa: str) -> str:
        """The statement that compares `scratch` with int8.h."""
        needed = f"qi_scratch_of<{self.struct}>({self.k}, {self.groups}, {self._entries_of_group(isa)})"
        return f'static_assert({needed} <= {self.scratch(isa)}, "scratch");'

    def _entries_of_group(self, isa: str) -> int:
        """Floats of a group that are computed once for all rows of x: int8.h's `qi_entries_of`, for nested formats."""
        return 16 * tile_of(isa).panels * (1 + (self.product.intercept is not None)) * self._nested

    @property
    def _nested(self) -> bool:
        """Whether the scale of a group is made of several entries, which costs as much as a few rows of products."""
        fields = self.format.declaration.fields
        return self.product.group != 0 and len({f.covers for f in fields if f.covers != 1}) > 1

    @functools.cached_property
    def _weight(self) -> PanelWeight:
        assert self.w.layout is not None
        return panel_weight(self.format, self.w.dtype, self.n, self.k, self.w.layout)

    @property
    def struct(self) -> str:
        """The name of the struct."""
        return self._weight.struct.replace("qw_", "qi_", 1)

    @property
    def statements(self) -> list[str]:
        """Those that say where the weight is, which is `w`."""
        return [
            f"job.packed.n = {self.n}, job.packed.k = {self.k};",
            *(f"job.packed.part[{i}] = w + {offset};" for i, offset in enumerate(self._weight.parts)),
        ]

    @property
    def definitions(self) -> str:
        """The struct of the weight, and what the product adds to it."""
        declaration, product = self.format.declaration, self.product
        parts = {g: g for g in declaration.split.per_entry}
        flip = declaration.codes.kind == "int"
        zero = "vzero()" if product.intercept is None else product.intercept.to_c(parts, style=FLOAT_LANES)
        affine, listed = product.intercept is not None, product.listed is not None
        lines = [
            f"#ifndef {self.struct.upper()}",
            f"#define {self.struct.upper()}",
            f"struct {self.struct} : {self._weight.struct} {{",
            f"    static constexpr int LOWEST = {product.first}, HIGHEST = {product.last(declaration.codes.bits)};",
            f"    static constexpr int64_t SHARED = {product.group};",
            f"    static constexpr bool FLIP = {str(flip).lower()}, AFFINE = {str(affine).lower()};",
            f"    static constexpr bool LISTED = {str(listed).lower()}, NESTED = {str(self._nested).lower()};",
            *_bytes_of_codes(product),
            f"    QG_METHOD vf slope() const {{ return {product.slope.to_c(parts, style=FLOAT_LANES)}; }}",
            f"    QG_METHOD vf intercept() const {{ return {zero}; }}",
            "};",
            "#endif",
            "",
        ]
        return self._weight.definitions + "\n".join(lines)


def _chunk(isa: str, rows: int, stride: int) -> int:
    """int8.h's `qi_chunk_of`: most rows of x in a task, prepared rows `stride` bytes apart."""
    size, blocks = _LARGE_CHUNK if isa == "x86-64-v4" else _CHUNK
    return rows * max(1, min(blocks, size // (rows * stride)))


def _piece(shared: int) -> int:
    """int8_tiles.h's `qt_piece`."""
    if shared == 0:
        return 512
    return next(piece for piece in itertools.count(2 * shared, 2 * shared) if piece >= 256 and piece % 64 == 0)


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


def _text(spec: KernelSpec) -> ProductText:
    body = _body(spec)
    return ProductText(spec.name, spec.operands[1], body.n, body.k)


def emit(spec: KernelSpec, isa: str) -> str:
    """C++ text of one kernel. KernelSelectionError for unsupported operands."""
    body, made = _body(spec), _text(spec)
    scratch = made.scratch(isa)
    source, run = source_of(spec.operands[0], body.window), f"qi_run<{made.struct}>(ctx, &job);"
    if body.window is not None:
        needed = f"{scratch} + qi_window_room({body.k})"
        source.append(f'static_assert({needed} <= {scratch_bytes(spec, isa)}, "scratch");')
        run = f"qi_run<{made.struct}, qi_rows_of_windows>(ctx, &job, {scratch});"
    if body.rows is not None:
        source = linear_norm.source(spec, scratch)
    lines = [
        "qg_job job = {};",
        f"job.m = {c_dim(body.m)}, job.n = {body.n}, job.k = {body.k};",
        *source,
        "const char* const w = (const char*)op[1];",
        *made.statements,
        f"job.finish = qk_{spec.name}_finish;",
        *targets_of(spec, body),
        "job.op = op, job.sym = sym;",
        run,
    ]
    lines = [made.assertion(isa), *used_symbols(spec, lines, "sym"), *lines]
    total = scratch_bytes(spec, isa)
    header = shared.header_comment(
        spec,
        f"codes times codes{' of windows of an image' * (body.window is not None)}, {made.groups} group(s) of columns; "
        f"{made.struct}; {total} bytes of scratch per thread",
    )
    definitions = made.definitions + linear_norm.rows_functions(spec)
    return "\n".join([header, definitions + finish_of(spec, body), text.entry_function(spec, lines)])
