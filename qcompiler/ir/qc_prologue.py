"""Prologues of `qc.linear`: a norm of x and of what it multiplies and adds, and rows of int8, as the op's region.

    ^bb0(%x: tensor<1x64xf32>, %weight: tensor<64xf32>):
      %rows = qc.rms_norm %x weight(%weight) {eps = 1e-05} : tensor<1x64xf32>
      qc.yield %rows

`LinearOp.norm` is the norm in it, and `LinearOp.quantised` what makes rows of int8. `qc.yield %rows, %rows` keeps the
normalised rows for other ops: the linear's second result.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.ir import Block, Region, SSAValue

from qcompiler.formats import int8_rows
from qcompiler.ir.module import path_of, set_path
from qcompiler.ir.qc import QuantizeRowsOp, YieldOp
from qcompiler.ir.qc_norm import LayerNormOp, RmsNormOp, norm_of
from qcompiler.ir.types import shape_of, tensor


def prologue_region(
    norm: LayerNormOp | RmsNormOp | None,
    quantised: QuantizeRowsOp | None,
    x: SSAValue,
    affine: Sequence[SSAValue],
    *,
    keeps: bool = False,
) -> Region:
    """The prologue that makes the same of `x` as `norm` and then `quantised` do, as far as they are given. `affine` are
    the norm's weight and bias, if it has them. With `keeps`, the normalised rows are yielded for other readers."""
    block = Block(arg_types=[x.type, *(value.type for value in affine)])
    rows: SSAValue = block.args[0]
    kept = list[SSAValue]()
    if norm is not None:
        made = norm_of(norm, block.args)
        set_path(made, path_of(norm))
        block.add_op(made)
        rows = made.result
        kept = [rows] * keeps
    if quantised is not None:
        shape = shape_of(x.type)
        type_ = tensor((*shape[:-1], int8_rows.row_bytes(int(shape[-1]))), "i8")
        codes = QuantizeRowsOp(rows, None, type_, kind=quantised.kind.data, value=quantised.value.value.data)
        block.add_op(codes)
        rows = codes.result
    block.add_op(YieldOp(rows, *kept))
    return Region(block)
