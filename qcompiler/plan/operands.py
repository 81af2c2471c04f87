"""The parts of a KernelSpec: element types, operands and scalar programs. `plan/kernel.py` re-exports them.

Shapes and strides are `Dim`s over the program's symbols. Strides count elements. The offset of an operand in its buffer
belongs to the launch, not to the spec, so identical layers share kernels.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from qcompiler.plan.dims import Dim

Access = Literal["r", "w", "rw"]
DType = Literal["f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "ui8", "i1"]
"""Element types under MLIR's names. `i1` is stored as one byte, 0 or 1."""

ITEMSIZE: dict[str, int] = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "ui8": 1, "i1": 1,
}  # fmt: skip


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of all plan records: immutable, keyword-only, and strict about unknown JSON fields."""


class FormatRef(Strict, frozen=True):
    """A storage format by name and parameters: ``nf4`` with ``{"block": 64}``. `qcompiler.formats.get` resolves it."""

    name: str
    params: dict[str, int | bool | str] = {}


class Operand(Strict, frozen=True):
    """One pointer argument of a kernel.

    A packed operand has a `format`, its logical shape (rows, cols) and no strides. Its values decode to `dtype`, and
    its bytes have the order of `layout`.
    """

    name: str
    dtype: DType
    access: Access
    shape: tuple[Dim, ...]
    strides: tuple[Dim, ...] = ()
    format: FormatRef | None = None
    layout: str | None = None


# --- scalar programs: bodies of loops and epilogues ------------------------------------------------------------------


class ScalarOp(Strict, frozen=True):
    """One SSA op of a scalar body, under its MLIR name (`arith.addf`, `math.exp`, `arith.constant`, …).

    `args` are names of earlier results or of body inputs; `dtype` is the type of the result ("index" for
    `linalg.index`).  `value` belongs to `arith.constant` (floats as `float.hex()` text or "inf"/"-inf"/"nan"),
    `predicate` to `arith.cmpf`/`arith.cmpi` (MLIR's words: "olt", "sge", …), `axis` to `linalg.index`.
    """

    result: str
    op: str
    dtype: DType | Literal["index"]
    args: tuple[str, ...] = ()
    value: str | None = None
    predicate: str | None = None
    axis: int | None = None


class ScalarProgram(Strict, frozen=True):
    """Straight-line scalar code. `inputs` name the arguments in order (with dtypes), `yields` the results."""

    inputs: tuple[tuple[str, DType], ...]
    ops: tuple[ScalarOp, ...]
    yields: tuple[str, ...]
