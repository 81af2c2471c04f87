"""`arith.remf`, which MLIR's arith dialect has and xDSL's lacks: C's fmod, the exact remainder with the sign of `lhs`.

`ARITH` is xDSL's dialect with this op; `QCContext.default` loads it in its place.  The op prints in generic form, so
that a plain `xdsl-opt` reads it with `--allow-unregistered-dialect`.
"""

from __future__ import annotations

from xdsl.dialects.arith import Arith, FloatingPointLikeBinaryOperation
from xdsl.ir import Dialect
from xdsl.irdl import irdl_op_definition, traits_def
from xdsl.traits import Pure


@irdl_op_definition
class RemFOp(FloatingPointLikeBinaryOperation):
    """`lhs` less the whole multiple of `rhs` that leaves the least of the same sign; NaN where `rhs` is 0."""

    name = "arith.remf"

    traits = traits_def(Pure())


ARITH = Dialect("arith", [*Arith.operations, RemFOp], list(Arith.attributes))
