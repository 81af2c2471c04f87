"""The residual of a norm: `h + norm(y)` as one op.

    %n = qc.rms_norm %y weight(%g)                 %s = qc.rms_norm %y weight(%g) residual(%h)
    %s = linalg.generic … (%h, %n)  // addf  ->

The norm is rounded to its type and the sum is rounded again, as before, so no bit changes.  Reshapes between the two
are looked through.
"""

from __future__ import annotations

from xdsl.dialects import arith
from xdsl.dialects.linalg import ops
from xdsl.ir import SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import path_of
from qcompiler.ir.qc_norm import Norm, with_residual
from qcompiler.ir.types import dtype_of, shape_of, tensor_dtype
from qcompiler.kernels.select import FLOATS
from qcompiler.passes.devices.placing import DEVICE
from qcompiler.passes.loops import loops
from qcompiler.passes.views.views import Reshape, unreshaped


def add_residual(norm: Norm) -> Norm | None:
    """The op that stands for a norm and the addition that alone reads it, put in the place of the addition; None if
    there is none."""
    addition = _addition(norm)
    if addition is None or norm.residual is not None:
        return None
    (residual,) = [value for value in addition.inputs if unreshaped(value) is not norm.result]
    builder = build.with_path(InsertPoint.before(addition), path_of(norm))
    made = with_residual(norm, build.reshape(builder, norm.x, shape_of(residual.type)), residual)
    made.attributes.update(norm.attributes)
    builder.insert(made)
    addition.res[0].replace_all_uses_with(made.result)
    erase_if_dead(addition)
    erase_if_dead(norm)
    return made


def _addition(norm: Norm) -> ops.GenericOp | None:
    """The nest that alone reads a norm, if it adds another value of its type to it, element by element."""
    value: SSAValue = norm.result
    reader = _only_reader(value)
    while isinstance(reader, Reshape):
        value = reader.result
        reader = _only_reader(value)
    if not isinstance(reader, ops.GenericOp) or len(reader.inputs) != 2 or not loops.is_pointwise(reader):
        return None
    (result,), type_ = reader.res, value.type
    shape, dtype = shape_of(type_), tensor_dtype(norm.result.type)
    if shape[-1:] != shape_of(norm.x.type)[-1:] or dtype not in FLOATS or not _adds(reader, dtype):
        return None
    if any(each.type != type_ for each in (*reader.inputs, result)) or reader.inputs[0] is reader.inputs[1]:
        return None
    identity = loops.own_index(shape)
    indices = [*(index for _, index in loops.inputs_of(reader)), loops.output_index(reader)]
    own = all(loops.without_units(index, shape) == identity for index in indices)
    return reader if own and reader.attributes.get(DEVICE) == norm.attributes.get(DEVICE) else None


def _only_reader(value: SSAValue) -> object:
    uses = list(value.uses)
    return uses[0].operation if len(uses) == 1 else None


def _adds(nest: ops.GenericOp, dtype: str) -> bool:
    """Whether a body adds its two inputs in fp32 and rounds the sum to `dtype`."""
    block = nest.body.block
    wide: list[SSAValue] = list(block.args[:2])
    body = list(block.ops)
    if dtype != "f32":
        if len(body) != 5 or not all(isinstance(each, arith.ExtFOp) for each in body[:2]):
            return False
        sources, wide = [each.operands[0] for each in body[:2]], [each.results[0] for each in body[:2]]
        if set(sources) != set(block.args[:2]) or any(dtype_of(value.type) != "f32" for value in wide):
            return False
        body = body[2:]
    if not isinstance(body[0], arith.AddfOp) or set(body[0].operands) != set(wide) or len(body[0].operands) != 2:
        return False
    last = body[0].results[0]
    if dtype != "f32":
        if not isinstance(body[1], arith.TruncFOp) or body[1].operands[0] is not last:
            return False
        last = body[1].results[0]
    return isinstance(body[-1], ops.YieldOp) and list(body[-1].operands) == [last] and len(body) == 2 + (dtype != "f32")
