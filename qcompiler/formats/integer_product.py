"""Products of int8 rows with a weight's integer codes: which formats have them, and their exact definition.

A format has one if an element is affine in an integer, and entries serve 16 columns or whole runs of 32:

    value = slope * code + intercept      int4: slope = scales     q4_K: slope = d * scales, intercept = -(dmin * mins)

The integer is what a code stands for: consecutive ones (int4: -8 … 7), or those of a list (iq4_nl: -127, -104, … 113)
in steps of a power of two, with which the slope is multiplied (mxfp4: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives in
steps of 0.5).

With q the codes of a row of x, s its scale (int8_rows.py), and the columns cut into groups that share entries (of at
most 65,536 columns, so that sums of bytes stay in 32 bits), in fp32, every operation rounded, groups ascending:

    total = 0
    for each group:
        term  = float(sum of code * q over the group) * slope                 the sum is exact, in int32
        term  = term + float(sum of q over the group) * intercept             where there is one
        total = total + term
    result = total * s
"""

from __future__ import annotations

import ast
import functools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qcompiler.formats.base import Format, PackedTensor
from qcompiler.formats.declaration import Declaration
from qcompiler.formats.equation import Equation, Float32
from qcompiler.formats.int8_rows import RUN

WIDEST = 65536
"""Maximum of columns in a group: 255 * 127 times as many is below 2**31."""

PIECE = 16
"""Columns of the smallest group: those of a tile of `mma`, and of a word of 2-bit codes."""

LARGEST = 255
"""The largest magnitude of an integer: 255 * 127 * WIDEST is below 2**31."""

NARROWEST = 2
"""The fewest bits of a code: kernels take a word of codes in four steps at most, and one-bit codes would take eight."""

FINEST = 8
"""The finest step of a list of integers is 2^-FINEST."""


@dataclass(frozen=True)
class IntegerProduct:
    """`first` is the smallest integer, `group` the columns that share entries (0: all of a row); `slope` and
    `intercept` read the parts of `Declaration.split.per_entry`.

    Integers count up with the codes (signed codes with their sign bit flipped), unless `listed` has that of each code.
    """

    first: int
    group: int
    slope: Equation
    intercept: Equation | None
    listed: tuple[int, ...] | None = None

    def columns(self, cols: int) -> int:
        """Columns of a group in rows of `cols`."""
        return self.group or min(max(cols, 1), WIDEST)

    def last(self, bits: int) -> int:
        """The largest integer of codes of `bits` bits."""
        return max(self.listed) if self.listed else self.first + (1 << bits) - 1

    def offset_of(self, bits: int) -> int:
        """By how much the integer of a code of `bits` bits is larger than the signed byte in which kernels hold it.

        It is 0 if integers fit into bytes. Else bytes begin at -128, but those of fewer than 8 bits are the codes."""
        if self.first >= -128 and self.last(bits) < 128:
            return 0
        return self.first + (128 if self.listed or bits == 8 else 0)


def first_of_integers(declaration: Declaration) -> int | None:
    """The smallest value of a code if values are consecutive integers in the order of the codes, else None.

    Signed codes are ordered as two's complement: flipping the sign bit makes them count up.
    """
    values, kind = declaration.code_values, declaration.codes.kind
    if kind not in ("uint", "int"):
        return None
    ascending = np.roll(values, values.size // 2) if kind == "int" else values
    first = float(ascending[0])
    counted = np.array_equal(ascending, np.float32(first) + np.arange(values.size, dtype=np.float32))
    whole = counted and first.is_integer() and abs(first) < 1 << 16
    return int(first) if whole and not np.signbit(values[values == 0]).any() else None


def listed_integers(declaration: Declaration) -> tuple[tuple[int, ...], float] | None:
    """(the integer of each code, their step) if values are integers times a power of two, of which 16 codes at most
    span at most 255; else None. -0 counts as 0, which is what it adds to a sum."""
    values = declaration.code_values.astype(np.float64)
    if declaration.codes.kind != "uint" or values.size > 16 or not np.isfinite(values).all():
        return None
    for step in (2.0**-n for n in range(FINEST + 1)):
        integers = values / step
        if (integers == np.rint(integers)).all():
            return (tuple(map(int, integers)), step) if np.ptp(integers) <= 255 else None
    return None


@functools.lru_cache(maxsize=256)
def integer_product(fmt: Format) -> IntegerProduct | str:
    """How codes of `fmt` are multiplied as integers, or the reason why they cannot be."""
    d = fmt.declaration
    first, listed, step = first_of_integers(d), None, 1.0
    if first is None:
        found = listed_integers(d)
        if found is None:
            return f"codes of {fmt.name} stand for values of a table, not for integers"
        listed, step = found
        first = min(listed)
    if d.blocking != "row":
        return "its blocks run across rows"
    covers = [f.covers for f in d.fields if isinstance(f.covers, int) and f.covers > 1]
    group = math.gcd(*covers) if covers else 0
    if (group % RUN and group != PIECE) or group > WIDEST:
        return f"groups of {group} columns; integer products take {PIECE} and multiples of {RUN}"
    integers = np.array(listed) if listed is not None else first + np.arange(d.code_values.size)
    if np.abs(integers).max() > LARGEST or d.codes.bits < NARROWEST:
        return (
            f"codes of {d.codes.bits} bits for integers up to {np.abs(integers).max()}; integer products take "
            f"{NARROWEST} bits or more, and integers up to {LARGEST}"
        )
    slope = _slope(ast.parse(d.split.per_element.text, mode="eval").body)
    if slope is None:
        return f"an element, {d.decode.text}, is not affine in its code"
    if step != 1.0:
        slope = ast.BinOp(slope, ast.Mult(), ast.Constant(step))
    at_zero = _at_zero(d.split.per_element.text) if _adds(d.split.per_element.text) else None
    return IntegerProduct(
        first, group, Equation(ast.unparse(slope)), None if at_zero is None else Equation(at_zero), listed
    )


def multiply(
    codes: npt.NDArray[np.int8], scales: Float32, packed: PackedTensor, rows: tuple[int, int] | None = None
) -> Float32:
    """fp32 (M, N): int8 codes (M, K) with scales (M,) by a weight (N, K), or by its `rows` [first, stop). This is the
    definition.

    The caller must first check that `integer_product` returns a product.
    """
    fmt, cols = packed.format, packed.cols
    product = integer_product(fmt)
    assert isinstance(product, IntegerProduct), product
    d = fmt.declaration
    first, stop = (0, packed.rows) if rows is None else rows
    entries = fmt.entries_of_rows(packed, first, stop)
    bits = np.ascontiguousarray(entries.pop(d.codes.name)).view(np.uint8)
    integers = d.code_values if product.listed is None else np.array(product.listed)
    weight = integers[bits].astype(np.float64)  # products and sums of these are exact integers
    x = codes.astype(np.float64)
    total = np.zeros((len(codes), stop - first), np.float32)
    step = product.columns(cols)
    with np.errstate(invalid="ignore", over="ignore"):
        for k in range(0, cols, step):
            here = {name: e[:, k : k + 1] if e.shape[1] == cols else e[:, :1] for name, e in entries.items()}
            parts = {name: eq.evaluate(here, d.table_arrays) for name, eq in d.split.per_entry.items()}
            sums = (x[:, k : k + step] @ weight[:, k : k + step].T).astype(np.float32)
            term = sums * product.slope.evaluate(parts, d.table_arrays).reshape(1, -1)
            if product.intercept is not None:
                ones = x[:, k : k + step].sum(axis=1, keepdims=True).astype(np.float32)
                term = term + ones * product.intercept.evaluate(parts, d.table_arrays).reshape(1, -1)
            total = total + term
        return np.asarray(total * scales.reshape(-1, 1), np.float32)


def line_of(declaration: Declaration) -> tuple[Equation, Equation | None] | None:
    """(scale, offset) of an element that is `scale * code + offset` (q4_K), or `scale * code` with None as its offset
    (nf4, q4_0). Both read the parts of `Declaration.split.per_entry`. None for any other element."""
    text = declaration.split.per_element.text
    slope = _slope(ast.parse(text, mode="eval").body)
    if slope is None or isinstance(slope, ast.Constant):
        return None
    return Equation(ast.unparse(slope)), Equation(_offset(text)) if _adds(text) else None


# --- equations -------------------------------------------------------------------------------------------------------


def _reads_code(node: ast.expr) -> bool:
    return any(isinstance(n, ast.Name) and n.id == "code" for n in ast.walk(node))


def _slope(node: ast.expr) -> ast.expr | None:
    """The factor of `code` in an expression that is affine in it, without the terms that do not read it."""
    match node:
        case ast.Name("code"):
            return ast.Constant(1)
        case ast.BinOp(left, ast.Add(), right):
            return _slope(left) if _reads_code(left) else _slope(right)
        case ast.BinOp(left, ast.Sub(), right):
            return _slope(left) if _reads_code(left) else None
        case ast.BinOp(left, ast.Mult() as op, right):
            mine, other = (left, right) if _reads_code(left) else (right, left)
            factor = None if _reads_code(other) else _slope(mine)
            if factor is None:
                return None
            if isinstance(factor, ast.Constant) and factor.value == 1:
                return other
            return ast.BinOp(factor, op, other) if mine is left else ast.BinOp(other, op, factor)
        case _:
            return None


def _adds(text: str) -> bool:
    return any(isinstance(n, ast.Add | ast.Sub) for n in ast.walk(ast.parse(text, mode="eval")))


class _AtZero(ast.NodeTransformer):
    """Puts 0 in place of the code."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(0) if node.id == "code" else node


class _WithoutCode(_AtZero):
    """The same, and in place of a product with the code."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        names = [each.id for each in (node.left, node.right) if isinstance(each, ast.Name)]
        if isinstance(node.op, ast.Mult) and "code" in names:
            return ast.Constant(0)
        self.generic_visit(node)
        return node


def _at_zero(text: str) -> str:
    """The expression at code 0: the factor of the sum of q."""
    return ast.unparse(_AtZero().visit(ast.parse(text, mode="eval")))


def _offset(text: str) -> str:
    """The terms that do not read the code: `0 - g1` of `g0 * code - g1`, also where g0 is infinite."""
    return ast.unparse(_WithoutCode().visit(ast.parse(text, mode="eval")))


__all__ = ["PIECE", "WIDEST", "IntegerProduct", "first_of_integers", "integer_product", "line_of", "multiply"]
