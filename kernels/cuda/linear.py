"""The `linear` template: which engine serves a spec, how a weight is decoded, how a sum becomes a result.

    engine_of(spec, arch)      "fma": CUDA cores, linear_fma.py;  "mma": tensor cores, linear_mma.py
    weight_of(name, operand)   the struct `qk_<name>_w`, from which linear.cuh's templates decode tiles
    finish_of(spec)            the function `qk_<name>_finish`: bias, epilogue, one rounding, store, within bounds

Nothing here knows a format.  Codes, fields and the arithmetic come from its declaration.  The part of the decode
equation that depends on codes alone becomes a table of 16 values (or, where they are consecutive integers, arithmetic),
the rest becomes `value`, operation by operation, so that the bits are those of `Format.decode`.
"""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from qcompiler import formats
from qcompiler.errors import KernelSelectionError
from qcompiler.formats import Format
from qcompiler.formats.base import Declaration, Section
from qcompiler.formats.equation import Equation, Float32
from qcompiler.kernels import layouts
from qcompiler.kernels.cuda.geometry import CudaKernel, check_extent
from qcompiler.kernels.layouts.cuda import tile_columns
from qcompiler.kernels.layouts.panels import LANES, packed_name
from qcompiler.kernels.scalar import float_literal, scalar_statements
from qcompiler.kernels.text import STORAGE_TYPES, VALUE_TYPES, c_dim, identifier, indent
from qcompiler.plan.kernel import ITEMSIZE, DType, KernelSpec, LinearKernel, Operand

FLOATS: tuple[DType, ...] = ("f32", "bf16", "f16")
LAYOUT = "cuda_t16_v1"
PIECE = 16
"""Columns of a piece: the depth of one `mma`, and of one word of 4-bit codes."""

Engine = Literal["fma", "mma"]


def linear_body(spec: KernelSpec) -> LinearKernel:
    """The spec's body, checked to be a linear."""
    if not isinstance(spec.body, LinearKernel):
        raise KernelSelectionError(f"kernel '{spec.name}' is a {spec.template}, not a linear")
    return spec.body


def engine_of(spec: KernelSpec, arch: str) -> Engine:
    """Tensor cores where x and the decoded weight share a 16-bit type, the architecture multiplies it, and the weight
    lies in tiles; CUDA cores for everything else, and for M <= 8, where the weight's bytes set the time."""
    from qcompiler.kernels.cuda.emit import arch_number

    body, (x, w) = linear_body(spec), spec.operands[:2]
    needs = {"bf16": 80, "f16": 75}.get(x.dtype)
    wide = body.m_class in ("9-64", "large")
    fits = needs is not None and x.dtype == w.dtype and arch_number(arch) >= needs and w.layout == LAYOUT
    return "mma" if wide and fits else "fma"


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """Text and geometry of one linear on `arch`. KernelSelectionError for operands that no kernel takes."""
    check(spec)
    engine = importlib.import_module(f"qcompiler.kernels.cuda.linear_{engine_of(spec, arch)}")
    kernel: CudaKernel = engine.emit(spec, arch)
    return kernel


def check(spec: KernelSpec) -> None:
    """KernelSelectionError unless the operands are those of a linear, in types and strides that kernels take."""
    body, where = linear_body(spec), f"kernel '{spec.name}'"
    if body.window is not None:
        raise KernelSelectionError(f"{where} reads the windows of an image, which only CPU kernels do")
    fixed = 4 if body.has_bias else 3
    if len(spec.operands) < fixed:
        raise KernelSelectionError(f"{where}: a linear has x, w, {'bias, ' * body.has_bias}extras and out")
    check_extent(spec, spec.operands[1], 0)
    check_extent(spec, spec.operands[1], 1)
    for operand in (spec.operands[0], spec.operands[-1]):
        if operand.dtype not in FLOATS:
            raise KernelSelectionError(f"{where}: operand '{operand.name}' is {operand.dtype}; linears take {FLOATS}")
        if operand.strides[1] != 1:
            raise KernelSelectionError(f"{where}: operand '{operand.name}' needs unit stride in its last dim")
    wanted = 0 if body.epilogue is None else len(body.epilogue.inputs) - 1
    if len(spec.operands) - fixed != wanted:
        given = len(spec.operands) - fixed
        raise KernelSelectionError(f"{where}: its epilogue takes {wanted} extra inputs, {given} are given")


# --- weights ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """How a kernel reads its weight of `rows` x `cols`.

    `storage`: "codes" (packed) and "values" (plain) lie in cuda_t16_v1, "strided" is plain memory under any strides.
    `struct` names the generated C++ struct that `definitions` define; linear.cuh says what it holds.  `bits` are those
    of one stored element; a tile is 16 rows by `tile` columns, a panel has `tiles` of them.  `lookup` says that codes
    go through a table in shared memory (`code_value` fills it), else `first` makes numbers of them.  A lane that
    prefetches a tile keeps its scales and zero points in `entry_registers`.
    """

    storage: Literal["codes", "values", "strided"]
    dtype: DType
    rows: int
    cols: int
    bits: int
    struct: str
    definitions: str
    lookup: bool = False
    entry_registers: int = 0

    @property
    def tile(self) -> int:
        return tile_columns(self.bits)

    @property
    def tiles(self) -> int:
        return -(-self.cols // self.tile)

    @property
    def panels(self) -> int:
        return -(-self.rows // LANES)


def weight_of(name: str, operand: Operand) -> Weight:
    """How kernel `name` reads the weight `operand` (n, k); KernelSelectionError where it cannot."""
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
        f"    static constexpr int bits = {bits};",
        "    static constexpr bool packed = false, lookup = false, straddles = false;",
        f"    static constexpr int64_t rows = {rows}, cols = {cols}, tiles = {-(-cols // tile_columns(bits))};",
        "};",
    ]
    return Weight("values" if in_tiles else "strided", operand.dtype, rows, cols, bits, struct, _block(lines))


@dataclass(frozen=True)
class Decoding:
    """A decode equation in two parts: `of_code` reads codes alone, `rest` reads the other fields and "code"."""

    of_code: Equation
    rest: Equation


def split_equation(declaration: Declaration) -> Decoding:
    """The largest part of the decode equation that depends on codes alone, and the equation around it.

    Both parts hold the operations of the whole in its order, so that they round alike.  KernelSelectionError where
    codes appear in two separate parts.
    """
    codes = declaration.codes.name
    parts: list[ast.expr] = []

    class Split(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {"table"}
            if isinstance(node, ast.expr) and names == {codes}:
                parts.append(node)
                return ast.Name("code")
            return self.generic_visit(node)

    rest = Split().visit(ast.parse(declaration.decode.text, mode="eval").body)
    if len(parts) != 1:
        raise KernelSelectionError(f"no CUDA kernel decodes '{declaration.decode.text}': codes stand in several parts")
    return Decoding(Equation(ast.unparse(parts[0])), Equation(ast.unparse(rest)))


def code_values(declaration: Declaration) -> Float32:
    """What each code stands for before scale and zero point: float32, one entry per code, as its unsigned bits."""
    codes = np.arange(1 << declaration.codes.bits, dtype=np.uint8).view(declaration.codes.dtype)
    values = split_equation(declaration).of_code.evaluate({declaration.codes.name: codes}, declaration.table_array)
    return np.asarray(values, np.float32)


def _code_value(name: str, declaration: Declaration) -> tuple[list[str], list[str], bool]:
    """(definitions before the struct, members, whether kernels look values up in shared memory)."""
    values = code_values(declaration)
    text = split_equation(declaration).of_code.text
    bits, half = declaration.codes.bits, values.size // 2
    shift = half if declaration.codes.kind == "int" else 0  # two's complement counts up once its sign bit is flipped
    ascending = np.roll(values, shift)
    if np.array_equal(ascending, ascending[0] + np.arange(values.size, dtype=np.float32)):
        what = "a code, its sign bit flipped," if shift else "a code"
        return (
            [],
            [f"static constexpr int first = {int(ascending[0])};  // {what} stands for code + first: {text}"],
            False,
        )
    if bits != 4:
        raise KernelSelectionError(f"no CUDA kernel looks up {bits}-bit codes ('{declaration.decode.text}')")
    literals = [f"{float_literal(float(value), 'f32')}" for value in values]
    listed = ",\n".join("    " + ", ".join(literals[i : i + 8]) for i in (0, 8))
    table = f"// What a code stands for: {text}\n__device__ const float qk_{name}_codes[16] = {{\n{listed}}};"
    return [table], [f"static QC_DEVICE float code_value(int code) {{ return qk_{name}_codes[code]; }}"], True


def _entry_field(section: Section, straddles: bool, per_row: int) -> tuple[str, str]:
    """(C++ type, expression that reads the entry of `row` for `block`) of a field with an entry per block."""
    kinds = {("f", 2): "qc_f16", ("f", 4): "float", ("u", 1): "uint8_t", ("i", 1): "int8_t"}
    ctype = kinds[section.dtype.kind, section.dtype.itemsize]
    index = "block" if straddles else f"((row >> 4) * {per_row} + block) * 16 + (row & 15)"
    return ctype, f"((const {ctype}*)(w + {section.offset}))[{index}]"


def _packed_weight(name: str, operand: Operand, fmt: Format) -> Weight:
    declaration, (rows, cols) = fmt.declaration, (int(d) for d in operand.shape)
    sections = {s.name: s for s in layouts.get(LAYOUT).sections(fmt, operand.dtype, rows, cols)}
    decoding, block = split_equation(declaration), declaration.block_size(cols)
    straddles, bits = cols % block != 0, declaration.codes.bits
    if bits not in (4, 8) or block < (PIECE if straddles else 1) or (not straddles and cols > block and block % PIECE):
        raise KernelSelectionError(f"kernel '{name}': no CUDA kernel decodes {bits}-bit codes in blocks of {block}")
    before, members, lookup = _code_value(name, declaration)
    fields: dict[str, tuple[str, str]] = {}
    for field in declaration.fields:
        if field.covers != 1:
            section = sections[packed_name(fmt, field, cols)]
            fields[identifier(field.name)] = _entry_field(section, straddles, cols // block)
    struct, listed = f"qk_{name}_w", ", ".join(read for _, read in fields.values())
    entries = {field: f"qc_float(e.{field})" for field in fields} | {"code": "code"}
    value = re.sub(r"\(float\)\((code|qc_float\([\w.]+\))\)", r"\1", decoding.rest.to_c(entries))  # floats already
    lines = [
        *before,
        f"// The weight of qk_{name}: {fmt} in {LAYOUT}; an element is {declaration.decode.text}, rounded to "
        f"{operand.dtype}.",
        f"struct {struct} {{",
        f"    typedef {STORAGE_TYPES[operand.dtype]} type;",
        f"    static constexpr int bits = {bits};",
        f"    static constexpr bool packed = true, lookup = {_bool(lookup)}, straddles = {_bool(straddles)};",
        f"    static constexpr bool flips_sign = {_bool(declaration.codes.kind == 'int')};",
        f"    static constexpr int64_t rows = {rows}, cols = {cols}, block = {block};",
        f"    static constexpr int64_t tiles = {-(-cols // tile_columns(bits))};",
        *indent(members),
        f"    struct entry {{ {' '.join(f'{kind} {field};' for field, (kind, _) in fields.items())} }};  // as stored",
        "    // `block` counts in the row, or in the whole tensor where blocks straddle rows.",
        "    static QC_DEVICE entry load(const uint8_t* w, int64_t row, int64_t block) {",
        f"        return entry{{{listed}}};",
        "    }",
        "    static QC_DEVICE float value(float code, const entry& e) {  // before rounding",
        f"        return {value};",
        "    }",
        "};",
    ]
    per_tile = 1 if block >= cols else max(1, tile_columns(bits) // block)
    registers = 0 if straddles else 2 * len(fields) * per_tile  # of two rows
    return Weight("codes", operand.dtype, rows, cols, bits, struct, _block(lines), lookup, registers)


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _block(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


# --- finish ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finish:
    """`definition` of ``qk_<name>_finish(sum, m, n, …)``, which stores element (m, n) if it lies inside the result."""

    definition: str
    name: str
    arguments: tuple[str, ...]

    def call(self, total: str, m: str, n: str) -> str:
        """The statement that finishes the fp32 sum `total` of element (m, n)."""
        return f"{self.name}({', '.join((total, m, n, *self.arguments))});"


def finish_of(spec: KernelSpec) -> Finish:
    """Bias, epilogue, one rounding, store. The arguments are the kernel's own parameters, under their names."""
    from qcompiler.kernels.cuda.emit import parameters

    body, out = linear_body(spec), spec.operands[-1]
    lines = [f"if (m >= {c_dim(body.m)} || n >= {body.n}) return;"]
    total = "sum"
    if body.has_bias:
        bias = spec.operands[2]
        step = _times("n", c_dim(bias.strides[0]) if bias.strides else "1")
        lines.append(f"const float biased = sum + {_element(bias, step)};")
        total = "biased"
    result = total
    if body.epilogue is not None:
        inputs = [total]
        for i, operand in enumerate(_extras(spec)):
            lines.append(f"const {VALUE_TYPES[operand.dtype]} e{i} = {_element(operand, _place(operand))};")
            inputs.append(f"e{i}")
        statements = scalar_statements(body.epilogue, inputs)
        lines += statements.lines
        (result,) = statements.results
    lines.append(f"qc_store({identifier(out.name)} + {_place(out)}, {result});")
    used = set(re.findall(r"\w+", " ".join(lines)))
    passed = [(kind, name) for kind, name in parameters(spec) if name in used]
    name = f"qk_{spec.name}_finish"
    head = "".join(f", {kind} {argument}" for kind, argument in passed)
    definition = [f"QC_DEVICE void {name}(float sum, int64_t m, int64_t n{head}) {{", *indent(lines), "}"]
    return Finish(_block(definition), name, tuple(argument for _, argument in passed))


def _extras(spec: KernelSpec) -> tuple[Operand, ...]:
    return spec.operands[3 if linear_body(spec).has_bias else 2 : -1]


def _element(operand: Operand, place: str) -> str:
    return f"qc_load({identifier(operand.name)} + {place})"


def _place(operand: Operand) -> str:
    """The element offset of (m, n); a stride of 0 broadcasts."""
    terms = [_times(index, c_dim(stride)) for index, stride in zip("mn", operand.strides, strict=True)]
    return " + ".join(t for t in terms if t != "0") or "0"


def _times(index: str, stride: str) -> str:
    return "0" if stride == "0" else index if stride == "1" else f"{index} * {stride}"


def row_offset(operand: Operand, m: str) -> str:
    """The element offset of row `m` of an (m, k) operand with unit stride along k."""
    return _times(m, c_dim(operand.strides[0]))
