"""Scalar ops that MLIR has and xDSL's dialects lack: `arith.remf` and `math.erfc`.

No expression of other ops computes them: `a - b * trunc(a / b)` is inexact for large quotients and NaN if `b` is
infinite, and `1 - erf(x)` has no correct digit from x = 4 on. `ARITH` and `MATH` are xDSL's dialects with these ops
added; `QCContext.default` loads them instead of xDSL's. The ops print in generic form, so that a plain `xdsl-opt` reads
them with `--allow-unregistered-dialect`.
"""

from __future__ import annotations

from xdsl.dialects.arith import Arith, FloatingPointLikeBinaryOperation
from xdsl.dialects.math import FloatingPointLikeUnaryMathOperation, Math
from xdsl.ir import Dialect
from xdsl.irdl import irdl_op_definition, traits_def
from xdsl.traits import Pure, SameOperandsAndResultType


@irdl_op_definition
class RemFOp(FloatingPointLikeBinaryOperation):
    """C's fmod: the remainder of `lhs / rhs`, with the sign of `lhs`; NaN if `rhs` is 0."""

    name = "arith.remf"

    traits = traits_def(Pure())


@irdl_op_definition
class ErfcOp(FloatingPointLikeUnaryMathOperation):
    """The complementary error function, 1 - erf(x), with all its digits."""

    name = "math.erfc"

    traits = traits_def(Pure(), SameOperandsAndResultType())


OURS = (RemFOp, ErfcOp)
ARITH = Dialect("arith", [*Arith.operations, RemFOp], list(Arith.attributes))
MATH = Dialect("math", [*Math.operations, ErfcOp], list(Math.attributes))
ARITH_OPS = frozenset(ARITH.operations)
SCALAR_OPS = ARITH_OPS | frozenset(MATH.operations)
"""What loop bodies compute with."""
