"""What kernels for CUDA know of a product of int8 rows with the integer codes of a weight: the struct that int8.cuh
reads, and which instructions multiply bytes."""

from __future__ import annotations

import ast
import math

import numpy as np

from qcompiler import formats
from qcompiler.errors import KernelSelectionError
from qcompiler.formats.declaration import Declaration
from qcompiler.formats.integer_product import IntegerProduct, integer_product
from qcompiler.kernels.cuda.geometry import check_extent
from qcompiler.kernels.cuda.signature import arch_number
from qcompiler.kernels.cuda.weights import AS_THEY_ARE, LAYOUT, Weight, block, digits_of
from qcompiler.plan.kernel import KernelSpec

TENSOR_CORES = 75
"""The first architecture whose tensor cores multiply bytes."""


def passed_over(arch: str) -> list[tuple[str, str]]:
    """Ways of multiplying that kernels for `arch` do without, best first, and why."""
    if arch_number(arch) >= TENSOR_CORES:
        return [("dp4a", "tensor cores multiply bytes")]
    return [("mma", f"int8 tensor cores: sm_{TENSOR_CORES}")]


def engine_of(arch: str) -> str:
    """What multiplies bytes: tensor cores ("mma"), or "dp4a"."""
    return "mma" if arch_number(arch) >= TENSOR_CORES else "dp4a"


def product_of(spec: KernelSpec) -> IntegerProduct:
    """The integer product of the operand w. KernelSelectionError if there is none, and for w in another layout."""
    w = spec.operands[1]
    where = f"kernel '{spec.name}'"
    if w.format is None or w.layout != LAYOUT:
        raise KernelSelectionError(f"{where}: integers are multiplied with packed weights in layout '{LAYOUT}'")
    check_extent(spec, w, 0)
    check_extent(spec, w, 1)
    product = integer_product(formats.get(w.format.name, **w.format.params))
    if isinstance(product, str):
        raise KernelSelectionError(f"{where}: {w.format.name} has no integer product: {product}")
    return product


def struct_of(name: str, weight: Weight, spec: KernelSpec, *, pairs: bool = False) -> str:
    """What int8.cuh needs to know about the product with the operand w of `spec`.

    Bytes are signed: of unsigned codes of 8 bits they hold the code minus 128, of listed codes their integers, less an
    offset where these do not fit into a byte.
    """
    product = product_of(spec)
    reference = spec.operands[1].format
    assert reference is not None
    d = formats.get(reference.name, **reference.params).declaration
    parts = {g: f"p.of[{i}]" for i, g in enumerate(d.split.per_entry)}
    offset = product.offset_of(weight.bits)
    first = product.first - offset if weight.bits < 8 else 0
    listed = product.listed or ()
    if listed:
        first = 0
    signed = np.resize(np.array([integer - offset for integer in listed] or [0], np.int8), 16).view("<u4")
    words = ", ".join(f"{word:#010x}u" for word in signed.tolist())
    slope = product.slope.to_c(parts, style=AS_THEY_ARE)
    zero = "0.0f" if product.intercept is None else product.intercept.to_c(parts, style=AS_THEY_ARE)
    lines = [
        f"struct {name} {{",
        f"    typedef {weight.struct} weight;",
        f"    static constexpr int64_t group = {product.columns(weight.cols)};",
        f"    static constexpr int first = {first};",
        f"    static constexpr int offset = {offset};",
        f"    static constexpr bool pairs = {str(pairs).lower()};",
        f"    static constexpr bool affine = {str(product.intercept is not None).lower()};",
        f"    static constexpr bool biases = {str(_biases(product, weight, d)).lower()};",
        f"    static constexpr bool listed = {str(bool(listed)).lower()};",
        *(_list_member(words) if listed else []),
        f"    static QC_DEVICE float slope(const weight::parts& p) {{ return {slope}; }}",
        f"    static QC_DEVICE float intercept(const weight::parts& p) {{ return {zero}; }}",
        "};",
    ]
    return block(lines)


def _biases(product: IntegerProduct, weight: Weight, declaration: Declaration) -> bool:
    """Whether 1.5 * 2^23 and a group's sum are a number of fp32, and a slope times 1.5 * 2^23 is exact: a slope of 22
    digits at most that is far from overflowing."""
    group, most = product.columns(weight.cols), 1 << (weight.bits if weight.bits < 8 else 7)
    if product.listed:
        most = max(map(abs, product.listed))
    digits = None if product.offset_of(weight.bits) else _digits_of_slope(ast.parse(product.slope.text), declaration)
    return digits is not None and digits <= 22 and most * 128 * group < 1 << 22


def _digits_of_slope(node: ast.AST, declaration: Declaration) -> int | None:
    match node:
        case ast.Module([ast.Expr(value)]):
            return _digits_of_slope(value, declaration)
        case ast.Name(name):
            return digits_of(declaration, name)
        case ast.BinOp(left, ast.Mult(), ast.Constant(step)) if math.frexp(float(step))[0] == 0.5:  # type: ignore[arg-type]
            return _digits_of_slope(left, declaration)
        case _:
            return None


def _list_member(words: str) -> list[str]:
    """The bytes of the 16 codes, four in a word; the compiler folds the choice."""
    first, second, third, fourth = words.split(", ")
    return [
        "    static QC_DEVICE constexpr uint32_t list(int i) {",
        f"        return i == 0 ? {first} : i == 1 ? {second} : i == 2 ? {third} : {fourth};",
        "    }",
    ]
